"""Eq. 5-7 and Table 1: the coefficients against their definitions, golden numbers and a Gaussian oracle."""

import math

import mpmath
import pytest
import torch
from hypothesis import HealthCheck, given, settings, target
from hypothesis import strategies as st

from equalizer import equalizer_gain
from sde import METHODS, SIGMA_LIMIT, log_prob, sage_variance, sde_step, shifted_sigmas, step_coefficients

mpmath.mp.dps = 40
quick = settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)

# Levels from 0 to 1, as dense near both ends as float64 is.
exponents = st.floats(-17, 0)
levels = st.one_of(st.floats(0, 1), exponents.map(lambda e: 10**e), exponents.map(lambda e: 1 - 10**e))
intervals = (
    st.tuples(levels, levels).map(lambda pair: (max(pair), min(pair))).filter(lambda pair: pair[0] > 0)
)
etas = st.floats(0.01, 1)


def variance(sigma, sigma_next, eta=1.0):
    sigmas = torch.tensor([sigma, sigma_next], dtype=torch.float64)
    return sage_variance(*sigmas, eta).item()


def clamped(*sigmas):
    return [mpmath.mpf(min(sigma, SIGMA_LIMIT)) for sigma in sigmas]


def exact_variance(sigma, sigma_next, eta=1.0):
    """The integral of diffusion**2 over the clamped interval, to 40 digits."""
    upper, lower = clamped(sigma, sigma_next)
    return mpmath.mpf(eta) ** 2 * (mpmath.log((1 - lower) / (1 - upper)) - (upper - lower))


def tolerance(sigma, exact):
    """Rounding of drop and of log1p, about 3e-16 drop, where the variance is at least sigma drop / 2."""
    return 1e-12 * float(exact) if sigma >= 1e-3 else 1e-18


def one_step(method, sigma, sigma_next, eta):
    """a, b and std of a single exploring step, 0-dim."""
    sigmas = torch.tensor([sigma, sigma_next], dtype=torch.float64)
    return [value[0] for value in step_coefficients(method, sigmas, eta, sde_last_step=True)]


# Schedule


@quick
@given(st.integers(1, 1000), st.floats(0.1, 12))
def test_schedule_falls_from_exactly_one_to_exactly_zero(num_steps, shift):
    sigmas = shifted_sigmas(num_steps, shift)
    assert sigmas.dtype == torch.float64 and sigmas.shape == (num_steps + 1,)
    assert sigmas[0] == 1 and sigmas[-1] == 0 and (sigmas.diff() < 0).all()


def test_schedule_of_the_paper():
    expected = [1, 0.98958, 0.97826, 0.96591, 0.95238, 0.9375, 0.92105, 0.90278, 0.88235, 0.85938, 0.83333]
    expected += [0.80357, 0.76923, 0.72917, 0.68182, 0.625, 0.55556, 0.46875, 0.35714, 0.20833, 0]
    assert shifted_sigmas(20, 5.0).tolist() == pytest.approx(expected, abs=6e-6)


@pytest.mark.parametrize(("num_steps", "shift"), [(0, 5.0), (20, 0.0), (20, -1.0), (20, math.nan)])
def test_schedule_refuses(num_steps, shift):
    with pytest.raises(ValueError, match=str(shift)):
        shifted_sigmas(num_steps, shift)


# Variance of a SAGE step


@quick
@given(intervals, etas)
def test_variance_is_the_closed_form_at_40_digits(interval, eta):
    exact = exact_variance(*interval, eta)
    error = abs(variance(*interval, eta) - exact)
    if exact > 0 and interval[0] >= 1e-3:
        target(float(error / exact))
    assert error <= tolerance(interval[0], exact)


@settings(quick, max_examples=30)
@given(intervals, etas)
def test_variance_is_the_integral_of_the_squared_diffusion(interval, eta):
    upper, lower = clamped(*interval)
    with mpmath.workdps(20):
        integral = mpmath.quad(lambda sigma: eta**2 * sigma / (1 - sigma), [lower, upper])
    assert abs(variance(*interval, eta) - integral) <= tolerance(interval[0], integral)


@quick
@given(st.tuples(levels, levels, levels).map(sorted), etas)
def test_variance_adds_over_a_split_of_the_interval(split, eta):
    low, middle, high = split
    whole = variance(high, low, eta)
    parts = variance(high, middle, eta) + variance(middle, low, eta)
    assert abs(parts - whole) <= 2 * tolerance(high, whole)


@quick
@given(intervals, etas)
def test_variance_scales_with_eta_squared(interval, eta):
    assert variance(*interval, eta) == pytest.approx(eta**2 * variance(*interval), rel=1e-15)


@settings(quick, max_examples=500)
@given(intervals)
def test_variance_is_never_negative_nor_nan(interval):
    assert 0 <= variance(*interval) < math.inf


@quick
@given(st.integers(1, 1000), st.floats(1, 12), st.sampled_from(METHODS), st.floats(0, 1))
def test_no_schedule_gives_a_bad_coefficient(num_steps, shift, method, eta):
    a, b, std = step_coefficients(method, shifted_sigmas(num_steps, shift), eta, sde_last_step=True)
    assert (std >= 0).all() and std.isfinite().all()
    assert a.isfinite().all() and (b < 0).all() and b.isfinite().all()


@quick
@given(intervals, etas)
def test_flow_grpo_exceeds_the_integral_by_the_exact_excess(interval, eta):
    sigma, sigma_next = (level * SIGMA_LIMIT for level in interval)
    if sigma_next == sigma:
        return
    drop = mpmath.mpf(sigma) - mpmath.mpf(sigma_next)
    u = drop / (1 - mpmath.mpf(sigma))
    excess = eta**2 * (u - mpmath.log1p(u))
    flow = one_step("flow_grpo", sigma, sigma_next, eta)[2].item() ** 2
    assert abs(flow - variance(sigma, sigma_next, eta) - excess) <= 1e-15 * (flow + float(drop))


def test_log1p_form_keeps_what_the_printed_form_cancels():
    sigma, sigma_next = 0.02, 0.019
    printed = math.log((1 - sigma_next) / (1 - sigma)) - (sigma - sigma_next)
    exact = exact_variance(sigma, sigma_next)
    assert abs(printed / exact - 1) > 1e-12
    assert abs(variance(sigma, sigma_next) / exact - 1) < 1e-14


@pytest.mark.parametrize(("num_steps", "shift"), [(112, 3.0), (68, 5.0), (49, 7.0), (38, 9.0)])
def test_clamping_the_upper_level_alone_turns_negative(num_steps, shift):
    def first_variance_as_released(num_steps):
        sigma, sigma_next = shifted_sigmas(num_steps, shift)[:2].tolist()
        return math.log((1 - sigma_next) / (1 - min(sigma, SIGMA_LIMIT))) - (sigma - sigma_next)

    assert first_variance_as_released(num_steps - 1) > 0 > first_variance_as_released(num_steps)


# Table 1


GOLDEN = """
 i  std: dance   flow      cps      sage   gain: dance   flow      cps       sage
 0    0.025516 0.700000 0.941150 0.556187    1.58922 7.80216 12.19985 8.16052
 1    0.026602 0.725989 0.930381 0.425554    1.52383 5.97951  6.84108 5.29831
 2    0.027785 0.521878 0.918634 0.330744    1.45842 3.94018  4.61790 3.72585
 5    0.032062 0.347690 0.875973 0.233006    1.26211 1.97139  2.10373 1.95057
 9    0.040344 0.279250 0.792547 0.189643    1.00000 1.00000  1.00000 1.00000
14    0.059591 0.244252 0.594410 0.163924    0.67068 0.40089  0.41323 0.39712
18    0.096440 0.201269 0.198137 0.121869    0.39808 0.12613  0.11085 0.11485
19    0.114109 0.163903 0.000000 0.079501    0.31764 0.07337  0        0.05514
"""
GOLDEN_ROWS = [[float(value) for value in line.split()] for line in GOLDEN.strip().splitlines()[1:]]
BASELINES = {"dance_grpo": 0.25, "flow_grpo": 0.7, "cps": 0.8, "sage": 0.5}  # method: its own eta


@pytest.mark.parametrize("column", range(4), ids=list(BASELINES))
def test_golden_table(column):
    method, eta = list(BASELINES.items())[column]
    _, b, std = step_coefficients(method, shifted_sigmas(20, 5.0), eta, sde_last_step=True)
    gain = equalizer_gain(
        b.abs() / std
    )  # infinite where std is 0: counted in the median, in this table alone
    for row in GOLDEN_ROWS:
        step = int(row[0])
        assert std[step].item() == pytest.approx(row[1 + column], abs=1e-6)
        assert gain[step].item() == pytest.approx(row[5 + column], rel=1e-5, abs=5e-6)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("dance_grpo", (0.99967448, 0.51025391, 0.51790856, 2.70452992)),
        ("flow_grpo", (0.755, 0.38791667, 0.59791667, -0.60726359)),
        ("cps", (0.31621473, 0.16852403, 0.45086894, -0.90328544)),
        ("sage", (0.84532773, 0.43308053, 0.59993678, -0.37728872)),
    ],
)
def test_golden_transition(method, expected):
    a, b, std = (value[0] for value in step_coefficients(method, shifted_sigmas(20, 5.0), BASELINES[method]))
    x, velocity, noise = torch.tensor([[[0.5]], [[-1.0]], [[0.3]]], dtype=torch.float64)
    x_next, mean = sde_step(x, velocity, a, b, std, noise)
    assert b.item() == pytest.approx(-0.01041667, abs=5e-9)
    assert [a.item(), mean.item(), x_next.item(), log_prob(x_next, mean, std).item()] == pytest.approx(
        expected, abs=5e-9
    )


def mean_written_out(method, x, velocity, sigma, sigma_next, eta, std):
    """Eq. 7 as it is printed, with the errata's signs, in x0 and z."""
    x0, z = x - sigma * velocity, x + (1 - sigma) * velocity
    if method == "cps":
        return (1 - sigma_next) * x0 + math.sqrt(sigma_next**2 - std**2) * z
    if method == "sage_exact":
        rate = eta**2 / 2 * (math.log(sigma / (1 - sigma)) - math.log(sigma_next / (1 - sigma_next)))
        return (1 - sigma_next) * x0 + sigma_next * math.exp(-rate) * z
    score = -(x - (1 - sigma) * x0) / sigma**2
    return x - (sigma - sigma_next) * velocity + std**2 / 2 * score


@quick
@given(st.sampled_from(METHODS), st.floats(0.02, 0.98), st.floats(0.01, 0.99), etas, st.floats(-3, 3))
def test_linear_form_is_eq_7_written_out(method, sigma, share, eta, x):
    sigma_next, velocity = sigma * share, 0.7
    a, b, std = (value.item() for value in one_step(method, sigma, sigma_next, eta))
    written_out = mean_written_out(method, x, velocity, sigma, sigma_next, eta, std)
    assert a * x + b * velocity == pytest.approx(written_out, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize(("sigma", "sigma_next"), [(0.9, 0.5), (0.5, 0.1), (0.97, 0.95)])
def test_sage_exact_is_the_limit_of_small_sage_steps_with_x0_frozen(sigma, sigma_next):
    """At x0 = 0, so velocity = x / sigma: x stays Gaussian, and Euler's factor and variance are known."""

    def euler(num_steps):
        sigmas = torch.linspace(sigma, sigma_next, num_steps + 1, dtype=torch.float64)
        factor, spread = 1.0, 0.0
        for level, a, b, std in zip(sigmas[:-1].tolist(), *euler_coefficients(sigmas), strict=True):
            slope = a + b / level
            factor, spread = slope * factor, slope**2 * spread + std**2
        return factor, spread

    def euler_coefficients(sigmas):
        return [value.tolist() for value in step_coefficients("sage", sigmas, 0.5, sde_last_step=True)]

    a, b, std = (value.item() for value in one_step("sage_exact", sigma, sigma_next, 0.5))
    coarse, fine = euler(1000), euler(2000)
    extrapolated = [2 * f - c for f, c in zip(fine, coarse, strict=True)]  # Euler's error is of order 1
    assert extrapolated == pytest.approx([a + b / sigma, std**2], rel=1e-5)
    assert fine != pytest.approx([a + b / sigma, std**2], rel=1e-5)


def test_sage_exact_redraws_all_noise_at_sigma_one():
    a, b, std = one_step("sage_exact", 1.0, 0.9, 0.01)
    assert (a.item(), b.item(), std.item()) == pytest.approx((0.1, -0.1, 0.9), abs=1e-15)


@pytest.mark.parametrize("method", METHODS)
def test_vanishing_eta_is_the_euler_step(method):
    sigmas = shifted_sigmas(20, 5.0)[1:]  # below 1, where sage_exact has this limit too
    for eta, distance in [(0.0, 0.0), (1e-3, 1e-4), (1e-4, 1e-6)]:
        a, b, std = step_coefficients(method, sigmas, eta, sde_last_step=True)
        assert (a - 1).abs().max() <= distance
        assert (b - sigmas.diff()).abs().max() <= distance
        assert std.max() <= 10 * eta


@pytest.mark.parametrize("method", METHODS)
def test_coefficients_are_float64_whatever_the_levels_are(method):
    sigmas = shifted_sigmas(20, 5.0).float()
    for single, double in zip(
        step_coefficients(method, sigmas, 0.5), step_coefficients(method, sigmas.double(), 0.5), strict=True
    ):
        assert single.dtype == torch.float64 and torch.equal(single, double)


def assert_ode(steps, sigmas, index):
    a, b, std = (value[index] for value in steps)
    assert (a, b, std) == (1, sigmas[1:][index] - sigmas[:-1][index], 0)


@pytest.mark.parametrize("method", METHODS)
def test_last_step_is_the_ode_step_unless_asked(method):
    sigmas = shifted_sigmas(20, 5.0)
    assert_ode(step_coefficients(method, sigmas, 0.5), sigmas, -1)
    exploring = step_coefficients(method, sigmas, 0.5, sde_last_step=True)
    if method in ("cps", "sage_exact", "ode"):
        assert_ode(exploring, sigmas, -1)
    else:
        assert exploring.std[-1] > 0.05
    others = step_coefficients(method, sigmas, 0.5)
    assert all(torch.equal(one[:-1], other[:-1]) for one, other in zip(exploring, others, strict=True))
    assert (others.std[:-1] > 0).all() == (method != "ode")


@pytest.mark.parametrize(
    ("num_steps", "shift", "first"), [(67, 5.0, 0), (68, 5.0, 1), (50, 7.0, 1), (300, 5.0, 4)]
)
def test_sage_steps_above_the_limit_are_ode_steps(num_steps, shift, first):
    sigmas = shifted_sigmas(num_steps, shift)
    steps = step_coefficients("sage", sigmas, 0.5)
    assert (sigmas[1:] >= SIGMA_LIMIT).sum() == first
    for index in range(first):
        assert_ode(steps, sigmas, index)
    assert (steps.std[first:-1] > 0).all()


@pytest.mark.parametrize(
    ("method", "sigmas", "eta"),
    [
        ("sde", [1.0, 0.5, 0.0], 0.5),
        ("sage", [1.0, 0.5, 0.0], -0.1),
        ("sage", [1.0, 0.5, 0.0], math.nan),
        ("cps", [1.0, 0.5, 0.0], 1.1),
        ("sage", [0.0, 0.5, 1.0], 0.5),
        ("sage", [1.0, 0.5, 0.5], 0.5),
        ("sage", [1.1, 0.5, 0.0], 0.5),
        ("sage", [1.0, 0.5, -0.1], 0.5),
        ("sage", [1.0, math.nan, 0.0], 0.5),
        ("sage", [1.0], 0.5),
        ("sage", [[1.0, 0.5], [0.5, 0.0]], 0.5),
    ],
)
def test_coefficients_refuse(method, sigmas, eta):
    with pytest.raises(ValueError, match="got"):
        step_coefficients(method, torch.tensor(sigmas), eta)


# One step and its log-probability


@pytest.mark.parametrize("method", METHODS)
def test_sensitivity_is_the_derivative_of_the_mean(method):
    for a, b, std in zip(*step_coefficients(method, shifted_sigmas(10, 5.0), 0.5), strict=True):
        x, noise = torch.randn(2, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        velocity = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
        _, mean = sde_step(x, velocity, a, b, std, noise)
        (derivative,) = torch.autograd.grad(mean.sum(), velocity)
        assert torch.equal(derivative.abs(), b.abs().expand(2, 3))


def test_step_stays_in_the_dtype_of_x():
    a, b, std = one_step("sage", 0.9, 0.8, 0.5)
    assert a.dtype == b.dtype == std.dtype == torch.float64
    x = torch.ones(2, 3)
    for velocity_dtype in (torch.float32, torch.bfloat16, torch.float64):
        x_next, mean = sde_step(x, x.to(velocity_dtype), a, b, std, x)
        assert x_next.dtype == mean.dtype == log_prob(x_next, mean, std).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_step_refuses_half_precision(dtype):
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=str(dtype)):
        sde_step(x.to(dtype), x, *one_step("sage", 0.9, 0.8, 0.5), x)


def test_step_refuses_to_broadcast():
    x, other = torch.ones(2, 3), torch.ones(1, 3)
    for velocity, noise in [(other, x), (x, other)]:
        with pytest.raises(ValueError, match=r"\(1, 3\)"):
            sde_step(x, velocity, *one_step("sage", 0.9, 0.8, 0.5), noise)


def test_log_prob_is_the_mean_log_density():
    generator = torch.Generator().manual_seed(0)
    x_next, mean = torch.randn(2, 4, 3, 5, 2, 2, dtype=torch.float64, generator=generator)
    std = torch.tensor(0.3, dtype=torch.float64)
    expected = torch.distributions.Normal(mean, std).log_prob(x_next).mean(dim=(1, 2, 3, 4))
    torch.testing.assert_close(log_prob(x_next, mean, std), expected, rtol=1e-12, atol=0)


def test_log_prob_gradient_flows_through_the_mean_alone():
    mean = torch.zeros(2, 3, requires_grad=True)
    x_next = mean + 1.0  # a sample that still hangs on the graph
    (gradient,) = torch.autograd.grad(log_prob(x_next, mean, torch.tensor(0.5)).sum(), mean)
    torch.testing.assert_close(gradient, torch.full((2, 3), 1 / 0.25 / 3))


@pytest.mark.parametrize("std", [0.0, -1.0, math.nan])
def test_log_prob_refuses_a_step_without_noise(std):
    with pytest.raises(ValueError, match=str(std)):
        log_prob(torch.zeros(1, 3), torch.zeros(1, 3), torch.tensor(std))


# Gaussian oracle


def moments(method, num_steps, data_mean, data_std, sde_last_step=True, printed_score=False):
    """Exact mean and variance of a sampler's output for data N(data_mean, data_std**2), shift 5, eta 0.5.

    x0 = E[x0 | x] is linear in x, so is the velocity (x - x0) / sigma, and x stays Gaussian. The score as the
    paper prints it, -(x - x0) / sigma**2, is ours plus x0 / sigma.
    """
    sigmas = shifted_sigmas(num_steps, 5.0)
    steps = step_coefficients(method, sigmas, 0.5, sde_last_step)
    mean, variance = 0.0, 1.0
    for sigma, a, b, std in zip(sigmas[:-1].tolist(), *(value.tolist() for value in steps), strict=True):
        slope_x0 = (1 - sigma) * data_std**2 / (((1 - sigma) * data_std) ** 2 + sigma**2)
        offset_x0 = data_mean * (1 - slope_x0 * (1 - sigma))
        slope = a + b * (1 - slope_x0) / sigma
        offset = -b * offset_x0 / sigma
        if printed_score:
            slope += std**2 / 2 * slope_x0 / sigma
            offset += std**2 / 2 * offset_x0 / sigma
        mean, variance = slope * mean + offset, slope**2 * variance + std**2
    return mean, variance


STD_OVER_TRUE_STD = [  # at T = 20 and T = 1000, thin data, std 0.1
    ("ode", 0.348, 0.980),
    ("dance_grpo", 2.471, 1.009),
    ("flow_grpo", 1.172, 0.986),
    ("sage", 0.828, 0.984),
    ("cps", 0.344, 0.896),
    ("sage_exact", 0.347, 0.977),
]


@pytest.mark.parametrize(("method", "coarse", "fine"), STD_OVER_TRUE_STD)
def test_oracle_variance(method, coarse, fine):
    for num_steps, expected in [(20, coarse), (1000, fine)]:
        _, variance = moments(method, num_steps, 0.0, 0.1)
        assert math.sqrt(variance) / 0.1 == pytest.approx(expected, abs=5e-4)


def test_oracle_variance_with_an_ode_last_step():
    _, variance = moments("sage", 20, 0.0, 0.1, sde_last_step=False)
    assert math.sqrt(variance) / 0.1 == pytest.approx(0.383, abs=5e-4)


@pytest.mark.parametrize("method", METHODS)
def test_oracle_mean_is_exact_at_any_number_of_steps(method):
    for num_steps in (20, 1000):
        mean, _ = moments(method, num_steps, 0.7, 0.5)
        assert mean == pytest.approx(0.7, rel=1e-12)


@pytest.mark.parametrize("method", ["ode", "dance_grpo", "sage", "sage_exact"])
def test_oracle_variance_converges_with_order_one(method):
    errors = [abs(moments(method, num_steps, 0.0, 0.1)[1] / 0.01 - 1) for num_steps in (1000, 4000)]
    assert math.log(errors[0] / errors[1], 4) == pytest.approx(1, abs=0.1)


def test_oracle_limits_of_flow_and_cps():
    """Flow's first std is eta at any T, yet it ends close; cps forgets a share of the noise at every step."""
    assert step_coefficients("flow_grpo", shifted_sigmas(4000, 5.0), 0.5).std[0].item() == pytest.approx(0.5)
    assert math.sqrt(moments("flow_grpo", 4000, 0.0, 0.1)[1]) / 0.1 == pytest.approx(1, abs=0.02)
    assert math.sqrt(moments("cps", 64_000, 0.0, 0.1)[1]) / 0.1 == pytest.approx(0.92, abs=5e-3)


def test_oracle_rejects_the_score_as_printed():
    mean, variance = moments("sage", 4000, 0.7, 0.5)
    assert mean == pytest.approx(0.7, rel=1e-10) and variance / 0.25 == pytest.approx(1, abs=2e-3)
    mean, variance = moments("sage", 4000, 0.7, 0.5, printed_score=True)
    assert mean == pytest.approx(0.94, abs=5e-3) and variance / 0.25 == pytest.approx(1.18, abs=5e-3)
