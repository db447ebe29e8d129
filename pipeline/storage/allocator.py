"""The allocator of extents in the arena."""

from __future__ import annotations

import bisect
from typing import NamedTuple

from pipeline.errors import ArenaFullError, LedgerError
from pipeline.storage.arena import ALIGNMENT_BYTES, _round_up


class Extent(NamedTuple):
    """A range of the arena's payload, in bytes."""

    offset: int
    nbytes: int


class ExtentAllocator:
    """First-fit allocation of extents; lives in the buffer alone, rebuilt from the ledger after a restart.

    Invariant: the free ranges are sorted, disjoint and never adjacent, and ``free_bytes`` is their sum.

    Attributes:
        holds: Whether what is released stays taken for now, for somebody reads it (`hold`).
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
        wanted = _round_up(max(nbytes, 1), ALIGNMENT_BYTES)
        for index, size in enumerate(self._sizes):
            if size >= wanted:
                return self._take(index, self._offsets[index], wanted)
        raise ArenaFullError(
            f"extent of {wanted:,} B does not fit: {self.free_bytes:,} B free of {self.capacity_bytes:,} B"
        )

    def take(self, extent: Extent) -> None:
        """Mark a known extent as taken, when a restarted buffer rebuilds its table.

        Raises:
            LedgerError: If it is not free, so two extents would overlap.
        """
        wanted = _round_up(max(extent.nbytes, 1), ALIGNMENT_BYTES)
        index = bisect.bisect_right(self._offsets, extent.offset) - 1
        if index < 0 or extent.offset + wanted > self._offsets[index] + self._sizes[index]:
            raise LedgerError(f"extent {extent.offset:,}+{wanted:,} B overlaps another")
        self._take(index, extent.offset, wanted)

    def shrink(self, extent: Extent, nbytes: int) -> Extent:
        """Give the tail of an extent back once its true size is known."""
        kept, held = _round_up(max(nbytes, 1), ALIGNMENT_BYTES), _round_up(max(extent.nbytes, 1), ALIGNMENT_BYTES)
        if kept > held:
            raise LedgerError(f"extent of {held:,} B cannot hold {nbytes:,} B")
        if kept < held:
            self._give(extent.offset + kept, held - kept)
        return Extent(extent.offset, nbytes)

    def release(self, extent: Extent) -> None:
        """Give an extent back, merging it with its free neighbours."""
        if self.holds:
            self._released.append(extent)
        else:
            self._give(extent.offset, _round_up(max(extent.nbytes, 1), ALIGNMENT_BYTES))

    def hold(self) -> None:
        """Let no extent that is taken now be reserved anew before `let_go`."""
        self.holds = True

    def let_go(self) -> None:
        """Give back what was released since `hold`."""
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
