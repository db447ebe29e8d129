"""Policy losses by name: each returns one number an action; `pipeline.trainer.loss.aggregation` adds them up.

    ppo        clipped surrogate, with bounds of its own on either side and dual clip on request
    gspo       clipped surrogate of the sequence's ratio
    cispo      clipped ratio as a constant weight of the log-prob
    reinforce  the log-prob alone, without a ratio

A loss depends on the actions of one row at most, so that a step may be cut into micro-batches of any rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from pipeline.config import user_modules
from pipeline.errors import ConfigError
from pipeline.trainer.loss.row_sums import of_actions, row_means

_MAX_LOG_RATIO = 20.0
"""exp(20) = 5e8 is far outside every clip range; without the clamp a larger ratio would only overflow."""


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """The inputs of a policy loss: the actions that count of some whole rows, row after row.

    Attributes:
        log_probs: ``(N,)`` float32, of the policy that is trained; differentiable.
        old_log_probs: ``(N,)`` float32, of the policy that sampled.
        advantages: ``(N,)`` float32.
        counts: ``(B,)`` int64, the actions of each row; their sum is N.
        clip_low: The ratio's lower bound is 1 - `clip_low`.
        clip_high: The ratio's upper bound is 1 + `clip_high`.
        dual_clip: Most by which a negative advantage is multiplied, above 1; None for no bound.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    counts: Tensor
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def log_ratios(self) -> Tensor:
        """Return log_probs - old_log_probs, ``(N,)``."""
        return self.log_probs - self.old_log_probs

    def row_means(self, values: Tensor) -> Tensor:
        """Return the mean over its row of each of the values, ``(N,)``, at each action of the row, ``(N,)``."""
        return of_actions(row_means(values, self.counts), self.counts, len(values))


class PolicyTerms(NamedTuple):
    """The result of a policy loss.

    Attributes:
        losses: ``(N,)`` float32, differentiable.
        ratios: ``(N,)`` float32, the importance ratios, without gradient.
        clipped: ``(N,)`` bool, the actions at which a clip is in force.
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
    return _clipped_surrogate(inputs, ratios_of(inputs.row_means(inputs.log_ratios())))


def cispo(inputs: PolicyInputs) -> PolicyTerms:
    """Log-prob weighted by the clipped ratio: -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logp.

    CISPO: MiniMax-M1, arXiv:2506.13585 eq. 4 and 5. Every action keeps a gradient. The paper has no lower bound:
    `clip_low` of 1 or more.
    """
    ratios = ratios_of(inputs.log_ratios()).detach()
    weights = ratios.clamp(1 - inputs.clip_low, 1 + inputs.clip_high)
    return PolicyTerms(-weights * inputs.advantages * inputs.log_probs, ratios, weights != ratios)


def reinforce(inputs: PolicyInputs) -> PolicyTerms:
    """Policy gradient without a ratio: -A logp (Williams 1992, doi:10.1007/BF00992696; RLOO, arXiv:2402.14740)."""
    ratios = ratios_of(inputs.log_ratios()).detach()
    losses = -inputs.advantages * inputs.log_probs
    return PolicyTerms(losses, ratios, torch.zeros_like(losses, dtype=torch.bool))


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
        name: A key of `POLICY_LOSSES`, or ``module:function`` of the user's. That function takes `PolicyInputs`
            and returns ``(N,)`` losses, one an action, or `PolicyTerms`; another result is a ConfigError.

    Raises:
        ConfigError: If there is no such module or function.
    """
    if (known := POLICY_LOSSES.get(name)) is not None:
        return known
    function = user_modules.load_function("trainer.policy_loss", name)

    def checked(inputs: PolicyInputs) -> PolicyTerms:
        found = function(inputs)
        if not isinstance(found, PolicyTerms):
            ratios = ratios_of(inputs.log_ratios()).detach()
            found = PolicyTerms(found, ratios, torch.zeros_like(ratios, dtype=torch.bool))
        shape = inputs.log_probs.shape
        for part in found:
            if not isinstance(part, Tensor) or part.shape != shape:
                wrong = tuple(part.shape) if isinstance(part, Tensor) else f"a {type(part).__name__}"
                raise ConfigError(f"trainer.policy_loss: {name} returned {wrong} for actions {tuple(shape)}")
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
    return PolicyTerms(losses, ratios.detach(), clipped.detach())
