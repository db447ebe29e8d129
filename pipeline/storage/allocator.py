"""The allocator of extents in the arena."""

from __future__ import annotations

import bisect
from typing import NamedTuple

from pipeline.errors import ArenaFullError, LedgerError
from pipeline.storage.arena import ALIGNMENT_BYTES
from pipeline.storage.files import round_up


class Extent(NamedTuple):
    """A range of the arena's payload, in bytes."""

    offset: int
    nbytes: int


class ExtentAllocator:
    """First-fit allocation of extents; used by the buffer alone, rebuilt from the ledger after a restart.

    Invariant: the free ranges are sorted, disjoint and never adjacent, and ``free_bytes`` is their sum.

    Attributes:
        holds: Whether released extents stay taken until `let_go`, because a copy reads them (`hold`).
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.free_bytes = capacity_bytes
        self._offsets = [0]
        self._sizes = [capacity_bytes]
        self.holds = False
        self._released: list[Extent] = []

    def reserve(self, nbytes: int) -> Extent:
        """Take the first free range that holds `nbytes`.

        Raises:
            ArenaFullError: If there is none now.
        """
        needed = _aligned(nbytes)
        for index, size in enumerate(self._sizes):
            if size >= needed:
                return self._take(index, self._offsets[index], needed)
        raise ArenaFullError(
            f"extent of {needed:,} B does not fit: {self.free_bytes:,} B free of {self.capacity_bytes:,} B"
        )

    def take(self, extent: Extent) -> None:
        """Mark a known extent as taken, when a restarted buffer rebuilds its table.

        Raises:
            LedgerError: If it is not free: two extents would overlap.
        """
        needed = _aligned(extent.nbytes)
        index = bisect.bisect_right(self._offsets, extent.offset) - 1
        if index < 0 or extent.offset + needed > self._offsets[index] + self._sizes[index]:
            raise LedgerError(f"extent {extent.offset:,}+{needed:,} B overlaps another")
        self._take(index, extent.offset, needed)

    def shrink(self, extent: Extent, nbytes: int) -> Extent:
        """Free the tail of an extent once its true size is known."""
        kept, held = _aligned(nbytes), _aligned(extent.nbytes)
        if kept > held:
            raise LedgerError(f"extent of {held:,} B cannot hold {nbytes:,} B")
        if kept < held:
            self._give(extent.offset + kept, held - kept)
        return Extent(extent.offset, nbytes)

    def release(self, extent: Extent) -> None:
        """Free an extent and merge it with its free neighbours; between `hold` and `let_go` this is deferred."""
        if self.holds:
            self._released.append(extent)
        else:
            self._give(extent.offset, _aligned(extent.nbytes))

    def hold(self) -> None:
        """Keep every extent that is taken now from being reserved again before `let_go`."""
        self.holds = True

    def let_go(self) -> None:
        """Free the extents that were released since `hold`."""
        self.holds = False
        for extent in self._released:
            self.release(extent)
        self._released = []

    def _take(self, index: int, offset: int, nbytes: int) -> Extent:
        start, size = self._offsets[index], self._sizes[index]
        before, after = offset - start, start + size - offset - nbytes
        self._offsets[index : index + 1] = [start] * (before > 0) + [offset + nbytes] * (after > 0)
        self._sizes[index : index + 1] = [before] * (before > 0) + [after] * (after > 0)
        self.free_bytes -= nbytes
        return Extent(offset, nbytes)

    def _give(self, offset: int, nbytes: int) -> None:
        index = bisect.bisect_left(self._offsets, offset)
        self.free_bytes += nbytes
        if index < len(self._offsets) and self._offsets[index] == offset + nbytes:
            nbytes += self._sizes[index]
            del self._offsets[index], self._sizes[index]
        if index > 0 and self._offsets[index - 1] + self._sizes[index - 1] == offset:
            self._sizes[index - 1] += nbytes
            return
        self._offsets.insert(index, offset)
        self._sizes.insert(index, nbytes)


def _aligned(nbytes: int) -> int:
    return round_up(max(nbytes, 1), ALIGNMENT_BYTES)
