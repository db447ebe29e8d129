"""Rewards, advantages and further fields of an experience, by configuration; by default those of GRPO and PPO.

`Shaping` is the maker's part of it, the trainer's is `pipeline.trainer.loss.objective`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from pipeline.config import user_modules
from pipeline.config.losses import LogProbsBy, log_probs_by
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.experience.advantage_estimators import (
    ADVANTAGES,
    AdvantageFunction,
    AdvantageInputs,
    grpo,
    overlong_rewards,
)
from pipeline.experience.advantages import KL_ESTIMATORS, KlEstimator, group_mixed, k1_kl, kl_rewards
from pipeline.experience.running_moments import Moments
from pipeline.rollout.rows import Rows


@dataclass(frozen=True, slots=True)
class Shaping:
    """Rewards, advantages and further fields.

    Attributes:
        advantages: The estimator; None for the algorithm's own.
        kl_estimator: Estimator of the KL in the reward.
        overlong_buffer_tokens: Tokens before the longest length over which a response loses reward; 0 for none.
        overlong_penalty: The reward that a response of the longest length loses.
        longest: Maximum tokens of a response; None for the action columns of its batch.
        marks_cut: Whether `info` has "cut", ``(B,)`` bool: the response was cut at its maximum length. Rows of several
            turns have it in any case, and "turns", ``(B,)`` int64.
        keeps_engine_log_probs: Whether `behaviour_log_probs` holds those of the engine, if it returns any. For an
            engine that is not the trainer's own function.
        reward_clip: Bound of the magnitude of a score, with PPO in an environment of each turn's; None: no bound.
            "coati": 5 with PPO, none with GRPO.
        log_probs_by: Source of `action_log_probs`: "engine" refuses an engine that returns none, "trainer" leaves the
            field empty; None and "worker" leave the choice to the maker.
        score_moments: The moments of scores by whose deviation scores are divided, ``(3,)`` float64, replaced with each
            version that the worker fetches; None: scores are not divided.
    """

    advantages: AdvantageFunction | None = None
    kl_estimator: KlEstimator = k1_kl
    overlong_buffer_tokens: int = 0
    overlong_penalty: float = 1.0
    longest: int | None = None
    marks_cut: bool = False
    keeps_engine_log_probs: bool = False
    log_probs_by: LogProbsBy | None = None
    reward_clip: float | Literal["coati"] | None = "coati"
    score_moments: Tensor | None = field(default=None, compare=False)

    def marks(self, rows: Rows) -> dict[str, Tensor]:
        """Return the entries of `info` that describe the responses."""
        if rows.turns is not None:
            return {"cut": rows.cut, "turns": rows.turns.counts}
        return {"cut": rows.cut} if self.marks_cut else {}

    def scaled(self, scores: Tensor) -> Tensor:
        """Return scores, of rows or placed at actions, divided by their running deviation."""
        return scores if self.score_moments is None else scores / Moments.of(self.score_moments).scale

    def bounded(self, scores: Tensor, *, coati: float | None = None) -> Tensor:
        """Return scaled scores within their bound, of rows or placed at actions; `coati` is that of "coati"."""
        bound = coati if self.reward_clip == "coati" else self.reward_clip
        return scores if bound is None else scores.clamp(-bound, bound)

    def clipped(self, scores: Tensor) -> dict[str, Tensor]:
        """Return the entry of `info` for scaled scores beyond the bound, of rows ``(B,)`` or turns ``(B, A)``."""
        if not isinstance(self.reward_clip, float):
            return {}
        beyond = scores.abs() > self.reward_clip
        return {"reward_clipped": beyond if beyond.dim() == 1 else beyond.any(dim=1)}

    def shaped(self, rows: Rows, scores: Tensor) -> Tensor:
        """Return bounded scores with the penalty of length, ``(B,)``."""
        if not self.overlong_buffer_tokens:
            return scores
        longest = rows.num_actions if self.longest is None else self.longest
        # Only tokens that the model wrote count: the text of an environment does not.
        written = rows.action_mask.sum(dim=1)
        return scores + overlong_rewards(written, longest, self.overlong_buffer_tokens, self.overlong_penalty)

    def group_fields(
        self, rows: Rows, scores: Tensor, log_ratios: Tensor, *, kl_coef: float, group_size: int
    ) -> dict[str, Any]:
        """Return the fields of an algorithm that compares the responses of a prompt."""
        # In float64: a reward of 100,000,001 beside one of 100,000,000 is a signal.
        shaped = self.shaped(rows, self.bounded(self.scaled(scores.double())))
        kl = kl_rewards(self.kl_estimator(log_ratios, rows.action_mask), rows.action_mask, kl_coef)
        rewards = shaped + kl
        advantages = self.estimate(AdvantageInputs(rewards, group_size, rows.action_mask)).float()
        return {
            "values": rewards.float(),
            "reward": rewards.float(),
            "kl": kl,
            "advantages": advantages,
            "info": {
                "score": scores.float(),
                "group_mixed": group_mixed(shaped, group_size),
                **self.clipped(self.scaled(scores)),
            },
        }

    def estimate(self, inputs: AdvantageInputs) -> Tensor:
        """Return the advantages, ``(B,)`` or ``(B, A)``, with a critic ``(B, A)``; 0 outside the mask.

        Raises:
            ConfigError: If an estimator of the user's returns another shape.
        """
        advantages = (self.advantages or grpo)(inputs)
        mask = inputs.action_mask
        shape = tuple(advantages.shape) if isinstance(advantages, Tensor) else f"a {type(advantages).__name__}"
        if shape not in (tuple(mask.shape), (len(mask),)):
            raise ConfigError(f"rollout.advantages returned {shape} for {len(mask)} rows of {mask.shape[1]} actions")
        if advantages.dim() == 1 and inputs.values is None:
            return advantages
        columns = advantages.unsqueeze(1).expand(mask.shape) if advantages.dim() == 1 else advantages
        return columns.masked_fill(~mask, 0.0)


def shaping_of(config: Config) -> Shaping:
    """Return the shaping of a configuration.

    Raises:
        ConfigError: If the advantages are a function that does not exist.
    """
    rollout, name, by = config.rollout, config.advantages, log_probs_by(config)
    return Shaping(
        advantages=None if name in ("grpo", "gae") else load_advantages(name),
        kl_estimator=KL_ESTIMATORS[rollout.kl_estimator],
        overlong_buffer_tokens=rollout.overlong_buffer_tokens,
        overlong_penalty=rollout.overlong_penalty,
        longest=config.lengths.response,
        # Beside `trainer.mask_cut_responses` each line of metrics.jsonl has the share of cut responses.
        marks_cut=True,
        # Behind "engine" they are the log-probs themselves. The trainer's are those of its present weights, and the
        # ratio to the engine's is that to the policy that sampled.
        keeps_engine_log_probs=by == "trainer" or (by == "worker" and rollout.engine != "transformers"),
        log_probs_by="trainer" if by == "trainer" else rollout.log_probs,
        reward_clip=rollout.reward_clip,
        score_moments=Moments.new_state() if rollout.reward_scale == "running" else None,
    )


def load_advantages(name: str) -> AdvantageFunction:
    """Return the estimator of a name: a key of `ADVANTAGES`, or ``module:function`` of the user's.

    Raises:
        ConfigError: If there is no such module or function.
    """
    if (known := ADVANTAGES.get(name)) is not None:
        return known
    function: AdvantageFunction = user_modules.load_function("rollout.advantages", name)
    return function
