"""The arena: one shared-memory file with the ledger and every experience between its rollout and its training step.

    offset 0            header, one page: magic, layout, sizes, run
    4,096               ledger: journal, totals, one record an extent (see `pipeline.storage.ledger`)
    payload_offset      extents, each aligned to 64 bytes; an extent's offset counts from here

The file is allocated whole with posix_fallocate. A sparse file on a full tmpfs is a SIGBUS at the first write, which no
handler mends; an allocation that fails is an error that names the sizes.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

from pipeline.errors import ArenaFullError, ConfigError, LedgerError

ALIGNMENT_BYTES = 64
PAGE_BYTES = 4096
_MAGIC = b"rlhfd-arena\x00\x00\x00\x00\x02"
_HEADER = struct.Struct("<16sQQQQ")
_MADV_POPULATE_WRITE = 23


class Arena:
    """A mapping of the arena's file; owns the mapping, not the file.

    The buffer maps the ledger alone (`payload=False`): its memory stays small whatever the arena's size.
    """

    def __init__(self, path: Path, *, payload: bool = True) -> None:
        """Map an existing arena.

        Raises:
            LedgerError: If the file is no arena, or shorter than its header says.
        """
        self.path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            header = os.pread(descriptor, _HEADER.size, 0)
            size_bytes = os.fstat(descriptor).st_size
            if len(header) < _HEADER.size or not header.startswith(_MAGIC):
                raise LedgerError(f"{path} is no arena of this version")
            _, self.ledger_bytes, self.payload_offset, self.payload_bytes, self.layout = _HEADER.unpack(header)
            if size_bytes < self.payload_offset + self.payload_bytes:
                raise LedgerError(
                    f"{path} holds {size_bytes:,} B, its header says {self.payload_offset + self.payload_bytes:,} B"
                )
            length = self.payload_offset + (self.payload_bytes if payload else 0)
            self._map = mmap.mmap(descriptor, length)
        finally:
            os.close(descriptor)
        self._whole = memoryview(self._map)
        self.ledger = self._whole[PAGE_BYTES : PAGE_BYTES + self.ledger_bytes]
        self.payload = self._whole[self.payload_offset :]

    @classmethod
    def create(cls, path: Path, *, payload_bytes: int, ledger_bytes: int, layout: int) -> None:
        """Allocate a new arena file of mode 0600.

        Args:
            path: Where; its folder exists and is ours alone.
            payload_bytes: Room for extents.
            ledger_bytes: Room for the ledger.
            layout: Number of the ledger's layout; an attach with another one is refused by the ledger.

        Raises:
            ConfigError: If the file system has less room than that.
        """
        payload_offset = _round_up(PAGE_BYTES + ledger_bytes, PAGE_BYTES)
        total_bytes = payload_offset + _round_up(payload_bytes, PAGE_BYTES)
        refuse_larger_than_free(path.parent, total_bytes, "buffer.arena_bytes: an arena")
        temporary = path.with_suffix(".new")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            allocate(descriptor, total_bytes, "buffer.arena_bytes: an arena")
            os.pwrite(
                descriptor,
                _HEADER.pack(_MAGIC, ledger_bytes, payload_offset, _round_up(payload_bytes, PAGE_BYTES), layout),
                0,
            )
            # Renamed when whole: whoever finds `path` finds an arena, however its creator died.
            os.rename(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def populate(self) -> None:
        """Fault in every page of this process's mapping, so that no copy pays for it (12 against 1.1 GB/s)."""
        try:
            self._map.madvise(_MADV_POPULATE_WRITE)
        except OSError as error:
            # Kernels before 5.14 do not know it; the first pass over the arena is slower there, nothing else.
            if error.errno != errno.EINVAL:
                raise

    def extent(self, offset: int, nbytes: int) -> memoryview:
        """Return the bytes of one extent, writable.

        Raises:
            LedgerError: If the extent does not lie inside the arena.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.payload_bytes:
            raise LedgerError(f"extent {offset:,}+{nbytes:,} B lies outside an arena of {self.payload_bytes:,} B")
        return self.payload[offset : offset + nbytes]

    def address(self) -> int:
        """Return the address of the first payload byte in this process, as cudaHostRegister needs it."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + int(self.payload_offset)

    def close(self) -> None:
        """Unmap. Views handed out before (tensors too) keep the mapping alive until they go."""
        self.ledger.release()
        self.payload.release()
        self._whole.release()
        try:
            self._map.close()
        except BufferError:
            # A tensor over an extent still lives; the mapping goes with it.
            pass


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


def refuse_larger_than_free(folder: Path, nbytes: int, what: str) -> None:
    """Raise ConfigError when `folder`'s file system cannot hold `nbytes` more."""
    system = os.statvfs(folder)
    if nbytes > system.f_bavail * system.f_frsize:
        raise no_room(folder, nbytes, what)


def no_room(folder: Path, nbytes: int, what: str) -> ConfigError:
    """Return the error that names what did not fit, and what `folder`'s file system has."""
    system = os.statvfs(folder)
    free_bytes, total_bytes = system.f_bavail * system.f_frsize, system.f_blocks * system.f_frsize
    return ConfigError(f"{what} of {nbytes:,} B does not fit: {free_bytes:,} B free of {total_bytes:,} B on {folder}")


def allocate(descriptor: int, nbytes: int, what: str) -> None:
    """Allocate every page of a shared file, or raise ConfigError naming both sizes."""
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise no_room(Path(os.readlink(f"/proc/self/fd/{descriptor}")).parent, nbytes, what) from error


def _round_up(nbytes: int, multiple: int) -> int:
    return (nbytes + multiple - 1) // multiple * multiple
