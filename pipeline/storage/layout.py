"""The ledger's bytes: the offset of each part in shared memory, its reads, and the writes of a transaction."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import xxhash

from pipeline.errors import LedgerError
from pipeline.storage.records import (
    EXTENT_BYTES,
    EXTENT_WRITTEN_BYTES,
    ITEM_BYTES,
    LAYOUT_VERSION,
    TOTALS_BYTES,
    ExtentRecord,
    ExtentState,
    Totals,
)
from pipeline.storage.redo_log import REDO_LOG_HEADER_BYTES, WRITE_HEADER_BYTES, RedoLog
from pipeline.storage.tables import MOST_LEASES, VERSION_BYTES, VERSIONS_BYTES, PromptRange, PublishedVersions

_KNOWN_STATES = bytes(ExtentState)
# The tables of leases and of prompts begin with the number of their entries.
_COUNT = struct.Struct("<Q")
_LEASE = struct.Struct("<Q")
_PROMPTS = struct.Struct("<QQ")


class LedgerLayout:
    """Number of a ledger's extents and items, and the offset of each part in bytes; fixed when its arena is made.

    The parts, in this order: redo log, totals, vacant leases, prompts to issue again, versions, extents, items.

    Attributes:
        redo_log_bytes: Room for a transaction that changes every row of a large batch one by one.
        nbytes: Size of the whole ledger.
        identity: A number that two ledgers share only if both have this layout.
    """

    def __init__(self, extents: int, rows_per_extent: int) -> None:
        self.extents = extents
        self.rows_per_extent = rows_per_extent
        self.redo_log_bytes = REDO_LOG_HEADER_BYTES + max(1 << 20, 64 * rows_per_extent)
        self.totals_offset = self.redo_log_bytes
        self.vacant_offset = self.totals_offset + TOTALS_BYTES
        self.redo_offset = self.vacant_offset + _COUNT.size + MOST_LEASES * _LEASE.size
        self.versions_offset = self.redo_offset + _COUNT.size + extents * _PROMPTS.size
        self.extents_offset = self.versions_offset + VERSIONS_BYTES
        self.items_offset = self.extents_offset + extents * EXTENT_BYTES
        self.nbytes = self.items_offset + extents * rows_per_extent * ITEM_BYTES
        text = f"{LAYOUT_VERSION}:{extents}:{rows_per_extent}"
        self.identity = xxhash.xxh3_64_intdigest(text.encode()) >> 1

    @property
    def most_changed(self) -> int:
        """Full extents that one transaction can end, as that of a trained batch does."""
        each_bytes = 2 * WRITE_HEADER_BYTES + EXTENT_WRITTEN_BYTES + self.rows_per_extent * ITEM_BYTES
        return (self.redo_log_bytes - REDO_LOG_HEADER_BYTES - WRITE_HEADER_BYTES - TOTALS_BYTES) // each_bytes


class LedgerMemory:
    """Reads and writes of the parts; the next `commit` applies all writes that were `put`, or none.

    Attributes:
        redo_log: The transaction under way.
    """

    def __init__(self, memory: memoryview, layout: LedgerLayout) -> None:
        """Map a ledger and finish the transaction that a killed writer left behind.

        Args:
            memory: `layout.nbytes` of shared memory, zeroed or written before.
            layout: The layout of the memory.

        Raises:
            LedgerError: If the memory is too small, or the unfinished transaction is torn.
        """
        if len(memory) < layout.nbytes:
            raise LedgerError(f"a ledger of {layout.nbytes:,} B does not fit into {len(memory):,} B")
        self.redo_log = RedoLog(memory, layout.redo_log_bytes)
        self._memory = memory
        self._layout = layout

    # Reads.

    def totals(self) -> Totals:
        """Return the counters; fresh ones if nothing was ever written."""
        return Totals() if self.redo_log.is_fresh else Totals.unpack(self._memory[self._layout.totals_offset :])

    def vacant(self) -> list[int]:
        """Return the vacant lease numbers, lowest first."""
        return [lease for (lease,) in self._entries(self._layout.vacant_offset, _LEASE)]

    def redo(self) -> list[PromptRange]:
        """Return the prompts to be issued again, lowest position first."""
        return [PromptRange(*prompts) for prompts in self._entries(self._layout.redo_offset, _PROMPTS)]

    def versions(self) -> PublishedVersions:
        """Return the newest published versions."""
        return PublishedVersions(self._memory[self._layout.versions_offset :])

    def extents(self) -> tuple[list[ExtentRecord], list[int]]:
        """Return the records in use, oldest ticket first and without their items, and the free slots, last one first.

        Raises:
            LedgerError: If a state is unknown.
        """
        table = self._memory[self._layout.extents_offset : self._layout.items_offset]
        states = bytes(table[::EXTENT_BYTES])
        if states.strip(_KNOWN_STATES):
            raise LedgerError(f"an extent is in state {max(states)}, which is none")
        if states.count(ExtentState.FREE) == len(states):
            return [], [*reversed(range(len(states)))]
        used = [ExtentRecord.unpack(slot, table) for slot, state in enumerate(states) if state]
        free = [slot for slot, state in enumerate(states) if not state]
        return sorted(used, key=lambda record: record.ticket), free[::-1]

    def items(self, record: ExtentRecord) -> bytes:
        """Return the bytes of a record's items."""
        start = self._layout.items_offset + record.slot * self._layout.rows_per_extent * ITEM_BYTES
        return bytes(self._memory[start : start + record.rows * ITEM_BYTES])

    def _entries(self, offset: int, of_entry: struct.Struct) -> Iterator[tuple[int, ...]]:
        (count,) = _COUNT.unpack_from(self._memory, offset)
        start = offset + _COUNT.size
        return of_entry.iter_unpack(self._memory[start : start + count * of_entry.size])

    # Writes.

    def put_vacant(self, vacant: list[int]) -> None:
        """Write the vacant lease numbers."""
        self.redo_log.put(self._layout.vacant_offset, _COUNT.pack(len(vacant)) + b"".join(map(_LEASE.pack, vacant)))

    def put_redo(self, redo: list[PromptRange]) -> None:
        """Write the prompts to be issued again."""
        entries = b"".join(_PROMPTS.pack(*prompts) for prompts in redo)
        self.redo_log.put(self._layout.redo_offset, _COUNT.pack(len(redo)) + entries)

    def put_version(self, versions: PublishedVersions, index: int) -> None:
        """Write one entry of the versions."""
        self.redo_log.put(self._layout.versions_offset + index * VERSION_BYTES, versions.pack(index))

    def put_extent(self, record: ExtentRecord) -> None:
        """Write a record, without its items."""
        self.redo_log.put(self._layout.extents_offset + record.slot * EXTENT_BYTES, record.pack())

    def put_items(self, record: ExtentRecord, first: int, data: bytes) -> None:
        """Write items of a record, beginning with number `first`."""
        index = record.slot * self._layout.rows_per_extent + first
        self.redo_log.put(self._layout.items_offset + index * ITEM_BYTES, data)

    def commit(self, totals: Totals) -> None:
        """Apply all writes since the last commit, and the write of the counters.

        Raises:
            LedgerError: If the redo log has no room for them.
        """
        self.redo_log.put(self._layout.totals_offset, totals.pack())
        self.redo_log.commit()

    def close(self) -> None:
        """Release the memory; its content stays."""
        self.redo_log.close()
