"""The ledger's bytes: where each of its parts lies in shared memory, what is read there, what a transaction writes."""

from __future__ import annotations

from pipeline.errors import LedgerError
from pipeline.storage.records import (
    EXTENT_BYTES,
    ITEM_BYTES,
    TOTALS_BYTES,
    ExtentRecord,
    ExtentState,
    LedgerLayout,
    Totals,
)
from pipeline.storage.redo_log import Journal
from pipeline.storage.tables import (
    VACANT_BYTES,
    VERSION_BYTES,
    VERSIONS_BYTES,
    PublishedVersions,
    Run,
    pack_redo,
    pack_vacant,
    redo_bytes,
    unpack_redo,
    unpack_vacant,
)

_KNOWN_STATES = bytes(ExtentState)


class LedgerMemory:
    """The parts in their places; what is `put` is written by the next `commit`, all of it or nothing.

    Attributes:
        journal: Of the transaction under way.
    """

    def __init__(self, memory: memoryview, layout: LedgerLayout) -> None:
        """Map a ledger, finishing the transaction that a killed writer left behind.

        Args:
            memory: `layout.nbytes` of shared memory, zeroed or written before.
            layout: The layout it was made with.

        Raises:
            LedgerError: If the memory is too small, or the transaction that was left behind is torn.
        """
        if len(memory) < layout.nbytes:
            raise LedgerError(f"a ledger of {layout.nbytes:,} B does not fit into {len(memory):,} B")
        self.journal = Journal(memory, layout.journal_bytes)
        self._memory = memory
        self._rows_per_extent = layout.rows_per_extent
        self._totals_offset = layout.journal_bytes
        self._vacant_offset = self._totals_offset + TOTALS_BYTES
        self._redo_offset = self._vacant_offset + VACANT_BYTES
        self._versions_offset = self._redo_offset + redo_bytes(layout.extents)
        self._extents_offset = self._versions_offset + VERSIONS_BYTES
        self._items_offset = self._extents_offset + layout.extents * EXTENT_BYTES

    # What it holds.

    def totals(self) -> Totals:
        """Return the counters; fresh ones where nothing was ever written."""
        return Totals() if self.journal.is_fresh else Totals.unpack(self._memory[self._totals_offset :])

    def vacant(self) -> list[int]:
        """Return the vacant lease numbers, lowest first."""
        return unpack_vacant(self._memory[self._vacant_offset :])

    def redo(self) -> list[Run]:
        """Return the prompts to be issued again, lowest position first."""
        return unpack_redo(self._memory[self._redo_offset :])

    def versions(self) -> PublishedVersions:
        """Return what was published of late."""
        return PublishedVersions(self._memory[self._versions_offset :])

    def extents(self) -> tuple[list[ExtentRecord], list[int]]:
        """Return the records in use, oldest ticket first and without their items, and the free slots, last one first.

        Raises:
            LedgerError: If one is in no state there is.
        """
        table = self._memory[self._extents_offset : self._items_offset]
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
        start = self._items_offset + record.slot * self._rows_per_extent * ITEM_BYTES
        return bytes(self._memory[start : start + record.rows * ITEM_BYTES])

    # What becomes of it.

    def put_vacant(self, vacant: list[int]) -> None:
        """Write the vacant lease numbers."""
        self.journal.put(self._vacant_offset, pack_vacant(vacant))

    def put_redo(self, redo: list[Run]) -> None:
        """Write the prompts to be issued again."""
        self.journal.put(self._redo_offset, pack_redo(redo))

    def put_version(self, versions: PublishedVersions, place: int) -> None:
        """Write one place of the versions."""
        self.journal.put(self._versions_offset + place * VERSION_BYTES, versions.pack(place))

    def put_extent(self, record: ExtentRecord) -> None:
        """Write a record, without its items."""
        self.journal.put(self._extents_offset + record.slot * EXTENT_BYTES, record.pack())

    def put_items(self, record: ExtentRecord, first: int, data: bytes) -> None:
        """Write the items of a record from one on."""
        place = record.slot * self._rows_per_extent + first
        self.journal.put(self._items_offset + place * ITEM_BYTES, data)

    def commit(self, totals: Totals) -> None:
        """Make all writes since the last commit, and that of the counters.

        Raises:
            LedgerError: If the journal has no room for them.
        """
        self.journal.put(self._totals_offset, totals.pack())
        self.journal.commit()

    def close(self) -> None:
        """Let go of the memory; what it holds stays."""
        self.journal.close()
