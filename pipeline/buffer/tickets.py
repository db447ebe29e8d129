"""The buffer's tickets: who rolls out which prompts into which room, and what comes of it."""

from __future__ import annotations

import dataclasses
import heapq
import logging
from collections.abc import Sequence

from pipeline.buffer import admission
from pipeline.buffer.admission import Limits
from pipeline.buffer.leases import Quarantine, Send
from pipeline.buffer.observer import AsideReason, Observer
from pipeline.config.sizes import extent_bytes_bound
from pipeline.errors import ArenaFullError, GaveUpError
from pipeline.runtime.messages import Failed, Faulty, Sealed, Settled, Ticket, Wait, WantTickets
from pipeline.runtime.transport import worker_name
from pipeline.storage.allocator import Extent, ExtentAllocator
from pipeline.storage.ledger import Ledger
from pipeline.storage.records import ExtentRecord, ExtentState

# How long a seal waits for word of its weights: the trainer may have died between publishing and saying so.
_EARLY_S = 60.0

log = logging.getLogger(__name__)


class Tickets:
    """Tickets that are out, and those that are due; every extent that is not free belongs to exactly one."""

    def __init__(
        self,
        ledger: Ledger,
        limits: Limits,
        peers: dict[str, int],
        send: Send,
        observer: Observer,
        allocator: ExtentAllocator,
        quarantine: Quarantine,
        *,
        workers: int,
        prompts_in_source: int,
    ) -> None:
        """Take over the tickets of a ledger.

        Args:
            ledger: Says which are out.
            limits: What bounds the buffer.
            peers: Incarnation of each peer that is known; the buffer's own.
            send: Delivers a message to a peer by name.
            observer: Told of everything worth counting.
            allocator: Gives the room, and gets that back of which nothing came.
            quarantine: Keeps a copy of rows that are refused.
            workers: Rollout workers of this instance.
            prompts_in_source: Prompts of one epoch, 0 if unknown; see `Buffer`.
        """
        self.workers = {worker_name(index): index for index in range(workers)}
        self._ledger = ledger
        self._limits = limits
        self._peers = peers
        self._send = send
        self._observer = observer
        self._allocator = allocator
        self._quarantine = quarantine
        self._max_attempts = 1
        self._timeout_s = 0.0
        self._prompts_in_source = prompts_in_source
        self._barren_prompts = 0
        self._wanted: dict[str, int] = {}
        # Who may hold fewer tickets than it can, and who of them was not told yet why it gets none: to ask all of them
        # at each message would cost more than its books.
        self._short: set[str] = set()
        self._untold: set[str] = set()
        self._reason = ""
        self._waiting: dict[str, str] = {}
        self._early: dict[int, tuple[Sealed, float]] = {}
        # A dead run may have had more workers than this one; nobody says hello in their names.
        for record in [record for record in ledger.reserved_extents() if record.owner >= workers]:
            ledger.excuse(record)

    def limit(self, max_attempts: int, timeout_s: float) -> None:
        """Set how often a ticket is handed out, and the time a rollout may take, for those handed out from now on."""
        self._max_attempts, self._timeout_s = max_attempts, timeout_s

    def want(self, message: WantTickets) -> None:
        """Note how many tickets a worker can hold."""
        self._wanted[message.worker] = message.tickets
        self._lacks(message.worker)

    def forget(self, peer: str) -> None:
        """Hand nothing more to a worker that is gone."""
        self._wanted.pop(peer, None)
        self._waiting.pop(peer, None)
        self._short.discard(peer)
        self._untold.discard(peer)

    def _lacks(self, worker: str) -> None:
        self._short.add(worker)
        self._untold.add(worker)

    def orphan(
        self, worker: int, *, held: Sequence[int], attempts: Sequence[int] = (), blamed: int | None = None
    ) -> None:
        """Take tickets from a dead worker; the one that it was at, the oldest if nobody knows, has had its attempt.

        Args:
            worker: Its number.
            held: Tickets that its successor, or itself, has in hand.
            attempts: As which attempt it got each of these; left out, as the last.
            blamed: The one that it was at, if that is known.
        """
        owned = [record for record in self._ledger.reserved_extents() if record.owner == worker]
        as_attempt = dict(zip(held, attempts, strict=False))
        for record in [record for record in owned if as_attempt.get(record.ticket, record.attempt) != record.attempt]:
            # Handed out again by a buffer that died before it had said so.
            self._observer.ticket_ended("reissued")
            self._ledger.excuse(record)
        for record in [record for record in owned if record.ticket not in held]:
            blamed = record.ticket if blamed is None else blamed
            if record.ticket == blamed:
                self._reissue(record, "its worker died")
            else:
                self._observer.ticket_ended("reissued")
                self._ledger.excuse(record)

    def _reissue(self, record: ExtentRecord, reason: str) -> None:
        if record.attempt >= self._max_attempts:
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
            GaveUpError: If there is no room, and nothing can go.
        """
        if not self._short:
            return
        unowned: list[ExtentRecord] = []
        if self._ledger.index.owned.get(-1):
            unowned = [reserved for reserved in self._ledger.reserved_extents() if reserved.owner < 0]
        if paused:
            reason = "paused"
        elif unowned or not (reason := admission.prompts_to_issue(self._ledger, self._limits)[1]):
            reason = self._serve(unowned, now_s)
        if reason:
            self._tell(reason)

    def _serve(self, unowned: list[ExtentRecord], now_s: float) -> str:
        """Hand out tickets as long as there are any; return why there are no more, "" if nobody wants one."""
        owned = self._ledger.index.owned
        hungry = [
            (held, worker)
            for worker in self._short
            if (held := owned.get(self.workers[worker], 0)) < self._wanted[worker]
        ]
        self._short = {worker for _, worker in hungry}
        # Who holds least is served first, so that no worker idles while another one queues.
        heapq.heapify(hungry)
        while hungry:
            held, worker = hungry[0]
            record, owner, reason = unowned.pop(0) if unowned else None, self.workers[worker], ""
            if record is None:
                record, reason = self._reserve(owner)
            else:
                self._ledger.assign(record, owner)
            if record is None:
                return reason
            self._hand_out(record, worker, now_s)
            if held + 1 < self._wanted[worker]:
                heapq.heapreplace(hungry, (held + 1, worker))
            else:
                heapq.heappop(hungry)
                self._short.discard(worker)
        return ""

    def _tell(self, reason: str) -> None:
        """Tell workers without a ticket why; those that know it already are not asked."""
        workers = self._untold if reason == self._reason else self._short
        self._reason, self._untold = reason, set()
        for worker in workers:
            if not self._ledger.index.owned.get(self.workers[worker]) and self._waiting.get(worker) != reason:
                self._waiting[worker] = reason
                self._send(worker, Wait(self._peers[worker], reason))

    def _reserve(self, owner: int) -> tuple[ExtentRecord | None, str]:
        prompts, reason = admission.prompts_to_issue(self._ledger, self._limits)
        if not prompts:
            return None, reason
        rows = prompts * self._limits.group_size
        nbytes = extent_bytes_bound(rows, self._limits.row_bytes)
        try:
            extent = self._allocator.reserve(nbytes)
        except ArenaFullError as error:
            if (
                not self._allocator.holds
                and not self._ledger.reserved
                and not self._ledger.leased
                and self._ledger.ready < self._limits.sample_batch_size
            ):
                # Nothing can come and nothing can go: say so instead of hanging.
                raise GaveUpError(f"buffer.arena_bytes is too small: {error}") from error
            return None, "full"
        record = self._ledger.reserve(
            rows=rows, prompts=prompts, offset=extent.offset, nbytes=extent.nbytes, owner=owner
        )
        return record, ""

    def _hand_out(self, record: ExtentRecord, worker: str, now_s: float) -> None:
        self._waiting.pop(worker, None)
        self._send(
            worker,
            Ticket(
                self._peers[worker], record.ticket, record.position, record.prompts, record.attempt, record.offset,
                record.nbytes, record.policy_version, now_s + self._timeout_s,
            ),
        )  # fmt: skip

    def seal(self, sealed: Sealed, now_s: float) -> None:
        """Commit what came of a ticket, or refuse it; what is early is looked at again."""
        record = self._held_by(sealed)
        if record is not None:
            reason = admission.refusal(sealed, record, self._ledger)
            if reason == "early":
                # Settled once its weights are known here, or it is too late for that.
                self._early.setdefault(sealed.ticket, (sealed, now_s))
                return
            self._early.pop(sealed.ticket, None)
            if reason:
                self._refuse(record, sealed, reason)
            else:
                self._accept(record, sealed, now_s)
        self._settle(sealed.worker, sealed.ticket)

    def _accept(self, record: ExtentRecord, sealed: Sealed, now_s: float) -> None:
        reserved = Extent(record.offset, record.nbytes)
        self._ledger.seal(
            record, rows=sealed.rows, nbytes=sealed.nbytes, checksum=sealed.checksum,
            policy_version=sealed.policy_version, fingerprint=sealed.fingerprint, now_s=now_s,
        )  # fmt: skip
        self._allocator.shrink(reserved, sealed.nbytes)
        self._observer.ticket_ended("sealed")
        self._observer.sealed(sealed.rows, self._ledger.totals.policy_version - sealed.policy_version)
        self._barren_prompts = 0

    def refuse(self, faulty: Faulty) -> None:
        """Keep a copy of what did not pass the insert gate, and give its prompts another attempt, or set them aside.

        Raises:
            GaveUpError: If a whole epoch gave no experience.
        """
        record = self._held_by(faulty)
        if record is not None:
            self._refuse(record, faulty, faulty.reason, f"made by {faulty.worker}: {faulty.detail}")
        self._settle(faulty.worker, faulty.ticket)

    def _refuse(self, record: ExtentRecord, said: Sealed | Faulty, reason: AsideReason, detail: str = "") -> None:
        log.error("experience refused: ticket=%d worker=%s rows=%d version=%d reason=%s",
                  record.ticket, said.worker, said.rows, said.policy_version, reason)  # fmt: skip
        self._observer.set_aside(reason, record.rows)
        if reason != "rolled_back" and admission.is_possible(said, record):
            # Whole, but of weights that nobody knows, or wrong in itself: worth a look. One of impossible size could
            # not be read.
            told = dataclasses.replace(
                record, rows=said.rows, nbytes=said.nbytes, checksum=said.checksum,
                policy_version=said.policy_version, fingerprint=said.fingerprint,
            )  # fmt: skip
            self._quarantine([(told, list(range(said.rows)))], reason, detail or f"sealed by {said.worker}")
        if reason == "rolled_back":
            self._observer.ticket_ended("reissued")
            self._ledger.excuse(record)
        else:
            self._reissue(record, f"refused: {reason}")

    def retry_early(self, now_s: float) -> None:
        """Look again at seals that came before word of their weights did."""
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
        """Give a ticket's prompts another attempt, or set them aside.

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

    def _held_by(self, word: Sealed | Faulty | Failed) -> ExtentRecord | None:
        record = self._ledger.extents.get(word.ticket)
        if (
            record is not None
            and record.state is ExtentState.RESERVED
            and worker_name(record.owner) == word.worker
            and word.attempt in (0, record.attempt)
        ):
            return record
        self._observer.duplicate()
        return None

    def _settle(self, worker: str, ticket: int) -> None:
        if worker in self._peers:
            self._send(worker, Settled(self._peers[worker], ticket))
        if worker in self._wanted:
            self._lacks(worker)

    def _count_barren(self, prompts: int) -> None:
        self._barren_prompts += prompts
        if self._prompts_in_source and self._barren_prompts >= self._prompts_in_source:
            raise GaveUpError(
                f"{self._barren_prompts:,} prompts in a row, a whole epoch, gave no experience; the log says why"
            )

    def abandon(self, record: ExtentRecord) -> None:
        """End a ticket nothing came of."""
        self._allocator.release(Extent(record.offset, record.nbytes))
        self._ledger.abandon(record)
