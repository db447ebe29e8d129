"""The ledger's records (totals, extents, items), their changes of state, and their bytes in shared memory."""

from __future__ import annotations

import dataclasses
import enum
import struct
from collections.abc import Callable, Sequence
from typing import Final

from pipeline.errors import LedgerError

DROP_REASONS: Final = ("stale", "rolled_back", "filtered", "quarantined", "cleared", "spooled")
"""Reasons for which rows leave the ledger untrained: the order of `Totals.dropped`, the labels of the metric."""
LAYOUT_VERSION = 5
"""The layout of the ledger and of extents, in shared memory and in files: another number, another layout."""
_TOTALS = struct.Struct("<16q")
_EXTENT = struct.Struct("<BBhIIIQQQqQQQQd")
_ITEM = struct.Struct("<BxBxI")
ITEM_BYTES = _ITEM.size
EXTENT_WRITTEN_BYTES = _EXTENT.size
"""Bytes of `ExtentRecord.pack`, which a record of `EXTENT_BYTES` begins with."""
EXTENT_BYTES = 128
TOTALS_BYTES = 128


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


_STATES = tuple(map(int, ItemState))
# Indexed instead of called: the call of an enum costs more than the rest of a record's decoding.
_EXTENT_STATES, _ITEM_STATES = tuple(ExtentState), tuple(ItemState)


@dataclasses.dataclass
class Totals:
    """Counters that survive the buffer.

    Attributes:
        sealed: Items committed, ever.
        trained: Items acknowledged after an optimizer step, ever.
        dropped: Items dropped untrained, by each of `DROP_REASONS`.
        tickets: Tickets issued so far; the number of the next ticket.
        position: First prompt position that no ticket was issued for.
        leases: Lease numbers assigned so far; the next batch takes a vacant number, or else this one.
        policy_version: Newest version published, -1 before the first.
        trained_through: First lease that the newest version does not include.
        spool: Number of the spool that was restored into this arena, 0 for none.
        refilled: Prompts issued in place of dropped ones since the newest version; with rounds, prompts of the rounds
            begun since then (see `pipeline.buffer.admission`).
        round_left: Prompts of the present round that no ticket was issued for.
    """

    sealed: int = 0
    trained: int = 0
    dropped: list[int] = dataclasses.field(default_factory=lambda: [0] * len(DROP_REASONS))
    tickets: int = 0
    position: int = 0
    leases: int = 0
    policy_version: int = -1
    trained_through: int = 0
    spool: int = 0
    refilled: int = 0
    round_left: int = 0

    def issue(self, prompts: int, new_round: int) -> None:
        """Count a ticket, which may begin a round of `new_round` prompts."""
        self.tickets += 1
        self.refilled += new_round
        self.round_left = max(0, self.round_left + new_round - prompts)

    def begin(self, version: int, *, again: bool = False) -> None:
        """Set the newest version; the prompts for the next one begin, unless a resumed run goes on with this one."""
        self.policy_version = version
        if not again:
            self.refilled = self.round_left = 0

    def pack(self) -> bytes:
        """Return the totals' bytes in the ledger."""
        return _TOTALS.pack(
            self.sealed, self.trained, *self.dropped, self.tickets, self.position, self.leases, self.policy_version,
            self.trained_through, self.spool, self.refilled, self.round_left,
        )  # fmt: skip

    @classmethod
    def unpack(cls, data: memoryview) -> Totals:
        """Return the totals in `data`."""
        values = _TOTALS.unpack_from(data)
        split = 2 + len(DROP_REASONS)
        return cls(values[0], values[1], list(values[2:split]), *values[split:])


@dataclasses.dataclass(slots=True)
class ExtentRecord:
    """One extent, and the ticket for which it was reserved.

    Attributes:
        slot: Place of the record in the table.
        attempt: Number of hand-outs of its ticket.
        owner: Index of the worker that rolls it out, -1 for none.
        rows: Rows reserved; rows sealed, once it is sealed.
        prompts: Prompts of the ticket.
        ticket: The ticket's number.
        position: First prompt position of the ticket.
        policy_version: Newest version at the ticket's last hand-out; once sealed, the version that wrote the rows.
        fingerprint: Fingerprint of that version's weights, once it is sealed.
        offset: Offset of the extent in the arena's payload.
        nbytes: Bytes reserved; bytes written, once it is sealed.
        checksum: Checksum of the bytes, once it is sealed.
        sealed_s: Monotonic time of the seal.
        ready: Rows in state READY, set by `LedgerIndex.change`.
        held: Rows that are not GONE.
        items: State, deaths and lease of each row.
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
    ready: int = 0
    held: int = 0
    _items: list[Item] | bytes = dataclasses.field(default_factory=list)
    # The value of every row, decoded from `_items`.
    _common: Item | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def items(self) -> list[Item]:
        """Each row; rows left by a killed buffer are decoded at their first use, few at a time."""
        if isinstance(self._items, bytes):
            self._items, self._common = Item.unpack_all(self._items), None
        return self._items

    def hold(self, items: list[Item] | bytes) -> None:
        """Set the rows, or their bytes in the ledger."""
        self._items, self._common = items, None

    def change(self, rows: list[int], change: Callable[[Item], None]) -> tuple[int, bytes]:
        """Change rows; return the number of the first, and the new bytes from the first to the last."""
        if (item := self._alike(rows)) is not None:
            # The usual case: the rows of a record are equal all their time, and one change serves for every row.
            change(item)
            self._items = item.pack() * len(rows)
            return 0, self._items
        items = self.items
        for row in rows:
            change(items[row])
        return rows[0], b"".join([item.pack() for item in items[rows[0] : rows[-1] + 1]])

    def values(self, rows: list[int]) -> list[Item]:
        """Return the value of each of these rows; a single one if they are known to be equal."""
        if (item := self._alike(rows)) is not None:
            return [item]
        items = self.items
        return [items[row] for row in rows]

    def _alike(self, rows: list[int]) -> Item | None:
        """Return the common value of the rows if `rows` are all of them and known to be equal; else None."""
        data = self._items
        if not isinstance(data, bytes) or len(data) != len(rows) * ITEM_BYTES:
            return None
        if self._common is None and data == data[:ITEM_BYTES] * len(rows):
            (self._common,) = Item.unpack_all(data[:ITEM_BYTES])
        return self._common

    def pack(self) -> bytes:
        """Return the record's bytes in the ledger."""
        return _EXTENT.pack(
            self.state, self.attempt, self.owner, self.rows, self.prompts, 0, self.ticket, self.position, 0,
            self.policy_version, self.fingerprint, self.offset, self.nbytes, self.checksum, self.sealed_s,
        )  # fmt: skip

    @classmethod
    def unpack(cls, slot: int, table: memoryview) -> ExtentRecord:
        """Return the record in a slot of a table of records, without its items."""
        (state, attempt, owner, rows, prompts, _, ticket, position, _, version, fingerprint, offset, nbytes,
         checksum, sealed_s) = _EXTENT.unpack_from(table, slot * EXTENT_BYTES)  # fmt: skip
        return cls(
            slot, _EXTENT_STATES[state], attempt, owner, rows, prompts, ticket, position, version, fingerprint,
            offset, nbytes, checksum, sealed_s,
        )  # fmt: skip


@dataclasses.dataclass(slots=True)
class Item:
    """One row of a sealed extent; `deaths` counts the trainers that died at a batch with it."""

    state: ItemState = ItemState.READY
    lease: int = 0
    deaths: int = 0

    def lease_under(self, lease: int) -> None:
        """Lease it under a number.

        Raises:
            LedgerError: If it is not READY.
        """
        if self.state is not ItemState.READY:
            raise LedgerError(f"lease {lease}: a row is {self.state.name}, only a READY row is leased")
        self.state, self.lease = ItemState.LEASED, lease

    def make_ready(self) -> None:
        """Take it out of its lease, for another batch."""
        self.state = ItemState.READY

    def make_gone(self) -> None:
        """End it, trained or dropped."""
        self.state = ItemState.GONE

    def count_death(self) -> None:
        """Count one more trainer that died at a batch with it; the count ends at 255."""
        self.deaths = min(255, self.deaths + 1)

    def pack(self) -> bytes:
        """Return the item's bytes in the ledger."""
        return _ITEM.pack(self.state, self.deaths, self.lease)

    @classmethod
    def unpack_all(cls, data: bytes) -> list[Item]:
        """Return the items in `data`, in order."""
        return [cls(_ITEM_STATES[state], lease, deaths) for state, deaths, lease in _ITEM.iter_unpack(data)]

    @staticmethod
    def count_all(data: bytes) -> tuple[int, int]:
        """Return the number of READY and of LEASED items in `data`.

        Raises:
            LedgerError: If a state is unknown.
        """
        states = data[::ITEM_BYTES]
        gone, ready, leased = map(states.count, _STATES)
        if gone + ready + leased < len(states):
            raise LedgerError(f"an item is in state {max(states)}, which is none")
        return ready, leased


FRESH_ITEM = Item().pack()
_GONE_ITEM = Item(ItemState.GONE).pack()

# Rows of extents, in the order in which a batch takes them.
Chosen = list[tuple[ExtentRecord, list[int]]]


def fresh_items(rows: int, gone: Sequence[int] = ()) -> bytes:
    """Return the bytes of the items of a new extent, READY but for those in `gone`."""
    left_out = set(gone)
    if not left_out:
        return FRESH_ITEM * rows
    return b"".join([_GONE_ITEM if row in left_out else FRESH_ITEM for row in range(rows)])


def ready_rows(record: ExtentRecord) -> list[int]:
    """Return the READY rows of a sealed extent."""
    if record.ready == record.rows:
        return list(range(record.rows))
    ready = ItemState.READY
    return [row for row, item in enumerate(record.items) if item.state is ready] if record.ready else []


def held_rows(record: ExtentRecord) -> list[int]:
    """Return the rows of a sealed extent that are READY or LEASED."""
    gone = ItemState.GONE
    return [row for row, item in enumerate(record.items) if item.state is not gone]
