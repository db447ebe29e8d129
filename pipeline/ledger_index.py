"""What the ledger's records add up to, kept up to date as they change: no question costs a walk over all that is held.

A record is open while it is reserved or holds a ready row. Two heaps may name records that are not open any more; such
are thrown away when they come up.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator, Mapping

from pipeline.ledger_records import ExtentRecord, ExtentState


class LedgerIndex:
    """The records that are reserved or hold ready rows, and sums over them.

    Attributes:
        reserved: Records of tickets not yet settled, by ticket, the oldest first.
        ready_rows: Ready rows by the policy version that wrote them; versions without any are left out.
        ready_bytes: Bytes of sealed extents that hold a ready row; `sealed_bytes` of all that are sealed.
    """

    def __init__(self, extents: Mapping[int, ExtentRecord]) -> None:
        """Begin with no record at all.

        Args:
            extents: The ledger's records by ticket, as they are when this is asked.
        """
        self.reserved: dict[int, ExtentRecord] = {}
        self.ready_rows: dict[int, int] = {}
        self.ready_bytes = self.sealed_bytes = 0
        self._extents = extents
        self._ready: list[tuple[int, int, int]] = []
        self._positions: list[tuple[int, int]] = []
        self._seals: list[tuple[float, int]] = []

    def reserve(self, record: ExtentRecord) -> None:
        """Take in a record that has become reserved."""
        self.reserved[record.ticket] = record
        heapq.heappush(self._positions, (record.position, record.ticket))

    def seal(self, record: ExtentRecord) -> None:
        """Take in a record that has become sealed; its ready rows are told of by `change`."""
        self.reserved.pop(record.ticket, None)
        self.sealed_bytes += record.nbytes

    def free(self, record: ExtentRecord, was: ExtentState) -> None:
        """Forget a record that has become free, without a ready row."""
        if was is ExtentState.RESERVED:
            del self.reserved[record.ticket]
        else:
            self.sealed_bytes -= record.nbytes

    def change(self, record: ExtentRecord, ready: int) -> None:
        """Set how many rows of a sealed record are ready."""
        before, record.ready = record.ready, ready
        version = record.policy_version
        rows = self.ready_rows.get(version, 0) + ready - before
        if rows:
            self.ready_rows[version] = rows
        else:
            self.ready_rows.pop(version, None)
        key = (version, record.position, record.ticket)
        if ready and not before:
            bisect.insort(self._ready, key)
            heapq.heappush(self._positions, (record.position, record.ticket))
            heapq.heappush(self._seals, (record.sealed_s, record.ticket))
            self.ready_bytes += record.nbytes
        elif before and not ready:
            del self._ready[bisect.bisect_left(self._ready, key)]
            self.ready_bytes -= record.nbytes

    def ready(self) -> Iterator[ExtentRecord]:
        """Yield the records with ready rows, oldest version first, then in order of prompts; none may change meanwhile.

        Not by ticket: prompts that are issued again have a new one, and belong before those that came after them.
        """
        return (self._extents[ticket] for _, _, ticket in self._ready)

    def lowest_position(self) -> int | None:
        """Return the first prompt position of all open records."""
        heap = self._positions
        while heap and not self._is_open(self._extents.get(heap[0][1])):
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def oldest_seal_s(self) -> float | None:
        """Return when the record with ready rows that has waited longest was sealed."""
        heap = self._seals
        while heap and ((record := self._extents.get(heap[0][1])) is None or not record.ready):
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def _is_open(self, record: ExtentRecord | None) -> bool:
        return record is not None and (record.state is ExtentState.RESERVED or record.ready > 0)
