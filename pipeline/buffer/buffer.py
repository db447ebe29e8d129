"""The buffer: issues tickets, records sealed experience, leases batches to trainers. It touches no payload byte."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable

from pipeline.buffer.admission import Limits
from pipeline.buffer.context import BufferContext, KeepCopy, Send
from pipeline.buffer.evaluations import Evaluations
from pipeline.buffer.leases import Leases
from pipeline.buffer.metrics import BufferMetrics
from pipeline.buffer.tickets import Tickets
from pipeline.runtime.evaluation_plan import EvaluationPlan
from pipeline.runtime.messages import (
    Ack,
    Credit,
    Damaged,
    Drain,
    Evaluated,
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
    is_evaluation,
)
from pipeline.runtime.transport import trainer_name
from pipeline.storage import records
from pipeline.storage.allocator import Extent, ExtentAllocator
from pipeline.storage.ledger import Ledger
from pipeline.storage.records import Chosen
from pipeline.storage.tables import PromptRange
from pipeline.telemetry.evaluations import EvaluationFile

Spool = Callable[[Ledger, Chosen], None]
"""Writes ready rows of a ledger to disk, with the prompts of unfinished tickets."""

log = logging.getLogger(__name__)


class Buffer:
    """All of the buffer's decisions; messages go in and out, it has no socket and no clock.

    Invariants: ``sealed = trained + dropped + ready + leased`` in the ledger at all times; every extent that is not
    free belongs to exactly one ticket; lease j belongs to rank ``j mod world_size``.

    Attributes:
        ledger: The tickets and leases.
        evaluations: The evaluation under way, and those that are due.
        draining: Whether a `Drain` was received: no new tickets, no new leases.
        complete: Whether the run has taken its last step.
        paused: Whether no tickets are issued; set by the process.
        refused: Messages that no process of this instance can have sent.
        incarnation: Number of this buffer's life.
    """

    def __init__(
        self,
        ledger: Ledger,
        allocator: ExtentAllocator,
        limits: Limits,
        send: Send,
        observer: BufferMetrics,
        *,
        workers: int,
        incarnation: int | None = None,
        quarantine: KeepCopy = lambda chosen, reason, detail: None,
        plan: EvaluationPlan | None = None,
        book: EvaluationFile | None = None,
        last_position: Callable[[], int] = lambda: 0,
    ) -> None:
        """Take over a ledger, fresh or left by an earlier buffer.

        Args:
            ledger: Opened, hence whole.
            allocator: Empty; the ledger's extents are marked as taken here.
            limits: The bounds of the buffer.
            send: Delivers a message to a peer by name.
            observer: Counts the events.
            workers: Rollout workers of this instance.
            incarnation: Number that differs from every other buffer's of this arena; random if left out.
            quarantine: Keeps a copy of rows that are never delivered again.
            plan: Held-out prompts; None: there are no evaluations.
            book: The complete evaluations; given with a plan.
            last_position: Returns `Limits.last_position`; called once the first weights are published, when the files
                of the prompts surely exist.
        """
        self.ledger = ledger
        self.draining = self.complete = self.paused = False
        self.refused = 0
        self.incarnation = random.getrandbits(63) if incarnation is None else incarnation
        self._context = BufferContext(ledger, allocator, limits, send, observer, quarantine)
        self._allocator = allocator
        self._send = send
        self._observer = observer
        self._peers = self._context.peers
        self._pids: dict[str, int] = {}
        self.evaluations = Evaluations(self._context, plan, book, incarnation=self.incarnation)
        self._leases = Leases(self._context, self.evaluations.holds)
        self._tickets = Tickets(self._context, workers)
        for record in ledger.extents.values():
            allocator.take(Extent(record.offset, record.nbytes))
        self._last_position: Callable[[], int] | None = last_position
        self._find_end()
        if ledger.totals.policy_version >= 0:
            # Rows of newer weights from a spool, and rows that a killed buffer had not dropped yet after a rollback.
            self._leases.drop_rolled_back(0.0)
        self._names = [*self._tickets.workers, *map(trainer_name, range(limits.world_size))]
        for name in self._names:
            send(name, Welcome(self.incarnation))

    @property
    def limits(self) -> Limits:
        """The bounds in force."""
        return self._context.limits

    @property
    def used_bytes(self) -> int:
        """Bytes of the arena that are reserved or hold experience."""
        return self._allocator.capacity_bytes - self._allocator.free_bytes

    def limit(self, *, max_attempts: int, ticket_timeout_s: float) -> None:
        """Replace these two limits for all tickets that are handed out from now on."""
        self._context.limits = dataclasses.replace(
            self._context.limits, max_attempts=max_attempts, ticket_timeout_s=ticket_timeout_s
        )

    def _find_end(self) -> None:
        if self._last_position is not None and self.ledger.totals.policy_version >= 0:
            self._context.limits = dataclasses.replace(self.limits, last_position=self._last_position())
            self._last_position = None

    def handle(self, message: Message, now_s: float) -> None:
        """Record one message; its consequences follow in `step`.

        A message that is late, repeated or from a predecessor changes nothing. A message that no process of this
        instance can have sent is refused and counted in `refused`.
        """
        is_possible = True
        match message:
            case Hello():
                if is_possible := message.peer in self._names:
                    self._greet(message, now_s)
            case WantTickets() if message.worker not in self._tickets.workers:
                is_possible = False
            case WantTickets() if self._is_current(message.worker, message.incarnation):
                self._tickets.want(message)
                self.evaluations.want(message)
            case Sealed():
                if is_possible := self._is_issued(message):
                    self._tickets.seal(message, now_s)
            case Evaluated() | Failed() if is_evaluation(message.ticket):
                if is_possible := message.worker in self._tickets.workers:
                    self.evaluations.end(message)
            case Evaluated():
                is_possible = False
            case Failed():
                if is_possible := self._is_issued(message):
                    self._tickets.fail(message)
            case Faulty():
                if is_possible := self._is_issued(message):
                    self._tickets.refuse(message)
            case Credit() if self._is_current(message.trainer, message.incarnation):
                self._leases.credit(message)
            case Ack():
                self._leases.acknowledge(message, now_s)
            case Release() if self._is_current(message.trainer, message.incarnation):
                self._leases.release(message, now_s)
            case Published():
                if is_possible := self._is_publishable(message):
                    self._leases.publish(message, now_s)
                    self._find_end()
                    self._leases.drop_rolled_back(now_s)
                    self._tickets.retry_early(now_s)
            case Damaged():
                if is_possible := message.trainer == trainer_name(message.lease % self.limits.world_size):
                    self._leases.damaged(message, now_s)
            case PeerDied():
                if is_possible := message.peer in self._names:
                    self._remove_peer(message, now_s)
            case Drain():
                self.complete |= message.complete
                self._drain()
            case _:
                self._observer.duplicate()
        if not is_possible:
            self.refused += 1

    def _is_issued(self, report: Sealed | Failed | Faulty) -> bool:
        return report.worker in self._names and 0 <= report.ticket < max(1, self.ledger.totals.tickets)

    def _is_publishable(self, published: Published) -> bool:
        totals, world_size = self.ledger.totals, self.limits.world_size
        # A float64 of the metrics counts versions exactly up to 2 ** 53.
        version, fingerprint = 0 <= published.version < 1 << 53, 0 <= published.fingerprint < 1 << 64
        # Whole rounds of leases that exist: a lease of the future cannot be trained already.
        through = 0 <= published.trained_through <= totals.leases and published.trained_through % world_size == 0
        return version and fingerprint and through

    def step(self, now_s: float) -> None:
        """Issue the tickets and lease the batches that the rules allow now.

        Raises:
            GaveUpError: If nothing is allowed, and nothing in flight can change that.
        """
        self._tickets.retry_early(now_s)
        if self.draining:
            return
        # First: batches wait for an evaluation, and its tickets come before those of rollouts.
        self.evaluations.step(now_s, paused=self.paused)
        self._leases.lease_batches(now_s)
        self._tickets.issue(now_s, paused=self.paused)
        self._leases.tell_exhausted()

    def finish(self, spool: Spool | None = None) -> bool:
        """Remove all rows that no trainer will get, so that ``sealed = trained + dropped``.

        Rows that cannot be written stay in the ledger, as a spool would have left it, for a start that takes it over.

        Args:
            spool: Writes the rows to disk for the next start; None without a spool.

        Returns:
            Whether all rows for the spool were written.
        """
        for lease in list(self.ledger.leases):
            self.ledger.requeue(lease)
        for record in list(self.ledger.reserved_extents()):
            # With its prompts, in one commit: this process may be killed before the spool is written.
            self.ledger.totals.round_left += record.prompts
            self._tickets.abandon(record, again=True)
        rest = [(record, records.ready_rows(record)) for record in self.ledger.sealed_extents()]
        reason = "cleared"
        if spool is not None and self.ledger.totals.tickets:
            try:
                spool(self.ledger, rest)
                reason = "spooled"
            except OSError as error:
                log.error("the spool cannot be written, experiences stay in shared memory: rows=%d bytes=%d: %s",
                          self.ledger.ready, sum(record.nbytes for record, _ in rest), error)  # fmt: skip
                return False
        elif rest:
            log.info("undelivered experiences discarded: %d", self.ledger.ready)
        for part in rest:
            self._leases.free(self.ledger.drop([part], reason))
        return True

    def freeze(self) -> tuple[Chosen, list[PromptRange]]:
        """Return the rows that are neither trained nor dropped, leased rows included, and the prompts in flight.

        The bytes of these rows are unchanged until `thaw`, also if the rows leave the ledger.
        """
        self._allocator.hold()
        chosen = [(record, rows) for record in self.ledger.sealed_extents() if (rows := records.held_rows(record))]
        return chosen, [PromptRange(record.position, record.prompts) for record in self.ledger.reserved_extents()]

    def thaw(self) -> None:
        """Free the extents that were released since `freeze`."""
        self._allocator.let_go()

    # Peers.

    def _greet(self, hello: Hello, now_s: float) -> None:
        known = self._peers.get(hello.peer)
        if known == hello.incarnation:
            # A repeated message: this peer has been sent everything since its first `Hello`.
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
            self.evaluations.orphan(hello.peer, held=hello.held)
        elif role == "trainer":
            if index == "0" and hello.fresh:
                self._leases.rebase()
            self._leases.redeliver(int(index), held=hello.held, fresh=hello.fresh, now_s=now_s)

    def _is_current(self, peer: str, incarnation: int) -> bool:
        return self._peers.get(peer) == incarnation

    def _remove_peer(self, died: PeerDied, now_s: float) -> None:
        role, _, index = died.peer.partition("-")
        # The successor's `Hello` may arrive before: the two messages come over different sockets.
        if died.peer not in self._peers or died.pid == self._pids[died.peer]:
            self._forget(died.peer)
            if role == "worker":
                self._tickets.orphan(int(index), held=[], blamed=died.working_on)
                self.evaluations.orphan(died.peer, held=[], blamed=died.working_on)
        if role == "trainer" and died.working_on >= 0:
            self._leases.blame(died.peer, died.working_on, now_s)

    def _forget(self, peer: str) -> None:
        self._peers.pop(peer, None)
        self._tickets.forget(peer)
        self.evaluations.forget(peer)
        self._leases.forget(peer)

    def _drain(self) -> None:
        self.draining = True
        for peer, incarnation in self._peers.items():
            if peer.startswith("worker-"):
                self._send(peer, Wait(incarnation, "draining"))
            self._send(peer, Drain())
