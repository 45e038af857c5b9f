"""Held-out evaluation: policies compared on the same (prompt, seed) pairs, sampled by the ODE.

Both policies start a pair from the same noise, so the difference of their scores has a far smaller error than
either score.
"""

import csv
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hunyuan import Policy
from processes import World, gather_units, seeded_generator
from run_folder import thumbnails
from sde import sde_step, shifted_sigmas, step_coefficients


def read_prompts(path: str | Path) -> list[str]:
    """Prompts of a file: txt (one a line), csv (column `prompt`) or jsonl (key `prompt`).

    Raises: ValueError for a file that is missing, empty, or has a bad line, which is named with its number.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"prompt file {path} does not exist")
    lines = path.read_text().splitlines()
    if path.suffix == ".csv":
        rows = list(csv.DictReader(lines))
        prompts = [(number, row.get("prompt") or "") for number, row in enumerate(rows, 2)]
    elif path.suffix == ".jsonl":
        prompts = [(number, _json_prompt(path, number, line)) for number, line in enumerate(lines, 1)]
    else:
        prompts = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    for number, prompt in prompts:
        if not prompt.strip():
            raise ValueError(f"{path}, line {number}: no prompt")
    if not prompts:
        raise ValueError(f"prompt file {path} has no prompts")
    return [prompt.strip() for _, prompt in prompts]


def _json_prompt(path: Path, number: int, line: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error.msg})") from error
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise ValueError(f'{path}, line {number}: expected {{"prompt": "..."}}')
    return row["prompt"]


Pair = tuple[str, int]  # prompt, seed


@dataclass(frozen=True)
class Setting:
    """How held-out videos are sampled."""

    steps: int  # of the ODE
    shift: float  # of the schedule
    shape: tuple[int, int, int, int]  # (C, F, H, W) of the latents
    fps: int
    micro_batch: int  # videos of one prompt in a pass


class Scored(NamedTuple):
    """A held-out video's scores, NaN where it could not be scored, and a few small frames of it."""

    pair: Pair
    scores: dict[str, float]
    thumbnails: Tensor  # [5, C, h, w], uint8


@torch.no_grad()
def ode_latents(policy: Policy, prompt: str, seeds: list[int], setting: Setting) -> Tensor:
    """Latents of a prompt, one a seed, by the deterministic sampler: [len(seeds), C, F, H, W]."""
    draws = [seeded_generator("evaluation", prompt, seed) for seed in seeds]
    x = torch.stack([torch.randn(setting.shape, generator=draw) for draw in draws]).to(policy.device)
    sigmas = shifted_sigmas(setting.steps, setting.shift)
    for sigma, a, b, std in zip(sigmas, *step_coefficients("ode", sigmas, eta=0), strict=False):
        x, _ = sde_step(x, policy.velocity(x, sigma, prompt), a, b, std, torch.zeros_like(x))
    return x


def score(reward, videos: Tensor, prompts: list[str], fps: int) -> dict[str, Tensor]:
    """Scores of a user's reward, checked: {name: [B]}, float64 on the CPU, NaN where it could not score.

    Raises: ValueError if the reward raises or returns anything else.
    """
    try:
        scores = reward(videos, prompts, fps)
    except Exception as error:
        frame = error.__traceback__
        while frame.tb_next:
            frame = frame.tb_next
        place = f"{Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno}"
        raise ValueError(
            f"the reward raised {type(error).__name__}: {error} ({place}) on {prompts[0]!r}"
        ) from error
    shapes = {name: tuple(getattr(value, "shape", ())) for name, value in dict(scores).items()}
    if not shapes or any(shape != (len(videos),) for shape in shapes.values()):
        raise ValueError(f"the reward must return {{name: tensor of [{len(videos)}]}}, got {shapes}")
    return {name: value.detach().double().cpu() for name, value in scores.items()}


def score_pairs(
    policy: Policy, world: World, reward, pairs: list[Pair], setting: Setting, show=None
) -> Iterator[Scored]:
    """Samples and scores the pairs over all ranks; every rank gets every result, as it comes, in order.

    Args:
        pairs: those of one prompt side by side.
        show: called with (pair, video) on the rank that made it, videos [F, C, H, W].
    """
    units = []
    for _, same in itertools.groupby(pairs, key=lambda pair: pair[0]):
        same = list(same)
        units += [same[i : i + setting.micro_batch] for i in range(0, len(same), setting.micro_batch)]
    for start in range(0, len(units), world.size):  # as many passes on every rank, for FSDP
        unit = units[min(start + world.rank, len(units) - 1)]
        prompt, seeds = unit[0][0], [seed for _, seed in unit]
        videos = policy.decode(ode_latents(policy, prompt, seeds, setting))
        scores = score(reward, videos, [prompt] * len(videos), setting.fps)
        if show is not None and start + world.rank < len(units):
            for pair, video in zip(unit, videos, strict=True):
                show(pair, video)
        missing = setting.micro_batch - len(unit)
        rows = torch.nn.functional.pad(torch.stack(list(scores.values()), 1), (0, 0, 0, missing))
        small = torch.cat([thumbnails(videos), thumbnails(videos[:1]).expand(missing, -1, -1, -1, -1)])
        gathered = zip(
            units[start : start + world.size],
            gather_units(rows[None]),
            gather_units(small[None]),
            strict=False,
        )
        for done, numbers, frames in gathered:
            for i, pair in enumerate(done):
                yield Scored(pair, dict(zip(scores, numbers[i].tolist(), strict=True)), frames[i])


def mean_and_error(values: Tensor) -> dict[str, float]:
    """Mean, standard error of the mean, and number of the finite values.

    >>> mean_and_error(torch.tensor([1.0, 3.0, float("nan")]))
    {'mean': 2.0, 'error': 1.0, 'count': 2}
    """
    finite = values[values.isfinite()].double()
    error = finite.std() / len(finite) ** 0.5 if len(finite) > 1 else torch.tensor(torch.nan)
    mean = finite.mean() if len(finite) else torch.tensor(torch.nan)
    return {"mean": mean.item(), "error": error.item(), "count": len(finite)}
