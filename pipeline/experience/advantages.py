"""Rewards, KL terms and advantages of PPO and GRPO, as formulas over tensors.

k_t = logp_t - logp_ref_t is the log-ratio of action t; A is the number of action columns. Values outside the action
mask are ignored on input and zero on output. The two functions that begin with ``coati_`` are the conventions of
ColossalAI's coati, kept for runs that must be reproduced; nothing else uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from pipeline.errors import ShapeError

SCORE_CLIP = 5.0
"""coati's PPO clips the score of a response to [-SCORE_CLIP, SCORE_CLIP]; its GRPO does not."""

_MAX_EXPONENT = 60.0
"""exp(60), 1e26, can be summed in float32 over any response; the estimator is exact up to this exponent."""


KlEstimator = Callable[..., Tensor]
"""From log-ratios k of any shape, and an action mask of it or None, to an estimate of KL(actor || reference) each."""


def k1_kl(log_ratios: Tensor, action_mask: Tensor | None = None) -> Tensor:
    """Estimate KL(actor || reference) per action as k (k1, http://joschu.net/blog/kl-approx.html).

    Args:
        log_ratios: ``(B, A)`` or ``(N,)`` float32, k.
        action_mask: Bool of the same shape; None if all are actions.

    Returns:
        As many float32, of either sign. The gradient of its mean over samples is 0 on average.
    """
    return _masked(log_ratios, action_mask)


def k2_kl(log_ratios: Tensor, action_mask: Tensor | None = None) -> Tensor:
    """Estimate KL(actor || reference) per action as k^2 / 2 (k2, http://joschu.net/blog/kl-approx.html).

    Args:
        log_ratios: ``(B, A)`` or ``(N,)`` float32, k.
        action_mask: Bool of the same shape; None if all are actions.

    Returns:
        As many float32, never negative. The gradient of its mean over samples is that of the KL.
    """
    return _masked(log_ratios.square() / 2, action_mask)


def k3_kl(log_ratios: Tensor, action_mask: Tensor | None = None) -> Tensor:
    """Estimate KL(actor || reference) per action as exp(-k) - 1 + k (k3, http://joschu.net/blog/kl-approx.html).

    Args:
        log_ratios: ``(B, A)`` or ``(N,)`` float32, k.
        action_mask: Bool of the same shape; None if all are actions.

    Returns:
        As many float32, never negative, finite for every finite k.
    """
    exponents = (-log_ratios).clamp(max=_MAX_EXPONENT)
    # expm1 keeps the digits that exp(x) - 1 loses near 0: there k3 is the difference of two nearly equal numbers.
    return _masked((exponents.expm1() + log_ratios).clamp(min=0.0), action_mask)


def _masked(values: Tensor, action_mask: Tensor | None) -> Tensor:
    return values if action_mask is None else values.masked_fill(~action_mask, 0.0)


KL_ESTIMATORS: Final[Mapping[str, KlEstimator]] = {"k1": k1_kl, "k2": k2_kl, "k3": k3_kl}
"""The estimators by their names in `trainer.kl_estimator` and `rollout.kl_estimator`."""


def action_rewards(
    scores: Tensor,
    log_ratios: Tensor,
    action_mask: Tensor,
    kl_coef: float,
    turn_rewards: Tensor | None = None,
) -> Tensor:
    """Reward each action for staying close to the reference, and the last one with the score.

    r_t = -kl_coef k_t, plus the score at the last action of the row (arXiv:1909.08593 eq. 2). In rows of several turns
    the reward of each turn is at its own last action.

    Args:
        scores: ``(B,)`` float32, the reward of each response.
        log_ratios: ``(B, A)`` float32, k.
        action_mask: ``(B, A)`` bool, at least one action a row.
        kl_coef: Weight of the KL term.
        turn_rewards: ``(B, A)`` float32, the part of the scores that belongs to single turns, at their last actions.

    Returns:
        ``(B, A)`` float32.

    Raises:
        ShapeError: If a row has no action.
    """
    _count_actions(action_mask)
    rewards = (-kl_coef * log_ratios).masked_fill(~action_mask, 0.0)
    return rewards + placed_scores(scores, action_mask, turn_rewards)


def placed_scores(scores: Tensor, action_mask: Tensor, turn_rewards: Tensor | None = None) -> Tensor:
    """Return the scores at the actions that they belong to, ``(B, A)``: the last one of the row, or of each turn.

    Args:
        scores: As for `action_rewards`, as the other arguments.
        action_mask: ``(B, A)`` bool.
        turn_rewards: ``(B, A)`` float32.
    """
    columns = torch.arange(action_mask.shape[1], device=action_mask.device)
    last = torch.where(action_mask, columns, 0).amax(dim=1, keepdim=True)
    placed = scores.new_zeros(action_mask.shape) if turn_rewards is None else turn_rewards
    return placed.scatter_add(1, last, (scores - placed.sum(dim=1)).unsqueeze(1))


def generalized_advantages(values: Tensor, rewards: Tensor, action_mask: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalized advantage estimation (arXiv:1506.02438 eq. 16), every row terminal after its last action.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}. V and A are zero past the end of a row,
    also of a row truncated at its length limit. t counts actions: where the mask has holes (tool output between two
    actions), t + 1 is the next action. The advantages are not whitened.

    Args:
        values: ``(B, A)`` float32, the value of the state before each action.
        rewards: ``(B, A)`` float32.
        action_mask: ``(B, A)`` bool.
        gamma: Discount.
        lam: Lambda; 0 gives the one-step error, 1 the return minus the value.

    Returns:
        ``(B, A)`` float32.

    Raises:
        ShapeError: If the shapes differ.
    """
    if not values.shape == rewards.shape == action_mask.shape:
        raise ShapeError(
            f"values {tuple(values.shape)}, rewards {tuple(rewards.shape)} and action_mask "
            f"{tuple(action_mask.shape)} differ in shape"
        )
    values, rewards = values.masked_fill(~action_mask, 0.0), rewards.masked_fill(~action_mask, 0.0)
    # The actions of a row come first, contiguous; the other columns follow.
    columns = (~action_mask).byte().argsort(dim=1, stable=True)
    values, rewards = values.gather(1, columns), rewards.gather(1, columns)
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    errors = (rewards + gamma * following - values).unbind(dim=1)
    advantages: list[Tensor] = []
    advantage = torch.zeros_like(values[:, 0])
    for error in reversed(errors):
        advantage = error + gamma * lam * advantage
        advantages.append(advantage)
    result = torch.zeros_like(values).scatter(1, columns, torch.stack(advantages[::-1], dim=1))
    return result.masked_fill(~action_mask, 0.0)


def kl_rewards(log_ratios: Tensor, action_mask: Tensor, kl_coef: float) -> Tensor:
    """KL term of a GRPO response: the mean of -kl_coef k over its actions.

    Args:
        log_ratios: ``(B, A)`` float32, k.
        action_mask: ``(B, A)`` bool, at least one action a row.
        kl_coef: Weight of the KL term.

    Returns:
        ``(B,)`` float32.

    Raises:
        ShapeError: If a row has no action.
    """
    return (-kl_coef * log_ratios).masked_fill(~action_mask, 0.0).sum(dim=1) / _count_actions(action_mask)


def group_advantages(rewards: Tensor, group_size: int, *, eps: float = 1e-4) -> Tensor:
    """Normalize each reward within its prompt's group (GRPO, arXiv:2402.03300 section 4.1.2).

    Args:
        rewards: ``(B,)`` float32, the G responses of a prompt contiguous.
        group_size: Responses per prompt (G), at least 2.
        eps: Added to the group's unbiased standard deviation.

    Returns:
        ``(B,)`` float32: (reward - mean) / (standard deviation + eps), exactly 0 in a group of equal rewards.

    Raises:
        ShapeError: If B is not a multiple of `group_size`, or `group_size` is below 2.
    """
    groups = in_groups(rewards, group_size)  # (B/G, G)
    centered = groups - groups.mean(dim=1, keepdim=True)
    return zero_if_equal(centered / (groups.std(dim=1, keepdim=True) + eps), groups)


def zero_if_equal(advantages: Tensor, groups: Tensor) -> Tensor:
    """Return advantages, 0 in groups of equal rewards, whose mean may round to another number than the rewards.

    Args:
        advantages: ``(B/G, G)``.
        groups: ``(B/G, G)``, the rewards.

    Returns:
        ``(B,)``.
    """
    return advantages.masked_fill((groups == groups[:, :1]).all(dim=1, keepdim=True), 0.0).reshape(-1)


def group_mixed(scores: Tensor, group_size: int) -> Tensor:
    """Return which rows are in a group whose scores are not all equal; only these carry a training signal.

    Args:
        scores: ``(B,)``, the G responses of a prompt contiguous.
        group_size: Responses per prompt (G), at least 2.

    Returns:
        ``(B,)`` bool, the same for all rows of a group.

    Raises:
        ShapeError: If B is not a multiple of `group_size`, or `group_size` is below 2.
    """
    groups = in_groups(scores, group_size)
    return (groups != groups[:, :1]).any(dim=1).repeat_interleave(group_size)


def coati_kl(log_ratios: Tensor, action_mask: Tensor) -> Tensor:
    """Return coati's per-action KL: exp(k) - 1 - k, and -k above k = 10.

    The ratio is inverted (k3 of the reverse KL), and coati's guard against overflow makes it negative.

    Args:
        log_ratios: ``(B, A)`` float32, k.
        action_mask: ``(B, A)`` bool.

    Returns:
        ``(B, A)`` float32.
    """
    exponents = torch.where(log_ratios < 10, log_ratios, 0.0)
    return (exponents.exp() - 1 - log_ratios).masked_fill(~action_mask, 0.0)


def coati_action_rewards(scores: Tensor, log_ratios: Tensor, action_mask: Tensor, kl_coef: float) -> Tensor:
    """Return coati's per-action rewards: as `action_rewards`, with the clipped score added to EVERY action."""
    rewards = -kl_coef * log_ratios + scores.clamp(-SCORE_CLIP, SCORE_CLIP).unsqueeze(1)
    return rewards.masked_fill(~action_mask, 0.0)


def _count_actions(action_mask: Tensor) -> Tensor:
    counts = action_mask.sum(dim=1)
    if bool((counts == 0).any()):
        raise ShapeError(f"row {int((counts == 0).nonzero()[0])}: action_mask has no action")
    return counts


def in_groups(rewards: Tensor, group_size: int) -> Tensor:
    """Return the rewards ``(B,)`` as ``(B/G, G)``; refuse a B that is no multiple of G, and a G below 2."""
    if group_size < 2:
        raise ShapeError(f"group_size is {group_size}; a group needs at least 2 responses to compare")
    if rewards.dim() != 1 or len(rewards) % group_size:
        raise ShapeError(f"rewards of shape {tuple(rewards.shape)} do not divide into groups of {group_size}")
    return rewards.reshape(-1, group_size)
