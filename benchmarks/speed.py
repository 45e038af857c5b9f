"""Speeds, each as a ratio inside one run: `python -m benchmarks.speed --out benchmarks/speed_cpu.md`.

    1. a roll-out against `HunyuanVideo15Pipeline.__call__`, at equal steps, batch and guidance
    2. forward and backward without padding against diffusers' padded ones
    3. the share of an iteration that is not the transformer
    4. an iteration against the same one on the released code's schedule

Every figure is the median of several rounds in which the two sides take turns, so a busy machine slows both.
On a GPU the second has a row at full size; achieved TFLOP/s and peak memory are not measured yet.
"""

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import HunyuanVideo15Transformer3DModel

import processes
import train
from config import Config
from evaluate import Setting, ode_latents
from hunyuan import Policy, load_pipeline

PROMPT = "a red square moves left"
STOCK_TEXT = (1000, 256, 729)  # the pipeline's Qwen, ByT5 and image tokens
FULL = {}  # diffusers' defaults: HunyuanVideo 1.5
MEDIUM = {"num_layers": 4, "num_attention_heads": 8, "attention_head_dim": 64, "rope_axes_dim": (8, 28, 28)}


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


def roll_out(world: processes.World, rounds: int) -> tuple[str, float, float, str]:
    """1: our ODE sampling and the pipeline's, 4 videos, 10 steps."""
    policy = Policy(load_pipeline("tiny/hunyuan"), world.device)
    pipeline = load_pipeline("tiny/hunyuan").to(world.device)
    pipeline.set_progress_bar_config(disable=True)
    policy.encode([PROMPT])
    policy.shard()
    setting = Setting(10, policy.shift, (8, 3, 8, 8), 8, 4)
    size = {"height": 32, "width": 32, "num_frames": 9, "num_inference_steps": 10, "output_type": "latent"}
    ours = lambda: ode_latents(policy, PROMPT, [0, 1, 2, 3], setting)  # noqa: E731
    theirs = lambda: pipeline([PROMPT] * 4, **size)  # noqa: E731
    return "roll-out / pipeline, tiny", *in_turns(ours, theirs, world.device, rounds), "<= 1"


def passes(world: processes.World, rounds: int, name: str, config: dict, size: tuple, text: int) -> tuple:
    """2: forward and backward of one video, unpadded and padded as the pipeline does it."""
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    with torch.device(world.device):
        stock, ours = (HunyuanVideo15Transformer3DModel(**config).to(dtype) for _ in range(2))
        ours.load_state_dict(stock.state_dict())
        x = torch.randn(1, stock.config.in_channels, *size, dtype=dtype)
    from hunyuan import UnmaskedAttention

    for block in ours.transformer_blocks:
        block.attn.set_processor(UnmaskedAttention())

    def run(model, words: int, glyphs: int, image: int) -> None:
        mask = torch.zeros(1, words, device=world.device)
        mask[:, :text] = 1
        shape = model.config.text_embed_dim, model.config.text_embed_2_dim, model.config.image_embed_dim
        output = model(
            x,
            torch.full((1,), 500.0, device=world.device, dtype=dtype),
            torch.randn(1, words, shape[0], device=world.device, dtype=dtype),
            mask,
            encoder_hidden_states_2=torch.zeros(1, glyphs, shape[1], device=world.device, dtype=dtype),
            encoder_attention_mask_2=torch.zeros(1, glyphs, device=world.device),
            image_embeds=torch.zeros(1, image, shape[2], device=world.device, dtype=dtype),
            return_dict=False,
        )[0]
        output.float().square().mean().backward()

    pair = (lambda: run(ours, text, 0, 0)), (lambda: run(stock, *STOCK_TEXT))
    unpadded, padded = in_turns(*pair, world.device, rounds)
    return f"forward and backward, unpadded / padded, {name}", unpadded, padded, "<= 0.67 at full size"


def iterations(world: processes.World, rounds: int) -> list[tuple]:
    """3 and 4: an iteration of the default run, its bare transformer passes, and the released schedule.

    Released: one video a pass, every step explored, trained and given a reference pass, guidance in both.
    """
    with tempfile.TemporaryDirectory() as runs:
        common = {"runs": runs, "eval_seeds": 0, "guidance": 6.0, "anchor_every": 10**6}
        ours = train.Trainer(Config(**common), world)
        released = train.Trainer(Config(**common, micro_batch=1, sde_last_step=True), world)
        plain = train.Trainer(Config(runs=runs, eval_seeds=0, anchor_every=10**6), world)
        for trainer in (ours, released, plain):
            train.iterate(trainer, 0, False)
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
        ("not the transformer / iteration, default run", whole - alone, whole, "<= 0.10"),
        ("iteration / released schedule, guidance 6", fast, slow, ""),
    ]


def main() -> None:
    """Runs what the device allows and writes one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="markdown file to write")
    parser.add_argument("--rounds", type=int, default=3, help="times that each pair takes turns")
    options = parser.parse_args()
    world = processes.start("auto")
    rows = [roll_out(world, options.rounds)]
    tiny = load_pipeline("tiny/hunyuan").transformer.config
    rows.append(passes(world, options.rounds, "tiny", dict(tiny), (3, 8, 8), 10))
    rows.append(passes(world, options.rounds, "medium, 33 frames of 256x256", MEDIUM, (9, 16, 16), 64))
    if world.device.type == "cuda":
        rows.append(passes(world, options.rounds, "full, 81 frames of 480x848", FULL, (21, 30, 53), 256))
    rows += iterations(world, options.rounds)
    on_gpu = world.device.type == "cuda"
    machine = torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} CPU threads"
    lines = [f"{machine}, {platform.machine()}; medians of {options.rounds} rounds", ""]
    lines += ["| what | ratio | goal | seconds |", "|---|---|---|---|"]
    for name, ours, theirs, goal in rows:
        lines.append(f"| {name} | {ours / theirs:.2f} | {goal} | {ours:.3f} / {theirs:.3f} |")
    if not on_gpu:
        lines.append("| at full size, on a GPU | not run | at least 1.5 times as fast | |")
    options.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    processes.stop()


if __name__ == "__main__":
    main()
