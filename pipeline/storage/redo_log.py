"""A redo log: several writes to shared memory, applied all or none, also if their writer is killed at any store.

    0     committed u64, applied u64, length u64, checksum u64
    32    the writes of the transaction under way: offset u64, length u32, bytes

A transaction's writes go to the log, `committed` is stored, the writes are applied, `applied` is stored. A writer that
is killed before `committed` has changed nothing. After a later kill the next writer applies the writes again; this is
harmless because they are plain values.
"""

from __future__ import annotations

import struct

import xxhash

from pipeline.errors import LedgerError

REDO_LOG_HEADER_BYTES = 32
_COMMITTED, _APPLIED, _LENGTH, _CHECKSUM = range(4)
_WRITE = struct.Struct("<QI")
WRITE_HEADER_BYTES = _WRITE.size


class RedoLog:
    """Transactions over a range of shared memory that one process writes; the log lies at its start."""

    def __init__(self, memory: memoryview, nbytes: int) -> None:
        """Open it and finish the transaction that a killed writer left behind.

        Args:
            memory: The memory to write, the log included.
            nbytes: Size of the log, its header included.

        Raises:
            LedgerError: If the unfinished transaction is torn.
        """
        self.memory = memory
        self.marks = memory[:REDO_LOG_HEADER_BYTES].cast("Q")
        self._nbytes = nbytes
        self._writes: list[tuple[int, bytes]] = []
        self._redo()

    @property
    def is_fresh(self) -> bool:
        """Whether nothing was ever committed."""
        return not self.marks[_COMMITTED]

    def put(self, offset: int, data: bytes) -> None:
        """Add a write to the transaction; `commit` applies it."""
        self._writes.append((offset, data))

    def commit(self) -> None:
        """Apply all writes since the last commit.

        Raises:
            LedgerError: If the log has no room for them.
        """
        writes, self._writes = self._writes, []
        body = b"".join([_WRITE.pack(offset, len(data)) + data for offset, data in writes])
        if REDO_LOG_HEADER_BYTES + len(body) > self._nbytes:
            raise LedgerError(f"a transaction of {len(body):,} B does not fit into a redo log of {self._nbytes:,} B")
        self.memory[REDO_LOG_HEADER_BYTES : REDO_LOG_HEADER_BYTES + len(body)] = body
        self.marks[_LENGTH] = len(body)
        self.marks[_CHECKSUM] = xxhash.xxh3_64_intdigest(body)
        # This store commits the transaction.
        self.marks[_COMMITTED] += 1
        for offset, data in writes:
            self.memory[offset : offset + len(data)] = data
        self.marks[_APPLIED] = self.marks[_COMMITTED]

    def close(self) -> None:
        """Release the memory; its content stays."""
        self.marks.release()
        self.memory.release()

    def _redo(self) -> None:
        if self.marks[_COMMITTED] == self.marks[_APPLIED]:
            return
        body = bytes(self.memory[REDO_LOG_HEADER_BYTES : REDO_LOG_HEADER_BYTES + self.marks[_LENGTH]])
        if xxhash.xxh3_64_intdigest(body) != self.marks[_CHECKSUM]:
            raise LedgerError("the redo log's committed transaction is torn")
        start = 0
        while start < len(body):
            offset, length = _WRITE.unpack_from(body, start)
            start += _WRITE.size
            self.memory[offset : offset + length] = body[start : start + length]
            start += length
        self.marks[_APPLIED] = self.marks[_COMMITTED]
