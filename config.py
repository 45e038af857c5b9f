"""Options of a run: one frozen dataclass, one line an option, and its command line."""

import argparse
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import torch

from sde import METHODS
from trust_region import KLWeight

# What a checkpoint's tensors belong to, so that a resumed run cannot change it.
SETTLED = {"model", "adaptation", "lora_rank", "lora_alpha", "kl", "velocity_kl"}


@dataclass(frozen=True)
class Config:
    """Options of a run. The defaults are those of the tiny one."""

    model: Annotated[str, "folder or hub id of a HunyuanVideo 1.5"] = "tiny/hunyuan"
    prompts: Annotated[str, "prompt file to train on: txt, csv or jsonl"] = "tiny/prompts.txt"
    eval_prompts: Annotated[str, "prompt file that is held out"] = "tiny/held_out.txt"
    reward: Annotated[
        str, "tiny, tiny_videoalign, videoalign@FOLDER, clipscore, pickscore, or your module:function"
    ] = "tiny"
    reward_weights: Annotated[str, "NAME=WEIGHT,...; empty: the reward's own"] = ""
    criteria: Annotated[str, "prompt_template.py of a VideoAlign checkout"] = ""
    offload: Annotated[bool, "the reward model is on the GPU only while it scores"] = False
    aggregate: Annotated[Literal["before", "after"], "weigh scores before or after normalising a group"] = (
        "before"
    )
    runs: Annotated[str, "folder of all runs"] = "runs"
    name: Annotated[str, "folder of this run; empty: the next number"] = ""

    frames: Annotated[int, "4 n + 1"] = 9
    height: Annotated[int, "pixels"] = 32
    width: Annotated[int, "pixels"] = 32
    fps: Annotated[int, "of the videos, for the reward and the mp4s"] = 8

    method: Annotated[Literal[METHODS], "sampler of the roll-outs (Table 1)"] = "sage"
    eta: Annotated[float, "exploration strength"] = 0.5
    steps: Annotated[int, "denoising steps of a roll-out"] = 8
    shift: Annotated[float, "of the schedule; 0: the model's own"] = 0.0
    guidance: Annotated[float, "scale of classifier-free guidance; 1: none"] = 1.0
    sde_last_step: Annotated[bool, "the last step adds noise too"] = False
    sde_window: Annotated[int, "explore so many neighbouring steps, drawn anew each iteration; 0: all"] = 0
    trained_steps: Annotated[int, "train so many of the exploring steps, drawn anew; 0: all"] = 0
    same_initial_noise: Annotated[bool, "a group starts from one noise (DanceGRPO's way)"] = False

    prompts_per_iteration: Annotated[int, "P"] = 2
    group_size: Annotated[int, "G, samples of a prompt"] = 12
    micro_batch: Annotated[int, "samples of one prompt in a pass; divides group_size"] = 12
    iterations: Annotated[int, "roll-outs with their updates"] = 40
    updates_per_iteration: Annotated[int, "optimizer steps on one roll-out"] = 1

    adaptation: Annotated[Literal["lora", "full"], "what is trained"] = "lora"
    lora_rank: Annotated[int, "r"] = 16
    lora_alpha: Annotated[int, "alpha / r scales the LoRA"] = 64
    learning_rate: Annotated[float, "of AdamW"] = 3e-4
    weight_decay: Annotated[float, "of AdamW"] = 0.0
    max_grad_norm: Annotated[float, "gradients are clipped to this norm"] = 1.0
    clip_range: Annotated[float, "of the ratio of mean log-probabilities"] = 1e-4
    advantage_eps: Annotated[float, "added to a group's std; the reward's own noise"] = 1e-4
    equalizer: Annotated[bool, "even out the steps' gradients (Eq. 9)"] = True

    kl: Annotated[Literal["none", "fixed", "stepwise", "moving", "dual"], "trust region (Eq. 11-15)"] = "dual"
    velocity_kl: Annotated[Literal["gaussian", "log_prob"], "form of the velocity term"] = "gaussian"
    beta_pos: Annotated[float, "weight of the position term"] = 1.0
    beta_vel: Annotated[float, "weight of the velocity term"] = 0.1
    anchor_every: Annotated[int, "updates between two refreshes of the anchor"] = 10
    kl_weight_min: Annotated[float, "per element; the warm-up starts here"] = 0.01
    kl_weight_max: Annotated[float, "per element; the warm-up ends here"] = 0.1
    kl_warmup: Annotated[int, "updates"] = 10
    kl_target: Annotated[float, "KL that the weight holds after the warm-up, nats per element"] = 1e-3
    kl_rate: Annotated[float, "largest relative change of the weight per update"] = 0.1

    eval_every: Annotated[int, "iterations between held-out evaluations"] = 20
    eval_seeds: Annotated[int, "seeds of each held-out prompt; 0: no evaluation"] = 12
    eval_steps: Annotated[int, "steps of the ODE"] = 10
    save_every: Annotated[int, "iterations between checkpoints"] = 10
    keep: Annotated[int, "checkpoints kept"] = 2

    seed: Annotated[int, "of everything that is drawn"] = 0
    device: Annotated[Literal["auto", "cpu", "cuda"], "auto: a GPU where there is one"] = "auto"
    precision: Annotated[Literal["auto", "float32", "bfloat16"], "of the blocks; auto: bfloat16 on a GPU"] = (
        "auto"
    )
    checkpointing: Annotated[bool, "recompute activations in the backward pass"] = False
    attention: Annotated[str, "diffusers' attention backend of the blocks, one with a backward"] = "native"
    offload_anchors: Annotated[bool, "anchors wait on the CPU"] = False

    def __post_init__(self):
        at_least = {
            "steps": 1, "prompts_per_iteration": 1, "group_size": 2, "micro_batch": 1, "iterations": 1,
            "updates_per_iteration": 1, "lora_rank": 1, "lora_alpha": 1, "anchor_every": 1, "eval_every": 1,
            "eval_seeds": 0, "eval_steps": 1, "save_every": 1, "keep": 1, "fps": 1, "sde_window": 0,
            "trained_steps": 0, "eta": 0, "shift": 0, "learning_rate": 0, "weight_decay": 0, "guidance": 0,
            "advantage_eps": 0, "beta_pos": 0, "beta_vel": 0, "kl_warmup": 0,
        }  # fmt: skip
        for name, least in at_least.items():
            if not getattr(self, name) >= least:
                raise ValueError(f"--{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("max_grad_norm", "clip_range"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name} must be above 0, got {getattr(self, name)}")
        if self.group_size % self.micro_batch:
            raise ValueError(
                f"--micro_batch {self.micro_batch} does not divide --group_size {self.group_size}"
            )
        if self.kl == "moving" and self.anchor_every == 1:
            raise ValueError(
                "--kl moving --anchor_every 1 holds nothing: the anchor is the policy, its KL always 0"
            )
        if self.sde_window and self.trained_steps:
            raise ValueError(
                f"choose one: --sde_window {self.sde_window} or --trained_steps {self.trained_steps}"
            )
        kl_weight(self)

    @property
    def units(self) -> int:
        """Micro-batches of an iteration."""
        return self.prompts_per_iteration * self.group_size // self.micro_batch

    @property
    def anchors(self) -> tuple[str, ...]:
        """Roles of the older policies that the trust region keeps (Eq. 11-15)."""
        position = self.kl in ("fixed", "moving", "dual")
        velocity = self.kl in ("stepwise", "dual") and self.velocity_kl == "gaussian"
        return ("position",) * position + ("velocity",) * velocity

    def references(self, update: int) -> list[tuple[str, ...]]:
        """Reference passes that an update needs, counted from 0, each with the roles it serves.

        None for an anchor that is the policy itself, as after a refresh and at the first update: its KL and
        the gradient of it are 0. One for both right after that, when the anchor is the previous policy.

        >>> [Config(kl="dual", anchor_every=10).references(update) for update in (0, 1, 2, 10)]
        [[], [('position', 'velocity')], [('position',), ('velocity',)], [('velocity',)]]
        """
        since = update if self.kl == "fixed" else update % self.anchor_every  # the position's last refresh
        if since == 1 and len(self.anchors) == 2:
            return [self.anchors]
        age = {"position": since, "velocity": update}
        return [(role,) for role in self.anchors if age[role]]

    @property
    def released_passes(self) -> dict[str, float]:
        """Transformer passes a trained sample-step of the released code's schedule, by kind.

        Samples one by one, guidance always doubled, all steps trained, each with a reference.
        """
        once = 2 / self.updates_per_iteration
        return {"roll-out": once, "reference": once, "replay": 2.0}


def kl_weight(config: Config) -> KLWeight:
    """The KL weight that the options describe; its feedback sees the KLs between two refreshes."""
    bounds = config.kl_weight_min, config.kl_weight_max
    return KLWeight(*bounds, config.kl_warmup, config.kl_target, config.kl_rate, window=config.anchor_every)


def compute_dtype(precision: str, on_gpu: bool) -> torch.dtype:
    """What the blocks compute in, by the option of that name."""
    low = precision == "bfloat16" or (precision == "auto" and on_gpu)
    return torch.bfloat16 if low else torch.float32


def add_options(parser: argparse.ArgumentParser, options: type) -> None:
    """One command-line option a field of a dataclass: its type, choices and default, and its help.

    Options that are not given stay out of the result, so a dataclass or a stored run supplies the default.
    """
    hints = get_type_hints(options, include_extras=True)
    for field in dataclasses.fields(options):
        kind, text = get_args(hints[field.name])
        details = {"help": f"{text} ({field.default!r})", "default": argparse.SUPPRESS}
        if kind is bool:
            details["action"] = argparse.BooleanOptionalAction
        elif get_origin(kind) is Literal:
            details["choices"] = get_args(kind)
        elif get_origin(kind) is tuple:
            details |= {"action": "append", "type": get_args(kind)[0]}
        else:
            details["type"] = kind
        parser.add_argument(f"--{field.name}", **details)


def parse(arguments: list[str], description: str) -> tuple[Config, Path | None]:
    """Config of the command line, and the run to resume, whose options are then the defaults."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=layout, allow_abbrev=False)
    parser.add_argument("--resume", type=Path, help="folder of a run to go on with; options override its own")
    add_options(parser, Config)
    given = vars(parser.parse_args(arguments))
    resume = given.pop("resume", None)
    if resume is None:
        return Config(**given), None
    stored = resume / "config.json"
    if not stored.is_file():
        raise ValueError(f"--resume {resume}: no config.json there, so no run")
    options = json.loads(stored.read_text())
    for name in SETTLED & given.keys() & options.keys():
        if given[name] != options[name]:
            raise ValueError(
                f"--resume {resume}: its --{name} is {options[name]} and cannot become {given[name]}"
            )
    return Config(**{**options, **given}), resume
