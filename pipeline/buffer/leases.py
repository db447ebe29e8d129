"""The buffer's leases: the trainer rank of each batch, and the end of each lease."""

from __future__ import annotations

import logging
from collections.abc import Callable

from pipeline.buffer import admission
from pipeline.buffer.context import BufferContext
from pipeline.buffer.metrics import AsideReason, LeaseEnd
from pipeline.runtime.messages import Ack, Credit, Damaged, Exhausted, ExtentRows, Lease, Published, Release
from pipeline.runtime.transport import trainer_name
from pipeline.storage import records
from pipeline.storage.allocator import Extent
from pipeline.storage.records import Chosen, ExtentRecord
from pipeline.storage.tables import MOST_LEASES

# A trainer that dies twice at the same rows would die at them every time.
_DEATHS = 2

log = logging.getLogger(__name__)


class Leases:
    """Batches that are leased, and batches that are due; lease j belongs to rank ``j mod world_size``."""

    def __init__(self, context: BufferContext, holds: Callable[[int], bool] = lambda version: False) -> None:
        """Take over the leases of the context's ledger.

        Args:
            context: The surroundings, shared with the tickets.
            holds: Returns whether the batches that a version trains on must wait.
        """
        self._holds = holds
        self._context = context
        self._ledger = context.ledger
        self._peers = context.peers
        self._send = context.send
        self._observer = context.observer
        self._allocator = context.allocator
        self._quarantine = context.quarantine
        self._credit: dict[str, int] = {}
        self._leased_s: dict[int, float] = {}
        # Leases that their ranks have acknowledged, each of a step in which another rank has not acknowledged its own.
        self._acked: set[int] = set()
        # The incarnation of each rank that knows that no lease from this number on follows.
        self._told: dict[str, tuple[int, int]] = {}

    @property
    def _limits(self) -> admission.Limits:
        # Not kept: they are replaced, and have the end of the prompts once the first weights are published.
        return self._context.limits

    def credit(self, credit: Credit) -> None:
        """Record the number of batches that a rank can hold."""
        self._credit[credit.trainer] = min(credit.batches, MOST_LEASES // self._limits.world_size)

    def forget(self, peer: str) -> None:
        """Lease no more batches to a dead peer."""
        self._credit.pop(peer, None)

    def rebase(self) -> None:
        """Record that a trainer starts from the newest version: batches trained since then are in no later version."""
        totals, world_size = self._ledger.totals, self._limits.world_size
        lowest = min([totals.leases, *self._ledger.leases, *self._ledger.vacant[:1]])
        through = lowest // world_size * world_size
        if through > totals.trained_through:
            self._ledger.rebase(through)

    def lease_batches(self, now_s: float) -> None:
        """Lease the batches that are due, vacant numbers first; none before the first published version."""
        if self._ledger.totals.policy_version < 0:
            return
        outstanding: dict[str, int] = {}
        for lease in self._ledger.leases.keys() - self._acked:
            name = trainer_name(lease % self._limits.world_size)
            outstanding[name] = outstanding.get(name, 0) + 1
        while True:
            # Before each batch: the next one may be for a later version than the last.
            self._drop_stale()
            # Ranks take turns: in lock-step training no rank may be ahead of another's batch.
            trainer = trainer_name(self._ledger.next_lease() % self._limits.world_size)
            if outstanding.get(trainer, 0) >= self._credit.get(trainer, 0):
                return
            if self._holds(admission.version_of_lease(self._ledger, self._limits, self._ledger.next_lease())):
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

    def tell_exhausted(self) -> None:
        """Tell each rank, once, that no further batch can fill."""
        limits = self._limits
        if not admission.is_exhausted(self._ledger, limits):
            return
        through = min([self._ledger.totals.leases, *self._ledger.vacant[:1]])
        for rank in range(limits.world_size):
            name = trainer_name(rank)
            known = self._peers.get(name)
            if known is not None and self._told.get(name) != (known, through):
                if not self._told:
                    log.info("all passes are rolled out: prompts=%d rows_left=%d, fewer than a batch",
                             limits.last_position, self._ledger.ready)  # fmt: skip
                self._told[name] = known, through
                self._send(name, Exhausted(known, through))

    def _send_lease(self, trainer: str, lease: int, chosen: Chosen) -> None:
        parts = [
            ExtentRows(
                record.offset, record.nbytes, record.checksum, record.policy_version, record.ticket, rows,
                record.position, record.prompts,
            )
            for record, rows in chosen
        ]  # fmt: skip
        deaths = max([item.deaths for record, rows in chosen for item in record.values(rows)])
        version = admission.version_of_lease(self._ledger, self._limits, lease)
        position = admission.uncovered_position(self._ledger, lease)
        self._send(trainer, Lease(self._peers[trainer], lease, version, parts, position, deaths))

    def redeliver(self, rank: int, *, held: list[int], fresh: bool, now_s: float) -> None:
        """Send a rank the leases of its predecessor again, except those after a vacant number.

        A predecessor's acknowledgements are void: its successor takes a step again that other ranks take again.
        """
        world_size = self._limits.world_size
        if fresh:
            self._acked = {lease for lease in self._acked if lease % world_size != rank}
        vacant = next((lease for lease in self._ledger.vacant if lease % world_size == rank), None)
        if vacant is not None:
            self._take_back(rank, vacant, "holder_died", now_s)
        for lease in sorted(self._ledger.leases):
            if lease % world_size == rank and lease not in held and lease not in self._acked:
                chosen = self._ledger.leases[lease]
                self._observer.lease_ended("holder_died", sum(len(rows) for _, rows in chosen), None)
                self._send_lease(trainer_name(rank), lease, chosen)

    def acknowledge(self, ack: Ack, now_s: float) -> None:
        """Count the batches of a step as trained, once every rank has acknowledged its own.

        Ranks step together. If they all die before the last one has, their successors take the whole step again: one
        that had the rows of its next step would wait for the others without end.
        """
        if ack.lease not in self._ledger.leases or ack.lease in self._acked:
            self._observer.duplicate()
            return
        self._acked.add(ack.lease)
        ledger, first = self._ledger, ack.lease - ack.lease % self._limits.world_size
        step = range(first, first + self._limits.world_size)
        is_whole = step.stop <= ledger.totals.leases and not any(lease in step for lease in ledger.vacant)
        # A buffer that was killed here may have counted some of them.
        leases = [lease for lease in step if lease in ledger.leases]
        if is_whole and self._acked.issuperset(leases):
            for lease in leases:
                self._end("acked", lease, now_s)
                self.free(ledger.acknowledge(lease))

    def release(self, release: Release, now_s: float) -> None:
        """Take a batch back; its rows are ready again."""
        if release.lease in self._ledger.leases:
            self._end("nacked", release.lease, now_s)
            self._ledger.requeue(release.lease)
        else:
            self._observer.duplicate()

    def _end(self, result: LeaseEnd, lease: int, now_s: float) -> None:
        rows = sum(len(rows) for _, rows in self._ledger.leases[lease])
        self._acked.discard(lease)
        # Of a lease of an earlier buffer no time is known.
        leased_s = self._leased_s.pop(lease, None)
        self._observer.lease_ended(result, rows, None if leased_s is None else now_s - leased_s)

    def damaged(self, damaged: Damaged, now_s: float) -> None:
        """Take back a batch with damaged extents and the rank's batches after it; quarantine the damaged extents.

        Other leases with rows of the same extent are unchanged: their trainers check it before use.
        """
        rank = int(damaged.trainer.partition("-")[2])
        known = self._peers.get(damaged.trainer)
        parts = self._ledger.leases.get(damaged.lease, [])
        found = [record for record, _ in parts if record.ticket in damaged.tickets]
        if known == damaged.incarnation or not found:
            self._observer.duplicate()
            return
        if known is not None:
            self._peers[damaged.trainer] = damaged.incarnation
        log.error("damaged experience: trainer=%s lease=%d tickets=%s reason=%s",
                  damaged.trainer, damaged.lease, damaged.tickets, damaged.reason)  # fmt: skip
        self._take_back(rank, damaged.lease, "nacked", now_s)
        self._set_aside("checksum", [(record, records.ready_rows(record)) for record in found], damaged.reason)

    def blame(self, trainer: str, lease: int, now_s: float) -> None:
        """Record that a trainer died at a batch; rows with two deaths are not delivered again.

        A successor that connected before this message has the batch already, and accepts no other batch under the same
        number. It keeps the batch; only its own death would quarantine the rows.
        """
        rank = int(trainer.partition("-")[2])
        if lease not in self._ledger.leases or lease % self._limits.world_size != rank:
            return
        self._ledger.blame(lease)
        if trainer in self._peers:
            return
        poison = [
            (record, chosen)
            for record, rows in self._ledger.leases[lease]
            if (chosen := [row for row in rows if record.items[row].deaths >= _DEATHS])
        ]
        if poison:
            self._take_back(rank, lease, "holder_died", now_s)
            self._set_aside("killed_trainer", poison, f"{trainer} died {_DEATHS} times at lease {lease}")

    def _drop_stale(self) -> None:
        if stale := admission.stale_rows(self._ledger, self._limits):
            log.warning("stale experiences dropped: rows=%d", sum(len(rows) for _, rows in stale))
            for part in stale:
                self.free(self._ledger.drop([part], "stale"))

    def _take_back(self, rank: int, start: int, result: LeaseEnd, now_s: float) -> None:
        """Make a rank's batches from number `start` on ready again; a rank takes its batches in order of numbers."""
        for lease in sorted(self._ledger.leases):
            if lease >= start and lease % self._limits.world_size == rank:
                self._end(result, lease, now_s)
                self._ledger.requeue(lease)

    def _set_aside(self, reason: AsideReason, poison: Chosen, detail: str) -> None:
        for record, rows in poison:
            log.error("experience quarantined: ticket=%d position=%d rows=%d reason=%s",
                      record.ticket, record.position, len(rows), detail)  # fmt: skip
            self._observer.set_aside(reason, len(rows))
        self._quarantine(poison, reason, detail)
        for part in poison:
            self.free(self._ledger.drop([part], "quarantined"))

    def publish(self, published: Published, now_s: float) -> None:
        """Record a new version; the leases that it includes are trained."""
        totals, versions = self._ledger.totals, self._ledger.versions
        newest = published.version == totals.policy_version and versions.knows(published.version, published.fingerprint)
        # At a start no version is known: the trainer may go on from an earlier checkpoint than the prompts do.
        if published.rollback and (published.version <= totals.policy_version or totals.policy_version < 0):
            if newest:
                # A repeated message: batches leased since the first one are not void.
                self._observer.duplicate()
                return
            log.warning("rolled back: version=%d instead of %d", published.version, totals.policy_version)
            undone = admission.undone(self._ledger, published.position, self._limits.group_size)
            log.info("prompts whose training is undone are issued again: prompts=%d",
                     sum(prompts.prompts for prompts in undone))  # fmt: skip
            world_size = self._limits.world_size
            self._ledger.roll_back(published.version, published.fingerprint, world_size=world_size, redo=undone)
            return
        for lease in [lease for lease in self._ledger.leases if lease < published.trained_through]:
            self._end("acked", lease, now_s)
            self.free(self._ledger.acknowledge(lease))
        if published.version > totals.policy_version:
            through = max(published.trained_through, totals.trained_through)
            self._ledger.publish(published.version, published.fingerprint, through)
        else:
            self._observer.duplicate()

    def drop_rolled_back(self, now_s: float) -> None:
        """End the leases that a rollback made void, and drop the rows that were written by rolled back weights.

        Their prompts are issued again. The successor of a buffer killed in between does the rest from the ledger.
        """
        for lease in [lease for lease in self._ledger.leases if lease < self._ledger.totals.trained_through]:
            self._end("nacked", lease, now_s)
            self._ledger.requeue(lease)
        for record, rows in admission.rolled_back_rows(self._ledger):
            prompts = admission.prompts_of(record, rows, self._limits.group_size)
            log.warning("experience of rolled back weights dropped: ticket=%d version=%d rows=%d",
                        record.ticket, record.policy_version, len(rows))  # fmt: skip
            self.free(self._ledger.drop([(record, rows)], "rolled_back", redo=prompts))

    def free(self, records: list[ExtentRecord]) -> None:
        """Release extents to the allocator."""
        for record in records:
            self._allocator.release(Extent(record.offset, record.nbytes))
