"""Random numbers and gathered results that do not depend on who computes them."""

import json
import os
import subprocess
import sys

import torch

from config import Config
from processes import clear_errors, gather_units, mean_over_ranks, seeded_generator

SCRIPT = """
import torch
from processes import *

world = start("cpu")
units = torch.arange(6.0)[world.rank :: world.size]
assert gather_units(units[:, None]).flatten().tolist() == [0, 1, 2, 3, 4, 5]
assert mean_over_ranks(torch.tensor([world.rank, 1.0])).tolist() == [0.5, 1.0]
assert max_over_ranks(float(world.rank)) == 1.0
assert from_main([world.rank]) == [0]
with clear_errors():
    if world.rank:
        raise ValueError("paper jam")
stop()
"""


def test_one_process(world):
    assert (world.rank, world.size, world.is_main) == (0, 1, True)
    assert gather_units(torch.arange(3.0)).tolist() == [0, 1, 2]
    assert mean_over_ranks(torch.tensor([2.0])).tolist() == [2.0]


def test_two_processes(tmp_path):
    """Units come back in order, and an error of one rank alone is told with its rank and ends the run."""
    (tmp_path / "script.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, tmp_path / "script.py"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert "error on rank 1: paper jam" in done.stderr and "AssertionError" not in done.stderr


def test_an_error_of_a_library_has_a_place(monkeypatch, capsys):
    """A mistake that this repository names is one line; what a library complains of has its traceback too."""
    monkeypatch.setattr(os, "_exit", lambda status: None)
    with clear_errors():
        Config(steps=0)
    assert capsys.readouterr().err == "error: --steps must be at least 1, got 0\n"
    with clear_errors():
        json.loads("{")
    assert "json/decoder.py" in (error := capsys.readouterr().err) and "error: Expecting" in error


def test_seeds_do_not_repeat():
    """Neighbouring keys, and keys whose parts swap places, draw different numbers."""
    keys = [(run, step, sample) for run in range(4) for step in range(4) for sample in range(4)]
    draws = {key: torch.rand(1, generator=seeded_generator(*key)).item() for key in keys}
    assert len(set(draws.values())) == len(keys)
    assert torch.rand(1, generator=seeded_generator(*keys[7])).item() == draws[keys[7]]
    assert seeded_generator(0, "noise").initial_seed() == seeded_generator(0, "noise").initial_seed()
