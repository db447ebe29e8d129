"""The buffer: hands out tickets, notes what was sealed, leases batches to trainers. It touches no payload byte."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

from pipeline.buffer.admission import Limits
from pipeline.buffer.leases import Leases, Quarantine, Send
from pipeline.buffer.observer import Observer
from pipeline.buffer.tickets import Tickets
from pipeline.runtime.messages import (
    Ack,
    Credit,
    Damaged,
    Drain,
    Failed,
    Faulty,
    Hello,
    Message,
    PeerDied,
    Published,
    Release,
    Sealed,
    Wait,
    WantTickets,
    Welcome,
)
from pipeline.runtime.transport import trainer_name
from pipeline.storage import records
from pipeline.storage.allocator import Extent, ExtentAllocator
from pipeline.storage.ledger import Ledger
from pipeline.storage.records import Chosen
from pipeline.storage.tables import PromptRange

# Writes ready rows of a ledger to disk, with the prompts of tickets that were cut.
Spool = Callable[[Ledger, Chosen, list[PromptRange]], None]

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
        self._peers: dict[str, int] = {}
        self._pids: dict[str, int] = {}
        self._leases = Leases(ledger, limits, self._peers, send, observer, allocator, quarantine)
        self._tickets = Tickets(
            ledger, limits, self._peers, send, observer, allocator, quarantine,
            workers=workers, prompts_in_source=prompts_in_source,
        )  # fmt: skip
        self._tickets.limit(max_attempts, ticket_timeout_s)
        for record in ledger.extents.values():
            allocator.take(Extent(record.offset, record.nbytes))
        if ledger.totals.policy_version >= 0:
            # What a spool brought of newer weights, and what a rollback had not dropped yet when its buffer was killed.
            self._leases.drop_rolled_back(0.0)
        self._names = [*self._tickets.workers, *map(trainer_name, range(limits.world_size))]
        for name in self._names:
            send(name, Welcome(self.incarnation))

    @property
    def used_bytes(self) -> int:
        """Bytes of the arena that hold or await experience."""
        return self._allocator.capacity_bytes - self._allocator.free_bytes

    def limit(self, *, max_attempts: int, ticket_timeout_s: float) -> None:
        """Let other limits hold for what is handed out from now on; see the constructor."""
        self._tickets.limit(max_attempts, ticket_timeout_s)

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
                self._tickets.want(message)
            case Sealed():
                self._tickets.seal(message, now_s)
            case Failed():
                self._tickets.fail(message)
            case Faulty():
                self._tickets.refuse(message)
            case Credit() if self._is_current(message.trainer, message.incarnation):
                self._leases.credit(message)
            case Ack():
                self._leases.acknowledge(message, now_s)
            case Release() if self._is_current(message.trainer, message.incarnation):
                self._leases.release(message, now_s)
            case Published():
                self._leases.publish(message, now_s)
                self._leases.drop_rolled_back(now_s)
                self._tickets.retry_early(now_s)
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
            case (
                Hello(peer=name) | PeerDied(peer=name) | Sealed(worker=name) | Failed(worker=name) | Faulty(worker=name)
            ):
                return name in self._names and 0 <= getattr(message, "ticket", 0) < max(1, totals.tickets)
            case WantTickets():
                return message.worker in self._tickets.workers
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
        self._tickets.retry_early(now_s)
        if self.draining:
            return
        self._leases.lease_batches(now_s)
        self._tickets.issue(now_s, paused=self.paused)

    def finish(self, spool: Spool | None = None) -> bool:
        """Take out what no trainer will get any more, so that the books close.

        Args:
            spool: Writes it to disk for the next start; None where there is none.

        Returns:
            Whether nothing was lost that was meant to be spooled.
        """
        for lease in list(self.ledger.leases()):
            self.ledger.requeue(lease)
        cut = [PromptRange(record.position, record.prompts) for record in self.ledger.reserved_extents()]
        for record in list(self.ledger.reserved_extents()):
            self._tickets.abandon(record)
        rest = [(record, records.ready_rows(record)) for record in self.ledger.sealed_extents()]
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

    def freeze(self) -> tuple[Chosen, list[PromptRange]]:
        """Return the rows that are neither trained nor dropped, leased ones among them, and the prompts under way.

        The bytes of these rows stay as they are until `thaw`, whatever becomes of the rows.
        """
        self._allocator.hold()
        chosen = [(record, rows) for record in self.ledger.sealed_extents() if (rows := records.held_rows(record))]
        return chosen, [PromptRange(record.position, record.prompts) for record in self.ledger.reserved_extents()]

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
            self._tickets.orphan(int(index), held=hello.held, attempts=hello.attempts)
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
                self._tickets.orphan(int(index), held=[], blamed=died.working_on)
        if role == "trainer" and died.working_on >= 0:
            self._leases.blame(died.peer, died.working_on, now_s)

    def _forget(self, peer: str) -> None:
        self._peers.pop(peer, None)
        self._tickets.forget(peer)
        self._leases.forget(peer)

    def _drain(self) -> None:
        self.draining = True
        for peer, incarnation in self._peers.items():
            if peer.startswith("worker-"):
                self._send(peer, Wait(incarnation, "draining"))
            self._send(peer, Drain())
