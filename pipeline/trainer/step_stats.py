"""The statistics of one optimizer step: counts taken before its losses, sums from its passes, the exported result."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import FieldError
from pipeline.experience.advantages import k3_kl
from pipeline.experience.ragged import RaggedRows
from pipeline.progress import Telemetry
from pipeline.telemetry.metrics import IDLE_STEPS
from pipeline.trainer.batch import TrainingBatch
from pipeline.trainer.loss.losses import moments_of
from pipeline.trainer.loss.objective import Corrected
from pipeline.trainer.loss.row_sums import row_means

_ZERO_STEPS = 5

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepStats:
    """The statistics of one step over all ranks; fields that begin with ``row_`` or end with ``_s`` are of this rank.

    Of several updates, losses, norms and ratios are means; of an update that was discarded, `policy_kl_nats` alone.
    Where the trainer computes the log-probs, the policy before the step takes the place of the sampling policy, and the
    engine's log-probs are of older weights than its.

    Attributes:
        step: Steps so far, this one included.
        loss: Sum of the partial losses.
        policy_loss: Clipped policy loss; in a step that trains the critic alone, that of the policy as it stays.
        value_loss: Clipped value loss, of normalized values if they are normalized; None without a critic.
        return_mean: Running mean of returns; None unless values are normalized.
        return_stddev: Divisor of values and returns in the value loss: the running deviation of returns.
        entropy_loss: Minus the entropy of the trained policy times its coefficient; None if the coefficient is 0.
        kl_loss: KL to the reference times its coefficient; None if the coefficient is 0.
        gradient_norm: Gradient norm of the actor before clipping; 0 if the actor was not trained.
        critic_gradient_norm: Gradient norm of the critic before clipping; None without a critic.
        learning_rate: Learning rate of the actor in this step.
        critic_learning_rate: Learning rate of the critic in this step; None without a critic.
        kl_coef: Weight of the KL to the reference in this step's loss.
        updates: Optimizer updates taken; fewer than `trainer.epochs` times `trainer.mini_batches` after an early stop.
        policy_kl_nats: Mean k3 KL of the sampling policy to the trained one over the actions of the last pass, before
            its update.
        clipped_ratio: Share of the trained actions whose gradient the clip sets to 0.
        importance_ratio: Mean of new to sampling probability over the trained actions.
        behaviour_ratio_mean: Mean over the trained actions of the sampling policy's probability to the engine's, for
            the same weights; None if no row has log-probs of the engine, as in the four fields below.
        behaviour_ratio_min: The least of these ratios.
        behaviour_ratio_max: The largest of these ratios.
        behaviour_cut_ratio: Share of these ratios that the importance correction has truncated or masked.
        behaviour_gap_nats: Mean difference of the sampling policy's log-probs and the engine's, for the same weights.
        kl_nats: Mean k3 KL of the sampling policy to the reference over all actions; None without reference log-probs.
        entropy_nats: Entropy of the sampling policy: the mean of `action_entropy`, or of -log p of the sampled tokens,
            which estimates the entropy without a forward pass.
        response_length_mean_tokens: Mean number of actions of all rows.
        reward_mean: Mean of the raw scores of all rows.
        reward_stddev: Standard deviation of the raw scores of all rows.
        reward_running_mean: Running mean of raw scores; None unless scores are divided by their running deviation.
        reward_running_stddev: Running deviation of raw scores, by which the next version's scores are divided.
        padding_ratio: Share of padding in the tokens of the actor's passes; 0 without a pass.
        rows: Rows in the step.
        rows_trained: Rows that were not left out.
        tokens_trained: Actions of the trained rows.
        nonfinite: Places with NaN or infinity ("loss", "gradient"); that update changed no weight and was the last.
        row_importance_ratios: Mean importance ratio of each trained row of this rank.
        row_kl_nats: Mean k3 KL to the reference of each row of this rank; empty without reference log-probs.
        row_gap_nats: Mean difference of both log-probs of each trained row of this rank; empty without the engine's.
        forward_s: Seconds in forward passes; on a GPU, those of the device, here and below.
        backward_s: Seconds in backward passes.
        reduce_s: Seconds in the reduction of counts and gradients over the ranks.
        optimizer_s: Seconds in the optimizers; on a GPU, seconds to issue their work.
    """

    step: int
    loss: float
    policy_loss: float
    value_loss: float | None
    return_mean: float | None
    return_stddev: float | None
    entropy_loss: float | None
    kl_loss: float | None
    gradient_norm: float
    critic_gradient_norm: float | None
    learning_rate: float
    critic_learning_rate: float | None
    kl_coef: float
    updates: int
    policy_kl_nats: float
    clipped_ratio: float
    importance_ratio: float
    behaviour_ratio_mean: float | None
    behaviour_ratio_min: float | None
    behaviour_ratio_max: float | None
    behaviour_cut_ratio: float | None
    behaviour_gap_nats: float | None
    kl_nats: float | None
    entropy_nats: float
    response_length_mean_tokens: float
    reward_mean: float
    reward_stddev: float
    reward_running_mean: float | None
    reward_running_stddev: float | None
    padding_ratio: float
    rows: int
    rows_trained: int
    tokens_trained: int
    nonfinite: tuple[str, ...]
    row_importance_ratios: tuple[float, ...]
    row_kl_nats: tuple[float, ...]
    row_gap_nats: tuple[float, ...]
    forward_s: float
    backward_s: float
    reduce_s: float
    optimizer_s: float


class Counts(NamedTuple):
    """Sums over all rows of a step that are known before its losses."""

    rows_trained: float
    sequences_trained: float
    corrected: float
    corrected_ratios: float
    corrected_cut: float
    corrected_gaps: float
    actions_trained: float
    advantages: float
    squared_advantages: float
    returns: float
    squared_returns: float
    rows: float
    scores: float
    squared_scores: float
    actions: float
    entropies: float
    kls: float
    has_reference: float


class Sums(NamedTuple):
    """Sums over all trained actions of an update; the losses are already divided by the number of these actions.

    `policy_kl` is the k3 KL of the sampling policy to the trained one. `tokens` are those of the rows in the actor's
    passes, `passed` these and the padding.
    """

    policy: float
    kl: float
    ratios: float
    clipped: float
    entropy: float
    policy_kl: float
    value: float
    tokens: float
    passed: float


@dataclass(slots=True)
class Updates:
    """The updates of a step.

    Attributes:
        sums: The sums of each update, an update with NaN or infinity included.
        norms: The gradient norms of each of these updates, a model each.
        actions: The trained actions of each of these updates.
        row_ratios: Importance ratios of the rows of this rank.
        taken: Updates that changed weights.
        policy_kl_nats: The KL of the last pass, also if its update was discarded.
        nonfinite: Places with NaN or infinity in the last update.
    """

    sums: list[Sums] = field(default_factory=list)
    norms: list[list[float]] = field(default_factory=list)
    actions: list[float] = field(default_factory=list)
    row_ratios: list[Tensor] = field(default_factory=list)
    taken: int = 0
    policy_kl_nats: float = 0.0
    nonfinite: tuple[str, ...] = ()

    def add(self, sums: Sums, norms: list[float], actions: float, row_ratios: list[Tensor]) -> bool:
        """Add an update; return whether it changes weights: it has actions, and neither NaN nor infinity."""
        self.sums.append(sums)
        self.norms.append(norms)
        self.actions.append(actions)
        self.row_ratios += row_ratios
        self.nonfinite = where_nonfinite(sums, norms)
        changes_weights = actions > 0 and not self.nonfinite
        self.taken += changes_weights
        return changes_weights

    def mean(self, name: str) -> float:
        """Return the mean of a sum over the updates."""
        return self._sum(name) / max(len(self.sums), 1)

    def per_action(self, name: str) -> float:
        """Return a sum of all updates, divided by their actions."""
        return self._sum(name) / max(sum(self.actions), 1)

    def norm(self, model: int) -> float:
        """Return the mean gradient norm of a model over the updates."""
        return sum(norms[model] for norms in self.norms) / max(len(self.norms), 1)

    @property
    def padding_ratio(self) -> float:
        """Share of padding in the tokens of the passes."""
        passed = self._sum("passed")
        return 1 - self._sum("tokens") / passed if passed else 0.0

    def _sum(self, name: str) -> float:
        total: float = sum(getattr(each, name) for each in self.sums)
        return total


@dataclass(frozen=True, slots=True)
class Observed:
    """Statistics of all rows of a batch, trained on or not; `counts` are the last fields of `Counts`."""

    counts: Tensor
    row_kls: list[float]

    @classmethod
    def of(cls, rows: RaggedRows, batch: TrainingBatch) -> Self:
        """Return the statistics of rows.

        Args:
            rows: The rows.
            batch: The inputs of the loss from all of them.

        Raises:
            FieldError: If the log-probs or the scores are missing.
        """
        log_probs, base = batch.log_probs, batch.base_log_probs
        scores = rows.tensor("info.score" if "info.score" in rows.named else "reward")
        if log_probs is None or scores is None:
            raise FieldError("action_log_probs or the score is missing")
        scores = scores.float().flatten()
        entropy = -log_probs if batch.entropies is None else batch.entropies
        kls, row_kls = torch.zeros(()), list[float]()
        if base is not None:
            per_action = k3_kl(log_probs - base)
            kls, row_kls = per_action.sum(), row_means(per_action, batch.counts).tolist()
        counts = torch.tensor(
            [
                len(scores),
                scores.double().sum(),
                scores.double().square().sum(),
                len(log_probs),
                entropy.sum(),
                kls,
                base is not None,
            ],
            dtype=torch.float64,
        )
        return cls(counts, row_kls)


class Clock:
    """Marks points of the work of a device: of a CPU, which has computed an operation when its call returns."""

    def mark(self) -> Any:
        """Return the point after all that was issued to the device before; nothing waits."""
        return time.perf_counter()

    def between(self, first: Any, last: Any) -> float:
        """Return the seconds between two points; waits for the last one."""
        return float(last - first)

    def wait(self) -> None:
        """Wait until all that was issued to the device before is computed."""


class CardClock(Clock):
    """A GPU computes an operation after the call that issues it: points are events on its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """Return a new event after all that was issued to the stream before."""
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        """Return the seconds between two events; waits for the last one."""
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def wait(self) -> None:
        """Wait for the stream alone: copies of a publish on a stream of their own go on."""
        torch.cuda.current_stream(self._device).synchronize()


class Stopwatch:
    """Seconds by phase; telemetry is told of the start of each phase.

    Phases are marked on the device, and no mark is read before `seconds`: a wait after a pass would leave the device
    idle until the next one is issued.
    """

    def __init__(self, telemetry: Telemetry, clock: Clock) -> None:
        self._telemetry = telemetry
        self._clock = clock
        self._phases: list[tuple[str, Any, Any]] = []

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count the block's work for a phase."""
        self._telemetry.phase(phase)
        began = self._clock.mark()
        yield
        self._phases.append((phase, began, self._clock.mark()))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase; waits until the device has computed the last one."""
        found = {"forward": 0.0, "backward": 0.0, "reduce": 0.0, "optimizer": 0.0}
        for phase, began, ended in self._phases:
            found[phase] += self._clock.between(began, ended)
        return found


def count(batches: Sequence[TrainingBatch], observed: Sequence[Observed], corrected: Sequence[Corrected]) -> Tensor:
    """Add up this rank's `Counts`."""
    total = torch.zeros(len(Counts._fields), dtype=torch.float64)
    for batch, one, correction in zip(batches, observed, corrected, strict=True):
        advantages = moments_of(batch.advantages)
        returns = torch.zeros(2) if batch.returns is None else moments_of(batch.returns)[1:]
        rows = torch.tensor([len(batch), np.count_nonzero(batch.flat.counts)])
        total += torch.cat([rows, correction.sums.cpu(), advantages.cpu(), returns.cpu(), one.counts])
    return total


def where_nonfinite(sums: Sums, norms: Sequence[float]) -> tuple[str, ...]:
    """Return the places with NaN or infinity: "loss", "gradient"."""
    seen = {"loss": [sums.policy, sums.kl, sums.entropy, sums.value], "gradient": norms}
    return tuple(where for where, values in seen.items() if not all(math.isfinite(value) for value in values))


def stddev(count: float, total: float, squares: float) -> float:
    """Return the standard deviation of values given by their number, sum and sum of squares."""
    return math.sqrt(max(squares / max(count, 1) - (total / max(count, 1)) ** 2, 0.0))


class StepWarnings:
    """Warnings, once each, of steps that teach nothing.

    Args:
        skips_cut: Whether rows whose response was cut are left out of a step.
    """

    def __init__(self, *, skips_cut: bool) -> None:
        self._skips_cut = skips_cut
        self._idle_steps = self._zero_steps = 0

    def look(self, stats: StepStats, cut_ratio: float) -> None:
        """Log that no row of the first steps has a reward other than 0, or that steps in a row trained no token.

        In GRPO a step trains no token if all rewards of each group are equal, otherwise if all its responses were cut.
        """
        is_zero = stats.reward_mean == 0 and stats.reward_stddev == 0
        self._zero_steps = self._zero_steps + 1 if is_zero and self._zero_steps >= 0 else -1
        if self._zero_steps == _ZERO_STEPS:
            log.warning("all rewards so far are 0: does the reward function find the answer in the responses, and are "
                        "prompts and answers of the types that it compares? `rlhfd samples` shows both: steps=%d",
                        _ZERO_STEPS)  # fmt: skip
        self._idle_steps = 0 if stats.tokens_trained else self._idle_steps + 1
        if self._idle_steps == IDLE_STEPS and self._skips_cut and cut_ratio > 0:
            log.warning("nothing to learn from, each response was cut, which trainer.mask_cut_responses leaves out, or "
                        "all rewards of its group are equal: steps_in_a_row=%d cut_ratio=%.2f",
                        IDLE_STEPS, cut_ratio)  # fmt: skip
        elif self._idle_steps == IDLE_STEPS:
            log.warning("nothing to learn from, in every group all rewards are equal: steps_in_a_row=%d", IDLE_STEPS)
