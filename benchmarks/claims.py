"""The paper's claims, tried on the tiny world: `python -m benchmarks.claims --out benchmarks/claims_tiny.md`.

    methods      the samplers of Table 1 at equal exploration and at equal eta, no KL; and the default run
    equalizer    the same without the gain of Eq. 9 (Figure 3)
    strategies   trust regions (Figure 8) against a learned reward that can be hacked
    weights      KL weights (Figure 7), the same

A row is several runs of train.py that differ in their seed alone; figures are means over the seeds with the
standard error of that mean. Equal exploration: eta such that a group from one initial noise spreads as
SAGE-GRPO's does at eta .5; the spreads are printed. Runs are kept, continued where they stopped, and not
repeated.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import processes
from config import Config
from evaluate import mean_and_error, read_prompts
from hunyuan import Policy, load_pipeline
from rollout import Sampler
from tiny.world import learned_reward
from tiny.world import reward as exact_reward

# Of equal spread, but for sage_exact, whose first step redraws all noise whatever its eta is.
ETAS = {"dance_grpo": 1.36, "flow_grpo": 0.64, "cps": 0.55, "sage": 0.5, "sage_exact": 0.5}
STRATEGIES = ("none", "fixed", "stepwise", "moving", "dual")
WEIGHTS = {"1e-7 to 1e-5": (1e-7, 1e-5), ".1 to 1": (0.1, 1.0)}
LEARNED = (
    "--reward=benchmarks.claims:watched_reward",
    "--reward_weights=VQ=1,MQ=1,TA=1",
    "--learning_rate=1e-3",
)
COLUMNS = {
    "reward": "change of the trained reward, held out",
    "exact": "of the exact reward",
    "verifier": "of the verifier",
    "spread": "of the rewards' spread in a group, relative",
}


def watched_reward(videos: Tensor, prompts: list[str], fps: float) -> dict[str, Tensor]:
    """The tiny VideoAlign's scores, and what they should be: the sum of the exact ones, logged only."""
    exact = exact_reward(videos, prompts, fps)
    return learned_reward(videos, prompts, fps) | {"exact": exact["VQ"] + exact["MQ"] + exact["TA"]}


@torch.no_grad()
def spreads() -> dict[str, float]:
    """Standard deviation of the latents within a group from one initial noise, by method, four prompts."""
    world = processes.start("cpu")
    policy = Policy(load_pipeline(Config.model), world.device)
    policy.encode([prompt for prompt, _ in read_prompts(Config.prompts)[:4]])
    policy.shard()
    result = {}
    for method, eta in ETAS.items():
        config = Config(method=method, eta=eta, same_initial_noise=True, prompts_per_iteration=4)
        rollout = Sampler(config, world, policy, list(policy.texts)).roll_out(0)
        result[method] = rollout.latents[:, -1].var(1).mean().sqrt().item()
    processes.stop()
    return result


def settings() -> dict[str, dict[str, tuple[str, ...]]]:
    """Options of train.py by claim and row."""
    alike = {f"{m}, eta {eta}": (f"--method={m}", f"--eta={eta}", "--kl=none") for m, eta in ETAS.items()}
    uneven = {row: options for row, options in alike.items() if not row.startswith("sage_exact")}
    equal = {f"{m}, eta .5": (f"--method={m}", "--kl=none") for m, eta in ETAS.items() if eta != Config.eta}
    weights = {
        f"dual, {name}": (*LEARNED, f"--kl_weight_min={low}", f"--kl_weight_max={high}")
        for name, (low, high) in WEIGHTS.items()
    }
    return {
        "methods": {**alike, **equal, "sage, eta 0.5, dual KL": ()},
        "equalizer": {f"{row}, no gain": (*options, "--no-equalizer") for row, options in uneven.items()},
        "strategies": {kl: (*LEARNED, f"--kl={kl}") for kl in STRATEGIES},
        "weights": weights,
    }


def train(folder: Path, seed: int, options: tuple[str, ...]) -> list[dict]:
    """The log of a run: as it stands, or after it was started or continued."""
    log = folder / "metrics.jsonl"
    if not (folder / "lora").exists():
        start = [f"--runs={folder.parent}", f"--name={folder.name}", f"--seed={seed}", *options]
        line = [f"--resume={folder}"] if (folder / "config.json").exists() else start
        command = [sys.executable, "train.py", *line, f"--eval_every={Config.iterations}"]
        with (folder.parent / f"{folder.name}.log").open("a") as output:
            one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run(command, env=one_thread, stdout=output, stderr=output, check=True)
    return [json.loads(line) for line in log.read_text().splitlines()]


def measure(log: list[dict]) -> dict[str, float]:
    """What is compared, of one run."""
    last = [line for line in log if line["kind"] == "evaluation"][-1]["paired"]
    spreads = [line["reward_spread"] for line in log if line["kind"] == "iteration"]
    start, end = (torch.tensor(some).mean().item() for some in (spreads[:10], spreads[-10:]))
    change = {name: last[name]["mean"] for name in ("reward", "verifier")}
    return {**change, "exact": last.get("exact", last["reward"])["mean"], "spread": end / start - 1}


def main() -> None:
    """Runs what is missing and writes one table a claim."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="markdown file to write")
    parser.add_argument("--runs", type=Path, default=Path("runs/claims"), help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each row")
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time, of one thread each")
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    claims, jobs = settings(), {}
    alike = ", ".join(f"{method} {value:.3f}" for method, value in spreads().items())
    lines = [f"{Config.iterations} iterations, {options.seeds} seeds a row. Latents' spread: {alike}."]
    with ThreadPoolExecutor(options.parallel) as pool:
        for seed in range(options.seeds):
            for claim, rows in claims.items():
                for row, line in rows.items():
                    place = options.runs / re.sub(r"[^\w.-]+", "_", f"{claim}_{row}_{seed}")
                    jobs[claim, row, seed] = pool.submit(train, place, seed, line)
        for job in tqdm(jobs.values(), "runs"):
            job.result()
    for claim, rows in claims.items():
        lines += ["", f"## {claim}", "", f"| | {' | '.join(COLUMNS.values())} |", "|---" * 5 + "|"]
        for row in rows:
            runs = [measure(jobs[claim, row, seed].result()) for seed in range(options.seeds)]
            figures = {name: mean_and_error(torch.tensor([run[name] for run in runs])) for name in COLUMNS}
            cells = (f"{figure['mean']:+.3f} ± {figure['error']:.3f}" for figure in figures.values())
            lines.append(f"| {row} | {' | '.join(cells)} |")
    options.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
