"""Gradient-norm equalizer over the steps of a sampler: Eq. 8-9 of SAGE-GRPO (arXiv 2603.21872).

A step's log-probability has a gradient of size sensitivity / std with respect to the velocity, and on a
shifted schedule that spans two orders of magnitude. The gain evens it out, so that every step teaches
about as much. It multiplies the policy loss, never the KL.

It knows no sampler: it takes the sensitivity and the std of the steps that explore, whatever method
they are of. Depends on torch only; copy this file.

    explores = std > 0
    gain = equalizer_gain(gradient_norm(b[explores].abs(), std[explores]))
"""

from torch import Tensor


def gradient_norm(sensitivity: Tensor, std: Tensor) -> Tensor:
    """Size of each step's policy gradient, per unit of noise (Eq. 8-9).

        grad_norm = sensitivity / std

    From log_prob = -(x_next - mean)**2 / (2 std**2) and x_next - mean = std noise, the gradient with
    respect to the velocity is sensitivity / std times noise. The paper leaves the sensitivity open; the
    released code settles it. 1 / std alone would miss that the step's drop in sigma varies 20-fold over
    a shifted schedule.

    Args:
        sensitivity: abs(d mean / d velocity), which is abs(b) where mean = a x + b velocity, [T].
        std: standard deviation of each step, above 0, [T].

    Returns: [T].
    Raises: ValueError where std is 0: an ODE step has no policy gradient. Leave it out.

    >>> gradient_norm(Tensor([0.01, 0.2]), Tensor([0.5, 0.1]))
    tensor([0.0200, 2.0000])
    """
    if not (std > 0).all():
        raise ValueError(f"every step must explore (std > 0), got std {std.tolist()}")
    return sensitivity / std


def equalizer_gain(grad_norm: Tensor, eps: float = 1e-8) -> Tensor:
    """Factor that brings each step's gradient to the median size (Eq. 9).

        gain = median(grad_norm) / (grad_norm + eps)

    The median is over all exploring steps of the schedule, so pass them all, not the subset that is
    trained: otherwise a step's gain would depend on which others were drawn. Of two middle values it is
    the lower one.

    Args:
        grad_norm: from `gradient_norm`, [T], at least 0; infinite entries get gain 0.
        eps: keeps the gain finite where grad_norm is 0; far below any real one (0.01 and more).

    Returns: [T].
    Raises: ValueError if grad_norm is empty, negative or NaN, or if its median is not finite.

    >>> equalizer_gain(Tensor([0.5, 1.0, 2.0, 4.0]))
    tensor([2.0000, 1.0000, 0.5000, 0.2500])
    """
    if not (grad_norm >= 0).all() or not grad_norm.median().isfinite():
        raise ValueError(f"grad_norm must be at least 0 with a finite median, got {grad_norm.tolist()}")
    return grad_norm.median() / (grad_norm + eps)  # Eq. 9
