"""The ledger: the state of every ticket, extent and item, in shared memory, written by the buffer alone.

    redo log  the transaction under way (see `pipeline.storage.redo_log`)
    totals    counters that outlive every process (`Totals`)
    tables    vacant leases, prompts to be issued again, published versions (see `pipeline.storage.tables`)
    extents   one record each: state, owner, ticket, prompts, policy version, offset, checksum
    items     `rows_per_extent` records an extent: state, deaths, lease

    extent      moved by                              to
    FREE        `reserve`, when a ticket is issued    RESERVED
    RESERVED    `seal`, when its worker is done       SEALED, or FREE if all rows are filtered
    RESERVED    `abandon`, when it gives no rows      FREE
    SEALED      its last item leaves                  FREE

    item        moved by                              to
    READY       `lease`                               LEASED
    LEASED      `acknowledge` (trained)               GONE
    LEASED      `requeue` (handed back, damaged, rolled back, second death)      READY
    READY       `drop` (reason), `seal` (filtered)    GONE

Lease numbers are dense: the number alone determines the rank that gets a batch and the version that trains on it. So a
number without its rows is vacant, and the next batch takes the lowest vacant number before a new one. Numbers below
`trained_through` are finished: a lease below it that is still out is void (its weights were rolled back).

Every change is one transaction of the redo log, so the totals and the states agree after any kill:
``sealed = trained + sum(dropped) + ready + leased``.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator, Sequence

from pipeline.errors import LedgerError
from pipeline.storage.extent_file import SavedExtent
from pipeline.storage.index import LedgerIndex
from pipeline.storage.layout import LedgerLayout, LedgerMemory
from pipeline.storage.records import DROP_REASONS, Chosen, ExtentRecord, ExtentState, Item, ItemState, fresh_items
from pipeline.storage.tables import MOST_LEASES, PromptRange, add_prompts

_FILTERED = DROP_REASONS.index("filtered")


class Ledger:
    """The ledger's table with its transactions; exactly one process, the buffer, opens it.

    All reads come from a mirror in this process.

    Attributes:
        extents: Every record that is not FREE, by ticket, oldest ticket first.
        index: Sums over the records, and the records that are reserved or ready.
        ready: Rows in state READY; `leased` and `reserved` likewise.
        leases: The rows of each lease that is out, in batch order.
        vacant: Lease numbers without rows, lowest first.
        redo: Prompts to be issued again, before those from `totals.position` on.
        versions: The newest published versions.
        memory: The shared memory with the parts above.
    """

    def __init__(self, memory: memoryview, layout: LedgerLayout) -> None:
        """Open a ledger and finish the transaction that a killed buffer left behind.

        Args:
            memory: `layout.nbytes` of shared memory, zeroed or written by an earlier buffer.
            layout: The layout of the memory.

        Raises:
            LedgerError: If the memory is too small or its records contradict one another.
        """
        self.layout = layout
        self.memory = LedgerMemory(memory, layout)
        self.totals = self.memory.totals()
        self.vacant = self.memory.vacant()
        self.redo = self.memory.redo()
        self.versions = self.memory.versions()
        self.extents: dict[int, ExtentRecord] = {}
        self.index = LedgerIndex(self.extents)
        self.ready = self.leased = self.reserved = 0
        self.leases: dict[int, Chosen] = {}
        records, self._free_slots = self.memory.extents()
        self._take_over(records)

    # Transactions.

    def reserve(
        self, *, rows: int, prompts: int, offset: int, nbytes: int, owner: int = -1, new_round: int = 0
    ) -> ExtentRecord:
        """Make the next ticket: its prompts, and the room for their rows.

        Prompts to be issued again come first; a ticket takes prompts of one `PromptRange` only. With an `owner` it is
        handed out at once, as by `assign`. `new_round`: the prompts of the round that begins with it.

        Raises:
            LedgerError: If every record is in use.
        """
        if not self._free_slots:
            raise LedgerError(f"all {self.layout.extents:,} extents are in use")
        if rows > self.layout.rows_per_extent:
            raise LedgerError(f"an extent of {rows} rows, the ledger was made for {self.layout.rows_per_extent}")
        totals = self.totals
        position = self._take_prompts(prompts)
        record = ExtentRecord(
            self._free_slots.pop(), ExtentState.RESERVED, int(owner >= 0), owner, rows, prompts, totals.tickets,
            position, totals.policy_version, 0, offset, nbytes,
        )  # fmt: skip
        totals.issue(prompts, new_round)
        self.extents[record.ticket] = record
        self.index.reserve(record)
        self.reserved += rows
        self.memory.put_extent(record)
        self._commit()
        return record

    def assign(self, record: ExtentRecord, owner: int) -> None:
        """Hand a ticket to a worker, or take it from a dead worker (owner -1).

        Every hand-out counts as an attempt and sets the policy version to the newest.
        """
        self._expect(record, ExtentState.RESERVED)
        attempt, version = record.attempt, record.policy_version
        if owner >= 0:
            attempt, version = min(255, attempt + 1), self.totals.policy_version
        self._hand(record, owner, attempt, version)
        self._commit()

    def excuse(self, record: ExtentRecord) -> None:
        """Take a ticket from its worker; the attempt does not count, because the ticket's prompts did not cause it."""
        self._expect(record, ExtentState.RESERVED)
        self._hand(record, -1, max(0, record.attempt - 1), record.policy_version)
        self._commit()

    def seal(self, record: ExtentRecord, *, rows: int, nbytes: int, checksum: int, policy_version: int,
             fingerprint: int, now_s: float, filtered: Sequence[int] = (), refilled: int = 0) -> bool:  # fmt: skip
        """Commit a ticket's experience, and drop the rows in `filtered`; the others are ready from then on.

        Return whether the extent became free, because all rows are filtered.
        """
        self._expect(record, ExtentState.RESERVED)
        if not 0 < rows <= record.rows or nbytes > record.nbytes:
            raise LedgerError(
                f"ticket {record.ticket}: sealed {rows} rows in {nbytes:,} B, "
                f"reserved {record.rows} in {record.nbytes:,} B"
            )
        self.index.settle(record)
        self.reserved -= record.rows
        self.ready += rows - len(filtered)
        record.state = ExtentState.SEALED
        record.rows, record.nbytes, record.checksum = rows, nbytes, checksum
        record.policy_version, record.fingerprint, record.sealed_s = policy_version, fingerprint, now_s
        record.hold(items := fresh_items(rows, filtered))
        record.held = rows - len(filtered)
        self.index.seal(record)
        self.index.change(record, record.held)
        self.totals.sealed += rows
        self.totals.dropped[_FILTERED] += len(filtered)
        self.totals.refilled += refilled
        self.memory.put_items(record, 0, items)
        self.memory.put_extent(record)
        if not record.held:
            self._free(record)
        self._commit()
        return not record.held

    def abandon(self, record: ExtentRecord, *, redo: PromptRange | None = None) -> None:
        """End a ticket that gave no rows; `redo`: its prompts, if they are to be issued again."""
        self._expect(record, ExtentState.RESERVED)
        self._issue_again([redo] if redo else [])
        self.reserved -= record.rows
        self._free(record)
        self._commit()

    def lease(self, chosen: Chosen) -> int:
        """Lease rows as the next batch and return its number: the lowest vacant one, or else a new one."""
        lease = self.next_lease()
        if self.vacant:
            self.vacant.pop(0)
            self.memory.put_vacant(self.vacant)
        else:
            self.totals.leases += 1
        for record, rows in chosen:
            self._change_items(record, rows, functools.partial(Item.lease_under, lease=lease))
            self.index.change(record, record.ready - len(rows))
            self.ready -= len(rows)
            self.leased += len(rows)
        self.leases[lease] = chosen
        self._commit()
        return lease

    def blame(self, lease: int) -> None:
        """Count one more trainer that died at a batch."""
        for record, rows in self.leases[lease]:
            self._change_items(record, rows, Item.count_death)
        self._commit()

    def acknowledge(self, lease: int) -> list[ExtentRecord]:
        """Count a batch as trained; return the extents that became free."""
        freed = []
        for record, rows in self.leases.pop(lease):
            self.totals.trained += len(rows)
            self.leased -= len(rows)
            freed += self._remove(record, rows)
        self._commit()
        return freed

    def requeue(self, lease: int) -> None:
        """Make a batch's rows ready again and its number vacant.

        Raises:
            LedgerError: If more numbers would be vacant than the table holds.
        """
        if lease >= self.totals.trained_through:
            if len(self.vacant) == MOST_LEASES:
                raise LedgerError(f"more than {MOST_LEASES:,} vacant leases")
            bisect.insort(self.vacant, lease)
            self.memory.put_vacant(self.vacant)
        for record, rows in self.leases.pop(lease):
            self._change_items(record, rows, Item.make_ready)
            self.index.change(record, record.ready + len(rows))
            self.leased -= len(rows)
            self.ready += len(rows)
        self._commit()

    def drop(self, chosen: Chosen, reason: str, *, redo: PromptRange | None = None) -> list[ExtentRecord]:
        """Drop ready rows untrained, counted under `reason`; return the extents that became free.

        Args:
            chosen: The rows.
            reason: One of `DROP_REASONS`.
            redo: Prompts to be issued again in place of the rows.
        """
        self._issue_again([redo] if redo else [])
        freed = []
        for record, rows in chosen:
            self.totals.dropped[DROP_REASONS.index(reason)] += len(rows)
            self.ready -= len(rows)
            self.index.change(record, record.ready - len(rows))
            freed += self._remove(record, rows)
        self._commit()
        return freed

    def restore(self, saved: SavedExtent, offset: int, now_s: float) -> None:
        """Restore an extent that an earlier ledger had sealed, at an offset of the arena.

        Its chosen rows are READY, the others GONE.

        Raises:
            LedgerError: If its ticket is in the ledger already, or no record is free.
        """
        if saved.ticket in self.extents or not self._free_slots or saved.rows > self.layout.rows_per_extent:
            raise LedgerError(f"ticket {saved.ticket} of {saved.rows} rows cannot be restored")
        record = ExtentRecord(
            self._free_slots.pop(), ExtentState.SEALED, 1, -1, saved.rows, saved.prompts, saved.ticket, saved.position,
            saved.policy_version, saved.fingerprint, offset, saved.nbytes, saved.checksum, now_s,
        )  # fmt: skip
        record.hold([Item(ItemState.READY if row in saved.chosen else ItemState.GONE) for row in range(saved.rows)])
        record.held = len(saved.chosen)
        self.extents[saved.ticket] = record
        self.index.seal(record)
        self.index.change(record, record.held)
        self.ready += record.held
        self.totals.sealed += record.held
        self.totals.tickets = max(self.totals.tickets, saved.ticket + 1)
        self.memory.put_extent(record)
        self.memory.put_items(record, 0, b"".join([item.pack() for item in record.items]))
        self._commit()

    def resume(self, *, position: int, redo: list[PromptRange], versions: list[tuple[int, int]], spool: int,
               refilled: int = 0, round_left: int = 0) -> None:  # fmt: skip
        """Continue from the end of an earlier ledger of the same run, whose extents are restored."""
        # In place: the index holds this mapping.
        in_order = sorted(self.extents.items())
        self.extents.clear()
        self.extents.update(in_order)
        self.totals.position = max(self.totals.position, position)
        self.totals.spool, self.totals.refilled, self.totals.round_left = spool, refilled, round_left
        self._issue_again(redo)
        for version, fingerprint in versions:
            self.memory.put_version(self.versions, self.versions.note(version, fingerprint))
        self._commit()

    def publish(self, version: int, fingerprint: int, trained_through: int) -> None:
        """Record the newest policy version; it includes the leases below `trained_through`."""
        self.totals.begin(version, again=self.versions.knows(version, fingerprint))
        self.memory.put_version(self.versions, self.versions.note(version, fingerprint))
        self._renumber(trained_through)
        self._commit()

    def rebase(self, trained_through: int) -> None:
        """Record the first lease that the newest version's successor is trained on."""
        self._renumber(trained_through)
        self._commit()

    def roll_back(self, version: int, fingerprint: int, *, world_size: int, redo: list[PromptRange]) -> None:
        """Make an older version the newest again; all leases that are out are void from then on.

        Numbers continue at rank 0's turn, so a restarted trainer gets its batches in step with the other ranks.

        Args:
            version: The older version.
            fingerprint: The fingerprint of its weights.
            world_size: Trainer ranks.
            redo: Prompts to be issued again, because the training on them is undone.
        """
        totals = self.totals
        self._issue_again(redo)
        for index in self.versions.roll_back(version):
            self.memory.put_version(self.versions, index)
        self.memory.put_version(self.versions, self.versions.note(version, fingerprint))
        totals.begin(version)
        totals.leases = -(-totals.leases // world_size) * world_size
        self._renumber(totals.leases)
        for record in self.reserved_extents():
            if record.policy_version > version:
                self._hand(record, record.owner, record.attempt, version)
        self._commit()

    # Reads.

    def reserved_extents(self) -> Iterator[ExtentRecord]:
        """Yield the extents of tickets not yet settled, oldest first."""
        return iter(self.index.reserved.values())

    def sealed_extents(self) -> Iterator[ExtentRecord]:
        """Yield the extents that hold items, oldest ticket first."""
        return (record for record in self.extents.values() if record.state is ExtentState.SEALED)

    def next_lease(self) -> int:
        """Return the lease number of the next batch."""
        return self.vacant[0] if self.vacant else self.totals.leases

    def has_free_slot(self) -> bool:
        """Return whether a record is free for one more ticket."""
        return bool(self._free_slots)

    def close(self) -> None:
        """Release the memory; its content stays for the next buffer."""
        self.memory.close()

    # Parts of the transactions.

    def _hand(self, record: ExtentRecord, owner: int, attempt: int, policy_version: int) -> None:
        self.index.count(record, -1)
        record.owner, record.attempt, record.policy_version = owner, attempt, policy_version
        self.index.count(record, 1)
        self.memory.put_extent(record)

    def _issue_again(self, redo: Sequence[PromptRange]) -> None:
        for prompts in redo:
            self.redo = add_prompts(self.redo, prompts, most=self.layout.extents)
        if redo:
            self.memory.put_redo(self.redo)

    def _expect(self, record: ExtentRecord, state: ExtentState) -> None:
        if record.state is not state:
            raise LedgerError(f"ticket {record.ticket} is {record.state.name}, expected {state.name}")

    def _remove(self, record: ExtentRecord, rows: list[int]) -> list[ExtentRecord]:
        self._change_items(record, rows, Item.make_gone)
        record.held -= len(rows)
        if record.held:
            return []
        self._free(record)
        return [record]

    def _free(self, record: ExtentRecord) -> None:
        self.index.free(record, record.state)
        record.state = ExtentState.FREE
        self.memory.put_extent(record)
        del self.extents[record.ticket]
        self._free_slots.append(record.slot)

    def _take_prompts(self, prompts: int) -> int:
        if not self.redo:
            self.totals.position += prompts
            return self.totals.position - prompts
        (position, count), *rest = self.redo
        if prompts > count:
            raise LedgerError(f"a ticket of {prompts} prompts, {count} are to be issued again from {position:,} on")
        left = [PromptRange(position + prompts, count - prompts)] if prompts < count else []
        self.redo = left + rest
        self.memory.put_redo(self.redo)
        return position

    def _renumber(self, trained_through: int) -> None:
        self.totals.trained_through = trained_through
        if self.vacant and self.vacant[0] < trained_through:
            self.vacant = [lease for lease in self.vacant if lease >= trained_through]
            self.memory.put_vacant(self.vacant)

    def _change_items(self, record: ExtentRecord, rows: list[int], change: Callable[[Item], None]) -> None:
        self.memory.put_items(record, *record.change(rows, change))

    def _commit(self) -> None:
        self.memory.commit(self.totals)

    def _take_over(self, records: list[ExtentRecord]) -> None:
        for record in records:
            if record.ticket in self.extents:
                raise LedgerError(f"ticket {record.ticket} stands twice in the ledger")
            self.extents[record.ticket] = record
            if record.state is ExtentState.RESERVED:
                self.reserved += record.rows
                self.index.reserve(record)
            else:
                self._read_items(record)
        for parts in self.leases.values():
            # The order of the leased batch: see `LedgerIndex.ready`.
            parts.sort(key=lambda part: (part[0].policy_version, part[0].position, part[0].ticket))

    def _read_items(self, record: ExtentRecord) -> None:
        data = self.memory.items(record)
        ready, leased = Item.count_all(data)
        record.hold(data)
        record.held = ready + leased
        self.index.seal(record)
        self.index.change(record, ready)
        self.ready += ready
        self.leased += leased
        if leased:
            self._read_leases(record)

    def _read_leases(self, record: ExtentRecord) -> None:
        for row, item in enumerate(record.items):
            if item.state is ItemState.LEASED:
                parts = self.leases.setdefault(item.lease, [])
                if not parts or parts[-1][0] is not record:
                    parts.append((record, []))
                parts[-1][1].append(row)
