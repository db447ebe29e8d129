"""The buffer's metrics."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal, get_args

from pipeline.progress import Telemetry
from pipeline.runtime.evaluation_plan import EvaluationPlan
from pipeline.runtime.messages import FaultReason
from pipeline.telemetry.evaluations import GAUGES, TOTAL, Evaluation
from pipeline.telemetry.metrics import EVALUATION_LABELS, Conservation
from pipeline.telemetry.slab import SlotWriter

if TYPE_CHECKING:
    from pipeline.buffer.buffer import Buffer
    from pipeline.buffer.evaluations import Evaluations

TicketEnd = Literal["sealed", "reissued", "failed"]
LeaseEnd = Literal["acked", "nacked", "holder_died"]
Kept = Literal["kept", "full", "error"]
AsideReason = Literal["checksum", "killed_trainer", "fingerprint", "rolled_back", "invalid", FaultReason]


class BufferMetrics(Telemetry):
    """Writes the buffer's slot: counts the events of tickets, leases and rows."""

    def __init__(self, writer: SlotWriter) -> None:
        super().__init__()
        self._writer = writer
        self._pushes = writer.counter("rlhfd_buffer_pushes_total", result="accepted")
        self._aside = {
            reason: writer.counter("rlhfd_quarantined_total", reason=reason) for reason in get_args(AsideReason)
        }
        self._files = {
            result: writer.counter("rlhfd_quarantine_files_total", result=result) for result in get_args(Kept)
        }
        self._snapshots = {
            whole: writer.counter("rlhfd_journal_writes_total", result="ok" if whole else "error")
            for whole in (True, False)
        }
        self._refused = {
            reason: writer.counter("rlhfd_buffer_pushes_total", result=result)
            for reason, result in (
                ("rolled_back", "stale"),
                *((reason, "invalid") for reason in ("fingerprint", "invalid", *get_args(FaultReason))),
            )
        }
        self._repeats = writer.counter("rlhfd_items_duplicate_total", point="push")
        self._tickets = {result: writer.counter("rlhfd_tickets_total", result=result) for result in get_args(TicketEnd)}
        self._leases = {result: writer.counter("rlhfd_leases_total", result=result) for result in get_args(LeaseEnd)}
        self._requeued = {
            reason: writer.counter("rlhfd_items_requeued_total", reason=reason) for reason in ("holder_died", "nacked")
        }
        self._staleness = writer.histogram("rlhfd_policy_staleness_versions", point="push")
        self._age = writer.histogram("rlhfd_buffer_item_age_seconds")
        self._lease_s = writer.histogram("rlhfd_lease_duration_seconds")
        self._oldest = writer.gauge("rlhfd_buffer_oldest_item_timestamp_seconds")
        self._capacity_items = writer.gauge("rlhfd_buffer_capacity_items")
        self._capacity_bytes = writer.gauge("rlhfd_buffer_capacity_bytes")
        self._paused = writer.gauge("rlhfd_paused")
        self._evaluations: EvaluationMetrics | None = None

    def progress(self, *, rows_done: int = 0, rows: int = 0, tokens: int | None = None) -> None:
        """Set the buffer's heartbeat."""
        self._writer.beat()

    def sealed(self, rows: int, staleness_versions: int) -> None:
        """Count rows of a seal; their policy version is this many versions behind the newest."""
        self._pushes.inc()
        self._staleness.observe(float(max(0, staleness_versions)), rows)

    def ticket_ended(self, result: TicketEnd) -> None:
        """Count a ticket that was settled or reissued."""
        self._tickets[result].inc()

    def leased(self, rows: int, age_s: float) -> None:
        """Count rows that were leased `age_s` after their seal."""
        self._age.observe(max(0.0, age_s), rows)

    def lease_ended(self, result: LeaseEnd, rows: int, duration_s: float | None) -> None:
        """Count a batch that was trained, handed back, or whose holder died; `duration_s` is None if not known."""
        self._leases[result].inc()
        if result in self._requeued:
            self._requeued[result].inc(rows)
        elif duration_s is not None:
            self._lease_s.observe(max(0.0, duration_s))

    def set_aside(self, reason: AsideReason, rows: int) -> None:
        """Count rows that were refused before their commit, or quarantined after it."""
        self._aside[reason].inc(rows)
        if reason in self._refused:
            self._refused[reason].inc()

    def quarantine_file(self, result: Kept) -> None:
        """Count a copy of quarantined rows that was written, had no room, or failed."""
        self._files[result].inc()

    def snapshot_written(self, whole: bool) -> None:
        """Count a write of a snapshot, whole or failed."""
        self._snapshots[whole].inc()

    def duplicate(self) -> None:
        """Count a message that repeats an earlier one or comes from a dead peer."""
        self._repeats.inc()

    def publish(self, buffer: Buffer, now_s: float, capacity_bytes: int) -> None:
        """Publish the ledger's totals, all of one moment."""
        ledger, limits = buffer.ledger, buffer.limits
        totals = ledger.totals
        index, oldest_s = ledger.index, ledger.index.oldest_seal_s()
        reserved = list(ledger.reserved_extents())
        self._writer.publish_group(
            Conservation(
                sealed=totals.sealed,
                trained=totals.trained,
                dropped=tuple(totals.dropped),
                ready_items=ledger.ready,
                leased_items=ledger.leased,
                writing_items=ledger.reserved,
                # An extent with any ready row counts as ready: its bytes cannot be divided.
                ready_bytes=index.ready_bytes,
                leased_bytes=index.sealed_bytes - index.ready_bytes,
                writing_bytes=sum(record.nbytes for record in reserved),
                leases_active=len(ledger.leases),
                tickets_outstanding=len(reserved),
            )
        )
        if oldest_s is None:
            self._oldest.clear()
        else:
            self._oldest.set(time.time() - (now_s - oldest_s))
        if limits.limit_batches:
            self._capacity_items.set(limits.limit_batches * limits.sample_batch_size)
        self._capacity_bytes.set(capacity_bytes)
        self._paused.set(float(buffer.paused))
        if buffer.evaluations.plan is not None:
            self._evaluations = self._evaluations or EvaluationMetrics(self._writer, buffer.evaluations.plan)
            self._evaluations.publish(buffer.evaluations)
        self._writer.beat()


class EvaluationMetrics:
    """Writes the evaluations into the buffer's slot; made only where there are held-out prompts."""

    def __init__(self, writer: SlotWriter, plan: EvaluationPlan) -> None:
        self._counts = {
            name: (writer.counter(metric, result=result), 0)
            for name, metric, result in (
                ("completed", "rlhfd_evaluations_total", "complete"),
                ("abandoned", "rlhfd_evaluations_total", "abandoned"),
                ("evaluated", "rlhfd_evaluation_prompts_total", "evaluated"),
                ("failed", "rlhfd_evaluation_prompts_total", "failed"),
            )
        }
        self._prompts = [writer.gauge("rlhfd_evaluation_under_way_prompts", state=state) for state in ("done", "all")]
        self._version = writer.gauge("rlhfd_evaluation_version")
        self._means = {
            (label, field): writer.gauge(metric, file=label)
            for label in (TOTAL, *EVALUATION_LABELS[: len(plan.names)])
            for field, metric in GAUGES.items()
        }
        self._shown: Evaluation | None = None

    def publish(self, evaluations: Evaluations) -> None:
        """Publish counts, progress and the last evaluation."""
        for name, (counter, before) in self._counts.items():
            if (now := getattr(evaluations, name)) != before:
                counter.inc(now - before)
                self._counts[name] = counter, now
        for gauge, count in zip(self._prompts, evaluations.progress, strict=True):
            gauge.set(count)
        if (last := evaluations.last) is None or last is self._shown:
            return
        self._shown = last
        self._version.set(last.version)
        for label, summary in zip((TOTAL, *EVALUATION_LABELS), (last.total, *last.files), strict=False):
            for field in GAUGES:
                value = getattr(summary, field)
                # A file that was left out of the configuration since has no gauge.
                if (mean := self._means.get((label, field))) is not None:
                    mean.clear() if value is None else mean.set(value)
