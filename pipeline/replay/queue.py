"""The decisions of a `DetachedReplayBuffer`: reservations and deliveries. No payload, no socket, no clock."""

from __future__ import annotations

import bisect
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar

from pipeline.errors import ArenaFullError, counted
from pipeline.runtime.messages import (
    Ack,
    Ask,
    Books,
    Damaged,
    Delivered,
    ExtentRows,
    Failed,
    Join,
    Lease,
    Message,
    PeerDied,
    Refused,
    Sealed,
    Settled,
    Ticket,
    WantBatch,
    WantRoom,
    Welcome,
)
from pipeline.storage.allocator import Extent, ExtentAllocator
from pipeline.storage.ledger import Ledger
from pipeline.storage.records import ExtentRecord, ExtentState, ready_rows

log = logging.getLogger(__name__)

Send = Callable[[str, Message], None]
_Request = TypeVar("_Request", WantRoom, WantBatch, Ask)
RefusalKind = Literal["deadline", "closed", "arena"]


def client_name(index: int) -> str:
    """Return the peer name of a client."""
    return f"client-{index}"


class ReplayQueue:
    """A queue of rows, delivered in batches of `sample_batch_size`, the oldest first, each row to one consumer.

    A vacant lease is a batch without a holder: `flush` made it, or its consumer died. It keeps its number and its rows
    and is delivered before younger rows. A client has one request in flight and holds at most one ticket or one lease.

    Invariants: ``sealed = trained + dropped + ready + leased`` in the ledger at all times; every lease in the ledger
    either has a living holder or is vacant.

    Attributes:
        closed: Reason why the queue refuses every request, "" while it serves.
    """

    def __init__(
        self,
        ledger: Ledger,
        allocator: ExtentAllocator,
        send: Send,
        *,
        sample_batch_size: int,
        limit: int,
        holders: Mapping[int, str],
        remember: Callable[[str, int], None],
        owner: str = "its owner",
        incarnation: int | None = None,
    ) -> None:
        """Take over a ledger, new or left by a killed server.

        Args:
            ledger: Opened, hence consistent.
            allocator: Empty; the ledger's extents are marked as taken here.
            send: Sends a message to a client by name.
            sample_batch_size: Rows of a batch.
            limit: Full batches at which producers wait, 0 for no limit.
            holders: Holder of each lease, as last recorded with `remember`.
            remember: Records, for the next server, the lease that a client is about to get, -1 for none.
            owner: Name of the owner in the reason of a close.
            incarnation: Distinguishes this server from its predecessors; None for a random one.
        """
        self.ledger = ledger
        self.closed = ""
        self.incarnation = random.getrandbits(62) if incarnation is None else incarnation
        self._allocator = allocator
        self._send = send
        self._batch_rows = sample_batch_size
        self._limit = limit
        self._remember = remember
        self._owner = owner
        self._draining = False
        self._peers: dict[str, int] = {}
        self._answered: dict[str, int] = {}
        self._waiting: dict[str, WantRoom | WantBatch | Ask] = {}
        self._holders = {lease: client for lease, client in holders.items() if lease in ledger.leases}
        self._vacant = sorted(lease for lease in ledger.leases if lease not in self._holders)
        for record in ledger.extents.values():
            allocator.take(Extent(record.offset, record.nbytes))

    @property
    def clients(self) -> set[str]:
        """Clients with a connection, a ticket or a lease; their death must be handled."""
        owners = {client_name(record.owner) for record in self.ledger.reserved_extents()}
        return owners | set(self._peers) | set(self._holders.values())

    @property
    def batches(self) -> int:
        """Batches ready for delivery."""
        return len(self._vacant) + self.ledger.ready // self._batch_rows

    @property
    def _queued(self) -> int:
        """Batches ready for delivery, and those that the appends in flight complete."""
        return len(self._vacant) + (self.ledger.ready + self.ledger.reserved) // self._batch_rows

    def next_deadline_s(self) -> float:
        """Return the earliest deadline of the waiting requests, `math.inf` without one."""
        return min((request.deadline_s for request in self._waiting.values()), default=math.inf)

    def handle(self, message: Message, now_s: float) -> None:
        """Handle one message; waiting requests are served in `step`."""
        match message:
            case Join():
                self._join(message)
            case WantRoom() | WantBatch() | Ask():
                self._request(message)
            case Sealed():
                self._seal(message, now_s)
            case Failed():
                self._fail(message)
            case Ack():
                self._acknowledge(message)
            case Damaged():
                self._quarantine(message)
            case PeerDied(peer="owner"):
                self.close()
            case PeerDied():
                self._client_died(message.peer)

    def step(self, now_s: float) -> None:
        """Serve the waiting requests that can be served now; refuse those whose deadline has passed."""
        # Each up to the first one that cannot be served.
        all(map(self._deliver, self._wanting(WantBatch)))
        all(map(self._give_room, self._wanting(WantRoom)))
        if self._draining and not self.closed:
            self._form_leases()
            if not self.ledger.ready and not self.ledger.leased and not self.ledger.reserved:
                self.close(f"drained and closed by {self._owner}")
        for room in self._wanting(WantRoom, now_s):
            self._refuse(room, "deadline", f"no room for {counted(room.rows, 'row')}: {self._fill_level()}")
        for batch in self._wanting(WantBatch, now_s):
            self._refuse(
                batch,
                "deadline",
                f"{counted(self.ledger.ready, 'row waits', 'rows wait')}, a batch takes {self._batch_rows}",
            )
        for drain in self._wanting(Ask, now_s):
            self._refuse(
                drain,
                "deadline",
                f"{counted(self.ledger.ready + self.ledger.leased, 'row was', 'rows were')} not taken",
            )

    def close(self, reason: str = "") -> None:
        """Refuse every waiting request and every later one."""
        self.closed = reason or f"closed by {self._owner}"
        for drain in self._wanting(Ask):
            self._answer(drain, self._books(drain, 0))
        for request in list(self._waiting.values()):
            self._refuse(request, "closed", self.closed)

    # Clients.

    def _join(self, join: Join) -> None:
        if join.server != self.incarnation:
            # Answers of a dead server may still be in flight to this client: it changes its incarnation first.
            self._send(join.client, Welcome(self.incarnation))
            return
        if self._peers.get(join.client) == join.incarnation:
            return
        self._forget(join.client)
        for record in self._reserved_by(join.client):
            if record.ticket != join.ticket:
                self._abandon(record)
        for lease in self._leased_by(join.client):
            if lease != join.lease:
                self._vacate(lease, join.client)
        self._peers[join.client] = join.incarnation

    def _client_died(self, client: str) -> None:
        self._forget(client)
        for record in self._reserved_by(client):
            log.info("append of a dead producer discarded: client=%s rows=%d", client, record.rows)
            self._abandon(record)
        for lease in self._leased_by(client):
            log.info("batch of a dead consumer goes to another: client=%s lease=%d", client, lease)
            self._vacate(lease, client)

    def _forget(self, client: str) -> None:
        self._peers.pop(client, None)
        self._answered.pop(client, None)
        self._waiting.pop(client, None)

    def _reserved_by(self, client: str) -> list[ExtentRecord]:
        return [record for record in self.ledger.reserved_extents() if client_name(record.owner) == client]

    def _leased_by(self, client: str) -> list[int]:
        return [lease for lease, holder in self._holders.items() if holder == client]

    # Requests: each client has one in flight and repeats it while it waits.

    def _wanting(self, kind: type[_Request], until_s: float = math.inf) -> list[_Request]:
        """Return the waiting requests of a kind with a deadline up to a time, in the order in which they came."""
        return [one for one in self._waiting.values() if isinstance(one, kind) and one.deadline_s <= until_s]

    def _request(self, request: WantRoom | WantBatch | Ask) -> None:
        if self._peers.get(request.client) != request.incarnation:
            self._send(request.client, Welcome(self.incarnation))
        elif request.request <= self._answered.get(request.client, -1):
            return
        elif self.closed:
            self._refuse(request, "closed", self.closed)
        elif isinstance(request, Ask):
            self._ask(request)
        elif isinstance(request, WantBatch):
            self._waiting[request.client] = request
        elif self._draining:
            self._refuse(request, "closed", f"being closed by {self._owner}")
        elif request.nbytes > self._allocator.capacity_bytes:
            capacity_bytes = self._allocator.capacity_bytes
            self._refuse(request, "arena", f"{request.nbytes:,} B do not fit into an arena of {capacity_bytes:,} B")
        else:
            self._waiting[request.client] = request

    def _ask(self, ask: Ask) -> None:
        rows = 0
        if ask.action == "flush":
            rows = self.ledger.ready
            self._form_leases()
        elif ask.action == "clear":
            rows = self._clear()
        elif ask.action == "drain":
            self._draining, self._waiting[ask.client] = True, ask
            for room in self._wanting(WantRoom):
                self._refuse(room, "closed", f"being closed by {self._owner}")
            return
        self._answer(ask, self._books(ask, rows))

    def _answer(self, request: WantRoom | WantBatch | Ask, answer: Message) -> None:
        self._waiting.pop(request.client, None)
        self._answered[request.client] = request.request
        self._send(request.client, answer)

    def _refuse(self, request: WantRoom | WantBatch | Ask, kind: RefusalKind, reason: str) -> None:
        self._answer(request, Refused(request.incarnation, request.request, kind, reason))

    def _books(self, ask: Ask, rows: int) -> Books:
        totals = self.ledger.totals
        vacant = sum(self._rows_of(lease) for lease in self._vacant)
        return Books(
            ask.incarnation, ask.request, totals.sealed, totals.trained, sum(totals.dropped),
            self.ledger.ready + vacant, self.ledger.leased - vacant, self.batches, self._allocator.free_bytes, rows,
        )  # fmt: skip

    # Appends.

    def _give_room(self, want: WantRoom) -> bool:
        if self._limit and self._queued >= self._limit:
            return False
        try:
            extent = self._allocator.reserve(want.nbytes) if self.ledger.has_free_slot() else None
        except ArenaFullError:
            extent = None
        if extent is None:
            if self.batches or self._holders or self.ledger.reserved:
                return False
            # No batch can be delivered, so no room can become free: refuse in place of a wait without end.
            rows = f"{counted(self.ledger.ready, 'row is', 'rows are')} there, a batch takes {self._batch_rows}"
            reason = f"{want.nbytes:,} B do not fit, and nothing can go: {rows}, {self._fill_level()}"
            self._refuse(want, "arena", reason)
            return True
        record = self.ledger.reserve(
            rows=want.rows, prompts=0, offset=extent.offset, nbytes=extent.nbytes,
            owner=int(want.client.partition("-")[2]),
        )  # fmt: skip
        ticket = Ticket(want.incarnation, record.ticket, 0, 0, 1, extent.offset, extent.nbytes, 0, want.deadline_s)
        self._answer(want, ticket)
        return True

    def _fill_level(self) -> str:
        if self._limit and self._queued >= self._limit:
            return f"{counted(self._queued, 'batch is', 'batches are')} queued, the limit is {self._limit}"
        capacity_bytes, free_bytes = self._allocator.capacity_bytes, self._allocator.free_bytes
        appends = f"{len(self.ledger.extents):,} of at most {self.ledger.layout.extents:,} appends"
        return f"{free_bytes:,} B free of {capacity_bytes:,} B, {appends}"

    def _seal(self, sealed: Sealed, now_s: float) -> None:
        record = self._held_by(sealed.worker, sealed.ticket)
        if record is not None:
            reserved = Extent(record.offset, record.nbytes)
            self.ledger.seal(
                record, rows=sealed.rows, nbytes=sealed.nbytes, checksum=sealed.checksum, policy_version=0,
                fingerprint=0, now_s=now_s,
            )  # fmt: skip
            self._allocator.shrink(reserved, sealed.nbytes)
        self._settle(sealed.worker, sealed.ticket)

    def _fail(self, failed: Failed) -> None:
        record = self._held_by(failed.worker, failed.ticket)
        if record is not None:
            self._abandon(record)
        self._settle(failed.worker, failed.ticket)

    def _held_by(self, client: str, ticket: int) -> ExtentRecord | None:
        record = self.ledger.extents.get(ticket)
        held = record is not None and record.state is ExtentState.RESERVED and client_name(record.owner) == client
        return record if held else None

    def _settle(self, client: str, ticket: int) -> None:
        if client in self._peers:
            self._send(client, Settled(self._peers[client], ticket))

    def _abandon(self, record: ExtentRecord) -> None:
        self._allocator.release(Extent(record.offset, record.nbytes))
        self.ledger.abandon(record)

    # Batches.

    def _deliver(self, want: WantBatch) -> bool:
        if self._vacant:
            lease = self._vacant.pop(0)
            self._remember(want.client, lease)
            chosen = self.ledger.leases[lease]
        elif self.ledger.ready >= self._batch_rows:
            # Recorded before the lease: the next server knows the holder of every lease.
            self._remember(want.client, self.ledger.next_lease())
            chosen = self.ledger.index.oldest_rows(self._batch_rows)
            lease = self.ledger.lease(chosen)
        else:
            return False
        self._holders[lease] = want.client
        parts = [
            ExtentRows(record.offset, record.nbytes, record.checksum, record.policy_version, record.ticket, rows)
            for record, rows in chosen
        ]
        self._answer(want, Lease(want.incarnation, lease, 0, parts))
        return True

    def _acknowledge(self, ack: Ack) -> None:
        if self._holders.get(ack.lease) == ack.trainer:
            del self._holders[ack.lease]
            self._free(self.ledger.acknowledge(ack.lease))
        self._end_lease(ack.trainer, ack.lease)

    def _end_lease(self, client: str, lease: int) -> None:
        # A lease that another client holds has not ended, even if this client acknowledges it.
        if client in self._peers and lease not in self.ledger.leases:
            self._send(client, Delivered(self._peers[client], lease))

    def _form_leases(self) -> None:
        """Lease all ready rows as vacant leases, the last one smaller if need be."""
        while self.ledger.ready:
            lease = self.ledger.lease(self.ledger.index.oldest_rows(min(self._batch_rows, self.ledger.ready)))
            bisect.insort(self._vacant, lease)

    def _vacate(self, lease: int, client: str) -> None:
        if self._holders.get(lease) == client:
            # The record is erased before another client gets the lease: the next server must not find two holders.
            self._remember(client, -1)
            del self._holders[lease]
            bisect.insort(self._vacant, lease)

    def _quarantine(self, damaged: Damaged) -> None:
        if self._holders.get(damaged.lease) == damaged.trainer:
            log.error("damaged rows dropped: lease=%d reason=%s", damaged.lease, damaged.reason)
            del self._holders[damaged.lease]
            self._requeue([damaged.lease])
            for ticket in set(damaged.tickets) & set(self.ledger.extents):
                self._drop(self.ledger.extents[ticket], "quarantined")
        self._end_lease(damaged.trainer, damaged.lease)

    def _clear(self) -> int:
        self._requeue(self._vacant)
        self._vacant.clear()
        rows = self.ledger.ready
        # One extent a transaction: all extents at once might not fit into the redo log.
        for record in list(self.ledger.sealed_extents()):
            self._drop(record, "cleared")
        return rows

    def _requeue(self, leases: Sequence[int]) -> None:
        """Make the rows of leases ready again; no number is used twice, so younger leases have higher numbers."""
        self.ledger.rebase(self.ledger.totals.leases)
        for lease in leases:
            self.ledger.requeue(lease)

    def _drop(self, record: ExtentRecord, reason: str) -> None:
        if rows := ready_rows(record):
            self._free(self.ledger.drop([(record, rows)], reason))

    def _free(self, records: list[ExtentRecord]) -> None:
        for record in records:
            self._allocator.release(Extent(record.offset, record.nbytes))

    def _rows_of(self, lease: int) -> int:
        return sum(len(rows) for _, rows in self.ledger.leases[lease])
