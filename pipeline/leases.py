"""The buffer's leases: which batch goes to which trainer rank, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pipeline import admission
from pipeline.admission import Limits
from pipeline.arena import Extent, ExtentAllocator
from pipeline.ledger import Ledger
from pipeline.ledger_records import ExtentRecord
from pipeline.messages import Ack, Credit, ExtentRows, Lease, Message, Published, Release
from pipeline.observer import LeaseEnd, Observer
from pipeline.transport import trainer_name

Send = Callable[[str, Message], None]


class Leases:
    """Batches that are out, and those that are due; lease j belongs to rank ``j mod world_size``."""

    def __init__(
        self,
        ledger: Ledger,
        limits: Limits,
        peers: Mapping[str, int],
        send: Send,
        observer: Observer,
        allocator: ExtentAllocator,
    ) -> None:
        """Take over the leases of a ledger.

        Args:
            ledger: Says which are out.
            limits: What bounds the buffer.
            peers: Incarnation of each peer that is known; kept by the buffer.
            send: Delivers a message to a peer by name.
            observer: Told of everything worth counting.
            allocator: Gets the room of extents back whose last row left.
        """
        self._ledger = ledger
        self._limits = limits
        self._peers = peers
        self._send = send
        self._observer = observer
        self._allocator = allocator
        self._credit: dict[str, int] = {}
        self._leased_s: dict[int, float] = {}

    def credit(self, credit: Credit) -> None:
        """Note how many batches a rank can hold."""
        self._credit[credit.trainer] = credit.batches

    def forget(self, peer: str) -> None:
        """Lease nothing more to a peer that is gone."""
        self._credit.pop(peer, None)

    def rebase(self) -> None:
        """A trainer begins from the newest version: what was trained since then is in no version to come."""
        totals, world_size = self._ledger.totals, self._limits.world_size
        through = min(self._ledger.leases(), default=totals.leases) // world_size * world_size
        if through > totals.trained_through:
            self._ledger.publish(totals.policy_version, through)

    def lease_batches(self, now_s: float) -> None:
        """Lease the batches that are due."""
        outstanding: dict[str, int] = {}
        for lease in self._ledger.leases():
            name = trainer_name(lease % self._limits.world_size)
            outstanding[name] = outstanding.get(name, 0) + 1
        while True:
            # Ranks take turns: in lock-step training no rank may run ahead of another's batch.
            trainer = trainer_name(self._ledger.totals.leases % self._limits.world_size)
            if outstanding.get(trainer, 0) >= self._credit.get(trainer, 0):
                return
            chosen = admission.next_batch(self._ledger, self._limits)
            if chosen is None:
                return
            for record, rows in chosen:
                self._observer.leased(len(rows), now_s - record.sealed_s)
            lease = self._ledger.lease(chosen)
            self._leased_s[lease] = now_s
            outstanding[trainer] = outstanding.get(trainer, 0) + 1
            self._send_lease(trainer, lease, chosen)

    def _send_lease(self, trainer: str, lease: int, chosen: list[tuple[ExtentRecord, list[int]]]) -> None:
        parts = [
            ExtentRows(record.offset, record.nbytes, record.checksum, record.policy_version, record.ticket, rows)
            for record, rows in chosen
        ]
        deliveries = max(record.items[row].deliveries for record, rows in chosen for row in rows)
        version = admission.version_of_lease(self._ledger, self._limits, lease)
        self._send(trainer, Lease(self._peers[trainer], lease, version, parts, deliveries))

    def redeliver(self, rank: int, *, held: list[int]) -> None:
        """Give a rank the leases of its predecessor again."""
        for lease in sorted(self._ledger.leases()):
            if lease % self._limits.world_size == rank and lease not in held:
                chosen = self._ledger.redeliver(lease)
                self._observer.lease_ended("holder_died", sum(len(rows) for _, rows in chosen), 0.0)
                self._send_lease(trainer_name(rank), lease, chosen)

    def acknowledge(self, ack: Ack, now_s: float) -> None:
        """Count a batch as trained."""
        if ack.lease in self._ledger.leases():
            self._end_lease("acked", ack.lease, now_s)
            self.free(self._ledger.acknowledge(ack.lease))
        else:
            self._observer.duplicate()

    def release(self, release: Release, now_s: float) -> None:
        """Take a batch back; its rows are ready again."""
        if release.lease in self._ledger.leases():
            self._end_lease("nacked", release.lease, now_s)
            self._ledger.requeue(release.lease)
        else:
            self._observer.duplicate()

    def _end_lease(self, result: LeaseEnd, lease: int, now_s: float) -> None:
        rows = sum(len(rows) for _, rows in self._ledger.leases()[lease])
        self._observer.lease_ended(result, rows, now_s - self._leased_s.pop(lease, now_s))

    def publish(self, published: Published, now_s: float) -> None:
        """Note a new version; the leases that it includes are trained."""
        for lease in [lease for lease in self._ledger.leases() if lease < published.trained_through]:
            self._end_lease("acked", lease, now_s)
            self.free(self._ledger.acknowledge(lease))
        if published.version > self._ledger.totals.policy_version:
            through = max(published.trained_through, self._ledger.totals.trained_through)
            self._ledger.publish(published.version, through)
        else:
            self._observer.duplicate()

    def free(self, records: list[ExtentRecord]) -> None:
        """Give the room of extents back."""
        for record in records:
            self._allocator.release(Extent(record.offset, record.nbytes))
