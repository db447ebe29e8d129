"""The loss of a configuration: policy loss, aggregation, KL, entropy, correction, and the whitening of advantages.

The correction is for an engine that is not the trainer's own function: it samples with the probabilities that its
kernels and its precision give, not with those that the trainer computes from the same weights. The ratio
k = exp(logp - logp_behaviour), both of the policy that sampled, corrects for the difference; the ratio inside the
policy loss goes from there to the policy that is trained.

    token          weight min(k, cap)                           truncated importance sampling (TIS)
    sequence       the same of the product over the response    truncated importance sampling by sequence
    token_mask     weight k, 0 above the cap                    masked importance sampling (MIS)
    sequence_mask  the same of the product over the response    masked importance sampling by sequence
    icepop         weight k, 0 outside floor ... cap            IcePop, arXiv:2510.18855
    none           weight 1

TIS: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"
(https://fengyao.notion.site/off-policy-rl). MIS: Liu et al. 2025, "When speed kills stability: demystifying RL collapse
from the training-inference mismatch" (https://richardli.xyz/rl-collapse).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Self

import torch
from torch import Tensor

from pipeline.config.schema import TrainerConfig
from pipeline.experience.advantages import KL_ESTIMATORS, KlEstimator
from pipeline.trainer.batch import TrainingBatch
from pipeline.trainer.loss.aggregation import AGGREGATIONS, Aggregation, StepTotals
from pipeline.trainer.loss.policy import PolicyInputs, PolicyLossFunction, PolicyTerms, load_policy_loss, ratios_of
from pipeline.trainer.loss.row_sums import of_actions, row_means, row_sums

ICEPOP_FLOOR: Final = 0.5
"""Weight below which `icepop` masks an action, as in its paper."""


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss of a step, of its parts on any rank.

    Attributes:
        trainer: The settings.
        policy_loss: From inputs to a loss an action.
        aggregate: From a loss an action to a share of the step's loss.
        kl_estimator: From log-ratios to a KL an action.
        clip_low: The ratio's lower bound is 1 - `clip_low`.
        clip_high: The ratio's upper bound is 1 + `clip_high`.
        equal_groups: Whether rows of groups with equal scores are not left out.
        whitens: Whether advantages are shifted and scaled to mean 0 and variance 1 over the step.
        constant_tokens: Constant length of a response, for `dr_grpo`.
        floor: Smallest importance weight that `icepop` does not mask.
    """

    trainer: TrainerConfig
    policy_loss: PolicyLossFunction
    aggregate: Aggregation
    kl_estimator: KlEstimator
    clip_low: float
    clip_high: float
    equal_groups: bool
    whitens: bool
    constant_tokens: int
    floor: float = ICEPOP_FLOOR

    @classmethod
    def of(
        cls, trainer: TrainerConfig, *, whitens: bool, response_tokens: int | None = None, equal_groups: bool = False
    ) -> Self:
        """Return the objective of a configuration.

        Args:
            trainer: The settings.
            whitens: Whether advantages are whitened.
            response_tokens: Tokens of the longest response, the constant length unless the settings have another.
            equal_groups: Whether rows of groups with equal scores stay, whatever the settings say.

        Raises:
            ConfigError: If the policy loss is a function that does not exist.
            ValueError: If `dr_grpo` has no constant length.
        """
        constant_tokens = trainer.dr_grpo_tokens or response_tokens
        if trainer.loss_aggregation == "dr_grpo" and constant_tokens is None:
            raise ValueError("dr_grpo needs a constant length: dr_grpo_tokens, or the tokens of the longest response")
        return cls(
            trainer=trainer,
            policy_loss=load_policy_loss(trainer.policy_loss),
            aggregate=AGGREGATIONS[trainer.loss_aggregation],
            kl_estimator=KL_ESTIMATORS[trainer.kl_estimator],
            clip_low=trainer.clip_range if trainer.clip_low is None else trainer.clip_low,
            clip_high=trainer.clip_range if trainer.clip_high is None else trainer.clip_high,
            equal_groups=equal_groups or trainer.loss_rows == "all",
            whitens=whitens,
            constant_tokens=constant_tokens or 1,
        )

    def policy(self, log_probs: Tensor, part: TrainingBatch) -> PolicyTerms:
        """Return the policy loss of each action, times its importance weight if the rows have weights.

        Args:
            log_probs: ``(N,)`` float32, of the policy that is trained.
            part: The rows.

        Returns:
            The terms.
        """
        assert part.log_probs is not None
        bounds = self.clip_low, self.clip_high, self.trainer.dual_clip
        terms = self.policy_loss(PolicyInputs(log_probs, part.log_probs, part.advantages, part.counts, *bounds))
        weights = part.importance_weights
        return terms if weights is None else terms._replace(losses=terms.losses * weights)

    def kl(self, log_probs: Tensor, base_log_probs: Tensor, counts: Tensor, totals: StepTotals) -> Tensor:
        """Return the share of the step's KL to the reference, a scalar."""
        return self.aggregate(self.kl_estimator(log_probs - base_log_probs), counts, totals)

    def entropy_loss(self, entropies: Tensor, counts: Tensor, totals: StepTotals) -> Tensor:
        """Return the share of the step's entropy bonus, as a loss: minus the coefficient times the entropy."""
        return -self.trainer.entropy_coef * self.aggregate(entropies, counts, totals)

    def correct(self, batch: TrainingBatch) -> Corrected:
        """Return a batch with its importance weights; unchanged if it has no log-probs of the engine."""
        log_probs, behaviour, counts = batch.log_probs, batch.behaviour_log_probs, batch.counts
        if behaviour is None or log_probs is None:
            none = torch.full((2,), -torch.inf, dtype=torch.float64)
            return Corrected(batch, torch.zeros(4), none, torch.zeros(0))
        kind, cap = self.trainer.importance_correction, self.trainer.importance_cap
        found = importance_weights(log_probs, behaviour, counts, kind, cap=cap, floor=self.floor)
        ratios, gaps = found.ratios.double(), (log_probs - behaviour).abs()
        sums = torch.stack([counts.sum().double(), ratios.sum(), found.cut.sum().double(), gaps.sum().double()])
        extremes = sums.new_full((2,), -torch.inf)
        if len(ratios):
            extremes = torch.stack([-ratios.min(), ratios.max()])
        return Corrected(replace(batch, importance_weights=found.weights), sums, extremes, row_means(gaps, counts))


class Corrected(NamedTuple):
    """A batch with its importance weights, and their statistics.

    Attributes:
        batch: The batch.
        sums: ``(4,)``: trained actions with a ratio, the sum of the ratios, the weights that were cut, the sum of the
            differences of both log-probs in nats.
        extremes: ``(2,)``: minus the least ratio, and the largest; -infinity without any, so that the maximum over
            several is that of all.
        row_gaps: ``(B,)`` float32, mean difference of both log-probs of each row; empty without any.
    """

    batch: TrainingBatch
    sums: Tensor
    extremes: Tensor
    row_gaps: Tensor


class Correction(NamedTuple):
    """The correction of some rows.

    Attributes:
        weights: ``(N,)`` float32, factors of the policy loss of each action.
        ratios: ``(N,)`` float32, k of the action, or of its whole response.
        cut: ``(N,)`` bool, the actions whose weight is not their ratio.
    """

    weights: Tensor
    ratios: Tensor
    cut: Tensor


def importance_weights(
    log_probs: Tensor, behaviour_log_probs: Tensor, counts: Tensor, kind: str, *, cap: float, floor: float
) -> Correction:
    """Return the weights of the actions of some rows, whole rows.

    Args:
        log_probs: ``(N,)`` float32, of the policy that sampled, computed as the trainer computes them.
        behaviour_log_probs: ``(N,)`` float32, of the same policy, computed by the engine that sampled.
        counts: ``(B,)`` int64, the actions of each row.
        kind: A name of the module's docstring.
        cap: Largest weight.
        floor: Smallest weight that is not masked; of `icepop` only.

    Returns:
        The weights, the ratios, and the actions whose weight was cut; all without gradient.

    Raises:
        ValueError: If there is no such kind.
    """
    log_ratios = (log_probs - behaviour_log_probs).detach()
    if kind.startswith("sequence"):
        log_ratios = of_actions(row_sums(log_ratios, counts), counts, len(log_ratios))
    ratios = ratios_of(log_ratios)
    if kind == "none":
        return Correction(torch.ones_like(ratios), ratios, torch.zeros_like(ratios, dtype=torch.bool))
    if kind in ("token", "sequence"):
        return Correction(ratios.clamp(max=cap), ratios, ratios > cap)
    if kind in ("token_mask", "sequence_mask"):
        cut = ratios > cap
    elif kind == "icepop":
        cut = (ratios > cap) | (ratios < floor)
    else:
        raise ValueError(f"importance_correction is {kind!r}")
    return Correction(ratios.masked_fill(cut, 0.0), ratios, cut)
