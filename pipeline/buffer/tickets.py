"""The buffer's tickets: the worker, prompts and room of each, and its outcome."""

from __future__ import annotations

import dataclasses
import heapq
import logging
from collections.abc import Sequence

from pipeline.buffer import admission
from pipeline.buffer.context import BufferContext
from pipeline.buffer.metrics import AsideReason
from pipeline.config.lengths import extent_bytes_bound
from pipeline.errors import ArenaFullError, GaveUpError
from pipeline.runtime.messages import Failed, Faulty, Sealed, Settled, Ticket, Wait, WantTickets
from pipeline.runtime.transport import worker_name
from pipeline.storage.allocator import Extent
from pipeline.storage.records import ExtentRecord, ExtentState
from pipeline.storage.tables import PromptRange

# Wait of a seal for its weights' `Published`: the trainer may have died between the publish and the message.
_EARLY_S = 60.0

log = logging.getLogger(__name__)


class Tickets:
    """Tickets that are handed out or due; every extent that is not free belongs to exactly one ticket."""

    def __init__(self, context: BufferContext, workers: int) -> None:
        """Take over the tickets of the context's ledger.

        Args:
            context: The surroundings, shared with the leases.
            workers: Rollout workers of this instance.
        """
        self.workers = {worker_name(index): index for index in range(workers)}
        self._context = context
        self._ledger = context.ledger
        self._peers = context.peers
        self._send = context.send
        self._observer = context.observer
        self._allocator = context.allocator
        self._quarantine = context.quarantine
        # Prompts without experience since the last seal.
        self._barren_prompts = 0
        # Tickets that each worker can hold.
        self._capacity: dict[str, int] = {}
        # Workers that may hold fewer tickets than they can, and those of them without a `Wait` since: a look at all
        # workers at each message would cost more than the ledger.
        self._short: set[str] = set()
        self._unnotified: set[str] = set()
        self._reason = ""
        self._waiting: dict[str, str] = {}
        # The newest version at which `max_refill` was reached.
        self._exhausted: int | None = None
        self._early: dict[int, tuple[Sealed, float]] = {}
        # A dead run may have had more workers than this one; no process will connect under their names.
        for record in [record for record in self._ledger.reserved_extents() if record.owner >= workers]:
            self._ledger.excuse(record)

    def want(self, message: WantTickets) -> None:
        """Record the number of tickets that a worker can hold."""
        self._capacity[message.worker] = message.tickets
        self._mark_short(message.worker)

    def forget(self, peer: str) -> None:
        """Hand no more tickets to a dead worker."""
        self._capacity.pop(peer, None)
        self._waiting.pop(peer, None)
        self._short.discard(peer)
        self._unnotified.discard(peer)

    def _mark_short(self, worker: str) -> None:
        self._short.add(worker)
        self._unnotified.add(worker)

    def orphan(self, worker: int, *, held: Sequence[int], attempts: Sequence[int] = (), blamed: int = -1) -> None:
        """Take tickets from a dead worker; the attempt counts for the one that may have caused the death.

        Args:
            worker: Number of the dead worker.
            held: Tickets that the worker or its successor holds.
            attempts: The attempt number under which it got each of these; the last attempt if left out.
            blamed: The ticket that may be the cause; -1 for none.
        """
        owned = [record for record in self._ledger.reserved_extents() if record.owner == worker]
        as_attempt = dict(zip(held, attempts, strict=False))
        for record in [record for record in owned if as_attempt.get(record.ticket, record.attempt) != record.attempt]:
            # Handed out again by a buffer that died before its message left.
            self._observer.ticket_ended("reissued")
            self._ledger.excuse(record)
        for record in [record for record in owned if record.ticket not in held]:
            if record.ticket == blamed:
                self._reissue(record, "its worker died")
            else:
                self._observer.ticket_ended("reissued")
                self._ledger.excuse(record)

    def _reissue(self, record: ExtentRecord, reason: str) -> None:
        if record.attempt >= self._context.limits.max_attempts:
            log.warning("prompts set aside: ticket=%d position=%d prompts=%d attempts=%d reason=%s",
                        record.ticket, record.position, record.prompts, record.attempt, reason)  # fmt: skip
            self._observer.ticket_ended("failed")
            self.abandon(record)
            self._count_barren(record.prompts)
        else:
            self._observer.ticket_ended("reissued")
            self._ledger.assign(record, -1)

    def issue(self, now_s: float, *, paused: bool) -> None:
        """Hand out the tickets that the rules allow now; none while the run is paused.

        Raises:
            GaveUpError: If there is no room, and no extent can become free.
        """
        if not self._short:
            return
        unowned: list[ExtentRecord] = []
        if self._ledger.index.owned.get(-1):
            unowned = [reserved for reserved in self._ledger.reserved_extents() if reserved.owner < 0]
        if paused:
            reason = "paused"
        elif unowned or not (reason := admission.prompts_to_issue(self._ledger, self._context.limits)[1]):
            reason = self._serve(unowned, now_s)
        if reason:
            self._notify(reason)

    def _serve(self, unowned: list[ExtentRecord], now_s: float) -> str:
        """Hand out tickets while the rules allow it; return the reason for the end, "" if no worker can hold more."""
        owned = self._ledger.index.owned
        short = [
            (held, worker)
            for worker in self._short
            if (held := owned.get(self.workers[worker], 0)) < self._capacity[worker]
        ]
        self._short = {worker for _, worker in short}
        # The worker with the fewest tickets first: no worker is idle while another one has a queue.
        heapq.heapify(short)
        while short:
            held, worker = short[0]
            record, owner, reason = unowned.pop(0) if unowned else None, self.workers[worker], ""
            if record is None:
                record, reason = self._reserve(owner)
            else:
                self._ledger.assign(record, owner)
            if record is None:
                return reason
            self._hand_out(record, worker, now_s)
            if held + 1 < self._capacity[worker]:
                heapq.heapreplace(short, (held + 1, worker))
            else:
                heapq.heappop(short)
                self._short.discard(worker)
        return ""

    def _notify(self, reason: str) -> None:
        """Send workers without a ticket the reason, once."""
        workers = self._unnotified if reason == self._reason else self._short
        self._reason, self._unnotified = reason, set()
        for worker in workers:
            if not self._ledger.index.owned.get(self.workers[worker]) and self._waiting.get(worker) != reason:
                self._waiting[worker] = reason
                self._send(worker, Wait(self._peers[worker], reason))

    def _reserve(self, owner: int) -> tuple[ExtentRecord | None, str]:
        limits = self._context.limits
        prompts, reason = admission.prompts_to_issue(self._ledger, limits)
        if not prompts:
            return None, reason
        rows = prompts * limits.group_size
        nbytes = extent_bytes_bound(rows, limits.row_bytes)
        try:
            extent = self._allocator.reserve(nbytes)
        except ArenaFullError as error:
            if (
                not self._allocator.holds
                and not self._ledger.reserved
                and not self._ledger.leased
                and self._ledger.ready < limits.sample_batch_size
            ):
                # No rollout and no batch is in flight: end the run instead of a wait without end.
                raise GaveUpError(f"buffer.arena_bytes is too small: {error}") from error
            return None, "full"
        record = self._ledger.reserve(
            rows=rows, prompts=prompts, offset=extent.offset, nbytes=extent.nbytes, owner=owner,
            new_round=admission.new_round(self._ledger, limits, admission.room_in_bound(self._ledger, limits)),
        )  # fmt: skip
        return record, ""

    def _hand_out(self, record: ExtentRecord, worker: str, now_s: float) -> None:
        self._waiting.pop(worker, None)
        self._send(
            worker,
            Ticket(
                self._peers[worker], record.ticket, record.position, record.prompts, record.attempt, record.offset,
                record.nbytes, record.policy_version, now_s + self._context.limits.ticket_timeout_s,
            ),
        )  # fmt: skip

    def seal(self, sealed: Sealed, now_s: float) -> None:
        """Commit a ticket's experience, or refuse it; an early seal is checked again later."""
        record = self._held_by(sealed)
        if record is not None:
            reason = admission.refusal(sealed, record, self._ledger)
            if reason == "early":
                # Settled once its weights are known, or after _EARLY_S.
                self._early.setdefault(sealed.ticket, (sealed, now_s))
                return
            self._early.pop(sealed.ticket, None)
            if reason:
                self._refuse(record, sealed, reason)
            elif admission.is_ahead(self._ledger, self._context.limits, record):
                self._put_off(record)
            else:
                self._accept(record, sealed, now_s)
        self._settle(sealed.worker, sealed.ticket)

    def _accept(self, record: ExtentRecord, sealed: Sealed, now_s: float) -> None:
        reserved = Extent(record.offset, record.nbytes)
        filtered = admission.filtered_rows(sealed, self._ledger, self._context.limits)
        self._log_exhausted(sealed, filtered)
        has_rounds = admission.has_rounds(self._context.limits)
        is_free = self._ledger.seal(
            record, rows=sealed.rows, nbytes=sealed.nbytes, checksum=sealed.checksum,
            policy_version=sealed.policy_version, fingerprint=sealed.fingerprint, now_s=now_s, filtered=filtered,
            refilled=0 if has_rounds else len(filtered) // self._context.limits.group_size,
        )  # fmt: skip
        kept = self._allocator.shrink(reserved, sealed.nbytes)
        if is_free:
            self._allocator.release(kept)
        self._observer.ticket_ended("sealed")
        self._observer.sealed(sealed.rows, self._ledger.totals.policy_version - sealed.policy_version)
        self._barren_prompts = 0

    def _log_exhausted(self, sealed: Sealed, filtered: list[int]) -> None:
        """Log once a version that groups without signal are kept because `max_refill` is reached."""
        version = self._ledger.totals.policy_version
        if sealed.flat and not filtered and self._context.limits.max_refill and version != self._exhausted:
            self._exhausted = version
            log.warning("groups without signal are trained, rollout.max_refill is reached: version=%d refilled=%d",
                        version, self._ledger.totals.refilled)  # fmt: skip

    def refuse(self, faulty: Faulty) -> None:
        """Keep a copy of experience that failed the insert gate, and retry its prompts or set them aside.

        Raises:
            GaveUpError: If a whole epoch gave no experience.
        """
        record = self._held_by(faulty)
        if record is not None:
            self._refuse(record, faulty, faulty.reason, f"made by {faulty.worker}: {faulty.detail}")
        self._settle(faulty.worker, faulty.ticket)

    def _refuse(self, record: ExtentRecord, report: Sealed | Faulty, reason: AsideReason, detail: str = "") -> None:
        log.error("experience refused: ticket=%d worker=%s rows=%d version=%d reason=%s",
                  record.ticket, report.worker, report.rows, report.policy_version, reason)  # fmt: skip
        self._observer.set_aside(reason, record.rows)
        if reason != "rolled_back" and admission.is_possible(report, record):
            # Whole, but of unknown weights or with wrong content: a copy helps to find the cause. Experience of an
            # impossible size could not be read.
            reported = dataclasses.replace(
                record, rows=report.rows, nbytes=report.nbytes, checksum=report.checksum,
                policy_version=report.policy_version, fingerprint=report.fingerprint,
            )  # fmt: skip
            self._quarantine([(reported, list(range(report.rows)))], reason, detail or f"sealed by {report.worker}")
        if reason == "rolled_back" and admission.is_ahead(self._ledger, self._context.limits, record):
            self._put_off(record)
        elif reason == "rolled_back":
            self._observer.ticket_ended("reissued")
            self._ledger.excuse(record)
        else:
            self._reissue(record, f"refused: {reason}")

    def _put_off(self, record: ExtentRecord) -> None:
        """End a ticket whose prompts are to come after others; they are issued again after those."""
        self._observer.ticket_ended("reissued")
        self.abandon(record, again=True)

    def retry_early(self, now_s: float) -> None:
        """Check again the seals that arrived before the `Published` of their weights."""
        for ticket, (sealed, came_s) in list(self._early.items()):
            record = self._ledger.extents.get(ticket)
            if record is None or worker_name(record.owner) != sealed.worker:
                del self._early[ticket]
            elif admission.refusal(sealed, record, self._ledger) != "early":
                self.seal(sealed, came_s)
            elif now_s - came_s > _EARLY_S:
                del self._early[ticket]
                self._refuse(record, sealed, "fingerprint")
                self._settle(sealed.worker, ticket)

    def fail(self, failed: Failed) -> None:
        """Retry a ticket's prompts, or set them aside.

        Raises:
            GaveUpError: If a whole epoch gave no experience.
        """
        record = self._held_by(failed)
        if record is not None:
            if failed.retry:
                self._reissue(record, failed.reason)
            else:
                self._observer.ticket_ended("failed")
                self.abandon(record)
                self._count_barren(record.prompts)
        self._settle(failed.worker, failed.ticket)

    def _held_by(self, report: Sealed | Faulty | Failed) -> ExtentRecord | None:
        record = self._ledger.extents.get(report.ticket)
        if (
            record is not None
            and record.state is ExtentState.RESERVED
            and worker_name(record.owner) == report.worker
            and report.attempt in (0, record.attempt)
        ):
            return record
        self._observer.duplicate()
        return None

    def _settle(self, worker: str, ticket: int) -> None:
        if worker in self._peers:
            self._send(worker, Settled(self._peers[worker], ticket))
        if worker in self._capacity:
            self._mark_short(worker)

    def _count_barren(self, prompts: int) -> None:
        self._barren_prompts += prompts
        epoch = self._context.limits.prompts_in_source
        if epoch and self._barren_prompts >= epoch:
            raise GaveUpError(
                f"{self._barren_prompts:,} prompts in a row, a whole epoch, gave no experience; the log says why"
            )

    def abandon(self, record: ExtentRecord, *, again: bool = False) -> None:
        """End a ticket that gave no rows; `again`: its prompts are to be issued again."""
        self._allocator.release(Extent(record.offset, record.nbytes))
        self._ledger.abandon(record, redo=PromptRange(record.position, record.prompts) if again else None)
