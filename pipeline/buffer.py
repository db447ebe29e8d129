"""The buffer: hands out tickets, notes what was sealed, leases batches to trainers. It touches no payload byte."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable

from pipeline import admission
from pipeline.admission import Limits
from pipeline.arena import Extent, ExtentAllocator
from pipeline.codec_bounds import extent_bytes_bound
from pipeline.errors import ArenaFullError, GaveUpError
from pipeline.leases import Leases, Quarantine, Send
from pipeline.ledger import Ledger
from pipeline.ledger_records import Chosen, ExtentRecord, ExtentState
from pipeline.ledger_tables import Run
from pipeline.messages import (
    Ack,
    Credit,
    Damaged,
    Drain,
    Failed,
    Hello,
    Message,
    PeerDied,
    Published,
    Release,
    Sealed,
    Settled,
    Ticket,
    Wait,
    WantTickets,
    Welcome,
)
from pipeline.observer import AsideReason, Observer
from pipeline.transport import trainer_name, worker_name

# How long a seal waits for word of its weights: the trainer may have died between publishing and saying so.
_EARLY_S = 60.0

# Writes ready rows of a ledger to disk, with the prompts of tickets that were cut.
Spool = Callable[[Ledger, Chosen, list[Run]], None]

log = logging.getLogger(__name__)


class Buffer:
    """All of the buffer's decisions; messages go in and out, no socket and no clock of its own.

    Invariants: ``sealed = trained + dropped + ready + leased`` in the ledger at all times; every extent that is not
    free belongs to exactly one ticket; lease j belongs to rank ``j mod world_size``.
    """

    def __init__(
        self,
        ledger: Ledger,
        allocator: ExtentAllocator,
        limits: Limits,
        send: Send,
        observer: Observer,
        *,
        workers: int,
        max_attempts: int = 3,
        ticket_timeout_s: float = 600.0,
        prompts_in_source: int = 0,
        incarnation: int | None = None,
        quarantine: Quarantine = lambda chosen, reason, detail: None,
    ) -> None:
        """Take over a ledger, fresh or left by an earlier buffer.

        Args:
            ledger: Opened, hence whole.
            allocator: Empty; the ledger's extents are marked as taken here.
            limits: What bounds the buffer.
            send: Delivers a message to a peer by name.
            observer: Told of everything worth counting.
            workers: Rollout workers of this instance.
            max_attempts: How often a ticket is handed out before its prompts are set aside.
            ticket_timeout_s: Time a rollout may take.
            prompts_in_source: Prompts of one epoch, 0 if unknown: when that many in a row give no experience at all,
                the buffer gives up.
            incarnation: Tells this buffer from its predecessors.
            quarantine: Keeps a copy of rows that are never delivered again.
        """
        self.ledger = ledger
        self.limits = limits
        self.draining = self.complete = self.paused = False
        self.refused = 0
        self.incarnation = random.getrandbits(63) if incarnation is None else incarnation
        self._allocator = allocator
        self._send = send
        self._observer = observer
        self._max_attempts = max_attempts
        self._ticket_timeout_s = ticket_timeout_s
        self._prompts_in_source = prompts_in_source
        self._barren_prompts = 0
        self._peers: dict[str, int] = {}
        self._pids: dict[str, int] = {}
        self._wanted: dict[str, int] = {}
        self._waiting: dict[str, str] = {}
        self._early: dict[int, tuple[Sealed, float]] = {}
        self._quarantine = quarantine
        self._leases = Leases(ledger, limits, self._peers, send, observer, allocator, quarantine)
        for record in ledger.extents.values():
            allocator.take(Extent(record.offset, record.nbytes))
        if ledger.totals.policy_version >= 0:
            # What a spool brought of newer weights, and what a rollback had not dropped yet when its buffer was killed.
            self._leases.drop_rolled_back(0.0)
        self._workers = {worker_name(index): index for index in range(workers)}
        self._names = [*self._workers, *map(trainer_name, range(limits.world_size))]
        for name in self._names:
            send(name, Welcome(self.incarnation))

    @property
    def used_bytes(self) -> int:
        """Bytes of the arena that hold or await experience."""
        return self._allocator.capacity_bytes - self._allocator.free_bytes

    def limit(self, *, max_attempts: int, ticket_timeout_s: float) -> None:
        """Let other limits hold for what is handed out from now on; see the constructor."""
        self._max_attempts, self._ticket_timeout_s = max_attempts, ticket_timeout_s

    def handle(self, message: Message, now_s: float) -> None:
        """Take note of one message; what follows from it is done in `step`.

        A message that is late, repeated or from a predecessor changes nothing. One that nobody of this instance could
        say is refused and counted in `refused`.
        """
        if not self._is_possible(message):
            self.refused += 1
            return
        match message:
            case Hello():
                self._greet(message, now_s)
            case WantTickets() if self._is_current(message.worker, message.incarnation):
                self._wanted[message.worker] = message.tickets
            case Sealed():
                self._seal(message, now_s)
            case Failed():
                self._fail(message)
            case Credit() if self._is_current(message.trainer, message.incarnation):
                self._leases.credit(message)
            case Ack():
                self._leases.acknowledge(message, now_s)
            case Release():
                self._leases.release(message, now_s)
            case Published():
                self._leases.publish(message, now_s)
                self._leases.drop_rolled_back(now_s)
                self._retry_early(now_s)
            case Damaged():
                self._leases.damaged(message, now_s)
            case PeerDied():
                self._bury(message, now_s)
            case Drain():
                self.complete |= message.complete
                self._drain()
            case _:
                self._observer.duplicate()

    def _is_possible(self, message: Message) -> bool:
        totals, world_size = self.ledger.totals, self.limits.world_size
        match message:
            case Hello(peer=name) | PeerDied(peer=name) | Sealed(worker=name) | Failed(worker=name):
                return name in self._names and 0 <= getattr(message, "ticket", 0) < max(1, totals.tickets)
            case WantTickets():
                return message.worker in self._workers
            case Damaged():
                return message.trainer == trainer_name(message.lease % world_size)
            case Published():
                # A float64 of the metrics counts versions exactly up to there.
                version, fingerprint = 0 <= message.version < 1 << 53, 0 <= message.fingerprint < 1 << 64
                # Whole rounds, each of them out: a lease yet to be made cannot be trained already.
                through = 0 <= message.trained_through <= totals.leases and message.trained_through % world_size == 0
                return version and fingerprint and through
        return True

    def step(self, now_s: float) -> None:
        """Issue the tickets and lease the batches that the rules allow now.

        Raises:
            GaveUpError: If nothing under way can ever change that nothing is allowed.
        """
        self._retry_early(now_s)
        if self.draining:
            return
        self._leases.lease_batches(now_s)
        self._issue_tickets(now_s)

    def finish(self, spool: Spool | None = None) -> bool:
        """Take out what no trainer will get any more, so that the books close.

        Args:
            spool: Writes it to disk for the next start; None where there is none.

        Returns:
            Whether nothing was lost that was meant to be spooled.
        """
        for lease in list(self.ledger.leases()):
            self.ledger.requeue(lease)
        cut = [Run(record.position, record.prompts) for record in self.ledger.reserved_extents()]
        for record in list(self.ledger.reserved_extents()):
            self._abandon(record)
        rest = [(record, admission.ready_rows(record)) for record in self.ledger.sealed_extents()]
        reason, whole = "cleared", True
        if spool is not None and self.ledger.totals.tickets:
            try:
                spool(self.ledger, rest, cut)
                reason = "spooled"
            except OSError as error:
                log.error("undelivered experiences lost, the spool cannot be written: rows=%d bytes=%d: %s",
                          self.ledger.ready, sum(record.nbytes for record, _ in rest), error)  # fmt: skip
                whole = False
        elif rest:
            log.info("undelivered experiences discarded: %d", self.ledger.ready)
        for part in rest:
            self._leases.free(self.ledger.drop([part], reason))
        return whole

    def freeze(self) -> tuple[Chosen, list[Run]]:
        """Return the rows that are neither trained nor dropped, leased ones among them, and the prompts under way.

        The bytes of these rows stay as they are until `thaw`, whatever becomes of the rows.
        """
        self._allocator.hold()
        chosen = [(record, rows) for record in self.ledger.sealed_extents() if (rows := admission.held_rows(record))]
        return chosen, [Run(record.position, record.prompts) for record in self.ledger.reserved_extents()]

    def thaw(self) -> None:
        """Let the room of rows that have left since `freeze` be used again."""
        self._allocator.let_go()

    # Peers.

    def _greet(self, hello: Hello, now_s: float) -> None:
        known = self._peers.get(hello.peer)
        if known == hello.incarnation:
            # It was told everything since it first said so.
            return
        if known is not None:
            self._forget(hello.peer)
        self._peers[hello.peer], self._pids[hello.peer] = hello.incarnation, hello.pid
        self._send(hello.peer, Welcome(self.incarnation))
        if self.draining:
            self._send(hello.peer, Drain())
        role, _, index = hello.peer.partition("-")
        if role == "worker":
            self._orphan(int(index), held=hello.held)
        elif role == "trainer":
            if index == "0" and hello.fresh:
                self._leases.rebase()
            self._leases.redeliver(int(index), held=hello.held, now_s=now_s)

    def _is_current(self, peer: str, incarnation: int) -> bool:
        return self._peers.get(peer) == incarnation

    def _bury(self, died: PeerDied, now_s: float) -> None:
        role, _, index = died.peer.partition("-")
        # Its successor may have said hello before: the two words come over different sockets.
        if died.peer not in self._peers or died.pid == self._pids[died.peer]:
            self._forget(died.peer)
            if role == "worker":
                self._orphan(int(index), held=[], blamed=died.working_on)
        if role == "trainer" and died.working_on >= 0:
            self._leases.blame(died.peer, died.working_on, now_s)

    def _forget(self, peer: str) -> None:
        self._peers.pop(peer, None)
        self._wanted.pop(peer, None)
        self._waiting.pop(peer, None)
        self._leases.forget(peer)

    def _drain(self) -> None:
        self.draining = True
        for peer, incarnation in self._peers.items():
            if peer.startswith("worker-"):
                self._send(peer, Wait(incarnation, "draining"))
            self._send(peer, Drain())

    # Tickets.

    def _orphan(self, worker: int, *, held: list[int], blamed: int | None = None) -> None:
        """Take tickets from a dead worker; the one that it was at, the oldest if nobody knows, has had its attempt."""
        lost = [record for record in self.ledger.reserved_extents() if record.owner == worker]
        for record in [record for record in lost if record.ticket not in held]:
            blamed = record.ticket if blamed is None else blamed
            if record.ticket == blamed:
                self._reissue(record, "its worker died")
            else:
                self._observer.ticket_ended("reissued")
                self.ledger.excuse(record)

    def _reissue(self, record: ExtentRecord, reason: str) -> None:
        if record.attempt >= self._max_attempts:
            log.warning("prompts set aside: ticket=%d position=%d prompts=%d attempts=%d reason=%s",
                        record.ticket, record.position, record.prompts, record.attempt, reason)  # fmt: skip
            self._observer.ticket_ended("failed")
            self._abandon(record)
            self._count_barren(record.prompts)
        else:
            self._observer.ticket_ended("reissued")
            self.ledger.assign(record, -1)

    def _issue_tickets(self, now_s: float) -> None:
        owned = self.ledger.index.owned
        held = {name: owned.get(self._workers[name], 0) for name in self._wanted}
        unowned = []
        if owned.get(-1):
            unowned = [reserved for reserved in self.ledger.reserved_extents() if reserved.owner < 0]
        reason = "paused" if self.paused else ""
        # Who holds least is served first, so that no worker idles while another one queues.
        while not self.paused and (hungry := [name for name in held if held[name] < self._wanted[name]]):
            worker = min(hungry, key=lambda name: (held[name], name))
            record, owner = unowned.pop(0) if unowned else None, self._workers[worker]
            if record is None:
                record, reason = self._reserve(owner)
            else:
                self.ledger.assign(record, owner)
            if record is None:
                break
            self._hand_out(record, worker, now_s)
            held[worker] += 1
        for worker in held:
            if held[worker] == 0 and self._waiting.get(worker) != reason:
                self._waiting[worker] = reason
                self._send(worker, Wait(self._peers[worker], reason))
            elif held[worker]:
                self._waiting.pop(worker, None)

    def _reserve(self, owner: int) -> tuple[ExtentRecord | None, str]:
        prompts, reason = admission.prompts_to_issue(self.ledger, self.limits)
        if not prompts:
            return None, reason
        rows = prompts * self.limits.group_size
        nbytes = extent_bytes_bound(rows, self.limits.row_bytes)
        try:
            extent = self._allocator.reserve(nbytes)
        except ArenaFullError as error:
            if (
                not self._allocator.holds
                and not self.ledger.reserved
                and not self.ledger.leased
                and self.ledger.ready < self.limits.sample_batch_size
            ):
                # Nothing can come and nothing can go: say so instead of hanging.
                raise GaveUpError(f"buffer.arena_bytes is too small: {error}") from error
            return None, "full"
        record = self.ledger.reserve(
            rows=rows, prompts=prompts, offset=extent.offset, nbytes=extent.nbytes, owner=owner
        )
        return record, ""

    def _hand_out(self, record: ExtentRecord, worker: str, now_s: float) -> None:
        self._waiting.pop(worker, None)
        self._send(
            worker,
            Ticket(
                self._peers[worker], record.ticket, record.position, record.prompts, record.attempt, record.offset,
                record.nbytes, record.policy_version, now_s + self._ticket_timeout_s,
            ),
        )  # fmt: skip

    def _seal(self, sealed: Sealed, now_s: float) -> None:
        record = self._held_by(sealed.worker, sealed.ticket)
        if record is not None:
            reason = admission.refusal(sealed, record, self.ledger)
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
        self.ledger.seal(
            record, rows=sealed.rows, nbytes=sealed.nbytes, checksum=sealed.checksum,
            policy_version=sealed.policy_version, fingerprint=sealed.fingerprint, now_s=now_s,
        )  # fmt: skip
        self._allocator.shrink(reserved, sealed.nbytes)
        self._observer.ticket_ended("sealed")
        self._observer.sealed(sealed.rows, self.ledger.totals.policy_version - sealed.policy_version)
        self._barren_prompts = 0

    def _refuse(self, record: ExtentRecord, sealed: Sealed, reason: AsideReason) -> None:
        log.error("experience refused: ticket=%d worker=%s rows=%d version=%d reason=%s",
                  record.ticket, sealed.worker, sealed.rows, sealed.policy_version, reason)  # fmt: skip
        self._observer.set_aside(reason, record.rows)
        if reason == "fingerprint":
            # Whole, but of weights that nobody knows: worth a look. One of impossible size could not be read.
            told = dataclasses.replace(
                record, rows=sealed.rows, nbytes=sealed.nbytes, checksum=sealed.checksum,
                policy_version=sealed.policy_version, fingerprint=sealed.fingerprint,
            )  # fmt: skip
            self._quarantine([(told, list(range(sealed.rows)))], reason, f"sealed by {sealed.worker}")
        if reason == "rolled_back":
            self._observer.ticket_ended("reissued")
            self.ledger.excuse(record)
        else:
            self._reissue(record, f"refused: {reason}")

    def _retry_early(self, now_s: float) -> None:
        """Look again at seals that came before word of their weights did."""
        for ticket, (sealed, came_s) in list(self._early.items()):
            record = self.ledger.extents.get(ticket)
            if record is None or worker_name(record.owner) != sealed.worker:
                del self._early[ticket]
            elif admission.refusal(sealed, record, self.ledger) != "early":
                self._seal(sealed, came_s)
            elif now_s - came_s > _EARLY_S:
                del self._early[ticket]
                self._refuse(record, sealed, "fingerprint")
                self._settle(sealed.worker, ticket)

    def _fail(self, failed: Failed) -> None:
        record = self._held_by(failed.worker, failed.ticket)
        if record is not None:
            if failed.retry:
                self._reissue(record, failed.reason)
            else:
                self._observer.ticket_ended("failed")
                self._abandon(record)
                self._count_barren(record.prompts)
        self._settle(failed.worker, failed.ticket)

    def _held_by(self, worker: str, ticket: int) -> ExtentRecord | None:
        record = self.ledger.extents.get(ticket)
        if record is not None and record.state is ExtentState.RESERVED and worker_name(record.owner) == worker:
            return record
        self._observer.duplicate()
        return None

    def _settle(self, worker: str, ticket: int) -> None:
        if worker in self._peers:
            self._send(worker, Settled(self._peers[worker], ticket))

    def _count_barren(self, prompts: int) -> None:
        self._barren_prompts += prompts
        if self._prompts_in_source and self._barren_prompts >= self._prompts_in_source:
            raise GaveUpError(
                f"{self._barren_prompts:,} prompts in a row, a whole epoch, gave no experience; the log says why"
            )

    def _abandon(self, record: ExtentRecord) -> None:
        self._allocator.release(Extent(record.offset, record.nbytes))
        self.ledger.abandon(record)
