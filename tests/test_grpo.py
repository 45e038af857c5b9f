"""Eq. 4, 10 and 43: advantages against the standard library, the objective against its gradient."""

import math
import statistics

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo import group_advantage, policy_loss

quick = settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
rewards = st.lists(st.integers(-50, 50).map(lambda n: n / 8), min_size=2, max_size=12)


def advantage_of(*group, **options):
    """Of a single group, as a list."""
    return group_advantage(torch.tensor([group], dtype=torch.float64), **options)[0].tolist()


# Advantages


@quick
@given(rewards, st.floats(1e-6, 1))
def test_advantage_is_the_standardised_reward(group, eps):
    mean, std = statistics.fmean(group), statistics.pstdev(group)
    expected = [(reward - mean) / (std + eps) for reward in group]
    assert advantage_of(*group, eps=eps) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_groups_do_not_mix():
    reward = torch.tensor([[0.0, 1.0, 5.0], [10.0, 30.0, 20.0], [4.0, 4.0, 4.0]])
    apart = torch.cat([group_advantage(row[None]) for row in reward])
    assert torch.equal(group_advantage(reward), apart)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [1.4063, 0.1, -1 / 3, 1e-30, 1e30])
def test_equal_rewards_have_advantage_exactly_zero(value, dtype):
    for group_size in range(1, 17):
        reward = torch.full((2, group_size), value, dtype=dtype)
        for eps in (1e-4, 0.0):
            assert torch.equal(group_advantage(reward, eps=eps), torch.zeros(2, group_size).double())


def test_advantage_is_computed_in_float64():
    reward = 1000 + torch.arange(8, dtype=torch.float32)[None] / 2**12  # exact, but the squares are not
    advantage = group_advantage(reward, eps=0)
    assert advantage.dtype == torch.float64
    expected = group_advantage(torch.arange(8, dtype=torch.float64)[None], eps=0)
    torch.testing.assert_close(advantage, expected, rtol=1e-9, atol=0)


@quick
@given(rewards, st.data())
def test_masked_sample_acts_through_its_absence_alone(group, data):
    position = data.draw(st.integers(0, len(group)))
    absent = advantage_of(*group)
    for bad in (math.nan, math.inf, -math.inf):
        with_bad = advantage_of(*group[:position], bad, *group[position:])
        assert with_bad.pop(position) == 0
        assert with_bad == pytest.approx(absent, rel=1e-12, abs=1e-12)

    valid = torch.ones(1, len(group) + 1, dtype=torch.bool)
    valid[0, position] = False
    masked = advantage_of(*group[:position], 1e6, *group[position:], valid=valid)
    assert masked.pop(position) == 0
    assert masked == pytest.approx(absent, rel=1e-12, abs=1e-12)


def test_mask_does_not_validate_a_reward_that_is_not_finite():
    everything = torch.ones(1, 3, dtype=torch.bool)
    assert advantage_of(1.0, 2.0, math.nan, valid=everything) == advantage_of(1.0, 2.0, math.nan)


@pytest.mark.parametrize("group", [(1.0, math.nan, math.inf), (math.nan,) * 3, (2.0,)])
def test_group_with_fewer_than_two_valid_samples_is_exactly_zero(group):
    assert advantage_of(*group, eps=0.0) == [0.0] * len(group)


def test_advantage_is_limited():
    group = [0.0] * 99 + [1.0]  # the odd one out is sqrt(99) standard deviations away
    assert advantage_of(*group)[-1] == 5
    assert advantage_of(*group, limit=2.0)[-1] == 2
    assert min(advantage_of(*(-reward for reward in group), limit=2.0)) == -2
    assert advantage_of(*group, limit=10.0, eps=0.0)[-1] == pytest.approx(math.sqrt(99))


def test_eps_is_the_floor_of_the_std():
    assert advantage_of(0.0, 2e-3, eps=1e-3) == pytest.approx([-0.5, 0.5])


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((4,), {}, r"\(4,\)"),
        ((2, 4), {"valid": torch.ones(4, dtype=torch.bool)}, r"\(2, 4\), \(4,\)"),
        ((2, 4), {"eps": -1e-4}, "-0.0001"),
        ((2, 4), {"limit": 0.0}, "0.0"),
    ],
)
def test_advantage_refuses(shape, options, message):
    with pytest.raises(ValueError, match=message):
        group_advantage(torch.zeros(shape), **options)


# Objective


@pytest.mark.parametrize("gain", [1.0, torch.tensor(0.3).double(), torch.tensor([0.3, 2.0, 1.0, 5.0])])
def test_ratio_form_and_log_prob_form_have_one_gradient_at_ratio_one(gain):
    advantage = torch.tensor([1.0, -0.5, 0.0, 2.0])
    log_prob = torch.tensor([-1.0, 0.2, 3.0, -0.7], requires_grad=True)
    (ratio_form,) = torch.autograd.grad(policy_loss(log_prob, log_prob, advantage, gain, 1e-4), log_prob)
    (log_form,) = torch.autograd.grad((-advantage * gain * log_prob).mean(), log_prob)
    torch.testing.assert_close(ratio_form, log_form.to(ratio_form), rtol=1e-6, atol=0)
    assert ratio_form.count_nonzero() == 3


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "expected", "has_gradient"),
    [
        (2.0, 0.05, -2.0 * math.exp(0.05), True),  # inside the range
        (2.0, 0.5, -2.0 * 1.1, False),  # good and already likelier: nothing more to gain
        (2.0, -0.5, -2.0 * math.exp(-0.5), True),  # good but less likely: pulled back
        (-2.0, 0.5, 2.0 * math.exp(0.5), True),  # bad but likelier: pulled back
        (-2.0, -0.5, 2.0 * 0.9, False),  # bad and already less likely
    ],
)
def test_clip_takes_the_worse_of_two(advantage, log_ratio, expected, has_gradient):
    log_prob_old = torch.tensor([-1.5], dtype=torch.float64)
    log_prob = (log_prob_old + log_ratio).requires_grad_()
    loss = policy_loss(log_prob, log_prob_old, torch.tensor([advantage]), 1.0, clip_range=0.1)
    (gradient,) = torch.autograd.grad(loss, log_prob)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert gradient.item() == pytest.approx(expected if has_gradient else 0.0, rel=1e-6)


def test_loss_counts_every_sample_and_weighs_by_gain():
    log_prob = torch.zeros(4)
    advantage = torch.tensor([1.0, 0.0, 0.0, 3.0])
    assert policy_loss(log_prob, log_prob, advantage, 1.0, 1e-4).item() == -1
    assert policy_loss(log_prob, log_prob, advantage, 0.5, 1e-4).item() == -0.5
    assert policy_loss(log_prob, log_prob, advantage, torch.tensor([2.0, 1, 1, 0]), 1e-4).item() == -0.5


def test_loss_keeps_the_dtype_and_the_old_policy_gets_no_gradient():
    log_prob, log_prob_old = torch.zeros(2, 3, requires_grad=True)
    advantage, gain = torch.ones(3, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)
    loss = policy_loss(log_prob, log_prob_old, advantage, gain, 1e-4)
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert torch.autograd.grad(loss, log_prob_old, allow_unused=True) == (None,)


def test_loss_refuses():
    three, four = torch.zeros(3), torch.zeros(4)
    for arguments in [(three, three, four), (three, four, three), (three[:, None], three, three)]:
        with pytest.raises(ValueError, match="one shape"):
            policy_loss(*arguments, 1.0, 1e-4)
    for clip_range in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=str(clip_range)):
            policy_loss(three, three, three, 1.0, clip_range)
