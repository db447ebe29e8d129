"""The arena: one shared-memory file with the ledger and every experience between its rollout and its training step.

    offset 0            header, one page: magic, layout, sizes, run
    4,096               ledger: journal, totals, one record an extent (see `pipeline.storage.ledger`)
    payload_offset      extents, each aligned to 64 bytes; an extent's offset counts from here

The file is allocated whole with posix_fallocate. A sparse file on a full tmpfs is a SIGBUS at the first write, which no
handler mends; an allocation that fails is an error that names the sizes.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
from pathlib import Path

from pipeline.errors import LedgerError
from pipeline.storage.files import allocate, refuse_larger_than_free

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


def _round_up(nbytes: int, multiple: int) -> int:
    return (nbytes + multiple - 1) // multiple * multiple
