"""The statistics of one optimizer step: counts taken before its losses, sums from its passes, the exported result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from pipeline.errors import FieldError
from pipeline.experience.advantages import k3_kl
from pipeline.experience.types import Experience
from pipeline.trainer.batch import TrainingBatch
from pipeline.trainer.losses import masked_moments


@dataclass(frozen=True, slots=True)
class StepStats:
    """The statistics of one update over all ranks; fields that begin with ``row_`` or end with ``_s`` are of this rank.

    Attributes:
        step: Updates so far, this one included.
        loss: Sum of the partial losses.
        policy_loss: Clipped policy loss; 0 in a step that trains the critic alone.
        value_loss: Clipped value loss; None without a critic.
        kl_loss: KL to the reference times its coefficient; None if the coefficient is 0.
        gradient_norm: Gradient norm of the actor before clipping; 0 if the actor was not trained.
        critic_gradient_norm: Gradient norm of the critic before clipping; None without a critic.
        learning_rate: Learning rate of the actor in this step.
        critic_learning_rate: Learning rate of the critic in this step; None without a critic.
        clipped_ratio: Share of the trained actions whose gradient the clip sets to 0.
        importance_ratio: Mean of new to sampling probability over the trained actions.
        kl_nats: Mean k3 KL of the sampling policy to the reference over all actions; None without reference log-probs.
        entropy_nats: Entropy of the sampling policy: the mean of `action_entropy`, or of -log p of the sampled tokens,
            which estimates the entropy without a forward pass.
        reward_mean: Mean of the raw scores of all rows.
        reward_stddev: Standard deviation of the raw scores of all rows.
        rows: Rows in the step.
        rows_trained: Rows that were not left out.
        tokens_trained: Actions of the trained rows.
        nonfinite: Places with NaN or infinity ("loss", "gradient"); if there is any, no weight was changed.
        row_importance_ratios: Mean importance ratio of each trained row of this rank.
        row_kl_nats: Mean k3 KL to the reference of each row of this rank; empty without reference log-probs.
        row_rewards: Raw score of each row of this rank.
        forward_s: Seconds in forward passes; on a GPU, seconds to issue them.
        backward_s: Seconds in backward passes; on a GPU, until the forward and backward pass are computed.
        reduce_s: Seconds in the reduction of counts and gradients over the ranks.
        optimizer_s: Seconds in the optimizers; on a GPU, seconds to issue their work.
    """

    step: int
    loss: float
    policy_loss: float
    value_loss: float | None
    kl_loss: float | None
    gradient_norm: float
    critic_gradient_norm: float | None
    learning_rate: float
    critic_learning_rate: float | None
    clipped_ratio: float
    importance_ratio: float
    kl_nats: float | None
    entropy_nats: float
    reward_mean: float
    reward_stddev: float
    rows: int
    rows_trained: int
    tokens_trained: int
    nonfinite: tuple[str, ...]
    row_importance_ratios: tuple[float, ...]
    row_kl_nats: tuple[float, ...]
    row_rewards: tuple[float, ...]
    forward_s: float
    backward_s: float
    reduce_s: float
    optimizer_s: float


class Counts(NamedTuple):
    """Sums over all rows of a step that are known before its losses."""

    rows_trained: float
    actions_trained: float
    advantages: float
    squared_advantages: float
    rows: float
    scores: float
    squared_scores: float
    actions: float
    entropies: float
    kls: float
    has_reference: float


class Sums(NamedTuple):
    """Sums over all trained actions of a step; the losses are already divided by the number of these actions."""

    policy: float
    kl: float
    ratios: float
    clipped: float
    value: float


@dataclass(frozen=True, slots=True)
class Observed:
    """Statistics of all rows of an experience, trained on or not; `counts` are the last fields of `Counts`."""

    counts: Tensor
    row_scores: list[float]
    row_kls: list[float]

    @classmethod
    def of(cls, experience: Experience) -> Self:
        """Return the statistics of an experience.

        Raises:
            FieldError: If the mask, the log-probs or the scores are missing.
        """
        mask, log_probs = experience.action_mask, experience.action_log_probs
        scores = (experience.info or {}).get("score", experience.reward)
        if mask is None or log_probs is None or scores is None:
            raise FieldError("action_mask, action_log_probs or the score is missing")
        mask, scores = mask.bool(), scores.float().flatten()
        entropy = -log_probs if experience.action_entropy is None else experience.action_entropy
        kls, row_kls = torch.zeros(()), list[float]()
        if experience.base_action_log_probs is not None:
            per_action = k3_kl((log_probs - experience.base_action_log_probs).masked_fill(~mask, 0.0), mask)
            kls = per_action.sum()
            row_kls = (per_action.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).tolist()
        counts = torch.tensor(
            [
                len(scores),
                scores.double().sum(),
                scores.double().square().sum(),
                mask.sum(),
                entropy.masked_fill(~mask, 0.0).sum(),
                kls,
                experience.base_action_log_probs is not None,
            ],
            dtype=torch.float64,
        )
        return cls(counts, scores.tolist(), row_kls)


class Stopwatch:
    """Seconds by phase; calls `on_phase` at the start of each phase.

    A GPU computes a pass after the call that issues it. So each backward pass ends with `synchronize`: otherwise its
    seconds would count for the phase that next reads a value from the GPU.
    """

    def __init__(self, on_phase: Callable[[str], None], synchronize: Callable[[], None] = lambda: None) -> None:
        self._on_phase = on_phase
        self._synchronize = synchronize
        self.seconds = {"forward": 0.0, "backward": 0.0, "reduce": 0.0, "optimizer": 0.0}

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count the block's seconds for a phase."""
        self._on_phase(phase)
        started_s = time.perf_counter()
        yield
        if phase == "backward":
            self._synchronize()
        self.seconds[phase] += time.perf_counter() - started_s


def count(batches: Sequence[TrainingBatch], observed: Sequence[Observed]) -> Tensor:
    """Add up this rank's `Counts`."""
    total = torch.zeros(len(Counts._fields), dtype=torch.float64)
    for batch, one in zip(batches, observed, strict=True):
        moments = masked_moments(batch.advantages, batch.action_mask)
        total += torch.cat([torch.tensor([len(batch.sequences)]), moments.cpu(), one.counts])
    return total


def where_nonfinite(sums: Sums, norms: Sequence[float]) -> tuple[str, ...]:
    """Return the places with NaN or infinity: "loss", "gradient"."""
    seen = {"loss": [sums.policy, sums.kl, sums.value], "gradient": norms}
    return tuple(where for where, values in seen.items() if not all(math.isfinite(value) for value in values))


def stddev(count: float, total: float, squares: float) -> float:
    """Return the standard deviation of values given by their number, sum and sum of squares."""
    return math.sqrt(max(squares / max(count, 1) - (total / max(count, 1)) ** 2, 0.0))
