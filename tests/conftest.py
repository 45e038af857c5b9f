"""What several tests need: the tiny model, a world of one, prompts."""

from copy import deepcopy
from functools import cache

import pytest
import torch

import evaluate
import hunyuan
import processes
import train

MODEL = "tiny/hunyuan"
PROMPTS = ["a red square moves left", 'a yellow circle stays still beside the word "two words" on a wall']
load_once = cache(hunyuan.load_pipeline)


def load_copy(*arguments, **options):
    """The pipeline as `hunyuan.load_pipeline` gives it, read from disk once in a process."""
    return deepcopy(load_once(*arguments, **options))


@pytest.fixture(scope="session", autouse=True)
def one_load():
    """Runs in this process load their model by `load_copy`, and draw no curves: those of their own do."""
    train.RunFolder.save_curves = lambda folder: None
    torch.set_num_threads(1)  # the tiny model is no faster on two, and tests of several processes need them
    for module in (train, evaluate):
        module.load_pipeline = load_copy


@pytest.fixture(scope="session")
def world():
    """One process, joined once."""
    yield processes.start("cpu")
    processes.stop()


@pytest.fixture
def make_policy(world):
    """A function of (guidance, adaptation, prompts) that gives a policy of its own."""

    def make(guidance: float = 1.0, adaptation: str = "lora", prompts=PROMPTS) -> hunyuan.Policy:
        torch.manual_seed(0)
        policy = hunyuan.Policy(load_copy(MODEL), world.device, guidance)
        policy.encode(prompts)
        policy.adapt(adaptation)
        policy.shard()
        return policy

    return make
