"""Losses of PPO and GRPO over action tokens, as formulas over tensors.

Those with a mask are for padded batches, of trainers that are not rlhfd's own; elements outside it never count. Each is
the mean over the masked actions of the batch. If the batch is one part of an optimizer step, `denominator` is the
number of actions in the whole step: then the losses of the parts, and their gradients, add up to those of the step. The
estimator of the KL is `pipeline.experience.advantages.k3_kl`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.errors import ShapeError
from pipeline.trainer.loss.policy import PolicyInputs, ppo

_VARIANCE_EPS = 1e-8


class PolicyLoss(NamedTuple):
    """The result of `policy_loss`.

    Attributes:
        loss: Scalar, differentiable.
        ratios: ``(B, A)`` float32, the importance ratios, without gradient; 1 outside the mask.
        clipped: ``(B, A)`` bool, the actions whose gradient the clip sets to 0.
    """

    loss: Tensor
    ratios: Tensor
    clipped: Tensor


def masked_mean(values: Tensor, mask: Tensor, denominator: float | None = None) -> Tensor:
    """Sum the masked elements and divide by `denominator`.

    Args:
        values: Any shape; elements outside the mask may be NaN.
        mask: The same shape, bool.
        denominator: The divisor, above 0; None for the number of masked elements.

    Returns:
        Scalar; 0 if the mask is empty.

    Raises:
        ShapeError: If the shapes differ.
    """
    if values.shape != mask.shape:
        raise ShapeError(f"values {tuple(values.shape)} and mask {tuple(mask.shape)} differ in shape")
    total = values.masked_fill(~mask, 0.0).sum()
    return total / (mask.sum().clamp(min=1) if denominator is None else denominator)


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_range: float,
    *,
    denominator: float | None = None,
) -> PolicyLoss:
    """Clipped surrogate loss of PPO, mean of -min(r A, clip(r, 1 - eps, 1 + eps) A), r = exp(logp - logp_old).

    PPO: arXiv:1707.06347 eq. 7. GRPO takes the same term (arXiv:2402.03300 eq. 3) with one advantage for all actions of
    a response; there it is first averaged within each response, here over all actions, so that an action of a long
    response weighs as much as one of a short response (DAPO, arXiv:2503.14476 eq. 8).

    Args:
        log_probs: ``(B, A)`` float32, of the policy that is trained.
        old_log_probs: ``(B, A)`` float32, of the policy that sampled.
        advantages: ``(B, A)`` float32.
        mask: ``(B, A)`` bool.
        clip_range: eps.
        denominator: Actions in the whole step; None for those in `mask`.

    Returns:
        The loss, the importance ratios and the mask of the clipped actions.

    Raises:
        ShapeError: If the inputs broadcast to another shape than the mask's.
        RuntimeError: If the inputs do not broadcast.
    """
    shapes = [tuple(each.shape) for each in (log_probs, old_log_probs, advantages)]
    # One value a row would be one a column.
    if any(len(shape) != mask.dim() for shape in shapes) or torch.broadcast_shapes(*shapes) != mask.shape:
        raise ShapeError(f"log-probs and advantages {shapes} and mask {tuple(mask.shape)} differ in shape")
    log_probs, old_log_probs, advantages = (
        each.expand(mask.shape)[mask] for each in (log_probs, old_log_probs, advantages)
    )
    counts = torch.tensor([len(advantages)], device=mask.device)
    losses, ratios, clipped = ppo(PolicyInputs(log_probs, old_log_probs, advantages, counts, clip_range, clip_range))
    return PolicyLoss(
        losses.sum() / (max(len(losses), 1) if denominator is None else denominator),
        torch.ones_like(mask, dtype=ratios.dtype).masked_scatter(mask, ratios),
        torch.zeros_like(mask).masked_scatter(mask, clipped),
    )


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip_range: float,
    *,
    denominator: float | None = None,
) -> Tensor:
    """Clipped value loss of PPO, mean of max((V - R)^2, (V_old + clip(V - V_old, -eps, eps) - R)^2) / 2.

    From OpenAI's baselines; written down in arXiv:2005.12729, section 3.

    Args:
        values: ``(B, A)`` float32, of the critic that is trained; elements outside the mask may be NaN, here and below.
        old_values: ``(B, A)`` float32, of the critic at the rollout.
        returns: ``(B, A)`` float32, R.
        mask: ``(B, A)`` bool.
        clip_range: eps.
        denominator: Actions in the whole step; None for those in `mask`.

    Returns:
        Scalar, differentiable.

    Raises:
        ShapeError: If the inputs broadcast to another shape than the mask's.
        RuntimeError: If the inputs do not broadcast.
    """
    if any(each.dim() != mask.dim() for each in (values, old_values, returns)):
        raise ShapeError(f"values and returns have one value a row, the mask is {tuple(mask.shape)}")
    # Filled before the arithmetic: NaN times the zero gradient of a masked element is NaN.
    values, old_values, returns = (each.masked_fill(~mask, 0.0) for each in (values, old_values, returns))
    return masked_mean(value_losses(values, old_values, returns, clip_range), mask, denominator) / 2


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float) -> Tensor:
    """Return the clipped value loss of each action, twice that of `value_loss`; all of one shape."""
    clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
    return torch.maximum((values - returns).square(), (clipped - returns).square())


def moments_of(values: Tensor) -> Tensor:
    """Count, sum and sum of squares, ``(3,)`` float64; the moments of parts add up to those of the whole."""
    exact = values.double()
    return torch.stack([exact.new_tensor(exact.numel()), exact.sum(), exact.square().sum()])


def mean_and_stddev(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population standard deviation from `moments_of`, both 0 if the count is 0."""
    count = moments[0].clamp(min=1)
    mean = moments[1] / count
    return mean, (moments[2] / count - mean.square()).clamp(min=0).sqrt()


def whiten(values: Tensor, mask: Tensor, moments: Tensor | None = None) -> Tensor:
    """Shift and scale the masked elements to mean 0 and variance 1, (x - mean) / sqrt(variance + 1e-8).

    Args:
        values: ``(B, A)`` float32; it may be NaN outside the mask.
        mask: ``(B, A)`` bool.
        moments: ``(3,)`` float64, count, sum and sum of squares of the masked elements of all batches of a step; None
            for those of this batch.

    Returns:
        ``(B, A)`` float32, 0 outside the mask.
    """
    return whitened(values, moments_of(values[mask]) if moments is None else moments).masked_fill(~mask, 0.0)


def whitened(values: Tensor, moments: Tensor) -> Tensor:
    """Shift and scale all elements as `whiten` does, by moments on any device."""
    mean, stddev = mean_and_stddev(moments)
    return (values - mean.float()) / (stddev.square() + _VARIANCE_EPS).sqrt().float()
