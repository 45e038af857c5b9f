"""Advantages and objective of group-relative policy optimisation: Eq. 4, 10 and 43 of SAGE-GRPO
(arXiv 2603.21872).

Where rewards, log-probabilities and the equalizer's gain come from is the trainer's, as are ranks: a group
may span them, so gather the rewards first. Depends on torch only; copy this file.

    advantage = group_advantage(reward)  # [P, G]: P prompts of G samples
    loss = policy_loss(log_prob, log_prob_old, advantage[prompt], gain, clip_range=1e-4)  # one step, [G]
    loss = loss + kl_weight * kl.mean()  # Eq. 43 with a plus, since it is minimised
"""

import torch
from torch import Tensor


def group_advantage(
    reward: Tensor, valid: Tensor | None = None, eps: float = 1e-4, limit: float = 5.0
) -> Tensor:
    """Reward of each sample relative to the other samples of its prompt (Eq. 10).

        advantage = clip((reward - mean(reward)) / (std(reward) + eps), -limit, limit)

    with the mean and the population std of the group's valid samples. A group without a preference
    teaches nothing: where all valid rewards are equal, or fewer than two are valid, the advantage is
    exactly 0. An invalid sample has advantage 0 and is otherwise absent; its reward is not replaced.

    Args:
        reward: [P, G], one row per prompt, any float dtype. NaN and infinities are invalid by themselves.
        valid: bool, [P, G]; None takes every finite reward.
        eps: the one floor of the std. Raise it to the reward's own noise, about 0.06 for VideoAlign.
        limit: bound of the advantage, above 0.

    Returns: [P, G], float64: in float32, rounding of eight equal rewards would be scaled up to about 1.
    Raises: ValueError if reward is not [P, G], valid has another shape, eps < 0 or limit <= 0.

    >>> group_advantage(torch.tensor([[1.0, 3.0, float("nan")], [7.0, 7.0, 7.0]]), eps=0)
    tensor([[-1.,  1.,  0.],
            [ 0.,  0.,  0.]], dtype=torch.float64)
    """
    if reward.dim() != 2 or (valid is not None and valid.shape != reward.shape):
        shapes = [tuple(tensor.shape) for tensor in (reward, valid) if tensor is not None]
        raise ValueError(f"reward and valid must both be [P, G], got {shapes}")
    if not (eps >= 0 and limit > 0):
        raise ValueError(f"eps must be at least 0 and limit above 0, got {eps} and {limit}")
    reward = reward.double()
    valid = reward.isfinite() if valid is None else valid & reward.isfinite()
    count = valid.sum(1, keepdim=True)
    highest = reward.masked_fill(~valid, -torch.inf).amax(1, keepdim=True)
    lowest = reward.masked_fill(~valid, torch.inf).amin(1, keepdim=True)
    differs = highest > lowest  # a test of the std would see the rounding of the mean

    mean = reward.masked_fill(~valid, 0).sum(1, keepdim=True) / count
    deviation = (reward - mean).masked_fill(~valid, 0)
    std = (deviation.square().sum(1, keepdim=True) / count).sqrt()
    return (deviation / (std + eps)).clamp(-limit, limit).masked_fill(~differs, 0)  # Eq. 10


def policy_loss(
    log_prob: Tensor, log_prob_old: Tensor, advantage: Tensor, gain: Tensor | float, clip_range: float
) -> Tensor:
    """Clipped policy objective of one step, to be minimised (Eq. 4, 43).

        ratio = exp(log_prob - log_prob_old)
        loss  = mean over samples of  gain max(-advantage ratio, -advantage clip(ratio, 1 - c, 1 + c))

    Eq. 4 and 43 print -advantage gain log_prob, which has the same gradient at ratio 1, where every
    first update is. The mean counts every sample, those of advantage 0 too, so the denominator is the
    same on all ranks.

    Args:
        log_prob: of the policy, [B], with gradient; averaged over elements.
        log_prob_old: of the policy that sampled, [B]; a constant.
        advantage: from `group_advantage`, [B].
        gain: the equalizer's for this step, 0-dim or [B]; 1 for none. At least 0.
        clip_range: c, above 0; about 1e-4, since the ratio of averages is the D-th root of the true one.

    Returns: scalar.
    Raises: ValueError if the first three differ in shape or clip_range is not above 0.

    >>> log_prob = torch.tensor([-1.0, -2.0])
    >>> policy_loss(log_prob, log_prob, torch.tensor([1.0, -3.0]), gain=0.5, clip_range=1e-4)
    tensor(0.5000)
    """
    if not log_prob.shape == log_prob_old.shape == advantage.shape:
        shapes = [tuple(tensor.shape) for tensor in (log_prob, log_prob_old, advantage)]
        raise ValueError(f"log_prob, log_prob_old and advantage must have one shape, got {shapes}")
    if not clip_range > 0:
        raise ValueError(f"clip_range must be above 0, got {clip_range}")
    advantage = advantage.to(log_prob)  # float64 would promote the loss
    ratio = (log_prob - log_prob_old.detach()).exp()
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return (gain * torch.maximum(-advantage * ratio, -advantage * clipped)).mean()
