"""The arena: one shared-memory file with the ledger and all experience from its rollout to its training step.

    offset 0            header, one page: magic, layout, sizes, run
    4,096               ledger: redo log, totals, one record an extent (see `pipeline.storage.ledger`)
    payload_offset      extents, each aligned to 64 bytes; an extent's offset counts from here

The file is allocated whole with posix_fallocate. A sparse file on a full tmpfs causes a SIGBUS at the first write, and
no handler repairs that; a failed allocation is an error with both sizes.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from pathlib import Path

from pipeline.errors import LedgerError
from pipeline.storage.files import allocate, refuse_larger_than_free, replacing, round_up
from pipeline.storage.truncation import truncated

ALIGNMENT_BYTES = 64
PAGE_BYTES = 4096
_MAGIC = b"rlhfd-arena\x00\x00\x00\x00\x02"
_HEADER = struct.Struct("<16sQQQQ")
_MADV_POPULATE_WRITE = 23


class Arena:
    """A mapping of the arena's file; owns the mapping, not the file.

    The buffer maps the ledger alone (`payload=False`): its memory stays small at any arena size.
    """

    def __init__(self, path: Path, *, payload: bool = True) -> None:
        """Map an existing arena.

        Raises:
            LedgerError: If the file is no arena, or shorter than the sizes in its header.
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
                raise LedgerError(truncated(path, size_bytes, self.payload_offset + self.payload_bytes))
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
            path: Path of the file; its folder exists and is accessible to this user alone.
            payload_bytes: Size of the payload, the room for extents.
            ledger_bytes: Size of the ledger.
            layout: Number of the ledger's layout (`LedgerLayout.identity`); another layout is not taken over.

        Raises:
            ConfigError: If the file system has less free space.
        """
        payload_offset = round_up(PAGE_BYTES + ledger_bytes, PAGE_BYTES)
        payload_bytes = round_up(payload_bytes, PAGE_BYTES)
        refuse_larger_than_free(path.parent, payload_offset + payload_bytes, "buffer.arena_bytes: an arena")
        with replacing(path) as descriptor:
            allocate(descriptor, payload_offset + payload_bytes, "buffer.arena_bytes: an arena")
            os.pwrite(descriptor, _HEADER.pack(_MAGIC, ledger_bytes, payload_offset, payload_bytes, layout), 0)

    def populate(self) -> None:
        """Fault in every page of this process's mapping: later copies have no page faults (12 against 1.1 GB/s)."""
        try:
            self._map.madvise(_MADV_POPULATE_WRITE)
        except OSError as error:
            # Kernels before 5.14 do not support it; there the first pass over the arena is slower, nothing else.
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

    def close(self) -> None:
        """Unmap. Views of it that exist (tensors too) keep the mapping alive until they are freed."""
        self.ledger.release()
        self.payload.release()
        self._whole.release()
        try:
            self._map.close()
        except BufferError:
            # A tensor over an extent is in use; its end unmaps.
            pass
