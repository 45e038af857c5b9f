"""What a run will need, before it is started: parameters, passes, FLOPs, memory and time.

    python plan.py --gpus 8 --model ID --frames 81 --height 480 --width 848 ...    all of train.py's options

The policy is built and adapted on the meta device, where tensors have shapes but no values, so 8 billion
parameters take seconds. Bytes of weights, gradients, optimizer, anchors and trajectory are counted; what FSDP
gathers and what autograd keeps are estimates that no GPU has confirmed. Left out: held-out evaluations, the
VAE's work, the reward model, communication, and the text encoders, which leave before the training.
"""

import argparse
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, NamedTuple

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Transformer3DModel,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from config import Config, add_options, compute_dtype
from hunyuan import Policy
from processes import clear_errors
from rollout import full_schedule, iteration_schedule

REAL = "HunyuanVideo 1.5"
FLASH_BACKWARD = 2.5  # of attention's forward of two products: four for the gradients, one recomputed
TIMESTEP_LAYERS = re.compile(r"(^|\.)(time_\w+|norm\w*)\.")  # one row a video
TEXT_LAYERS = re.compile(r"^context_embedder\.|\.(add_[qkv]_proj|to_add_out|ff_context)(\.|$)")
IDLE_LAYERS = re.compile(r"^(image_embedder|context_embedder_2)\.")  # of images, and of words in quotes


@dataclass(frozen=True)
class Machine:
    """What a run is planned for, beside the run's own options."""

    gpus: Annotated[int, "processes, each with a GPU"] = 1
    tflops: Annotated[float, "TFLOP/s that a GPU achieves"] = 400.0
    text_tokens: Annotated[int, "valid tokens of a prompt"] = 256
    transformer_config: Annotated[str, "model folder, or default for the real one; empty: --model's"] = ""

    def __post_init__(self):
        for name in ("gpus", "tflops", "text_tokens"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name} must be above 0, got {getattr(self, name)}")


def build_policy(config: Config, folder: str, dtype: torch.dtype) -> Policy:
    """The policy on the meta device, adapted, in the dtypes that `load_pipeline` and `Policy.shard` give it.

    Args:
        folder: with the configurations, in the hub's layout; empty: those of the real model, which are the
            defaults of diffusers' classes, and its shift at 480p.
        dtype: that the blocks compute in.

    Raises: ValueError for a folder that lacks a configuration.
    """
    classes = {
        "transformer": HunyuanVideo15Transformer3DModel,
        "vae": AutoencoderKLHunyuanVideo15,
        "scheduler": FlowMatchEulerDiscreteScheduler,
    }
    configs = {"transformer": {}, "vae": {}, "scheduler": {"shift": 5.0}}
    if folder:
        for name, kind in classes.items():
            if not (Path(folder) / name / kind.config_name).is_file():
                raise ValueError(f"{folder} has no {name}/{kind.config_name}, the hub's layout has one")
            configs[name] = kind.load_config(Path(folder) / name)
    with torch.device("meta"):
        parts = {name: kind.from_config(configs[name]) for name, kind in classes.items()}
        policy = Policy(SimpleNamespace(**parts), torch.device("meta"), config.guidance)
        if config.adaptation == "lora":
            policy.transformer.transformer_blocks.to(dtype)
        policy.adapt(config.adaptation, config.lora_rank, config.lora_alpha)
    policy.parameters = [each for each in policy.transformer.parameters() if each.requires_grad]
    return policy


def shard_bytes(tensors: Iterable[Tensor], gpus: int) -> int:
    """Bytes of the first GPU's shards, which are the largest: FSDP2 splits the first dimension.

        sum over tensors of bytes ceil(rows / gpus) / rows

    >>> shard_bytes([torch.zeros(16, 8)], gpus=64)
    32
    """
    return sum(-(-len(each) // gpus) * each.nbytes // len(each) for each in tensors)


def scaled(value: float) -> str:
    """A number of three digits and its prefix.

    >>> scaled(683_752_858_968_064)
    '684 T'
    """
    value = float(f"{value:.3g}")
    power = min(int(math.log10(max(value, 1))) // 3, 5)
    return f"{value / 1000**power:g} {' kMGTP'[power].strip()}"


class Flops(NamedTuple):
    """Of the matrix products of one video's forward."""

    linear: int
    trained: int  # the part of `linear` whose weights are trained
    attention: int

    @property
    def forward(self) -> int:
        return self.linear + self.attention

    def replay(self, checkpointing: bool) -> float:
        """Forward, the same again with checkpointing, and backward.

        backward = linear + trained + 2.5 attention         gradients of inputs, weights and attention
        """
        backward = self.linear + self.trained + FLASH_BACKWARD * self.attention
        return self.forward * (2 if checkpointing else 1) + backward


def count_flops(transformer: nn.Module, image: int, text: int) -> Flops:
    """FLOPs of a forward without padding; LoRA's layers are among the layers.

    linear    = sum over layers of 2 weights rows       rows: image tokens, text tokens, or 1 (timestep)
    attention = 4 width ((image + text)**2 blocks + text**2 refiner blocks)
    """
    linear = trained = 0
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear | nn.Conv3d) and not IDLE_LAYERS.search(name):
            rows = 1 if TIMESTEP_LAYERS.search(name) else text if TEXT_LAYERS.search(name) else image
            linear += 2 * module.weight.numel() * rows
            trained += 2 * module.weight.numel() * rows * module.weight.requires_grad
    config = transformer.config
    pairs = (image + text) ** 2 * config.num_layers + text**2 * config.num_refiner_layers
    return Flops(linear, trained, 4 * config.num_attention_heads * config.attention_head_dim * pairs)


class Plan:
    """The numbers of a run.

    Args:
        config: the run's options.
        machine: what it is planned for.

    Raises: ValueError for options that do not fit each other, the model or the number of GPUs.
    """

    def __init__(self, config: Config, machine: Machine):
        if config.units % machine.gpus:
            raise ValueError(f"{config.units} micro-batches do not divide by --gpus {machine.gpus}")
        self.config, self.machine = config, machine
        at_hand = config.model if (Path(config.model) / "transformer").is_dir() else ""
        folder = machine.transformer_config or at_hand
        self.folder = "" if folder == "default" else folder
        self.dtype = compute_dtype(config.precision, on_gpu=config.device != "cpu")
        self.policy = build_policy(config, self.folder, self.dtype)
        self.transformer = self.policy.transformer
        shape = self.policy.latent_shape(config.frames, config.height, config.width)
        patch = self.transformer.config.patch_size**2 * self.transformer.config.patch_size_t
        self.width = self.transformer.config.num_attention_heads * self.transformer.config.attention_head_dim
        self.latents = torch.Size(shape).numel()
        self.image, self.text = self.latents // shape[0] // patch, machine.text_tokens
        self.flops = count_flops(self.transformer, self.image, self.text)
        full = full_schedule(config, config.shift or self.policy.shift)
        self.trained = len(iteration_schedule(config, full, 0)[1])
        self.units = config.units // machine.gpus
        self.samples = self.units * config.micro_batch
        self.guided = 2 if config.guidance != 1 else 1

    def passes(self) -> dict[str, float]:
        """Micro-batches that one GPU puts through the transformer in an iteration, by kind.

            roll-out     units steps guided                 guided: 2 with guidance, else 1
            reference    units trained guided               an update and an anchor that is not the policy
            replay       units trained guided               an update; forward and backward

        References are the mean over the run. Replays are at most so many: without a KL, samples of advantage
        0 need none.
        """
        config, each = self.config, self.units * self.guided
        updates = range(config.iterations * config.updates_per_iteration)
        needed = sum(len(config.references(update)) for update in updates)
        return {
            "roll-out": each * config.steps,
            "reference": each * self.trained * needed / config.iterations,
            "replay": each * self.trained * config.updates_per_iteration,
        }

    def released_passes(self) -> dict[str, float]:
        """The same with the released code's schedule for as many samples and updates."""
        sample_steps = self.samples * self.config.steps * self.config.updates_per_iteration
        return {kind: passes * sample_steps for kind, passes in self.config.released_passes.items()}

    def iteration_flops(self) -> dict[str, float]:
        """FLOPs of one GPU in an iteration, by kind: passes times micro_batch times those of a video."""
        each = dict.fromkeys(("roll-out", "reference"), self.flops.forward)
        each["replay"] = self.flops.replay(self.config.checkpointing)
        return {kind: passes * self.config.micro_batch * each[kind] for kind, passes in self.passes().items()}

    @cached_property
    def block_activations(self) -> int:
        """Bytes that autograd keeps of one block's forward for its backward, its weights aside.

        Counted on the graph of a block that computes on fake tensors of a CPU, whose fused attention keeps
        what a GPU's flash kernel keeps: query, key, value, output, and a number a row.
        """
        block, kept = self.transformer.transformer_blocks[0], {}

        def keep(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
            return tensor

        def fake(shape: Iterable[int], needs_grad: bool = True) -> Tensor:
            return torch.empty(*shape, dtype=self.dtype, requires_grad=needs_grad)

        with FakeTensorMode(), saved_tensors_hooks(keep, lambda tensor: tensor):
            weights = {name: fake(each.shape, each.requires_grad) for name, each in block.named_parameters()}
            states = [fake((self.config.micro_batch, rows, self.width)) for rows in (self.image, self.text)]
            timestep = fake((self.config.micro_batch, self.width), self.config.adaptation == "full")
            rotary = [torch.empty(self.image, self.transformer.config.attention_head_dim) for _ in range(2)]
            torch.func.functional_call(block, weights, (*states, timestep, None, rotary))
        for shared in (*weights.values(), timestep, *rotary):  # weights, or the same for all blocks
            kept.pop(shared.untyped_storage()._cdata, None)
        return sum(storage.nbytes() for storage in kept.values())

    def activations(self, checkpointing: bool) -> int:
        """Bytes that a replay keeps for its backward. Estimated: the blocks alone.

        with checkpointing   guided blocks micro_batch tokens width itemsize + block
        without              guided blocks block
        """
        blocks, block = self.transformer.config.num_layers, self.block_activations
        if not checkpointing:
            return self.guided * blocks * block
        states = self.config.micro_batch * (self.image + self.text) * self.width
        return self.guided * blocks * states * self.dtype.itemsize + block

    def memory(self) -> dict[str, int]:
        """Bytes of the first GPU during an update, by kind, without activations.

        transformer   shards of all parameters; frozen blocks in the compute dtype, all else float32
        VAE           whole on every GPU, in the compute dtype
        gradients     shards of the trained parameters
        optimizer     two moments of them, and a float32 a tensor that counts
        anchors       shards of them, each anchor
        trajectory    latents of every sample in float32: steps + 1, and the anchors' means of trained steps
        gathered      estimated, 0 without FSDP: two blocks and a block's gradients in the compute dtype,
                      the gradients again and all outside of the blocks in float32
        """
        gpus, itemsize, anchors = self.machine.gpus, self.dtype.itemsize, len(self.config.anchors)
        trained = shard_bytes(self.policy.parameters, gpus)
        named = dict(self.transformer.named_parameters())
        block = [each for name, each in named.items() if name.startswith("transformer_blocks.0.")]
        outside = sum(each.numel() for name, each in named.items() if "transformer_blocks" not in name)
        weights = sum(each.numel() for each in block)
        gradients = sum(each.numel() for each in block if each.requires_grad)
        gathered = 2 * weights * itemsize + gradients * (itemsize + 4) + outside * 4
        return {
            "transformer": shard_bytes(self.transformer.parameters(), gpus),
            "VAE": sum(each.numel() for each in self.policy.vae.parameters()) * itemsize,
            "gradients": trained,
            "optimizer": 2 * trained + 4 * len(self.policy.parameters),
            "anchors": anchors * trained * (not self.config.offload_anchors),
            "trajectory": self.samples * (self.config.steps + 1 + anchors * self.trained) * self.latents * 4,
            "gathered": gathered if gpus > 1 or self.dtype != torch.float32 else 0,
        }

    @property
    def checkpoint(self) -> int:
        """Bytes of a checkpoint on disk: what is trained, its two moments and count of steps, the anchors."""
        trained = sum(each.nbytes for each in self.policy.parameters)
        return (3 + len(self.config.anchors)) * trained + 4 * len(self.policy.parameters)

    def table(self) -> str:
        """All of it, to be read.

        passes of a trained sample-step = passes / (samples trained updates)
        """
        config, flops, ours = self.config, self.iteration_flops(), self.passes()
        updates, total = config.updates_per_iteration, sum(flops.values())
        size = f"{config.frames} x {config.height} x {config.width}"
        lines = [
            f"{self.folder or REAL}, {config.adaptation}, GPUs: {self.machine.gpus}",
            f"{config.prompts_per_iteration} x {config.group_size} videos of {size}, {config.steps} steps, "
            f"guidance {config.guidance:g}, micro-batch {config.micro_batch}",
            "",
        ]
        facts = {
            "parameters": f"{self.transformer.num_parameters():,}",
            "  of them trained": f"{self.transformer.num_parameters(only_trainable=True):,}",
            "tokens of a video": f"{self.image:,} image + {self.text:,} text",
            "forward of a video": f"{scaled(self.flops.forward)}FLOP",
            "replay of a video": f"{scaled(self.flops.replay(config.checkpointing))}FLOP",
            "update of a GPU": f"{scaled((total - flops['roll-out']) / updates)}FLOP",
            "iteration of a GPU": f"{scaled(total)}FLOP",
            f"{self.machine.tflops:g} TFLOP/s": f"{total / self.machine.tflops / 1e12:,.4g} s an iteration",
        }
        facts["checkpoint"] = f"{scaled(self.checkpoint)}B on disk, {config.keep} kept and one being written"
        lines += [f"{name:<22}{value}" for name, value in facts.items()]
        lines += ["", "passes of a GPU          roll-out  reference     replay  a trained sample-step"]
        rows = {
            "iteration": (ours, self.trained * updates),
            "update": ({kind: ours[kind] / updates for kind in ("reference", "replay")}, self.trained),
            "iteration, released": (self.released_passes(), config.steps * updates),
        }
        for name, (row, steps) in rows.items():
            cells = "".join(f"{row.get(kind, 0):>11,.5g}" for kind in ours)
            lines.append(f"{name:<22}{cells}{sum(row.values()) / steps / self.samples:>23.2f}")
        memory = {kind: (size, size) for kind, size in self.memory().items()}
        memory["activations"] = self.activations(True), self.activations(False)
        memory["peak"] = tuple(map(sum, zip(*memory.values(), strict=True)))
        lines += ["", "memory of a GPU          with checkpointing           without"]
        for kind, sizes in memory.items():
            about = "about " if kind in ("gathered", "activations", "peak") else ""
            less, more = (f"{about}{scaled(size)}B" for size in sizes)
            lines.append(f"{kind:<22}{less:>21}{more:>18}")
        return "\n".join(lines)


def main() -> None:
    """The command line."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout, allow_abbrev=False)
    add_options(parser, Machine)
    add_options(parser, Config)
    given = vars(parser.parse_args())
    with clear_errors():
        machine = Machine(**{name: given.pop(name) for name in Machine.__annotations__ if name in given})
        print(Plan(Config(**given), machine).table())


if __name__ == "__main__":
    main()
