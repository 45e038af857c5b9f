"""Eq. 11-15: KL terms against their definitions, anchors in one and in two processes, the KL weight."""

import copy
import json
import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from sde import log_prob
from trust_region import Anchor, KLWeight, gaussian_kl, log_prob_kl

STD = torch.tensor(0.3, dtype=torch.float64)


def gradient(value, parameter):
    return torch.autograd.grad(value, parameter)[0]


# KL terms


def test_gaussian_kl_is_the_kl_of_two_gaussians():
    mean, mean_ref = torch.randn(2, 3, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(normal(mean, STD), normal(mean_ref, STD)).mean(dim=(1, 2))
    torch.testing.assert_close(gaussian_kl(mean, mean_ref, STD), expected, rtol=1e-12, atol=0)


def test_gaussian_kl_pulls_towards_the_reference_and_rests_there():
    reference = torch.tensor([[0.5, -1.0, 2.0]], dtype=torch.float64)
    at_rest = reference.clone().requires_grad_()
    assert torch.equal(
        gradient(gaussian_kl(at_rest, reference, STD).sum(), at_rest), torch.zeros(1, 3).double()
    )
    away = (reference + torch.tensor([0.1, 0.0, -0.2])).requires_grad_()
    pull = gradient(gaussian_kl(away, reference, STD).sum(), away)
    torch.testing.assert_close(pull, (away.detach() - reference) / STD**2 / 3)


def test_gaussian_kl_takes_the_reference_as_a_constant():
    mean, mean_ref = torch.zeros(1, 3, requires_grad=True), torch.ones(1, 3, requires_grad=True)
    kl = gaussian_kl(mean, mean_ref, STD)
    assert kl.dtype == torch.float32
    assert torch.autograd.grad(kl.sum(), mean_ref, allow_unused=True) == (None,)


@pytest.mark.parametrize("std", [0.0, -1.0, math.nan])
def test_gaussian_kl_refuses_a_step_without_noise(std):
    with pytest.raises(ValueError, match=str(std)):
        gaussian_kl(torch.zeros(1, 3), torch.ones(1, 3), torch.tensor(std))


def mean_and_error(shift, num_samples=20_000):
    """Gradient of the log-prob velocity term, over samples of the old policy, which is `shift` behind."""
    noise = torch.randn(num_samples, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mean = torch.full((num_samples, 1), shift, dtype=torch.float64, requires_grad=True)
    x_next, mean_old = STD * noise, torch.zeros_like(mean)
    kl = log_prob_kl(log_prob(x_next, mean_old, STD), log_prob(x_next, mean, STD))
    if shift == 0:
        assert torch.equal(kl, torch.zeros(num_samples).double())
    samples = gradient(kl.sum(), mean)
    return samples.mean().item(), samples.std().item() / math.sqrt(num_samples)


def test_log_prob_form_is_noise_when_on_policy():
    """Its mean gradient is zero; 4 standard errors: a right form fails at 1 seed in 16,000."""
    mean, error = mean_and_error(shift=0.0)
    assert abs(mean) < 4 * error
    assert error * math.sqrt(20_000) == pytest.approx(1 / STD.item(), rel=0.05)  # while each sample's is not


def test_log_prob_form_has_the_gradient_of_the_kl_on_average():
    """Off-policy its mean gradient is that of `gaussian_kl`; 4 standard errors, of which the signal is 47."""
    mean, error = mean_and_error(shift=0.1)
    policy = torch.full((1, 1), 0.1, dtype=torch.float64, requires_grad=True)
    expected = gradient(gaussian_kl(policy, torch.zeros(1, 1), STD).sum(), policy).item()
    assert abs(mean - expected) < 4 * error < expected / 10


def test_log_prob_kl_is_constant_in_the_old_policy():
    old, new = torch.zeros(2, 3, requires_grad=True)
    assert torch.autograd.grad(log_prob_kl(old, new).sum(), old, allow_unused=True) == (None,)


# Anchor


def bits(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def same(one, other):
    return all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


@pytest.fixture
def moved():
    """Parameters, their anchor, the values it keeps and the values they have moved to."""
    parameters = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4).bfloat16())]
    anchor, kept = Anchor(iter(parameters)), bits(parameters)
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(1.1).add_(0.1)
    return parameters, anchor, kept, bits(parameters)


def test_anchor_swaps_in_and_restores_bit_for_bit(moved):
    parameters, anchor, kept, current = moved
    identities = [parameter.data_ptr() for parameter in parameters]
    for _ in range(2):
        with anchor.swapped_in():
            assert same(parameters, kept)
        assert same(parameters, current)
    assert [parameter.data_ptr() for parameter in parameters] == identities
    assert same(anchor.state_dict().values(), kept)


def test_anchor_restores_when_the_body_raises(moved):
    parameters, anchor, kept, current = moved
    with pytest.raises(KeyError), anchor.swapped_in():
        raise KeyError
    assert same(parameters, current) and same(anchor.state_dict().values(), kept)


def test_two_anchors_nest(moved):
    parameters, anchor, kept, current = moved
    previous = Anchor(parameters)
    with torch.no_grad():
        parameters[0].zero_()
    with anchor.swapped_in():
        with previous.swapped_in():
            assert same(parameters, current)
        assert same(parameters, kept)
    assert not parameters[0].any()


def test_anchor_refresh_takes_the_current_values_and_no_reference(moved):
    parameters, anchor, _, current = moved
    anchor.refresh()
    with torch.no_grad():
        parameters[0].zero_()
    with anchor.swapped_in():
        assert same(parameters, current)


def test_anchor_state_survives_a_file(moved, tmp_path):
    parameters, anchor, kept, _ = moved
    torch.save(anchor.state_dict(), tmp_path / "anchor.pt")
    resumed = Anchor(parameters)
    resumed.load_state_dict(torch.load(tmp_path / "anchor.pt", weights_only=True))
    with resumed.swapped_in():
        assert same(parameters, kept)


def test_anchor_refuses_another_state(moved):
    _, anchor, kept, _ = moved
    state = {"0": torch.zeros(3, 2), "1": torch.zeros(4)}
    for wrong in ({"0": state["0"]}, {**state, "2": state["0"]}, {**state, "1": torch.zeros(1)}):
        with pytest.raises(ValueError, match="shapes"):
            anchor.load_state_dict(wrong)
    assert same(anchor.state_dict().values(), kept)


def test_anchor_refuses_use_while_swapped_in(moved):
    parameters, anchor, _, current = moved
    for use in (
        anchor.refresh,
        anchor.state_dict,
        anchor.swapped_in().__enter__,
        lambda: anchor.load_state_dict({}),
    ):
        with pytest.raises(ValueError, match="swapped in"), anchor.swapped_in():
            use()
        assert same(parameters, current)


def test_an_anchor_waits_where_it_is_told_to():
    model = nn.Linear(2, 2)
    assert {kept.device.type for kept in Anchor(model.parameters()).snapshot} == {"cpu"}
    assert {kept.device.type for kept in Anchor(model.parameters(), torch.device("meta")).snapshot} == {
        "meta"
    }


def test_anchor_refuses_to_hold_nothing():
    with pytest.raises(ValueError, match="no parameters"):
        Anchor(parameter for parameter in nn.Linear(2, 2).parameters() if not parameter.requires_grad)


def test_autograd_notices_a_swap_between_forward_and_backward():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    anchor = Anchor(model.parameters())
    loss = model(torch.ones(1, 2)).sum()
    with anchor.swapped_in():
        pass
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Residual(nn.Module):
    """Two blocks between two layers; 5 and 7 do not divide by two ranks."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 2)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5)) for _ in range(2)
        )

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def train(model, x):
    """Three large steps of full fine-tuning, so that the outputs differ visibly."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        reshard(model)


def reshard(model):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def output(model, x):
    """Leaves the root gathered, as any forward without gradient does."""
    return model(x)


def swap_on_two_ranks(rank, folder):
    """The body of the test below, in each of two processes: the same model sharded and whole."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    whole, x = Residual(), torch.randn(4, 3)
    sharded, mesh = copy.deepcopy(whole), init_device_mesh("cpu", (2,))
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    anchor = Anchor(sharded.parameters())
    assert all(isinstance(kept, DTensor) and kept.placements[0].is_shard() for kept in anchor.snapshot)

    initial = output(whole, x)
    for model in (whole, sharded):
        train(model, x)
    moved = output(sharded, x)
    reshard(sharded)
    shards = bits(parameter.to_local() for parameter in anchor.parameters)
    torch.testing.assert_close(moved, output(whole, x))
    assert (moved - initial).abs().max() > 0.1

    with anchor.swapped_in():
        torch.testing.assert_close(output(sharded, x), initial, rtol=0, atol=1e-6)
        reshard(sharded)
    assert same([parameter.to_local() for parameter in anchor.parameters], shards)
    assert torch.equal(output(sharded, x), moved)
    reshard(sharded)

    dcp.save(anchor.state_dict(), checkpoint_id=f"{folder}/anchor")
    resumed = Anchor(anchor.parameters)
    state = {name: torch.zeros_like(kept) for name, kept in resumed.state_dict().items()}
    dcp.load(state, checkpoint_id=f"{folder}/anchor")
    resumed.load_state_dict(state)
    with resumed.swapped_in():
        torch.testing.assert_close(output(sharded, x), initial, rtol=0, atol=1e-6)
        reshard(sharded)
    resumed.refresh()
    with resumed.swapped_in():
        assert torch.equal(output(sharded, x), moved)
        reshard(sharded)
    dist.destroy_process_group()


def test_anchor_under_fsdp2_is_the_anchor_of_the_whole_model(tmp_path):
    torch.multiprocessing.spawn(swap_on_two_ranks, args=(str(tmp_path),), nprocs=2)


# KL weight


def kl_weight(**changes):
    values = {"minimum": 0.01, "maximum": 0.1, "warmup": 0, "target": 1e-3, "rate": 0.1, "window": 1}
    return KLWeight(**{**values, **changes})


def test_weight_warms_up_linearly_whatever_the_kl():
    weight = kl_weight(warmup=4)
    values = [weight.value] + [weight.update(kl) for kl in (0.0, 9.0, -1.0, 1e-3)]
    assert values == pytest.approx([0.01, 0.0325, 0.055, 0.0775, 0.1])
    assert weight.update(0.0) == pytest.approx(0.09)
    assert kl_weight(warmup=0).value == 0.1


def test_weight_rises_above_the_target_and_falls_below():
    weight = kl_weight(maximum=10.0)
    weight.value = 1.0
    for kl, expected in [(1.5e-3, 1.05), (1e-3, 1.05), (0.5e-3, 0.9975), (5e-3, 1.09725), (-5e-3, 0.987525)]:
        assert weight.update(kl) == pytest.approx(expected)
        assert weight.value == pytest.approx(expected)


def test_weight_stays_in_its_range():
    weight = kl_weight()
    low = [weight.update(0.0) for _ in range(100)]
    high = [weight.update(1.0) for _ in range(100)]
    assert (min(low), low[-1], max(high), high[-1]) == (0.01, 0.01, 0.1, 0.1)
    assert all(0.01 <= value <= 0.1 for value in low + high)


def test_weight_holds_the_kl_at_its_target():
    """A process whose KL is 1e-4 / weight: at the weight 0.1 it is at the target 1e-3, from either side."""
    for start in (0.01, 1.0):
        weight = kl_weight(maximum=1.0, rate=0.3)
        weight.value = start
        for _ in range(100):
            weight.update(1e-4 / weight.value)
        assert weight.value == pytest.approx(0.1, rel=1e-3)


def test_weight_sees_the_mean_of_the_last_window():
    weight = kl_weight(maximum=10.0, window=3)
    weight.value = 1.0
    kls, expected = [0.9e-3, 0.9e-3, 1.5e-3, 0.9e-3, 0.3e-3], [0.99, 0.99 * 0.99]
    expected += [expected[-1] * 1.01, expected[-1] * 1.01 * 1.01, expected[-1] * 1.01 * 1.01 * 0.99]
    assert [weight.update(kl) for kl in kls] == pytest.approx(expected)


def test_weight_resumes_where_it_stopped():
    kls = [1e-3, 3e-3, 0.2e-3, 0.7e-3, 1.2e-3, 0.4e-3]
    for stop in range(len(kls)):
        weight = kl_weight(warmup=2, window=3)
        for kl in kls[:stop]:
            weight.update(kl)
        resumed = kl_weight(warmup=2, window=3)
        resumed.load_state_dict(json.loads(json.dumps(weight.state_dict())))
        assert resumed.value == weight.value
        assert [resumed.update(kl) for kl in kls[stop:]] == [weight.update(kl) for kl in kls[stop:]]


def test_weight_state_is_not_shared():
    weight = kl_weight(window=2)
    state = weight.state_dict()
    weight.update(1.0)
    assert state == {"updates": 0, "value": 0.1, "recent": []}


@pytest.mark.parametrize(
    "changes",
    [
        {"minimum": 0.0},
        {"minimum": 0.2},
        {"maximum": math.inf},
        {"warmup": -1},
        {"target": 0.0},
        {"target": math.nan},
        {"rate": 1.0},
        {"rate": -0.1},
        {"window": 0},
    ],
)
def test_weight_refuses(changes):
    (name, value) = next(iter(changes.items()))
    with pytest.raises(ValueError, match=f"{name}={value}"):
        kl_weight(**changes)


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_weight_refuses_a_kl_that_is_not_finite(kl):
    with pytest.raises(ValueError, match=str(kl)):
        kl_weight().update(kl)
