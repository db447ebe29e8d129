"""The ledger: what became of every ticket, extent and item, in shared memory, written by the buffer alone.

    journal   committed u64, applied u64, length u64, checksum u64, then the writes of the transaction under way
    totals    counters that outlive every process (`Totals`)
    extents   one record each: state, owner, ticket, prompts, policy version, place, checksum
    items     `rows_per_extent` records an extent: state, deliveries, lease

    extent      who moves it                      to
    FREE        `reserve`, when a ticket is issued    RESERVED
    RESERVED    `seal`, when its worker is done       SEALED
    RESERVED    `abandon`, when nothing comes of it   FREE
    SEALED      its last item leaves                  FREE

    item        who moves it                      to
    READY       `lease`                               LEASED
    LEASED      `acknowledge` (trained)               GONE
    LEASED      `requeue` (its holder died)           READY
    READY       `drop` (reason)                       GONE

Every change is one transaction: its writes go to the journal, `committed` is stored, the writes are made, `applied` is
stored. A buffer killed before `committed` changed nothing; killed after it, the next one makes the writes again, which
is harmless because they are plain values. So the totals and the states agree after any kill:
``sealed = trained + sum(dropped) + ready + leased``.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
from collections.abc import Iterator

import xxhash

from pipeline.errors import LedgerError

DROP_REASONS = ("stale", "rolled_back", "filtered", "quarantined", "cleared")
LAYOUT_VERSION = 3

_JOURNAL_HEADER = struct.Struct("<QQQQ")
_WRITE = struct.Struct("<QI")
_TOTALS = struct.Struct("<12q")
_EXTENT = struct.Struct("<BBhIIIQQQqQQQQd")
_ITEM = struct.Struct("<BBHI")
_EXTENT_BYTES = 128
_TOTALS_BYTES = 128


class ExtentState(enum.IntEnum):
    """States of an extent."""

    FREE = 0
    RESERVED = 1
    SEALED = 2


class ItemState(enum.IntEnum):
    """States of an item, a row of a sealed extent."""

    GONE = 0
    READY = 1
    LEASED = 2


@dataclasses.dataclass(frozen=True)
class LedgerLayout:
    """How many extents and items a ledger can tell apart; fixed when its arena is made."""

    extents: int
    rows_per_extent: int

    @property
    def journal_bytes(self) -> int:
        """Room for a transaction that touches every row of a large batch one by one."""
        return _JOURNAL_HEADER.size + max(1 << 20, 64 * self.rows_per_extent)

    @property
    def nbytes(self) -> int:
        """Size of the whole ledger."""
        items = self.extents * self.rows_per_extent * _ITEM.size
        return self.journal_bytes + _TOTALS_BYTES + self.extents * _EXTENT_BYTES + items

    @property
    def identity(self) -> int:
        """A number that two ledgers share only if they can be read alike."""
        return xxhash.xxh3_64_intdigest(f"{LAYOUT_VERSION}:{self.extents}:{self.rows_per_extent}".encode()) >> 1


@dataclasses.dataclass
class Totals:
    """Counters that survive the buffer.

    Attributes:
        sealed: Items committed, ever.
        trained: Items acknowledged after an optimizer step, ever.
        dropped: Items taken out untrained, by reason.
        tickets: Tickets issued so far, which is the next ticket's number.
        position: First prompt position no ticket was issued for.
        leases: Batches leased so far, which is the next lease's number.
        policy_version: Newest version published, -1 before the first.
        trained_through: First lease that the newest version does not include.
    """

    sealed: int = 0
    trained: int = 0
    dropped: list[int] = dataclasses.field(default_factory=lambda: [0] * len(DROP_REASONS))
    tickets: int = 0
    position: int = 0
    leases: int = 0
    policy_version: int = -1
    trained_through: int = 0

    def pack(self) -> bytes:
        """Return the totals' bytes in the ledger."""
        return _TOTALS.pack(
            self.sealed, self.trained, *self.dropped, self.tickets, self.position, self.leases, self.policy_version,
            self.trained_through,
        )  # fmt: skip

    @classmethod
    def unpack(cls, data: memoryview) -> Totals:
        """Return the totals that `data` holds."""
        values = _TOTALS.unpack_from(data)
        split = 2 + len(DROP_REASONS)
        return cls(values[0], values[1], list(values[2:split]), *values[split:])


@dataclasses.dataclass
class ExtentRecord:
    """One extent, and the ticket it was reserved for.

    Attributes:
        slot: Place of the record in the table.
        attempt: How often its ticket was handed out.
        owner: Index of the worker that rolls it out, -1 while none does.
        rows: Rows reserved; the rows that came once it is sealed.
        order: The ticket's number; batches take items in this order.
        policy_version: Newest version when the ticket was issued; the version that wrote the rows once it is sealed.
        sealed_s: Monotonic time of the seal.
        items: State, deliveries and lease of each row.
    """

    slot: int
    state: ExtentState = ExtentState.FREE
    attempt: int = 0
    owner: int = -1
    rows: int = 0
    prompts: int = 0
    ticket: int = 0
    position: int = 0
    policy_version: int = -1
    fingerprint: int = 0
    offset: int = 0
    nbytes: int = 0
    checksum: int = 0
    sealed_s: float = 0.0
    items: list[Item] = dataclasses.field(default_factory=list)

    def pack(self) -> bytes:
        """Return the record's bytes in the ledger."""
        return _EXTENT.pack(
            self.state, self.attempt, self.owner, self.rows, self.prompts, 0, self.ticket, self.position, 0,
            self.policy_version, self.fingerprint, self.offset, self.nbytes, self.checksum, self.sealed_s,
        )  # fmt: skip


@dataclasses.dataclass
class Item:
    """One row of a sealed extent."""

    state: ItemState = ItemState.READY
    deliveries: int = 0
    lease: int = 0


class Ledger:
    """The ledger's table with its transactions; exactly one process, the buffer, opens it.

    All reads come from a mirror in this process.

    Attributes:
        extents: Every record that is not FREE, by ticket, oldest ticket first.
        ready: Rows in state READY; `leased` and `reserved` likewise.
    """

    def __init__(self, memory: memoryview, layout: LedgerLayout) -> None:
        """Open a ledger, finishing the transaction that a killed buffer left behind.

        Args:
            memory: `layout.nbytes` of shared memory, zeroed or written by an earlier buffer.
            layout: The layout it was made with.

        Raises:
            LedgerError: If the memory is too small or its records contradict one another.
        """
        if len(memory) < layout.nbytes:
            raise LedgerError(f"a ledger of {layout.nbytes:,} B does not fit into {len(memory):,} B")
        self._memory = memory
        self.layout = layout
        self._totals_offset = layout.journal_bytes
        self._extents_offset = self._totals_offset + _TOTALS_BYTES
        self._items_offset = self._extents_offset + layout.extents * _EXTENT_BYTES
        self._marks = memory[:32].cast("Q")
        self._writes: list[tuple[int, bytes]] = []
        fresh = self._marks[0] == 0
        self._redo()
        self.totals = Totals() if fresh else Totals.unpack(memory[self._totals_offset :])
        self.extents: dict[int, ExtentRecord] = {}
        self.ready = self.leased = self.reserved = 0
        self._free_slots: list[int] = []
        self._leases: dict[int, list[tuple[ExtentRecord, list[int]]]] = {}
        self._read_table()

    # Transactions.

    def reserve(self, *, rows: int, prompts: int, offset: int, nbytes: int) -> ExtentRecord:
        """Make the next ticket, nobody's yet: its prompts, and the room for what comes of them.

        Raises:
            LedgerError: If every record is in use.
        """
        if not self._free_slots:
            raise LedgerError(f"all {self.layout.extents:,} extents are in use")
        if rows > self.layout.rows_per_extent:
            raise LedgerError(f"an extent of {rows} rows, the ledger was made for {self.layout.rows_per_extent}")
        totals = self.totals
        record = ExtentRecord(
            self._free_slots.pop(), ExtentState.RESERVED, 0, -1, rows, prompts, totals.tickets, totals.position,
            totals.policy_version, 0, offset, nbytes,
        )  # fmt: skip
        totals.tickets += 1
        totals.position += prompts
        self.extents[record.ticket] = record
        self.reserved += rows
        self._put_extent(record)
        self._commit()
        return record

    def assign(self, record: ExtentRecord, owner: int) -> None:
        """Hand a ticket to a worker, or take it from a dead one (owner -1).

        Every hand-out counts as an attempt and names the version that is newest then.
        """
        self._expect(record, ExtentState.RESERVED)
        if owner >= 0:
            record.attempt = min(255, record.attempt + 1)
            record.policy_version = self.totals.policy_version
        record.owner = owner
        self._put_extent(record)
        self._commit()

    def seal(self, record: ExtentRecord, *, rows: int, nbytes: int, checksum: int, policy_version: int,
             fingerprint: int, now_s: float) -> None:  # fmt: skip
        """Commit a ticket's experiences; `rows` of them are ready from here on."""
        self._expect(record, ExtentState.RESERVED)
        if not 0 < rows <= record.rows or nbytes > record.nbytes:
            raise LedgerError(
                f"ticket {record.ticket}: sealed {rows} rows in {nbytes:,} B, "
                f"reserved {record.rows} in {record.nbytes:,} B"
            )
        self.reserved -= record.rows
        self.ready += rows
        record.state = ExtentState.SEALED
        record.rows, record.nbytes, record.checksum = rows, nbytes, checksum
        record.policy_version, record.fingerprint, record.sealed_s = policy_version, fingerprint, now_s
        record.items = [Item() for _ in range(rows)]
        self.totals.sealed += rows
        self._put_extent(record)
        self._put_items(record, 0, rows)
        self._commit()

    def abandon(self, record: ExtentRecord) -> None:
        """End a ticket nothing came of."""
        self._expect(record, ExtentState.RESERVED)
        self.reserved -= record.rows
        self._free(record)
        self._commit()

    def lease(self, chosen: list[tuple[ExtentRecord, list[int]]]) -> int:
        """Lease rows as the next batch and return its number."""
        lease = self.totals.leases
        self.totals.leases += 1
        for record, rows in chosen:
            for row in rows:
                item = record.items[row]
                if item.state is not ItemState.READY:
                    raise LedgerError(
                        f"ticket {record.ticket} row {row} is {item.state.name}, only a READY row is leased"
                    )
                item.state, item.lease, item.deliveries = ItemState.LEASED, lease, min(255, item.deliveries + 1)
            self._put_items(record, rows[0], rows[-1] + 1)
            self.ready -= len(rows)
            self.leased += len(rows)
        self._leases[lease] = chosen
        self._commit()
        return lease

    def redeliver(self, lease: int) -> list[tuple[ExtentRecord, list[int]]]:
        """Count one more delivery of a batch whose holder died; it stays leased under its number."""
        chosen = self._leases[lease]
        for record, rows in chosen:
            for row in rows:
                record.items[row].deliveries = min(255, record.items[row].deliveries + 1)
            self._put_items(record, rows[0], rows[-1] + 1)
        self._commit()
        return chosen

    def acknowledge(self, lease: int) -> list[ExtentRecord]:
        """Count a batch as trained; return the extents that are free now."""
        freed = []
        for record, rows in self._leases.pop(lease):
            self.totals.trained += len(rows)
            self.leased -= len(rows)
            freed += self._remove(record, rows)
        self._commit()
        return freed

    def requeue(self, lease: int) -> int:
        """Make a batch's rows ready again; return how many."""
        count = 0
        for record, rows in self._leases.pop(lease):
            for row in rows:
                record.items[row].state = ItemState.READY
            self._put_items(record, rows[0], rows[-1] + 1)
            count += len(rows)
        self.leased -= count
        self.ready += count
        self._commit()
        return count

    def drop(self, chosen: list[tuple[ExtentRecord, list[int]]], reason: str) -> list[ExtentRecord]:
        """Take ready rows out untrained, counted under `reason`; return the extents that are free now."""
        freed = []
        for record, rows in chosen:
            self.totals.dropped[DROP_REASONS.index(reason)] += len(rows)
            self.ready -= len(rows)
            freed += self._remove(record, rows)
        self._commit()
        return freed

    def publish(self, version: int, trained_through: int) -> None:
        """Note the newest policy version and which leases it includes."""
        self.totals.policy_version = version
        self.totals.trained_through = trained_through
        self._commit()

    # Reads.

    def reserved_extents(self) -> Iterator[ExtentRecord]:
        """Yield the extents of tickets not yet settled, oldest first."""
        return (record for record in self.extents.values() if record.state is ExtentState.RESERVED)

    def sealed_extents(self) -> Iterator[ExtentRecord]:
        """Yield the extents that hold items, oldest ticket first."""
        return (record for record in self.extents.values() if record.state is ExtentState.SEALED)

    def leases(self) -> dict[int, list[tuple[ExtentRecord, list[int]]]]:
        """Return the rows under each lease that is out, in batch order."""
        return self._leases

    def has_free_slot(self) -> bool:
        """Return whether one more ticket can be written down."""
        return bool(self._free_slots)

    def close(self) -> None:
        """Let go of the memory; what it holds stays for the next buffer."""
        self._marks.release()
        self._memory.release()

    # The table's bytes.

    def _expect(self, record: ExtentRecord, state: ExtentState) -> None:
        if record.state is not state:
            raise LedgerError(f"ticket {record.ticket} is {record.state.name}, expected {state.name}")

    def _remove(self, record: ExtentRecord, rows: list[int]) -> list[ExtentRecord]:
        for row in rows:
            record.items[row].state = ItemState.GONE
        self._put_items(record, rows[0], rows[-1] + 1)
        if any(item.state is not ItemState.GONE for item in record.items):
            return []
        self._free(record)
        return [record]

    def _free(self, record: ExtentRecord) -> None:
        record.state = ExtentState.FREE
        self._put_extent(record)
        del self.extents[record.ticket]
        self._free_slots.append(record.slot)

    def _put_extent(self, record: ExtentRecord) -> None:
        self._writes.append((self._extents_offset + record.slot * _EXTENT_BYTES, record.pack()))

    def _put_items(self, record: ExtentRecord, start: int, stop: int) -> None:
        first = record.slot * self.layout.rows_per_extent + start
        data = b"".join(_ITEM.pack(item.state, item.deliveries, 0, item.lease) for item in record.items[start:stop])
        self._writes.append((self._items_offset + first * _ITEM.size, data))

    def _commit(self) -> None:
        writes = [*self._writes, (self._totals_offset, self.totals.pack())]
        self._writes.clear()
        body = b"".join(_WRITE.pack(offset, len(data)) + data for offset, data in writes)
        if _JOURNAL_HEADER.size + len(body) > self.layout.journal_bytes:
            raise LedgerError(f"a transaction of {len(body):,} B does not fit into the journal")
        self._memory[32 : 32 + len(body)] = body
        self._marks[2] = len(body)
        self._marks[3] = xxhash.xxh3_64_intdigest(body)
        # From this store on the transaction happened; before it, it did not.
        self._marks[0] += 1
        for offset, data in writes:
            self._memory[offset : offset + len(data)] = data
        self._marks[1] = self._marks[0]

    def _redo(self) -> None:
        if self._marks[0] == self._marks[1]:
            return
        body = bytes(self._memory[32 : 32 + self._marks[2]])
        if xxhash.xxh3_64_intdigest(body) != self._marks[3]:
            raise LedgerError("the journal's committed transaction is torn")
        start = 0
        while start < len(body):
            offset, length = _WRITE.unpack_from(body, start)
            start += _WRITE.size
            self._memory[offset : offset + length] = body[start : start + length]
            start += length
        self._marks[1] = self._marks[0]

    def _read_table(self) -> None:
        found = []
        for slot in range(self.layout.extents):
            start = self._extents_offset + slot * _EXTENT_BYTES
            if self._memory[start] == ExtentState.FREE:
                self._free_slots.append(slot)
            else:
                found.append(self._read_extent(slot, start))
        self._free_slots.reverse()
        for record in sorted(found, key=lambda record: record.ticket):
            if record.ticket in self.extents:
                raise LedgerError(f"ticket {record.ticket} stands twice in the ledger")
            self.extents[record.ticket] = record
            self._count(record)

    def _count(self, record: ExtentRecord) -> None:
        if record.state is ExtentState.RESERVED:
            self.reserved += record.rows
        for row, item in enumerate(record.items):
            self.ready += item.state is ItemState.READY
            if item.state is ItemState.LEASED:
                self.leased += 1
                parts = self._leases.setdefault(item.lease, [])
                if not parts or parts[-1][0] is not record:
                    parts.append((record, []))
                parts[-1][1].append(row)

    def _read_extent(self, slot: int, start: int) -> ExtentRecord:
        (state, attempt, owner, rows, prompts, _, ticket, position, _, version, fingerprint, offset, nbytes,
         checksum, sealed_s) = _EXTENT.unpack_from(self._memory, start)  # fmt: skip
        record = ExtentRecord(
            slot, ExtentState(state), attempt, owner, rows, prompts, ticket, position, version, fingerprint,
            offset, nbytes, checksum, sealed_s,
        )  # fmt: skip
        if record.state is ExtentState.SEALED:
            record.items = list(self._read_items(slot, rows))
        return record

    def _read_items(self, slot: int, rows: int) -> Iterator[Item]:
        start = self._items_offset + slot * self.layout.rows_per_extent * _ITEM.size
        for row in range(rows):
            state, deliveries, _, lease = _ITEM.unpack_from(self._memory, start + row * _ITEM.size)
            yield Item(ItemState(state), deliveries, lease)
