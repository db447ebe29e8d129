"""What the ledger's records add up to, kept up to date as they change: no question costs a walk over all that is held.

A record is open while it is reserved or holds a ready row. Two heaps may name records that are not open any more; such
are thrown away when they come up.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator, Mapping
from typing import Literal

from pipeline.storage.records import ExtentRecord, ExtentState


class LedgerIndex:
    """The records that are reserved or hold ready rows, and sums over them.

    Attributes:
        reserved: Records of tickets not yet settled, by ticket, the oldest first.
        owned: How many of them each worker holds, by its index; -1 for those that none does.
        reserved_rows: Rows they may become, by the policy version they were handed out at.
        ready_rows: Ready rows by the policy version that wrote them; versions without any are left out.
        ready_bytes: Bytes of sealed extents that hold a ready row; `sealed_bytes` of all that are sealed.
    """

    def __init__(self, extents: Mapping[int, ExtentRecord]) -> None:
        """Begin with no record at all.

        Args:
            extents: The ledger's records by ticket, as they are when this is asked.
        """
        self.reserved: dict[int, ExtentRecord] = {}
        self.owned: dict[int, int] = {}
        self.reserved_rows: dict[int, int] = {}
        self.ready_rows: dict[int, int] = {}
        self.ready_bytes = self.sealed_bytes = 0
        self._extents = extents
        self._ready: list[tuple[int, int, int]] = []
        self._positions: list[tuple[int, int]] = []
        self._seals: list[tuple[float, int]] = []

    def reserve(self, record: ExtentRecord) -> None:
        """Take in a record that has become reserved."""
        self.reserved[record.ticket] = record
        self.count(record, 1)
        heapq.heappush(self._positions, (record.position, record.ticket))

    def count(self, record: ExtentRecord, sign: Literal[1, -1]) -> None:
        """Count a reserved record in or out; who changes its owner, version or rows does both around it."""
        _add(self.owned, record.owner, sign)
        _add(self.reserved_rows, record.policy_version, sign * record.rows)

    def settle(self, record: ExtentRecord) -> None:
        """Forget a record that ceases to be reserved."""
        del self.reserved[record.ticket]
        self.count(record, -1)

    def seal(self, record: ExtentRecord) -> None:
        """Take in a record that has become sealed; its ready rows are told of by `change`."""
        self.sealed_bytes += record.nbytes

    def free(self, record: ExtentRecord, was: ExtentState) -> None:
        """Forget a record that has become free, without a ready row."""
        if was is ExtentState.RESERVED:
            self.settle(record)
        else:
            self.sealed_bytes -= record.nbytes

    def change(self, record: ExtentRecord, ready: int) -> None:
        """Set how many rows of a sealed record are ready."""
        before, record.ready = record.ready, ready
        version = record.policy_version
        _add(self.ready_rows, version, ready - before)
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


def _add(sums: dict[int, int], key: int, amount: int) -> None:
    """Add to a sum; one of nothing is left out."""
    if total := sums.get(key, 0) + amount:
        sums[key] = total
    else:
        sums.pop(key, None)
