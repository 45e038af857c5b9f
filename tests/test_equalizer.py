"""Eq. 8-9. The golden gains of four samplers are in test_sde.py, beside the std they come from."""

import math

import pytest
import torch

from equalizer import equalizer_gain, gradient_norm
from sde import METHODS, log_prob, sde_step, shifted_sigmas, step_coefficients


def exploring_steps(method, num_steps=20):
    a, b, std = step_coefficients(method, shifted_sigmas(num_steps, 5.0), 0.5)
    explores = std > 0
    return a[explores], b[explores], std[explores]


@pytest.mark.parametrize("method", [method for method in METHODS if method != "ode"])
def test_gradient_norm_is_the_gradient_of_the_log_prob_per_unit_of_noise(method):
    a, b, std = exploring_steps(method)
    norms = gradient_norm(b.abs(), std)
    x = torch.ones(1, 1, dtype=torch.float64)
    for step in range(len(std)):
        velocity = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
        x_next, mean = sde_step(x, velocity, a[step], b[step], std[step], noise=x)
        (gradient,) = torch.autograd.grad(log_prob(x_next, mean, std[step]).sum(), velocity)
        torch.testing.assert_close(gradient.abs().squeeze(), norms[step], rtol=1e-9, atol=0)


@pytest.mark.parametrize("method", [method for method in METHODS if method != "ode"])
def test_gain_brings_every_step_to_the_median(method):
    _, b, std = exploring_steps(method)
    norms = gradient_norm(b.abs(), std)
    gain = equalizer_gain(norms)
    torch.testing.assert_close(gain * norms, norms.median().expand_as(norms), rtol=1e-5, atol=0)


def test_sage_gradients_span_two_orders_of_magnitude_before_the_gain():
    a_step_more = step_coefficients("sage", shifted_sigmas(20, 5.0), 0.5, sde_last_step=True)
    for (_, b, std), span in [(a_step_more, 148), (exploring_steps("sage"), 71)]:
        norms = gradient_norm(b.abs(), std)
        assert (norms.max() / norms.min()).item() == pytest.approx(span, abs=0.5)


def test_median_is_the_lower_of_two_middle_values():
    assert equalizer_gain(torch.tensor([8.0, 1.0, 2.0, 4.0]), eps=0.0).tolist() == [0.25, 2.0, 1.0, 0.5]


def test_infinite_gradient_counts_in_the_median_and_has_gain_zero():
    assert equalizer_gain(torch.tensor([1.0, 2.0, math.inf]), eps=0.0).tolist() == [2.0, 1.0, 0.0]


def test_eps_bounds_the_gain_of_a_step_without_gradient():
    gain = equalizer_gain(torch.tensor([0.0, 2.0, 3.0], dtype=torch.float64), eps=1e-3)
    assert gain[0].item() == pytest.approx(2000) and gain[1].item() == pytest.approx(2 / 2.001)


def test_gradient_norm_refuses_a_step_without_noise():
    for std in (0.0, -0.1, math.nan):
        with pytest.raises(ValueError, match=str(std)):
            gradient_norm(torch.tensor([0.1, 0.1]), torch.tensor([0.5, std]))


@pytest.mark.parametrize("norms", [[], [1.0, -1.0, 2.0], [1.0, math.nan], [1.0, math.inf, math.inf]])
def test_gain_refuses(norms):
    with pytest.raises(ValueError, match=r"grad_norm must be .* got \["):
        equalizer_gain(torch.tensor(norms))
