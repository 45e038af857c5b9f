"""Held-out evaluation: policies compared on the same (prompt, seed) pairs, sampled by the ODE.

    python evaluate.py --lora runs/001/lora                  the tiny model, before and after a run
    python evaluate.py --model ID --lora runs/002/lora --prompts FILE --reward videoalign ...    the real one

Prints the rows of the paper's Table 2, one a policy, and saves them with the contact sheet. All policies
start a pair from the same noise, so the difference of their scores has a far smaller error than either score.
Videos that were scored before, in a folder named by --out, are not sampled again.
"""

import argparse
import csv
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from config import add_options, compute_dtype
from hunyuan import LORA_FILE, Policy, existing, load_pipeline
from processes import World, clear_errors, from_main, gather_units, seeded_generator, start, stop
from reward import load_reward
from run_folder import contact_sheet, new_folder, thumbnails
from sde import sde_step, shifted_sigmas, step_coefficients

TABLE_2 = ("Overall", "VQ", "MQ", "TA", "CLIPScore", "PickScore")


def read_prompts(path: str | Path) -> list[tuple[str, int | None]]:
    """Prompts of a file, and their seeds: txt (a prompt a line), csv or jsonl (`prompt`, perhaps `seed`).

    Raises: ValueError for a file that is missing, empty, or has a bad line, which is named with its number.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"prompt file {path} {'is a folder' if path.is_dir() else 'does not exist'}")
    lines = path.read_text().splitlines()
    if path.suffix == ".csv":
        reader = csv.DictReader(lines)
        if "prompt" not in (reader.fieldnames or ["prompt"]):
            raise ValueError(f"{path} has no column `prompt`, its columns are {', '.join(reader.fieldnames)}")
        rows = list(enumerate(reader, 2))
    elif path.suffix == ".jsonl":
        rows = [(number, _json_row(path, number, line)) for number, line in enumerate(lines, 1)]
    else:
        rows = [(number, {"prompt": line}) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ValueError(f"prompt file {path} has no prompts")
    result = []
    for number, row in rows:
        prompt, seed = (
            str(value).strip() if (value := row.get(key)) is not None else "" for key in ("prompt", "seed")
        )
        if not prompt:
            raise ValueError(f"{path}, line {number}: no prompt")
        if seed and not seed.isdecimal():
            raise ValueError(f"{path}, line {number}: the seed must be a whole number, got {seed!r}")
        result.append((prompt, int(seed) if seed else None))
    return result


def _json_row(path: Path, number: int, line: str) -> dict:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error.msg})") from error
    if not isinstance(row, dict):
        raise ValueError(f'{path}, line {number}: expected {{"prompt": "..."}}')
    return row


def pairs_of(prompts: list[tuple[str, int | None]], num_seeds: int) -> list[tuple[str, int]]:
    """(prompt, seed) pairs: the file's seed where it has one, else seeds 0...num_seeds - 1. None twice.

    >>> pairs_of([("a cat", None), ("a dog", 7)], num_seeds=2)
    [('a cat', 0), ('a cat', 1), ('a dog', 7)]
    """
    seeds = [(prompt, range(num_seeds) if seed is None else [seed]) for prompt, seed in prompts]
    return list(dict.fromkeys((prompt, seed) for prompt, each in seeds for seed in each))


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
    named = scores if isinstance(scores, dict) else {}
    shapes = {name: tuple(getattr(value, "shape", ())) for name, value in named.items()}
    if not shapes or any(shape != (len(videos),) for shape in shapes.values()):
        found = shapes if named else type(scores).__name__
        raise ValueError(f"the reward must return {{name: tensor of [{len(videos)}]}}, got {found}")
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
    for first in range(0, len(units), world.size):  # as many passes on every rank, for FSDP
        unit = units[min(first + world.rank, len(units) - 1)]
        prompt, seeds = unit[0][0], [seed for _, seed in unit]
        videos = policy.decode(ode_latents(policy, prompt, seeds, setting))
        scores = score(reward, videos, [prompt] * len(videos), setting.fps)
        if show is not None and first + world.rank < len(units):
            for pair, video in zip(unit, videos, strict=True):
                show(pair, video)
        missing = setting.micro_batch - len(unit)
        rows = torch.nn.functional.pad(torch.stack(list(scores.values()), 1), (0, 0, 0, missing))
        small = torch.cat([thumbnails(videos), thumbnails(videos[:1]).expand(missing, -1, -1, -1, -1)])
        here = units[first : first + world.size]
        gathered = zip(here, gather_units(rows[None]), gather_units(small[None]), strict=False)
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


@dataclass(frozen=True)
class Options:
    """Options of an evaluation. The defaults are those of the tiny model."""

    model: Annotated[str, "folder or hub id of a HunyuanVideo 1.5; the first row"] = "tiny/hunyuan"
    lora: Annotated[tuple[str, ...], "folder of a run's LoRA, a row each; may be given again"] = ()
    transformer: Annotated[tuple[str, ...], "folder of a fine-tuned transformer, likewise"] = ()
    prompts: Annotated[str, "prompt file: txt, csv or jsonl, with seeds if you like"] = "tiny/held_out.txt"
    seeds: Annotated[int, "seeds of each prompt that has none in the file"] = 12
    reward: Annotated[tuple[str, ...], "as in train.py; may be given again"] = ("tiny",)
    criteria: Annotated[str, "prompt_template.py of a VideoAlign checkout"] = ""
    out: Annotated[str, "folder of the results, continued if it is there; empty: a new one"] = ""

    frames: Annotated[int, "4 n + 1"] = 9
    height: Annotated[int, "pixels"] = 32
    width: Annotated[int, "pixels"] = 32
    fps: Annotated[int, "of the videos"] = 8
    steps: Annotated[int, "of the ODE"] = 20
    shift: Annotated[float, "of the schedule; 0: the model's own"] = 0.0
    guidance: Annotated[float, "scale of classifier-free guidance; 1: none"] = 1.0
    micro_batch: Annotated[int, "videos of one prompt in a pass"] = 12
    device: Annotated[Literal["auto", "cpu", "cuda"], "auto: a GPU where there is one"] = "auto"
    precision: Annotated[Literal["auto", "float32", "bfloat16"], "auto: bfloat16 on a GPU"] = "auto"

    def __post_init__(self):
        for name in ("seeds", "fps", "steps", "micro_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")


def named_reward(text: str, criteria: str, device: torch.device | str):
    """A reward by its name, or as name@source where its weights have a folder or hub id of their own."""
    name, _, source = text.partition("@")
    return load_reward(name, source or None, criteria if criteria and name == "videoalign" else None, device)


def joint_reward(rewards: list):
    """One reward that gives the scores of all, and Overall = VQ + MQ + TA where there are these three."""

    def reward(videos: Tensor, prompts: list[str], fps: float) -> dict[str, Tensor]:
        scores = {name: value for each in rewards for name, value in each(videos, prompts, fps).items()}
        if {"VQ", "MQ", "TA"} <= set(scores):
            scores["Overall"] = scores["VQ"] + scores["MQ"] + scores["TA"]
        return scores

    return reward


def table(rows: dict[str, list[dict[str, float]]]) -> tuple[str, dict]:
    """Table 2 as markdown and as numbers: a row a policy, differences paired with the first row.

    Args:
        rows: policy to the scores of its pairs, the same pairs in the same order.

    Returns: markdown, and {policy: {score: {mean, error, count, difference, difference_error}}}.
    """
    first = next(iter(rows.values()))
    others = [name for name in first[0] if name not in TABLE_2]
    columns = [*TABLE_2, *others]
    lines = ["| policy | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    numbers = {}
    for policy, scores in rows.items():
        cells, numbers[policy] = [], {}
        for name in columns:
            if name not in first[0]:
                cells.append("-")
                continue
            values, base = (torch.tensor([each[name] for each in some]).double() for some in (scores, first))
            own, paired = mean_and_error(values), mean_and_error(values - base)
            numbers[policy][name] = {**own, "difference": paired["mean"], "difference_error": paired["error"]}
            change = "" if scores is first else f" ({paired['mean']:+.4f} ± {paired['error']:.4f})"
            cells.append(f"{own['mean']:.4f} ± {own['error']:.4f}{change}")
        lines.append(f"| {policy} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n", numbers


def load_policy(options: Options, world: World, source: str, prompts: list[str]) -> Policy:
    """The model with a LoRA or a transformer of its own (source ""), with the prompts encoded."""
    dtype = compute_dtype(options.precision, world.device.type == "cuda")
    policy = Policy(load_pipeline(options.model, dtype, masters=False), world.device, options.guidance)
    if source in options.lora:
        policy.load_lora(source)
    elif source:
        policy.load_transformer(source)
    policy.encode(prompts)
    policy.shard(dtype)
    return policy


def score_row(options: Options, world: World, source: str, pairs: list[Pair], reward, out: Path) -> None:
    """Scores of one policy: a line a pair, appended as they come; pairs with a line are not sampled again."""
    file = out / f"{row_name(source)}.jsonl"
    seen = from_main(scored(file) if world.is_main else None)
    missing = [pair for pair in pairs if pair not in seen]
    if not missing:
        return
    policy = load_policy(options, world, source, [prompt for prompt, _ in pairs])
    shape = policy.latent_shape(options.frames, options.height, options.width)
    setting = Setting(options.steps, options.shift or policy.shift, shape, options.fps, options.micro_batch)
    results, first = score_pairs(policy, world, reward, missing, setting), shown(pairs)
    for each in tqdm(results, row_name(source), len(missing), disable=not world.is_main):
        if world.is_main:
            if each.pair in first:
                frames = out / f"{row_name(source)}_{first.index(each.pair)}.safetensors"
                save_file({"frames": each.thumbnails}, frames)
            with file.open("a") as lines:
                lines.write(json.dumps([*each.pair, each.scores]) + "\n")
    dist.barrier()


def shown(pairs: list[Pair]) -> list[Pair]:
    """The first pair of each of the first eight prompts, for the contact sheet."""
    return list({prompt: (prompt, seed) for prompt, seed in reversed(pairs)}.values())[::-1][:8]


def row_name(source: str) -> str:
    """A row's name, good for a file: "initial", or its folder with the slashes replaced."""
    return re.sub(r"[^\w.-]+", "_", source).strip("_") or "initial"


def scored(file: Path) -> dict[Pair, dict[str, float]]:
    """Scores of a row so far; a last line that a kill has cut off is dropped, from the file too."""
    if not file.exists():
        return {}
    text = file.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole)
    return {(prompt, seed): scores for prompt, seed, scores in map(json.loads, whole.splitlines())}


def open_folder(options: Options, world: World) -> Path:
    """The folder of the results: a new one, or one of the same settings.

    Raises: ValueError if the folder was made with other settings; its scores would not compare.
    """
    settings = {k: v for k, v in asdict(options).items() if k not in ("lora", "transformer", "out", "device")}
    settings = json.loads(json.dumps(settings))
    out = Path(options.out) if options.out else new_folder(Path("evaluations"), world.is_main)
    before, file = settings, out / "config.json"
    if world.is_main:
        out.mkdir(parents=True, exist_ok=True)
        if file.exists():
            before = json.loads(file.read_text())
        else:
            file.write_text(json.dumps(settings, indent=2) + "\n")
    before = from_main(before)
    for name, value in settings.items():
        if (was := before.get(name)) != value:
            raise ValueError(f"{out} was made with --{name} {was!r}, not {value!r}; choose another --out")
    return out


def run(options: Options, world: World) -> None:
    """Scores every policy, then prints and saves the table and the contact sheet."""
    pairs = pairs_of(read_prompts(options.prompts), options.seeds)
    sources = ["", *options.lora, *options.transformer]
    for folders, file in ((options.lora, LORA_FILE), (options.transformer, "config.json")):
        for folder in folders:
            existing(folder, file)
    reward = joint_reward([named_reward(name, options.criteria, world.device) for name in options.reward])
    out = open_folder(options, world)
    for source in sources:
        score_row(options, world, source, pairs, reward, out)
    if not world.is_main:
        return
    rows = {row_name(source): scored(out / f"{row_name(source)}.jsonl") for source in sources}
    markdown, numbers = table({name: [scores[pair] for pair in pairs] for name, scores in rows.items()})
    (out / "table.md").write_text(markdown)
    (out / "table.json").write_text(json.dumps(numbers, indent=2) + "\n")
    columns = {}
    for name in rows:
        files = [out / f"{name}_{i}.safetensors" for i in range(len(shown(pairs)))]
        columns[name] = torch.stack([load_file(file)["frames"] for file in files])
    contact_sheet([prompt for prompt, _ in shown(pairs)], columns).savefig(out / "contact_sheet.png", dpi=110)
    print(f"{len(pairs)} pairs, differences to the first row paired:\n\n{markdown}\nsaved in {out}")


def main() -> None:
    """The command line."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout, allow_abbrev=False)
    add_options(parser, Options)
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in vars(parser.parse_args()).items()}
    with clear_errors():
        options = Options(**given)
        run(options, start(options.device))
    stop()


if __name__ == "__main__":
    main()
