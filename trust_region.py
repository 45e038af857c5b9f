"""Trust region of SAGE-GRPO: Eq. 11-15 of arXiv 2603.21872.

The policy is held near older ones by a KL per step, between two Gaussians of the same variance:

    KL = beta_pos position + beta_vel velocity  (Eq. 14)
    position  `gaussian_kl` to an anchor that is refreshed now and then (Eq. 11, 13)
    velocity  `gaussian_kl` to the policy before the last update; `log_prob_kl` is the printed Eq. 15

`Anchor` keeps the older parameters, `KLWeight` adapts the weight of the sum.

When to refresh, and how the terms are added, is the trainer's; nothing here knows models, optimizers or
ranks. Depends on torch only; copy this file.

    anchor = Anchor(parameters)
    with torch.no_grad(), anchor.swapped_in():
        mean_anchor = step(model(x))
    loss = loss + kl_weight.value * gaussian_kl(step(model(x)), mean_anchor, std).mean()
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def gaussian_kl(mean: Tensor, mean_ref: Tensor, std: Tensor) -> Tensor:
    """KL divergence of two steps with the same variance, averaged over a sample's elements (Eq. 11, 13).

        KL = mean over elements of  (mean - mean_ref)**2 / (2 std**2)

    Averaged like the log-probability it stands beside, so a weight is per element. The variance is the
    step's own, without a floor. The reference is a constant: gradients flow through `mean` alone.

    Args:
        mean: the step's mean under the policy, [B, ...].
        mean_ref: the same under the reference, same shape.
        std: the step's standard deviation, 0-dim, above 0.

    Returns: [B], at least 0.
    Raises: ValueError if std is not positive: an ODE step has no KL.

    >>> gaussian_kl(torch.ones(2, 8), torch.zeros(2, 8), torch.tensor(0.5))
    tensor([2., 2.])
    """
    if not std > 0:
        raise ValueError(f"a step without noise has no KL, got std {float(std)}")
    return (mean - mean_ref.detach()).square().flatten(1).mean(1) / (2 * std**2)


def log_prob_kl(log_prob_old: Tensor, log_prob: Tensor) -> Tensor:
    """The velocity term as it is printed, on samples of the roll-out (Eq. 15).

        KL = log_prob_old - log_prob

    Kept for comparison. On samples of the old policy this estimates KL(old || policy): at the first
    update its value is 0 and its gradient is minus the mean score function, zero in expectation, which
    is noise and not a trust region. `gaussian_kl` against the previous policy is the closed form.

    Args:
        log_prob_old: of the previous policy, [B]; a constant.
        log_prob: of the policy, [B].

    Returns: [B], of either sign.

    >>> log_prob_kl(torch.tensor([1.0]), torch.tensor([0.75]))
    tensor([0.2500])
    """
    return log_prob_old.detach() - log_prob


class Anchor:
    """Snapshot of the trainable parameters, which can take their place for a while (Eq. 13, 14).

    Swapping exchanges the values in place, so it needs no third copy and the parameters stay the same
    tensors. Swap before the policy's forward, never between its forward and its backward. It works on
    DTensors as it does on tensors. Under FSDP2 give it the parameters listed right after sharding, and
    reshard every group before and after a swap: a gathered group does not see a change of its shards.

    Args:
        parameters: tensors, at least one; the anchor starts as a copy of their values.
        device: where the copy waits; by default beside the parameters.

    Raises: ValueError if there are no parameters, or on a use of the snapshot while it is swapped in.

    >>> policy = torch.nn.Parameter(torch.zeros(1))
    >>> anchor = Anchor([policy])
    >>> _ = policy.data.fill_(1.0)
    >>> with anchor.swapped_in():
    ...     policy.item()
    0.0
    >>> policy.item()
    1.0
    """

    def __init__(self, parameters: Iterable[Tensor], device: torch.device | None = None):
        self.parameters = list(parameters)
        if not self.parameters:
            raise ValueError("an anchor of no parameters: is anything trainable?")
        self.snapshot = [each.detach().to(device or each.device, copy=True) for each in self.parameters]
        self.is_swapped_in = False

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies the current parameters into the snapshot."""
        self._require_swapped_out()
        for kept, parameter in zip(self.snapshot, self.parameters, strict=True):
            kept.copy_(parameter)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The parameters hold the snapshot inside, and their own values again, bit for bit, after it."""
        self._require_swapped_out()
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def state_dict(self) -> dict[str, Tensor]:
        """The snapshot itself, not a copy, by position: "0", "1", ..."""
        self._require_swapped_out()
        return {str(i): kept for i, kept in enumerate(self.snapshot)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copies a saved snapshot in; ValueError unless it has as many tensors, of the same shapes."""
        own = {name: tuple(kept.shape) for name, kept in self.state_dict().items()}
        given = {name: tuple(saved.shape) for name, saved in state.items()}
        if given != own:
            raise ValueError(f"the saved anchor has shapes {given}, the parameters {own}")
        for name, kept in self.state_dict().items():
            kept.copy_(state[name])

    @torch.no_grad()
    def _exchange(self) -> None:
        for kept, parameter in zip(self.snapshot, self.parameters, strict=True):
            values = parameter.detach().clone()
            parameter.copy_(kept)
            kept.copy_(values)
        self.is_swapped_in = not self.is_swapped_in

    def _require_swapped_out(self) -> None:
        if (
            self.is_swapped_in
        ):  # the snapshot now holds the policy, which would be lost or saved as the anchor
            raise ValueError("the anchor is swapped in: leave `with anchor.swapped_in()` first")


class KLWeight:
    """Weight of the KL: a linear warm-up, then proportional feedback towards a target KL.

        warm-up   value = minimum + (maximum - minimum) updates / warmup
        feedback  value = value (1 + rate clip(KL / target - 1, -1, 1)), kept in [minimum, maximum]

    A KL above the target raises the weight, one below lowers it (the released code does the opposite).
    Units: per element, like `gaussian_kl`; the KL is the beta-weighted sum that the loss has, averaged
    over all samples and ranks, once per update.

    Args:
        minimum, maximum: range of the weight, 0 < minimum <= maximum.
        warmup: updates until it first reaches the maximum, at least 0.
        target: the KL to hold, above 0.
        rate: largest relative change per update, in [0, 1); 0 leaves the maximum.
        window: the feedback sees the mean of the last `window` KLs, at least 1. Best the time between two
            refreshes of the anchor, since right after one the KL is 0.

    Raises: ValueError for values out of these ranges.

    >>> weight = KLWeight(minimum=0.01, maximum=0.1, warmup=2, target=1e-3, rate=0.1)
    >>> [round(weight.update(kl), 4) for kl in (0.0, 0.0, 1e-3, 0.5e-3, 9.0)]
    [0.055, 0.1, 0.1, 0.095, 0.1]
    """

    def __init__(
        self, minimum: float, maximum: float, warmup: int, target: float, rate: float, window: int = 1
    ):
        in_range = 0 < minimum <= maximum < math.inf and 0 < target < math.inf and 0 <= rate < 1
        if not in_range or warmup < 0 or window < 1:
            raise ValueError(
                "KLWeight needs 0 < minimum <= maximum, warmup >= 0, target > 0, 0 <= rate < 1, window >= 1; "
                f"got {minimum=}, {maximum=}, {warmup=}, {target=}, {rate=}, {window=}"
            )
        self.minimum, self.maximum, self.warmup = minimum, maximum, warmup
        self.target, self.rate = target, rate
        self.updates = 0
        self.recent = deque[float](maxlen=window)
        self.value = minimum if warmup else maximum

    def update(self, kl: float) -> float:
        """Counts one update with this KL (finite, or ValueError) and returns the next update's weight."""
        kl = float(kl)
        if not math.isfinite(kl):
            raise ValueError(f"the KL is not finite: {kl}")
        self.updates += 1
        self.recent.append(kl)
        if self.updates <= self.warmup:
            self.value = self.minimum + (self.maximum - self.minimum) * (self.updates / self.warmup)
        else:
            error = sum(self.recent) / len(self.recent) / self.target - 1
            value = self.value * (1 + self.rate * min(max(error, -1.0), 1.0))
            self.value = min(max(value, self.minimum), self.maximum)
        return self.value

    def state_dict(self) -> dict:
        """Plain numbers, for JSON or a checkpoint."""
        return {"updates": self.updates, "value": self.value, "recent": list(self.recent)}

    def load_state_dict(self, state: dict) -> None:
        """Continues from a saved state; the ranges stay those of the constructor."""
        self.updates, self.value = state["updates"], state["value"]
        self.recent = deque(state["recent"], maxlen=self.recent.maxlen)
