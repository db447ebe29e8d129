"""Policy losses by name: each returns one number an action; `pipeline.trainer.loss.aggregation` adds them up.

    ppo        clipped surrogate, with bounds of its own on either side and dual clip on request
    gspo       clipped surrogate of the sequence's ratio
    cispo      clipped ratio as a constant weight of the log-prob
    reinforce  the log-prob alone, without a ratio

A loss depends on the actions of one row at most, so that a step may be cut into micro-batches of any rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from pipeline.config import user_modules
from pipeline.errors import ConfigError

_MAX_LOG_RATIO = 20.0
"""exp(20) = 5e8 is far outside every clip range; without the clamp a larger ratio would only overflow."""


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """The inputs of a policy loss; elements outside the mask may be NaN.

    Attributes:
        log_probs: ``(B, A)`` float32, of the policy that is trained; differentiable.
        old_log_probs: ``(B, A)`` float32, of the policy that sampled.
        advantages: ``(B, A)`` float32.
        mask: ``(B, A)`` bool.
        clip_low: The ratio's lower bound is 1 - `clip_low`.
        clip_high: The ratio's upper bound is 1 + `clip_high`.
        dual_clip: Most by which a negative advantage is multiplied, above 1; None for no bound.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def filled(self) -> PolicyInputs:
        """Return the same inputs with 0 outside the mask, also in the gradient."""
        columns = (self.log_probs, self.old_log_probs, self.advantages)
        log_probs, old_log_probs, advantages = (column.masked_fill(~self.mask, 0.0) for column in columns)
        return replace(self, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)

    def log_ratios(self) -> Tensor:
        """Return log_probs - old_log_probs, ``(B, A)``, 0 outside the mask, also in the gradient."""
        # masked_fill also stops the gradient there, which may be NaN.
        return (self.log_probs - self.old_log_probs).masked_fill(~self.mask, 0.0)


class PolicyTerms(NamedTuple):
    """The result of a policy loss.

    Attributes:
        losses: ``(B, A)`` float32, differentiable; not counted outside the mask.
        ratios: ``(B, A)`` float32, the importance ratios, without gradient; 1 outside the mask.
        clipped: ``(B, A)`` bool, the actions at which a clip is in force.
    """

    losses: Tensor
    ratios: Tensor
    clipped: Tensor


PolicyLossFunction = Callable[[PolicyInputs], PolicyTerms]


def ratios_of(log_ratios: Tensor) -> Tensor:
    """Return the ratios of log-ratios, from exp(-20) to exp(20)."""
    return log_ratios.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def ppo(inputs: PolicyInputs) -> PolicyTerms:
    """Clipped surrogate loss: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logp - logp_old).

    PPO: arXiv:1707.06347 eq. 7; two bounds (clip-higher): DAPO, arXiv:2503.14476 eq. 8. With `dual_clip` c the
    objective of an action of negative advantage is at least c A (arXiv:1912.09729 eq. 5), however large its ratio is.
    """
    return _clipped_surrogate(inputs, ratios_of(inputs.log_ratios()))


def gspo(inputs: PolicyInputs) -> PolicyTerms:
    """Clipped surrogate loss of the sequence's ratio, s = exp(mean over its actions of logp - logp_old).

    GSPO: arXiv:2507.18071 eq. 5 to 7. Each action of a sequence has the loss of the sequence: with `sequence_mean`
    this is the paper's mean over sequences. The paper's bounds are far closer to 1 than those of a token's ratio:
    3e-4 and 4e-4.
    """
    counts = inputs.mask.sum(dim=1, keepdim=True).clamp(min=1)
    means = inputs.log_ratios().sum(dim=1, keepdim=True) / counts
    ratios = ratios_of(means).expand(inputs.mask.shape)
    # Elements outside the mask share the ratio: NaN there would reach its gradient.
    return _clipped_surrogate(inputs.filled(), ratios)


def cispo(inputs: PolicyInputs) -> PolicyTerms:
    """Log-prob weighted by the clipped ratio: -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logp.

    CISPO: MiniMax-M1, arXiv:2506.13585 eq. 4 and 5. Every action keeps a gradient. The paper has no lower bound:
    `clip_low` of 1 or more.
    """
    ratios = ratios_of(inputs.log_ratios()).detach()
    weights = ratios.clamp(1 - inputs.clip_low, 1 + inputs.clip_high)
    losses = -weights * inputs.advantages * inputs.log_probs.masked_fill(~inputs.mask, 0.0)
    return PolicyTerms(losses, ratios, (weights != ratios) & inputs.mask)


def reinforce(inputs: PolicyInputs) -> PolicyTerms:
    """Policy gradient without a ratio: -A logp (Williams 1992, doi:10.1007/BF00992696; RLOO, arXiv:2402.14740)."""
    ratios = ratios_of(inputs.log_ratios()).detach()
    losses = -inputs.advantages * inputs.log_probs.masked_fill(~inputs.mask, 0.0)
    return PolicyTerms(losses, ratios, torch.zeros_like(inputs.mask))


POLICY_LOSSES: Final[Mapping[str, PolicyLossFunction]] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
}
"""The policy losses by their names in `trainer.policy_loss`."""


def load_policy_loss(name: str) -> PolicyLossFunction:
    """Return the policy loss of a name.

    Args:
        name: A key of `POLICY_LOSSES`, or ``module:function`` of the user's. That function takes `PolicyInputs`, with 0
            outside the mask, and returns ``(B, A)`` losses, one an action, or `PolicyTerms`; another result is a
            ConfigError.

    Raises:
        ConfigError: If there is no such module or function.
    """
    if (known := POLICY_LOSSES.get(name)) is not None:
        return known
    function = user_modules.load_function("trainer.policy_loss", name)

    def checked(inputs: PolicyInputs) -> PolicyTerms:
        found = function(inputs.filled())
        if not isinstance(found, PolicyTerms):
            ratios = ratios_of(inputs.log_ratios()).detach()
            found = PolicyTerms(found, ratios, torch.zeros_like(inputs.mask))
        for part in found:
            if not isinstance(part, Tensor) or part.shape != inputs.mask.shape:
                shape = tuple(part.shape) if isinstance(part, Tensor) else f"a {type(part).__name__}"
                raise ConfigError(
                    f"trainer.policy_loss: {name} returned {shape} for actions {tuple(inputs.mask.shape)}"
                )
        return found

    return checked


def _clipped_surrogate(inputs: PolicyInputs, ratios: Tensor) -> PolicyTerms:
    unclipped = -ratios * inputs.advantages
    bounded = -ratios.clamp(1 - inputs.clip_low, 1 + inputs.clip_high) * inputs.advantages
    losses, clipped = torch.maximum(unclipped, bounded), bounded > unclipped
    if inputs.dual_clip is not None:
        most = -inputs.dual_clip * inputs.advantages
        is_beyond = (inputs.advantages < 0) & (losses > most)
        losses, clipped = torch.where(is_beyond, most, losses), clipped | is_beyond
    return PolicyTerms(losses, ratios.detach().masked_fill(~inputs.mask, 1.0), clipped.detach() & inputs.mask)
