"""Exploring samplers for flow matching: Eq. 5-7 and Table 1 of SAGE-GRPO (arXiv 2603.21872).

Every method is linear in the latents and in the velocity, so a step is three numbers:

    mean   = a x + b velocity
    x_next = mean + std noise

`step_coefficients` gives them for a whole schedule, `sde_step` takes one step, `log_prob` scores it.
The path is x = (1 - sigma) x0 + sigma z with standard normal z; the model predicts velocity = z - x0,
which points to the noise; sampling goes from sigma 1 down to 0.

There is no model, guidance, loop or random number here: noise is an argument, so that a step can be
replayed. Depends on torch only; copy this file.

    sigmas = shifted_sigmas(num_steps=20, shift=5.0)
    steps = step_coefficients("sage", sigmas, eta=0.5)
    for sigma, a, b, std in zip(sigmas, *steps):
        x, mean = sde_step(x, model(x, sigma), a, b, std, torch.randn_like(x))
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

METHODS = ("sage", "sage_exact", "flow_grpo", "dance_grpo", "cps", "ode")
SIGMA_LIMIT = 1 - 3e-3  # the released code's guard: the diffusion of Eq. 5 is infinite at sigma = 1


class StepCoefficients(NamedTuple):
    """A schedule's steps: mean = a x + b velocity, x_next = mean + std noise. Each [T], float64."""

    a: Tensor
    b: Tensor
    std: Tensor


def shifted_sigmas(num_steps: int, shift: float) -> Tensor:
    """Noise levels of a flow-matching schedule, from exactly 1 down to exactly 0.

        t     = 1 - i / num_steps
        sigma = shift t / (1 + (shift - 1) t)

    Args:
        num_steps: T, at least 1.
        shift: above 0; 1 is the uniform schedule, HunyuanVideo 1.5 uses 5 to 9.

    Returns: [T + 1], float64: differences of neighbouring levels lose too much in float32.
    Raises: ValueError if there is no step or the shift is not positive.

    >>> shifted_sigmas(4, 5.0)
    tensor([1.0000, 0.9375, 0.8333, 0.6250, 0.0000], dtype=torch.float64)
    """
    if num_steps < 1 or not 0 < shift < math.inf:
        raise ValueError(f"a schedule needs num_steps >= 1 and shift > 0, got {num_steps} and {shift}")
    t = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    return shift * t / (shift * t + (1 - t))  # summed in this order, t = 1 gives exactly 1 for any shift


def sage_variance(sigma: Tensor, sigma_next: Tensor, eta: float) -> Tensor:
    """Variance of SAGE's step from sigma down to sigma_next (Eq. 5-6).

        diffusion = eta sqrt(sigma / (1 - sigma))
        variance  = integral of diffusion**2 from sigma_next to sigma
                  = eta**2 (log1p(drop / (1 - sigma)) - drop)        drop = sigma - sigma_next

    The paper's log((1 - sigma_next) / (1 - sigma)) - drop is the same number but cancels at low levels;
    this form keeps three more digits. Both levels are clamped to SIGMA_LIMIT, so an interval above it has
    variance 0; the released code clamps only the upper one, and is negative from 68 steps at shift 5.

    Args:
        sigma, sigma_next: noise levels, 1 >= sigma >= sigma_next >= 0, any shape, float64.
        eta: exploration strength, at least 0.

    Returns: the variance (not the std), never negative, same shape.

    >>> sigma, sigma_next = torch.tensor([0.5, 0.0], dtype=torch.float64)
    >>> sage_variance(sigma, sigma_next, eta=1.0)
    tensor(0.1931, dtype=torch.float64)
    """
    upper, lower = sigma.clamp(max=SIGMA_LIMIT), sigma_next.clamp(max=SIGMA_LIMIT)
    drop = upper - lower
    growth = torch.log1p(drop / (1 - upper)) - drop
    return eta**2 * growth.clamp(min=0)  # below 0 only by rounding, at levels under 1e-300


def step_coefficients(
    method: str, sigmas: Tensor, eta: float, sde_last_step: bool = False
) -> StepCoefficients:
    """Coefficients of every step of a schedule (Eq. 7, Table 1).

    Of the marginal-preserving SDE, `sage`, `flow_grpo` and `dance_grpo` take an Euler step, each with
    its own variance; with score = -(x - (1 - sigma) x0) / sigma**2 and x0 = x - sigma velocity

        mean = x - drop velocity + variance / 2 score        drop = sigma - sigma_next
        a    = 1 - variance / (2 sigma)
        b    = -drop - variance (1 - sigma) / (2 sigma)

    `cps` and `sage_exact` remix the predicted clean latents and noise, z = x + (1 - sigma) velocity,
    keeping the share rho of z and drawing the rest anew:

        x_next = (1 - sigma_next) x0 + sigma_next (rho z + sqrt(1 - rho**2) noise)
        a      = (1 - sigma_next) + sigma_next rho
        b      = -sigma (1 - sigma_next) + (1 - sigma) sigma_next rho

    with rho = cos(eta pi / 2) for `cps`, and for `sage_exact` (ours, not in the paper) the closed
    solution of SAGE's SDE with x0 frozen over the step, where z is an Ornstein-Uhlenbeck process:

        rho = (sigma_next (1 - sigma) / (sigma (1 - sigma_next))) ** (eta**2 / 2)

    A step without noise is exactly the ODE step, a = 1, b = -drop. Those are every step of `ode`, those
    of `sage` above SIGMA_LIMIT, those of `cps` and `sage_exact` that end at sigma 0, and the last step
    unless sde_last_step: its noise would stay in the sample. A step without noise has no `log_prob`:
    train std > 0 only.

    Args:
        method: one of METHODS.
        sigmas: noise levels, [T + 1], strictly decreasing within [0, 1].
        eta: exploration strength, at least 0; at most 1 for `cps`. No effect on `ode`.
        sde_last_step: let the last step explore too, as the paper and the released code do.

    Returns: a, b, std, each [T], float64. abs(b) is the sensitivity that the equalizer needs (Eq. 9).
    Raises: ValueError for an unknown method, levels that do not decrease within [0, 1], an eta out of range.

    >>> step_coefficients("dance_grpo", torch.tensor([1.0, 0.5, 0.0]), eta=0.5).std
    tensor([0.3536, 0.0000], dtype=torch.float64)
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if not 0 <= eta < math.inf or (method == "cps" and eta > 1):
        raise ValueError(f"eta must be at least 0, and at most 1 for cps; got {eta} for {method}")
    sigmas = sigmas.double()
    sigma, sigma_next = sigmas[:-1], sigmas[1:]
    drop = sigma - sigma_next
    if sigmas.dim() != 1 or len(drop) == 0 or sigmas[0] > 1 or sigmas[-1] < 0 or not (drop > 0).all():
        raise ValueError(f"sigmas must decrease strictly within [0, 1], got {sigmas.tolist()}")

    if method in ("cps", "sage_exact"):
        if method == "cps":
            rho, fresh = math.cos(eta * math.pi / 2), math.sin(eta * math.pi / 2)
        else:
            rho = (sigma_next * (1 - sigma) / (sigma * (1 - sigma_next))) ** (eta**2 / 2)
            fresh = (1 - rho**2).sqrt()
        a = (1 - sigma_next) + sigma_next * rho
        b = -sigma * (1 - sigma_next) + (1 - sigma) * sigma_next * rho
        std = sigma_next * fresh
    else:
        if method == "sage":
            variance = sage_variance(sigma, sigma_next, eta)
        elif method == "flow_grpo":
            guarded = torch.where(sigma == 1, sigmas[1], sigma)  # the released code's guard against 1 / 0
            variance = eta**2 * sigma / (1 - guarded) * drop
        elif method == "dance_grpo":
            variance = eta**2 * drop
        else:
            variance = torch.zeros_like(drop)
        a = 1 - variance / (2 * sigma)
        b = -drop - variance * (1 - sigma) / (2 * sigma)
        std = variance.sqrt()

    if not sde_last_step:
        std[-1] = 0
    return StepCoefficients(torch.where(std > 0, a, 1.0), torch.where(std > 0, b, -drop), std)


def sde_step(
    x: Tensor, velocity: Tensor, a: Tensor, b: Tensor, std: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """One denoising step, from sigma down to sigma_next (Eq. 7).

        mean   = a x + b velocity
        x_next = mean + std noise

    Args:
        x: latents at sigma, [B, C, F, H, W], float32 or wider.
        velocity: model output at x after guidance, same shape; cast to the dtype of x.
        a, b, std: the step's coefficients, 0-dim, float64: 0-dim tensors do not promote x.
        noise: standard normal, shape and dtype of x. It has no effect where std is 0.

    Returns: x_next and mean, both like x; `log_prob` needs the mean.
    Raises: ValueError if x is half precision (late steps would drown in rounding) or if shapes differ.

    >>> x, half = torch.ones(1, 1, 1, 1, 1), torch.tensor(0.5)
    >>> x_next, mean = sde_step(x, velocity=x, a=half, b=-half / 2, std=half, noise=x)
    >>> x_next.item(), mean.item()
    (0.75, 0.25)
    """
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"x must be float32 or float64, got {x.dtype}")
    if not x.shape == velocity.shape == noise.shape:
        shapes = [tuple(tensor.shape) for tensor in (x, velocity, noise)]
        raise ValueError(f"x, velocity and noise must have one shape, got {shapes}")
    mean = a * x + b * velocity.to(x.dtype)  # Eq. 7, without its noise
    return mean + std * noise, mean


def log_prob(x_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Gaussian log-probability of a step, averaged over a sample's elements.

        mean over elements of  -(x_next - mean)**2 / (2 std**2) - log(std) - log(2 pi) / 2

    The average, not the sum: a ratio of these is the D-th root of the true ratio of D elements, which
    is why clip ranges here are 1e-4 and not 0.2. x_next counts as a constant: gradients flow through
    the mean alone.

    Args:
        x_next: the sample that was drawn, [B, ...].
        mean: the step's mean under the policy in question, same shape.
        std: the step's standard deviation, 0-dim, above 0.

    Returns: [B].
    Raises: ValueError if std is not positive: an ODE step has no log-probability.

    >>> log_prob(torch.zeros(1, 8), torch.ones(1, 8), torch.tensor(1.0))
    tensor([-1.4189])
    """
    if not std > 0:
        raise ValueError(f"a step without noise has no log-probability, got std {float(std)}")
    square = (x_next.detach() - mean).square().flatten(1).mean(1)
    return -square / (2 * std**2) - std.log() - math.log(2 * math.pi) / 2
