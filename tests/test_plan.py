"""The plan's bytes, passes and FLOPs are those of a run."""

import os
import sys
from collections import Counter

import pytest
import torch
from conftest import MODEL, PROMPTS, load_copy
from test_train import arguments
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import plan
import train
from config import Config, parse
from hunyuan import Policy
from plan import Machine, Plan

REAL_VIDEO = {"frames": 81, "height": 480, "width": 848, "micro_batch": 1, "model": "not/at-hand"}


def tiny_config(**options) -> Config:
    """Of videos of two latent frames of 2 x 2 tokens: they are never scored."""
    size = {"frames": 5, "height": 16, "width": 16, "prompts_per_iteration": 1, "group_size": 2}
    short = {"device": "cpu", "steps": 3, "iterations": 2, "micro_batch": 2}
    return parse(arguments(**{**size, **short, **options}), "")[0]


def bytes_of(tensors) -> int:
    return sum(each.nbytes for each in tensors)


RUNS = [
    {
        "adaptation": "lora",
        "kl": "dual",
        "anchor_every": 2,
        "guidance": 2.0,
        "trained_steps": 1,
        "iterations": 3,
    },
    {"adaptation": "full", "kl": "moving", "anchor_every": 3, "updates_per_iteration": 2, "micro_batch": 1},
    {"adaptation": "full", "kl": "fixed", "anchor_every": 1, "precision": "bfloat16"},
    {"adaptation": "lora", "kl": "stepwise", "sde_window": 1},
    {"adaptation": "lora", "kl": "stepwise", "velocity_kl": "log_prob"},
    {"adaptation": "lora", "kl": "dual", "velocity_kl": "log_prob", "precision": "bfloat16"},
]


@pytest.mark.parametrize("options", RUNS)
def test_a_run_is_as_planned(world, options):
    """Its passes by kind, and the most bytes it holds; the gradients' just before they are dropped."""
    config = tiny_config(**options)
    trainer, passes, held, kind = train.Trainer(config, world), Counter(), Counter(), ["replay"]
    take_step, reference_means = trainer.take_step, trainer.reference_means

    def watched_step():
        held["gradients"] = bytes_of(each.grad for each in trainer.policy.parameters)
        take_step()

    def watched_means(rollout):
        kind[0] = "reference"
        means = reference_means(rollout)
        kind[0] = "replay"
        held["trajectory"] = max(held["trajectory"], rollout.latents.nbytes + bytes_of(means.values()))
        return means

    trainer.take_step, trainer.reference_means = watched_step, watched_means
    trainer.policy.transformer.register_forward_hook(lambda *_: passes.update([kind[0]]))
    for iteration in range(config.iterations):
        kind[0] = "roll-out"
        rollout = trainer.sampler.roll_out(iteration)
        kind[0] = "replay"
        for _ in range(config.updates_per_iteration):
            trainer.update(rollout, torch.randn(len(rollout.prompts), config.micro_batch), False)

    planned = Plan(config, Machine())
    expected = {name: count * config.iterations for name, count in planned.passes().items()}
    assert passes == {name: round(count, 9) for name, count in expected.items() if count}
    held.update(
        {
            "transformer": bytes_of(trainer.policy.transformer.parameters()),
            "VAE": bytes_of(trainer.policy.vae.parameters()),
            "optimizer": bytes_of(v for state in trainer.optimizer.state.values() for v in state.values()),
            "anchors": sum(bytes_of(anchor.state_dict().values()) for anchor in trainer.anchors.values()),
        }
    )
    assert planned.checkpoint == bytes_of(trainer.tensors().values())
    memory = planned.memory()
    assert bool(memory.pop("gathered")) == (config.precision == "bfloat16")  # FSDP is in use
    assert memory == held


@pytest.mark.parametrize("gpus", [1, 3, 64])
def test_the_first_shards_are_those_of_fsdp(gpus):
    tensors = [torch.zeros(shape, device="meta") for shape in ((16, 8), (2048, 16), (7,))]
    rows = [Shard.local_shard_size_and_offset(len(each), gpus, 0)[0] for each in tensors]
    expected = sum(each[:count].nbytes for each, count in zip(tensors, rows, strict=True))
    assert plan.shard_bytes(tensors, gpus) == expected


def test_the_released_schedule_does_not_depend_on_ours():
    """Six passes a sample and step; and two GPUs with four times the samples make twice the passes."""
    ours = Plan(tiny_config(kl="none"), Machine())
    other = Plan(tiny_config(guidance=6, sde_window=1, kl="dual"), Machine())
    assert ours.released_passes() == other.released_passes()
    assert sum(ours.released_passes().values()) == 6 * 2 * 3
    assert ours.passes() == {"roll-out": 3, "reference": 0, "replay": 2}
    shared = Plan(tiny_config(kl="none", prompts_per_iteration=4), Machine(gpus=2)).passes()
    assert shared == {name: 2 * count for name, count in ours.passes().items()}


def kept_for_backward(policy, x) -> int:
    """Bytes that autograd keeps of a velocity, without the parameters'."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        graph = policy.velocity(x, 0.5, PROMPTS[0])
    for parameter in policy.transformer.parameters():
        if not isinstance(parameter, DTensor):  # FSDP's, which no checkpointed block keeps
            kept.pop(parameter.untyped_storage().data_ptr(), None)
    assert graph.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("adaptation", ["lora", "full"])
def test_a_forward_of_the_tiny_transformer(make_policy, adaptation):
    """FLOPs of its matrix products, and what its backward needs of a block, both on real numbers."""
    policy = make_policy(adaptation=adaptation)
    config = Config(device="cpu", adaptation=adaptation, micro_batch=4)
    planned = Plan(config, Machine(text_tokens=policy.texts[PROMPTS[0]].words.shape[1]))
    x = torch.randn(4, 8, 3, 8, 8)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        policy.velocity(x, 0.5, PROMPTS[0])
    assert counter.get_total_flops() == 4 * planned.flops.forward

    four_blocks = kept_for_backward(policy, x)
    del policy.transformer.transformer_blocks[2]
    assert planned.block_activations == four_blocks - kept_for_backward(policy, x)
    assert planned.activations(checkpointing=False) == 4 * planned.block_activations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpointing_keeps_the_inputs_of_blocks(world, dtype):
    """As planned, in the dtype that they compute in, and the gradients are those without it."""
    gradients, x = [], torch.randn(4, 8, 3, 8, 8)
    for checkpointing in (False, True):
        torch.manual_seed(0)
        policy = Policy(load_copy(MODEL, dtype, masters=False), world.device)
        policy.encode(PROMPTS[:1])
        policy.adapt("lora")
        policy.shard(dtype, checkpointing)
        policy.velocity(x, 0.5, PROMPTS[0]).square().mean().backward()
        gradients.append([each.grad for each in policy.parameters])
        four_blocks = kept_for_backward(policy, x)
        del policy.transformer.transformer_blocks[2]
        block = four_blocks - kept_for_backward(policy, x)
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    config = Config(device="cpu", micro_batch=4, precision=str(dtype).removeprefix("torch."))
    planned = Plan(config, Machine(text_tokens=policy.texts[PROMPTS[0]].words.shape[1]))
    timestep = 4 * planned.width * 2 if dtype == torch.bfloat16 else 0  # FSDP's cast of it, which is small
    assert block == (planned.activations(checkpointing=True) - planned.block_activations) / 4 + timestep


@pytest.fixture(scope="module", params=["lora", "full"])
def real(request):
    """The plan of the real configuration at 81 frames of 480p."""
    return Plan(Config(adaptation=request.param, lora_rank=32, **REAL_VIDEO), Machine())


def test_the_real_model(real):
    """Its parameters, and its FLOPs at several sizes as they were once computed by hand."""
    parameters = real.transformer.num_parameters()
    if real.config.adaptation == "lora":
        layers = 8 * (1 + 1) + 4 * (1 + 4)  # rows and columns, in widths, of attention and MLPs
        trained = 32 * 2048 * (54 * layers - 1 * (1 + 1) - 2 * (1 + 4))  # the last block's text leads nowhere
        assert real.transformer.num_parameters(only_trainable=True) == trained
        parameters -= trained
    else:
        for tokens, peta in {33390: 0.684, 14310: 0.173, 75600: 2.958}.items():
            flops = plan.count_flops(real.transformer, tokens, 256)
            assert flops.forward / 1e15 == pytest.approx(peta, abs=6e-4)
    assert real.image == 33390
    assert parameters / 1e9 == pytest.approx(8.327, abs=5e-4)


def test_flops_of_a_real_block(real):
    """Forward and backward on the meta device, whose attention recomputes nothing, times 54."""
    block = real.transformer.transformer_blocks[0].to(torch.bfloat16)
    empty = {"device": "meta", "dtype": torch.bfloat16}
    states = [torch.empty(1, rows, 2048, requires_grad=True, **empty) for rows in (real.image, real.text)]
    rotary = [torch.empty(real.image, 128, device="meta") for _ in range(2)]
    with FlopCounterMode(display=False) as counter:
        image, text = block(*states, torch.empty(1, 2048, **empty), None, rotary)
    forward, flops = 54 * counter.get_total_flops(), real.flops
    with FlopCounterMode(display=False) as counter:
        (image.sum() + text.sum()).backward()
    replay = forward + 54 * counter.get_total_flops() + (plan.FLASH_BACKWARD - 2) * flops.attention
    assert forward == pytest.approx(flops.forward, rel=1e-3)
    assert replay == pytest.approx(flops.replay(checkpointing=False), rel=1e-3)
    assert replay + forward == pytest.approx(flops.replay(checkpointing=True), rel=1e-3)
    shape = 1, 16, 64, 128
    of_flash = sdpa_backward_flop_count(shape, shape, shape, shape) / sdpa_flop_count(shape, shape, shape)
    assert of_flash == plan.FLASH_BACKWARD


def test_activations_of_the_real_model(real):
    """Both predictions of a guided step are kept; with checkpointing each block's input, in bfloat16."""
    inputs, block = 54 * (33390 + 256) * 2048 * 2, real.block_activations
    assert real.activations(checkpointing=True) == inputs + block
    alone, guided = (Plan(tiny_config(guidance=guidance), Machine()) for guidance in (1.0, 6.0))
    assert guided.activations(checkpointing=False) == 2 * alone.activations(checkpointing=False)
    both = [each.activations(checkpointing=True) - alone.block_activations for each in (alone, guided)]
    assert both[1] == 2 * both[0]


WRONG = {
    "gpus": (["--gpus=0"], "--gpus must be above 0, got 0"),
    "speed": (["--tflops=-1"], "--tflops must be above 0, got -1.0"),
    "units": (["--gpus=3"], "2 micro-batches do not divide by --gpus 3"),
    "folder": (["--transformer_config=tests"], "tests has no transformer/config.json"),
    "option": (["--eta=-1"], "--eta must be at least 0, got -1"),
    "frames": (["--frames=8"], "4 n + 1, got 8"),
    "window": (["--sde_window=9"], "3 steps explore"),
}


def printed(monkeypatch, capsys, *line: str) -> tuple[list[int], str, str]:
    """Exit statuses other than success, and what plan.py prints."""
    left, small = [], ["--prompts_per_iteration=2", "--group_size=4", "--micro_batch=4", "--steps=4"]
    monkeypatch.setattr(sys, "argv", ["plan.py", *small, *line])
    monkeypatch.setattr(os, "_exit", left.append)
    plan.main()
    output = capsys.readouterr()
    return left, output.out, output.err


@pytest.mark.parametrize("wrong", WRONG)
def test_a_mistake_is_one_clear_line(monkeypatch, capsys, wrong):
    line, message = WRONG[wrong]
    left, output, errors = printed(monkeypatch, capsys, *line)
    assert left == [2] and not output
    assert len(errors.strip().splitlines()) == 1 and message in errors


def test_the_table(monkeypatch, capsys):
    """By default it is of the model at hand."""
    left, output, _ = printed(monkeypatch, capsys, "--device=cpu")
    assert not left and output.startswith("tiny/hunyuan, lora, GPUs: 1\n2 x 4 videos of 9 x 32 x 32, 4 steps")
    lines = [line.split() for line in output.splitlines() if line]
    memory = {line[0]: line[1:] for line in lines if line[-1].endswith("B")}
    assert memory["optimizer"] == ["2.16", "MB"] * 2 and memory["gathered"] == ["about", "0", "B"] * 2
    assert "tokens of a video     48 image + 256 text" in output
