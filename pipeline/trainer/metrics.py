"""The metrics of a trainer rank. Rank 0 alone exports losses and rewards: they are those of all ranks together."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, get_args

import numpy as np

from pipeline.models.device import allocator_bytes
from pipeline.progress import Event, Telemetry
from pipeline.storage.recording import Recorded
from pipeline.telemetry.activity import ActivityClock
from pipeline.telemetry.metrics import NUMBER_LABELS, REWARD_LABELS
from pipeline.telemetry.number_names import NumberNames
from pipeline.telemetry.slab import SlotWriter
from pipeline.trainer.dealing import Dealt
from pipeline.trainer.row_means import REWARD
from pipeline.trainer.step_stats import StepStats

_GAUGES: Final[Mapping[str, tuple[str, str, str]]] = {
    "policy_loss": ("rlhfd_loss", "kind", "policy"),
    "value_loss": ("rlhfd_loss", "kind", "value"),
    "kl_loss": ("rlhfd_loss", "kind", "kl"),
    "entropy_loss": ("rlhfd_loss", "kind", "entropy"),
    "loss": ("rlhfd_loss", "kind", "total"),
    "behaviour_ratio_mean": ("rlhfd_behaviour_ratio", "stat", "mean"),
    "behaviour_ratio_min": ("rlhfd_behaviour_ratio", "stat", "min"),
    "behaviour_ratio_max": ("rlhfd_behaviour_ratio", "stat", "max"),
}
"""Statistics of a step that are exported with a label: metric, label and its value."""

_NAMES: Final = {"kl_nats": "kl_mean_nats", "updates": "step_updates"} | {
    name: name
    for name in (
        "behaviour_cut_ratio", "clipped_ratio", "entropy_nats", "gradient_norm", "kl_coef", "learning_rate",
        "padding_ratio", "policy_kl_nats", "response_length_mean_tokens", "return_mean", "return_stddev",
        "reward_running_mean", "reward_running_stddev",
    )
}  # fmt: skip
"""Statistics of a step that are exported without a label: the metric's name behind ``rlhfd_``."""
_KEPT: Final = {*_GAUGES, "gradient_norm", "policy_kl_nats"}
"""Statistics whose gauge keeps its value at a step in which they are not finite, which is skipped and counted."""

_ROW_MEANS = ("cut_ratio", "groups_without_signal_ratio")


class TrainerMetrics(Telemetry):
    """Writes a rank's slot."""

    def __init__(
        self,
        writer: SlotWriter,
        *,
        rank: int,
        reward_source: str,
        reward_labels: Sequence[str] = (),
        numbers: NumberNames | None = None,
    ) -> None:
        super().__init__()
        self._writer = writer
        self._leads = rank == 0
        self._numbers = numbers
        self.clock = ActivityClock(writer, ["train", "publish", "wait_data", "wait_card", "fetch_weights"])
        self._waited_s = 0.0
        self._fetch_s = writer.histogram("rlhfd_train_phase_duration_seconds", phase="fetch")
        self._wait_s = writer.histogram("rlhfd_buffer_get_wait_seconds")
        self._tokens = writer.counter("rlhfd_tokens_total", kind="trained")
        self._experiences = writer.counter("rlhfd_train_experiences_total")
        self._staleness = writer.histogram("rlhfd_policy_staleness_versions", point="train")
        self._version = writer.gauge("rlhfd_policy_version")
        self._ratio = writer.histogram("rlhfd_importance_ratio")
        self._gaps = writer.histogram("rlhfd_engine_gap_nats", point="train")
        self._kl = writer.histogram("rlhfd_kl_nats")
        self._out_of_memory = writer.counter("rlhfd_out_of_memory_total", during="train")
        self._phases = {
            phase: writer.histogram("rlhfd_train_phase_duration_seconds", phase=phase)
            for phase in ("forward", "backward", "reduce", "optimizer")
        }
        if not self._leads:
            return
        self._gauges = {name: writer.gauge(f"rlhfd_{metric}") for name, metric in _NAMES.items()}
        for name, (metric, label, value) in _GAUGES.items():
            self._gauges[name] = writer.gauge(metric, **{label: value})
        for name in ("reward_mean", "reward_stddev"):
            self._gauges[name] = writer.gauge(f"rlhfd_{name}", source=reward_source)
        self._row_means = {name: writer.gauge(f"rlhfd_{name}") for name in _ROW_MEANS} | {
            f"{REWARD}{label}": writer.gauge("rlhfd_reward_function_mean", function=function)
            for label, function in zip(reward_labels, REWARD_LABELS, strict=False)
        }
        self._number_means = [writer.gauge("rlhfd_reward_function_mean", function=label) for label in NUMBER_LABELS]
        self._nonfinite = {
            where: writer.counter("rlhfd_nonfinite_total", where=where) for where in ("loss", "gradient")
        }
        self._publish_s = writer.histogram("rlhfd_weight_sync_duration_seconds", phase="publish")
        self._state_s = writer.histogram("rlhfd_weight_sync_duration_seconds", phase="state")
        self._publish_phase_s = writer.histogram("rlhfd_train_phase_duration_seconds", phase="publish")
        self._published_bytes = writer.counter("rlhfd_weight_sync_bytes_total", transport="shm")
        self._published = writer.counter("rlhfd_weight_syncs_total", result="ok")
        self._published_time = writer.gauge("rlhfd_weight_sync_last_success_timestamp_seconds")
        self._saved = writer.counter("rlhfd_checkpoints_total", result="ok")
        self._not_saved = writer.counter("rlhfd_checkpoints_total", result="error")
        self._since_saved = writer.gauge("rlhfd_checkpoint_failures_since_success")
        self._failures = 0
        self._save_s = writer.histogram("rlhfd_checkpoint_duration_seconds")
        self._save_wait_s = writer.counter("rlhfd_checkpoint_wait_seconds_total")
        self._save_time = writer.gauge("rlhfd_checkpoint_last_success_timestamp_seconds")

    def ends_at(self, step: int) -> None:
        """Set the step at which the run ends, 0 for none."""
        if self._leads:
            self._writer.gauge("rlhfd_last_step").set(step)

    @contextlib.contextmanager
    def fetching(self) -> Iterator[None]:
        """Time the copy of a batch out of the arena; a poll without a batch (below 0.1 ms) is not observed."""
        started_s = time.monotonic()
        yield
        duration_s = time.monotonic() - started_s
        if duration_s > 1e-4:
            self._fetch_s.observe(duration_s)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block's seconds as a wait for a batch."""
        self._writer.work_on()
        started_s = time.monotonic()
        with self.clock.during("wait_data"):
            yield
        self._waited_s += time.monotonic() - started_s

    @contextlib.contextmanager
    def waiting_for_card(self) -> Iterator[None]:
        """Count the block's seconds as a wait until the engines on the rank's card sleep."""
        # The batch would not be the cause of a death now.
        self._writer.work_on()
        with self.clock.during("wait_card"):
            yield

    def progress(self, *, rows_done: int = 0, rows: int = 0, tokens: int | None = None) -> None:
        """Set the rank's heartbeat."""
        self._writer.beat()

    def work_on(self, lease: int) -> None:
        """Set the lease in hand in the rank's slot."""
        self._writer.work_on(lease)

    def phase(self, name: str) -> None:
        """Set the heartbeat of a step in progress; in "reduce" the rank waits in a collective."""
        self._writer.set_in_collective(name == "reduce")

    def count(self, event: Event, kind: str) -> None:
        """Count a micro-batch that ran out of the device's memory: the passes of a trainer have no other event."""
        assert event == "out_of_memory"
        self._out_of_memory.inc()

    @contextlib.contextmanager
    def in_collective(self) -> Iterator[None]:
        """Count the block's seconds as a wait for data: the other ranks wait for theirs before they enter a step."""
        self._writer.set_in_collective(True)
        with self.clock.during("wait_data"):
            yield
        self._writer.set_in_collective(False)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Count the block's seconds as an optimizer step."""
        self._wait_s.observe(self._waited_s)
        self._waited_s = 0.0
        with self.clock.during("train"):
            yield

    @contextlib.contextmanager
    def publishing(self) -> Iterator[None]:
        """Count the block's seconds as a publish."""
        with self.clock.during("publish"):
            yield

    def began(self, version: int, *, step: int = 0, steps_before: int = 0) -> None:
        """Set the point from which training starts.

        Args:
            version: The policy version.
            step: Optimizer steps behind its weights.
            steps_before: Steps of earlier instances of the run, whose counters are gone.
        """
        if self._leads:
            self._version.set(version)
            # Absent until now: a reader that saw 0 first would take the steps before for a rate.
            self._steps = self._writer.counter("rlhfd_train_steps_total")
            self._steps.inc(steps_before)
            self._idle_steps = self._writer.counter("rlhfd_train_idle_steps_total")
            self._since_signal = self._writer.gauge("rlhfd_train_steps_since_signal")
            self._idle_in_a_row = 0
            self._since_signal.set(0)
            self._step = self._writer.gauge("rlhfd_train_step")
            self._step.set(step)

    def stepped(
        self,
        step: int,
        stats: StepStats,
        staleness: Sequence[np.ndarray],
        row_means: Mapping[str, float],
    ) -> None:
        """Count the step of this number, whose version is published, and export its statistics.

        Before the publish a killed trainer's successor takes the step again.

        Args:
            step: The number.
            stats: The statistics.
            staleness: Versions of each row of each batch.
            row_means: See `TakenStep`.
        """
        for versions in staleness:
            self._experiences.inc(len(versions))
            self._staleness.observe_many(versions.tolist())
        for histogram, values in (
            (self._ratio, stats.row_importance_ratios), (self._kl, stats.row_kl_nats), (self._gaps, stats.row_gap_nats),
        ):  # fmt: skip
            # A histogram refuses the others, which rlhfd_nonfinite_total counts.
            histogram.observe_many(filter(math.isfinite, values))
        for phase, histogram in self._phases.items():
            histogram.observe(getattr(stats, f"{phase}_s"))
        self._writer.beat()
        for state, nbytes in allocator_bytes().items():
            self._writer.gauge("rlhfd_torch_memory_bytes", state=state).set(nbytes)
        if self._leads:
            self._lead(step, stats, row_means)

    def _lead(self, step: int, stats: StepStats, row_means: Mapping[str, float]) -> None:
        # Those of all ranks.
        self._tokens.inc(stats.tokens_trained)
        for where in stats.nonfinite:
            self._nonfinite[where].inc()
        for name, gauge in self._gauges.items():
            value = getattr(stats, name)
            if value is not None and (math.isfinite(value) or name not in _KEPT):
                gauge.set(value)
        for name, gauge in self._row_means.items():
            if math.isfinite(row_means[name]):
                gauge.set(row_means[name])
        for name, gauge in zip([] if self._numbers is None else self._numbers.names, self._number_means, strict=False):
            if (mean := row_means.get(f"{REWARD}{name}")) is not None:
                gauge.set(mean)
        self._idle_in_a_row = 0 if stats.tokens_trained else self._idle_in_a_row + 1
        self._since_signal.set(self._idle_in_a_row)
        if self._idle_in_a_row:
            self._idle_steps.inc()
        # Last: a reader that sees the step finds its values.
        self._step.set(step)
        self._steps.inc()

    def dealt(self, dealt: Dealt) -> None:
        """Export how unequal the work of the ranks is, of the rows leased to each and of those dealt to it."""
        if self._leads:
            self._writer.gauge("rlhfd_rank_imbalance_ratio", rows="leased").set(dealt.leased)
            self._writer.gauge("rlhfd_rank_imbalance_ratio", rows="trained").set(dealt.trained)

    def published(
        self, version: int, nbytes: int, duration_s: float, *, waited_s: float, state_s: float | None
    ) -> None:
        """Count a publish.

        Args:
            version: The policy version.
            nbytes: Bytes written.
            duration_s: Seconds of the writes, in whichever thread.
            waited_s: Seconds that training waited for them.
            state_s: Seconds of them for the training state; None without one.
        """
        self._version.set(version)
        self._publish_s.observe(duration_s)
        if state_s is not None:
            self._state_s.observe(state_s)
        self._publish_phase_s.observe(waited_s)
        self._published_bytes.inc(nbytes)
        self._published.inc()
        self._published_time.set(time.time())

    def saved(self, duration_s: float) -> None:
        """Count a checkpoint."""
        self._saved.inc()
        self._failures = 0
        self._since_saved.set(0.0)
        self._save_s.observe(duration_s)
        self._save_time.set(time.time())

    def waited_for_checkpoint(self, duration_s: float) -> None:
        """Count a wait of training for the write of a checkpoint."""
        self._save_wait_s.inc(duration_s)

    def begin_recording(self) -> None:
        """Export the results for recorded rows, from 0 on; a run without a recording has none."""
        results: tuple[Recorded, ...] = get_args(Recorded)
        self._recordings = {result: self._writer.counter("rlhfd_recordings_total", result=result) for result in results}
        self._recording_bytes = self._writer.gauge("rlhfd_recording_bytes")

    def recorded(self, result: Recorded) -> None:
        """Count a result for the rows of a step."""
        self._recordings[result].inc()

    def recording_holds(self, nbytes: int) -> None:
        """Set the bytes of all recorded rows on disk."""
        self._recording_bytes.set(nbytes)

    def not_saved(self) -> None:
        """Count a checkpoint that could not be written."""
        self._not_saved.inc()
        self._failures += 1
        self._since_saved.set(float(self._failures))
