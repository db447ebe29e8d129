"""Sums over the ledger's records, updated with each change: no query walks over all records.

A record is open while it is reserved or holds a ready row. Two heaps may name records that are no longer open; these
are discarded when they reach the top, and all of them once they are most of a heap.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator, Mapping
from typing import Literal

from pipeline.storage.records import Chosen, ExtentRecord, ExtentState, ready_rows

_LEAST_ENTRIES = 64


class LedgerIndex:
    """The records that are reserved or hold ready rows, and sums over them.

    Attributes:
        reserved: Records of tickets not yet settled, by ticket, the oldest first.
        owned: Number of reserved records of each worker, by its index; -1: without a worker.
        reserved_rows: Reserved rows, by the policy version at which their tickets were handed out.
        ready_rows: Ready rows by the policy version that wrote them; versions without any are left out.
        ready_bytes: Bytes of sealed extents that hold a ready row; `sealed_bytes`: of all sealed extents.
    """

    def __init__(self, extents: Mapping[int, ExtentRecord]) -> None:
        """Begin without records.

        Args:
            extents: The ledger's own mapping of records by ticket, current at each query.
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
        """Add a record that has become reserved."""
        self.reserved[record.ticket] = record
        self.count(record, 1)
        heapq.heappush(self._positions, (record.position, record.ticket))
        self._trim()

    def count(self, record: ExtentRecord, sign: Literal[1, -1]) -> None:
        """Add or subtract a reserved record; a change of owner, version or rows is between a -1 and a 1."""
        _add(self.owned, record.owner, sign)
        _add(self.reserved_rows, record.policy_version, sign * record.rows)

    def settle(self, record: ExtentRecord) -> None:
        """Remove a record that is no longer reserved."""
        del self.reserved[record.ticket]
        self.count(record, -1)

    def seal(self, record: ExtentRecord) -> None:
        """Add a record that has become sealed; its ready rows are added by `change`."""
        self.sealed_bytes += record.nbytes

    def free(self, record: ExtentRecord, was: ExtentState) -> None:
        """Remove a record that has become free; it has no ready row."""
        if was is ExtentState.RESERVED:
            self.settle(record)
        else:
            self.sealed_bytes -= record.nbytes

    def change(self, record: ExtentRecord, ready: int) -> None:
        """Set the number of ready rows of a sealed record."""
        before, record.ready = record.ready, ready
        version = record.policy_version
        _add(self.ready_rows, version, ready - before)
        key = (version, record.position, record.ticket)
        if ready and not before:
            bisect.insort(self._ready, key)
            heapq.heappush(self._positions, (record.position, record.ticket))
            heapq.heappush(self._seals, (record.sealed_s, record.ticket))
            self.ready_bytes += record.nbytes
            self._trim()
        elif before and not ready:
            del self._ready[bisect.bisect_left(self._ready, key)]
            self.ready_bytes -= record.nbytes

    def ready(self) -> Iterator[ExtentRecord]:
        """Yield the records with ready rows, oldest version first, then in order of prompts; none may change meanwhile.

        The order is not by ticket: prompts that are issued again have a new ticket, and precede the prompts after them.
        """
        return (self._extents[ticket] for _, _, ticket in self._ready)

    def oldest_rows(self, count: int) -> Chosen:
        """Return the `count` ready rows of the oldest versions, in order of prompts; at least `count` are ready."""
        chosen: Chosen = []
        records = self.ready()
        while count:
            record = next(records)
            chosen.append((record, ready_rows(record)[:count]))
            count -= len(chosen[-1][1])
        return chosen

    def lowest_position(self) -> int | None:
        """Return the first prompt position of all open records; None if there are none."""
        heap = self._positions
        while heap and not self._is_open(self._extents.get(heap[0][1])):
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def oldest_seal_s(self) -> float | None:
        """Return the time of the earliest seal among the records with ready rows; None if there are none."""
        heap = self._seals
        while heap and ((record := self._extents.get(heap[0][1])) is None or not record.ready):
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def _trim(self) -> None:
        """Make the heaps anew once most of their entries are of records that are no longer open.

        The server of a replay buffer never asks for their tops; and a record may stay at the top for long.
        """
        if max(len(self._positions), len(self._seals)) > 4 * len(self._extents) + _LEAST_ENTRIES:
            records = [record for record in self._extents.values() if self._is_open(record)]
            self._positions = [(record.position, record.ticket) for record in records]
            self._seals = [(record.sealed_s, record.ticket) for record in records if record.ready]
            heapq.heapify(self._positions)
            heapq.heapify(self._seals)

    def _is_open(self, record: ExtentRecord | None) -> bool:
        return record is not None and (record.state is ExtentState.RESERVED or record.ready > 0)


def _add(sums: dict[int, int], key: int, amount: int) -> None:
    """Add to a sum; a sum of 0 is removed."""
    if total := sums.get(key, 0) + amount:
        sums[key] = total
    else:
        sums.pop(key, None)
