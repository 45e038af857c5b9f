"""Speeds, each as a ratio inside one run: `python -m benchmarks.speed --out benchmarks/speed_cpu.md`.

    1. a roll-out against `HunyuanVideo15Pipeline.__call__`, at equal steps, batch and guidance
    2. forward and backward without padding against diffusers' padded ones
    3. the share of an iteration that is not the transformer
    4. an iteration against the same one on the released code's schedule
    5. a LoRA update's FLOP/s against those of a large matrix product, and its peak memory against plan.py's

Where two sides are timed they take turns, and the figure is the median of several rounds, so a busy machine
slows both. A GPU adds the full size to 2 and 5: the real configuration with random weights, 81 frames of
480 x 848, in bfloat16 with checkpointing.
"""

import argparse
import gc
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15AttnProcessor2_0

import processes
import train
from config import Config
from evaluate import Setting, ode_latents
from hunyuan import Policy, Text, UnmaskedAttention, load_pipeline
from plan import Machine, Plan
from sde import log_prob
from trust_region import Anchor

PROMPT = "a red square moves left"
STOCK_TEXT = (1000, 256, 729)  # the pipeline's Qwen, ByT5 and image tokens
MEDIUM = {"num_layers": 4, "num_attention_heads": 8, "attention_head_dim": 64, "rope_axes_dim": (8, 28, 28)}


class Row(NamedTuple):
    """A line of the table: a / b."""

    what: str
    a: float
    b: float
    unit: str
    goal: str = ""


def seconds(action: Callable[[], object], device: torch.device) -> float:
    """Time of one call."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def in_turns(first: Callable, second: Callable, device: torch.device, rounds: int) -> tuple[float, float]:
    """Median seconds of two actions that take turns, after one round that does not count."""
    times = [(seconds(first, device), seconds(second, device)) for _ in range(rounds + 1)][1:]
    return tuple(statistics.median(column) for column in zip(*times, strict=True))


def roll_out(world: processes.World, rounds: int) -> Row:
    """1: our ODE sampling and the pipeline's, 4 videos, 10 steps."""
    policy = Policy(load_pipeline("tiny/hunyuan"), world.device)
    pipeline = load_pipeline("tiny/hunyuan").to(world.device)
    pipeline.set_progress_bar_config(disable=True)
    policy.encode([PROMPT])
    policy.shard()
    setting = Setting(10, policy.shift, (8, 3, 8, 8), 8, 4)
    size = {"height": 32, "width": 32, "num_frames": 9, "num_inference_steps": 10, "output_type": "latent"}
    times = in_turns(
        lambda: ode_latents(policy, PROMPT, [0, 1, 2, 3], setting),
        lambda: pipeline([PROMPT] * 4, **size),
        world.device,
        rounds,
    )
    return Row("roll-out / pipeline, tiny", *times, "s", "<= 1")


def passes(world: processes.World, rounds: int, name: str, config: dict, size: tuple, text: int) -> Row:
    """2: forward and backward of one video, unpadded and padded as the pipeline does it, the same weights."""
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    with torch.device("meta"):
        model = HunyuanVideo15Transformer3DModel(**config).to(dtype)
    model.to_empty(device=world.device)
    shape = model.config.text_embed_dim, model.config.text_embed_2_dim, model.config.image_embed_dim
    give = {"device": world.device, "dtype": dtype}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    if world.device.type == "cuda":
        model.enable_gradient_checkpointing()  # at full size nothing else fits
    x = torch.randn(1, model.config.in_channels, *size, **give)

    def run(processor, words: int, glyphs: int, image: int) -> None:
        for block in model.transformer_blocks:
            block.attn.set_processor(processor)
        mask = torch.zeros(1, words, device=world.device)
        mask[:, :text] = 1
        output = model(
            x,
            torch.full((1,), 500.0, **give),
            torch.randn(1, words, shape[0], **give),
            mask,
            encoder_hidden_states_2=torch.zeros(1, glyphs, shape[1], **give),
            encoder_attention_mask_2=torch.zeros(1, glyphs, device=world.device),
            image_embeds=torch.zeros(1, image, shape[2], **give),
            return_dict=False,
        )[0]
        output.float().square().mean().backward()

    times = in_turns(
        lambda: run(UnmaskedAttention(), text, 0, 0),
        lambda: run(HunyuanVideo15AttnProcessor2_0(), *STOCK_TEXT),
        world.device,
        rounds,
    )
    return Row(f"forward and backward, unpadded / padded, {name}", *times, "s", "<= 0.67 at full size")


def iterations(world: processes.World, rounds: int) -> list[Row]:
    """3 and 4: an iteration of the default run, its bare transformer passes, and the released schedule.

    Released: one video a pass, every step explored, trained and given a reference pass, guidance in both.
    """
    with tempfile.TemporaryDirectory() as runs:
        common = {"runs": runs, "eval_seeds": 0, "guidance": 6.0, "anchor_every": 10**6}
        ours = train.Trainer(Config(**common), world)
        released = train.Trainer(Config(**common, micro_batch=1, sde_last_step=True), world)
        plain = train.Trainer(Config(runs=runs, eval_seeds=0, anchor_every=10**6), world)
        for trainer in (ours, released, plain):
            for iteration in range(2):  # from the third on an iteration has both of its references
                train.iterate(trainer, iteration, False)
        fast, slow = in_turns(
            lambda: train.iterate(ours, 1, False),
            lambda: train.iterate(released, 1, False),
            world.device,
            rounds,
        )
        rollout = plain.sampler.roll_out(1)
        prompt, x = rollout.prompts[0], rollout.latents[0, 0]
        trained = len(rollout.trained)

        def bare() -> None:
            """The transformer's passes of an iteration and no more: roll-out, two references, replays."""
            with torch.no_grad():
                for _ in range(len(rollout.prompts) * (plain.config.steps + 2 * trained)):
                    plain.policy.velocity(x, 0.5, prompt)
            for _ in range(len(rollout.prompts) * trained):
                plain.policy.velocity(x, 0.5, prompt).sum().backward()

        alone, whole = in_turns(bare, lambda: train.iterate(plain, 1, False), world.device, rounds)
    return [
        Row("not the transformer / iteration, default run", whole - alone, whole, "s", "<= 0.10"),
        Row("iteration / released schedule, guidance 6", fast, slow, "s"),
    ]


def matmul_flops(world: processes.World, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of a square matrix product, the best of ten."""
    a, b = (torch.randn(size, size, device=world.device, dtype=dtype) for _ in range(2))
    a @ b
    return 2 * size**3 / min(seconds(lambda: a @ b, world.device) for _ in range(10))


def lora_update(world: processes.World, rounds: int, name: str, **options) -> list[Row]:
    """5: the reference and the replay of a step of one video, on random weights, and a matrix product.

    Its peak memory has the optimizer's step and the decoding of the video in it.
    """
    small = {"micro_batch": 1, "prompts_per_iteration": 1, "group_size": 2, "device": world.device.type}
    config = Config(**small, checkpointing=True, **options)
    planned = Plan(config, Machine(transformer_config="default" if options else config.model))
    policy, dtype, text = planned.policy, planned.dtype, planned.machine.text_tokens
    estimate = sum(planned.memory().values()) + planned.activations(checkpointing=True)
    policy.device = world.device
    for module in (policy.transformer, policy.vae):
        module.to_empty(device=world.device)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_(std=0.02)
    policy.vae.to(dtype)
    policy.shard(dtype, checkpointing=True)
    sizes = policy.transformer.config.text_embed_dim, policy.transformer.config.text_embed_2_dim
    shapes = (1, text, sizes[0]), (1, 0, sizes[1])
    policy.texts[PROMPT] = Text(*(torch.randn(shape, device=world.device) for shape in shapes))
    optimizer = torch.optim.AdamW(policy.parameters, 1e-4)
    anchors = [Anchor(policy.parameters) for _ in planned.config.anchors]
    shape = policy.latent_shape(config.frames, config.height, config.width)
    x, std = torch.randn(1, *shape, device=world.device), torch.tensor(0.2)

    def step() -> None:
        with torch.no_grad(), policy.at(anchors[0]):
            policy.velocity(x, 0.5, PROMPT)
        log_prob(x, policy.velocity(x, 0.5, PROMPT), std).sum().backward()

    on_gpu = world.device.type == "cuda"
    if on_gpu:
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
    step()
    optimizer.step()
    optimizer.zero_grad()
    policy.decode(x)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    rates = []
    for _ in range(rounds):
        flops = planned.flops.forward + planned.flops.replay(checkpointing=True)
        rates.append(
            (flops / seconds(step, world.device), matmul_flops(world, dtype, 8192 if on_gpu else 1024))
        )
    ours, best = (statistics.median(column) / 1e12 for column in zip(*rates, strict=True))
    rows = [Row(f"LoRA update / matrix product, {name}", ours, best, "TFLOP/s", ">= 0.55 at full size")]
    if on_gpu:
        rows.append(Row(f"peak memory / planned, {name}", peak / 1e9, estimate / 1e9, "GB", "<= 80 GB"))
    return rows


def main() -> None:
    """Runs what the device allows and writes one table, row by row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="markdown file to write")
    parser.add_argument("--rounds", type=int, default=3, help="times that each pair takes turns")
    options = parser.parse_args()
    world, rounds = processes.start("auto"), options.rounds
    on_gpu = world.device.type == "cuda"
    machine = torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} CPU threads"
    lines = [f"{machine}, {platform.machine()}; medians of {rounds} rounds", ""]
    lines += ["| what | ratio | goal | a / b |", "|---|---|---|---|"]
    tiny = dict(load_pipeline("tiny/hunyuan").transformer.config)
    full, size = "full, 81 frames of 480x848", {"frames": 81, "height": 480, "width": 848}
    steps = [
        lambda: [roll_out(world, rounds)],
        lambda: [passes(world, rounds, "tiny", tiny, (3, 8, 8), 10)],
        lambda: [passes(world, rounds, "medium, 33 frames of 256x256", MEDIUM, (9, 16, 16), 64)],
        lambda: iterations(world, rounds),
    ]
    if on_gpu:
        steps.append(lambda: lora_update(world, rounds, full, **size))
        steps.append(lambda: [passes(world, rounds, full, {}, (21, 30, 53), 256)])
    else:
        steps.append(lambda: lora_update(world, rounds, "tiny"))
    print("\n".join(lines))
    for step in steps:
        for row in step():
            both = f"{row.a:.3f} / {row.b:.3f} {row.unit}"
            lines.append(f"| {row.what} | {row.a / row.b:.2f} | {row.goal} | {both} |")
            print(lines[-1])
        options.out.write_text("\n".join(lines) + "\n")  # as it goes: a later row may not fit the device
    if not on_gpu:
        lines.append("| at full size, on a GPU | not run | 2 and 5 | |")
        options.out.write_text("\n".join(lines) + "\n")
    processes.stop()


if __name__ == "__main__":
    main()
