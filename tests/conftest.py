"""What several tests need: the tiny model, a world of one, prompts."""

import pytest
import torch

import processes
from hunyuan import Policy, load_pipeline

MODEL = "tiny/hunyuan"
PROMPTS = ["a red square moves left", 'a yellow circle stays still beside the word "two words" on a wall']


@pytest.fixture(scope="session")
def world():
    """One process, joined once."""
    yield processes.start("cpu")
    processes.stop()


@pytest.fixture
def make_policy(world):
    """A function of (guidance, adaptation, prompts) that loads a policy anew."""

    def make(guidance: float = 1.0, adaptation: str = "lora", prompts=PROMPTS) -> Policy:
        torch.manual_seed(0)
        policy = Policy(load_pipeline(MODEL), world.device, guidance)
        policy.encode(prompts)
        policy.adapt(adaptation)
        policy.shard()
        return policy

    return make
