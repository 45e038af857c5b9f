"""The whole loop: options, sampling, two processes, killing and resuming, errors."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import MODEL
from peft import get_peft_model_state_dict
from safetensors.torch import load_file

import train
from config import Config, parse
from hunyuan import ADAPTER, LORA_FILE, Policy, load_pipeline
from rollout import full_schedule, iteration_schedule
from sde import METHODS

ROOT = Path(__file__).parent.parent
SMALL = {
    "prompts": "tests/prompts.txt",  # relative to the repository, where pytest and the runs start
    "iterations": 2,
    "steps": 3,
    "prompts_per_iteration": 2,
    "group_size": 4,
    "micro_batch": 4,
    "eval_seeds": 0,
    "learning_rate": 1e-3,
    "save_every": 100,
}


def arguments(**options) -> list[str]:
    """Command line of a small run."""
    line = []
    for name, value in {**SMALL, **options}.items():
        line += (
            [f"--{name}" if value is True else f"--{name}={value}"]
            if value is not False
            else [f"--no-{name}"]
        )
    return line


def run_here(world, runs, **options) -> Path:
    """A run in this process, from its command line."""
    config, _ = parse(arguments(runs=runs, name="run", **options), "")
    train.run(config, None, world)
    return runs / "run"


def start(processes: int, *line: str, **environment) -> subprocess.Popen:
    """A run of its own, as a user starts it."""
    command = [sys.executable, "train.py"]
    if processes > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*launcher, f"--nproc_per_node={processes}", "train.py"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, *line], cwd=ROOT, env=variables, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen, seconds: int = 240) -> tuple[int, str]:
    """Exit status, and all that was printed; a run that hangs is a failure."""
    output, errors = process.communicate(timeout=seconds)
    return process.returncode, output + errors


def metrics(folder: Path, kind: str = "iteration") -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def lora(folder: Path) -> torch.Tensor:
    """All weights of a result, in one vector."""
    return torch.cat([value.flatten() for _, value in sorted(load_file(folder / "lora" / LORA_FILE).items())])


def change(folder: Path, weights: torch.Tensor) -> float:
    """Distance of a result from other weights, relative to how far those came from the untrained LoRA."""
    torch.manual_seed(Config.seed)
    policy = Policy(load_pipeline(Config.model), torch.device("cpu"))
    policy.adapt("lora")
    first = get_peft_model_state_dict(policy.transformer, adapter_name=ADAPTER)
    untrained = torch.cat([value.flatten() for _, value in sorted(first.items())])
    return ((lora(folder) - weights).norm() / (weights - untrained).norm()).item()


@pytest.mark.parametrize("method", [method for method in METHODS if method != "ode"])
def test_every_method_runs(world, tmp_path, method):
    folder = run_here(world, tmp_path, method=method)
    assert [line["iteration"] for line in metrics(folder)] == [1, 2]
    assert all(line["grad_norm"] > 0 for line in metrics(folder))
    assert lora(folder).isfinite().all()


def test_the_ode_explores_nothing(world, tmp_path):
    with pytest.raises(ValueError, match="0 steps explore"):
        run_here(world, tmp_path, method="ode")


TERMS = {"none": (), "fixed": ("position",), "stepwise": ("velocity",), "moving": ("position",)}


@pytest.mark.parametrize("kl", [*TERMS, "dual"])
def test_every_kl_strategy_runs(world, tmp_path, kl):
    """Its terms are 0 at the first update, when all references are the policy, and act at the second."""
    folder = run_here(world, tmp_path, kl=kl)
    first, second = metrics(folder)
    for term in ("position", "velocity"):
        assert first[f"kl_{term}"] == 0
        assert (second[f"kl_{term}"] > 0) == (term in TERMS.get(kl, ("position", "velocity")))


def test_the_log_prob_form_runs(world, tmp_path):
    folder = run_here(
        world, tmp_path, kl="stepwise", velocity_kl="log_prob", updates_per_iteration=2, iterations=1
    )
    assert metrics(folder)[0]["kl_velocity"] != 0


def test_the_log_counts_the_passes(world, tmp_path):
    """Of 2 units of 4 samples with 3 steps: two steps are trained; one reference serves both terms."""
    lines = metrics(run_here(world, tmp_path, kl="dual"))
    for line, references in zip(lines, (0, 1), strict=True):
        assert line["passes_per_sample_step"] == 2 * (3 + 2 * references + 2) / (2 * 4 * 2)
        assert line["passes_per_sample_step_released"] == 6


def test_a_refreshed_anchor_is_the_policy(world, tmp_path):
    folder = run_here(world, tmp_path, kl="moving", anchor_every=2, iterations=4, kl_warmup=4)
    lines = metrics(folder)
    assert [line["kl_position"] > 0 for line in lines] == [False, True, False, True]
    assert [round(line["kl_weight"], 4) for line in lines] == [0.01, 0.0325, 0.055, 0.0775]


@pytest.mark.parametrize(
    "options",
    [
        {"sde_last_step": True},
        {"sde_window": 2},
        {"trained_steps": 1},
        {"updates_per_iteration": 2},
        {"same_initial_noise": True},
        {"adaptation": "full", "learning_rate": 1e-4},
        {"guidance": 2.0},
        {"equalizer": False},
        {"checkpointing": True},
        {"attention": "_native_math"},
        {"offload_anchors": True},
        {"shift": 5.0},
        {"precision": "bfloat16"},
        {"aggregate": "after"},
        {"reward_weights": "TA=1"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_every_option_changes_the_run(world, tmp_path, options, plain_run):
    """Each switch runs, and what it promises is seen in the numbers."""
    folder = run_here(world, tmp_path, **{"iterations": 1, **options})
    lines = metrics(folder)
    if "sde_last_step" in options:
        assert lines[0]["steps"] == [0, 1, 2]
    elif "sde_window" in options:
        assert all(len(line["steps"]) == 2 and line["steps"][1] == line["steps"][0] + 1 for line in lines)
    elif "trained_steps" in options:
        assert all(len(line["steps"]) == 1 for line in lines)
    elif options.keys() & {"checkpointing", "attention", "offload_anchors"}:
        assert lines[0]["grad_norm"] == pytest.approx(plain_run["grad_norm"], rel=1e-5)
    elif "adaptation" in options:
        assert (folder / "transformer" / "config.json").is_file()
    else:
        assert lines[0]["grad_norm"] != plain_run["grad_norm"]


@pytest.fixture(scope="module")
def plain_run(world, tmp_path_factory):
    return metrics(run_here(world, tmp_path_factory.mktemp("plain"), iterations=1))[0]


def test_a_group_of_one_noise(world, tmp_path):
    """same_initial_noise: one noise in a group, another in the next; else each sample has its own."""
    for same in (False, True):
        config, _ = parse(arguments(runs=tmp_path, same_initial_noise=same), "")
        rollout = train.Trainer(config, world).sampler.roll_out(0)
        first = rollout.latents[:, 0].flatten(2)
        assert ((first[:, :1] == first).all() == same) and not (first[0, 0] == first[1, 0]).any()


def test_a_replay_is_the_roll_out_bit_for_bit(world, tmp_path):
    config, _ = parse(arguments(runs=tmp_path), "")
    trainer = train.Trainer(config, world)
    rollout = trainer.sampler.roll_out(3)
    for step in rollout.trained:
        mean = trainer.sampler.replay(rollout, 0, step)
        new = train.log_prob(rollout.latents[0, step + 1], mean, rollout.schedule.std[step])
        assert torch.equal(new, rollout.log_prob_old[0, step])


def test_a_replay_that_differs_stops_before_the_first_update(world, tmp_path, monkeypatch):
    replay = train.Sampler.replay
    monkeypatch.setattr(train.Sampler, "replay", lambda *a: replay(*a) + (0.01 if a[-1] == 1 else 0))
    with pytest.raises(ValueError, match=r"preflight failed: at step 1"):
        run_here(world, tmp_path)


def test_windows_and_subsets_keep_the_gain():
    """Of the full schedule's median, and the same on every rank since drawn from seed and iteration alone."""
    full = full_schedule(Config(), 3.0)
    windowed, trained = iteration_schedule(Config(sde_window=3), full, 5)
    assert trained == list(range(trained[0], trained[0] + 3))
    assert torch.equal(windowed.gain[trained], full.gain[trained])
    assert (windowed.std > 0).nonzero()[:, 0].tolist() == trained
    assert len({tuple(iteration_schedule(Config(trained_steps=3), full, i)[1]) for i in range(9)}) > 3


def test_two_processes_and_another_split_give_the_same_result(tmp_path):
    """Rewards within 1e-4, gradients 1e-4 relative, the change of the weights 2 % in norm."""
    common = arguments(runs=tmp_path, guidance=2.0)
    runs = {"one": (1, 4), "two": (2, 4), "split": (2, 2)}
    started = {
        name: start(processes, *common, f"--micro_batch={size}", f"--name={name}")
        for name, (processes, size) in runs.items()
    }
    for name, process in started.items():
        status, output = finish(process)
        assert status == 0, (name, output)
    one, weights = metrics(tmp_path / "one"), lora(tmp_path / "one")
    for name in ("two", "split"):
        for mine, other in zip(one, metrics(tmp_path / name), strict=True):
            assert other["reward"] == pytest.approx(mine["reward"], abs=1e-4)
        assert metrics(tmp_path / name)[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-4)
        assert change(tmp_path / name, weights) < 0.02


def test_a_full_fine_tune_on_two_processes_is_that_of_one(tmp_path):
    """Sharded weights, both anchors and their refresh: the third update has seen all of them."""
    line = arguments(runs=tmp_path, adaptation="full", learning_rate=1e-5, iterations=3, anchor_every=2)
    started = [start(processes, *line, f"--name={processes}") for processes in (1, 2)]
    for process in started:
        status, output = finish(process)
        assert status == 0, output
    file = "transformer/diffusion_pytorch_model.safetensors"
    one, two, before = (load_file(folder / file) for folder in (tmp_path / "1", tmp_path / "2", ROOT / MODEL))
    apart = torch.cat([(one[name] - two[name]).flatten() for name in one]).norm()
    assert 0 < apart < 0.02 * torch.cat([(one[name] - before[name]).flatten() for name in one]).norm()
    for mine, other in zip(metrics(tmp_path / "1"), metrics(tmp_path / "2"), strict=True):
        assert other["reward"] == pytest.approx(mine["reward"], abs=1e-4)
        assert other["kl"] == pytest.approx(mine["kl"], rel=1e-3, abs=1e-9)


def test_killed_and_resumed_is_the_run_that_was_not(tmp_path):
    """SIGKILL in the middle of an update, then --resume: the same weights, bit for bit, and the same log."""
    line = arguments(runs=tmp_path, iterations=5, anchor_every=2, save_every=1)
    whole = start(1, *line, "--name=whole")
    killed = start(1, *line, "--name=killed")
    log = tmp_path / "killed" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not log.exists() or len(log.read_text().splitlines()) < 3:
        assert time.monotonic() < deadline and killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    finish(killed)
    assert not (tmp_path / "killed" / "lora").exists()
    status, output = finish(start(1, "--resume", str(tmp_path / "killed")))
    assert status == 0, output
    assert finish(whole)[0] == 0
    assert torch.equal(lora(tmp_path / "killed"), lora(tmp_path / "whole"))
    untimed = [
        [{k: v for k, v in entry.items() if k != "seconds"} for entry in metrics(tmp_path / name)]
        for name in ("killed", "whole")
    ]
    assert untimed[0] == untimed[1]


def test_a_checkpoint_resumes_on_another_number_of_processes(tmp_path):
    line = arguments(runs=tmp_path)
    whole = start(1, *line, "--name=whole", "--iterations=3")
    half = start(2, *line, "--name=half")
    assert finish(half)[0] == 0
    status, output = finish(start(1, "--resume", str(tmp_path / "half"), "--iterations=3"))
    assert status == 0, output
    assert finish(whole)[0] == 0
    assert [entry["iteration"] for entry in metrics(tmp_path / "half")] == [1, 2, 3]
    assert change(tmp_path / "half", lora(tmp_path / "whole")) < 0.02


WRONG = {
    "typo": (["--learning_rat=1"], "--learning_rat=1"),
    "type": (["--steps=ten"], "'ten'"),
    "range": (["--eta=-1"], "--eta must be at least 0, got -1"),
    "group of 1": (["--group_size=1", "--micro_batch=1"], "--group_size must be at least 2, got 1"),
    "micro-batch": (["--group_size=8", "--micro_batch=3"], "--micro_batch 3 does not divide --group_size 8"),
    "anchor": (["--kl=moving", "--anchor_every=1"], "the anchor is the policy"),
    "weights": (["--kl_weight_min=1"], "minimum"),
    "both": (["--sde_window=2", "--trained_steps=2"], "choose one"),
    "no model": (["--model=tests"], "model_index.json"),
    "no prompts": (["--prompts=nowhere.txt"], "nowhere.txt does not exist"),
    "component": (
        ["--reward_weights=SQ=1"],
        "a weight for SQ, but the reward's scores are MQ, TA, VQ, verifier",
    ),
    "folder": (["--prompts=tiny"], "prompt file tiny is a folder"),
    "reward": (["--reward=nothing"], "nothing"),
    "resume": (["--resume=tests"], "no config.json"),
    "offload": (["--offload"], "tiny is none"),
    "attention": (["--attention=flash3"], "--attention flash3: "),
    "frames": (["--frames=8"], "4 n + 1, got 8"),
    "window": (["--sde_window=9", "--steps=4"], "3 steps explore"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_mistake_is_one_clear_line(world, tmp_path, capsys, monkeypatch, wrong):
    """In this process: what main prints, and that it leaves with a status that is not 0."""
    line, message = WRONG[wrong]
    left = []
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments(runs=tmp_path), *line])
    monkeypatch.setattr(train, "start", lambda device: world)
    monkeypatch.setattr(train, "stop", lambda: None)
    monkeypatch.setattr(os, "_exit", left.append)
    try:
        train.main()
    except SystemExit as error:  # of argparse
        left.append(error.code)
    errors = capsys.readouterr().err.strip().splitlines()
    assert left == [2] and message in errors[-1]
    assert not list(tmp_path.glob("run*/checkpoints"))


def test_an_empty_prompt_file(world, tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"empty\.txt has no prompts"):
        run_here(world, tmp_path, prompts=tmp_path / "empty.txt")


def test_a_run_is_never_overwritten(world, tmp_path):
    run_here(world, tmp_path, iterations=1)
    with pytest.raises(ValueError, match="exists already"):
        run_here(world, tmp_path, iterations=1)


USERS_REWARDS = """
import torch

def brightness(videos, prompts, fps):
    return {"brightness": videos.flatten(1).mean(1)}

def broken(videos, prompts, fps):
    raise RuntimeError("out of paint")

def one_group_fails(videos, prompts, fps):
    scores = videos.flatten(1).mean(1)
    one_group_fails.calls += 1
    return {"brightness": scores * (float("nan") if one_group_fails.calls % 2 else 1.0)}

one_group_fails.calls = 0

class OnDevice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, videos, prompts, fps):
        return {"brightness": self.weight * videos.flatten(1).mean(1)}

module = OnDevice()

def all_fail(videos, prompts, fps):
    return {"brightness": torch.full((len(videos),), float("nan"))}

def tensor(videos, prompts, fps):
    return videos.flatten(1).mean(1)

def wrong_shape(videos, prompts, fps):
    return {"brightness": videos.mean()}
"""


@pytest.fixture
def users_rewards(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(USERS_REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)


def test_a_users_reward_without_weights(world, tmp_path, users_rewards):
    folder = run_here(world, tmp_path, reward="my_rewards:brightness", iterations=1)
    line = metrics(folder)[0]
    assert line["reward"] == line["brightness"] > 0


def test_an_offloaded_reward_is_the_same_reward(world, tmp_path, users_rewards):
    runs = [
        run_here(world, tmp_path / str(off), reward="my_rewards:module", offload=off, iterations=1)
        for off in (False, True)
    ]
    assert metrics(runs[0])[0]["grad_norm"] == metrics(runs[1])[0]["grad_norm"]


def test_a_failed_sample_is_masked(world, tmp_path, users_rewards):
    folder = run_here(world, tmp_path, reward="my_rewards:one_group_fails", iterations=1)
    assert [line["invalid"] for line in metrics(folder)] == [0.5]
    assert all(line["grad_norm"] > 0 for line in metrics(folder))


def test_when_no_sample_can_be_scored_nothing_is_learnt(world, tmp_path, users_rewards, capsys):
    """A reward may come back in a later iteration; one that fails on all held-out videos need not start."""
    folder = run_here(world, tmp_path, reward="my_rewards:all_fail")
    assert all(line["invalid"] == 1 and "grad_norm" not in line for line in metrics(folder))
    assert "could score no sample of iteration 2" in capsys.readouterr().out
    with pytest.raises(ValueError, match="none of the 12 held-out videos"):
        run_here(world, tmp_path / "again", reward="my_rewards:all_fail", eval_seeds=1, eval_steps=1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "out of paint"),
        ("wrong_shape", r"tensor of \[1\]"),
        ("tensor", r"tensor of \[1\]\}, got Tensor"),
    ],
)
def test_a_bad_reward_is_named_before_there_is_a_run(world, tmp_path, users_rewards, name, message):
    with pytest.raises(ValueError, match=message):
        run_here(world, tmp_path, reward=f"my_rewards:{name}")
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_cannot_change_what_it_trains(world, tmp_path):
    folder = run_here(world, tmp_path, iterations=1)
    with pytest.raises(ValueError, match="--lora_rank is 16 and cannot become 8"):
        parse(["--resume", str(folder), "--lora_rank=8"], "")
    assert parse(["--resume", str(folder), "--lora_rank=16", "--seed=3"], "")[0].seed == 3


def test_two_processes_do_not_hang_on_a_mistake(tmp_path):
    """One line and a status that is not 0: for work that does not divide, for a reward that raises."""
    (tmp_path / "my_rewards.py").write_text(USERS_REWARDS)
    odd = start(2, *arguments(runs=tmp_path, prompts_per_iteration=3))
    path = {"PYTHONPATH": str(tmp_path)}
    broken = start(2, *arguments(runs=tmp_path, reward="my_rewards:broken"), **path)
    for process, message in ((odd, "do not divide by 2 processes"), (broken, "RuntimeError: out of paint")):
        status, output = finish(process, 120)
        assert status != 0 and message in output


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"], "")
    text = capsys.readouterr().out
    assert all(f"--{name}" in text for name in Config.__dataclass_fields__)
