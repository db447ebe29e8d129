"""A redo journal: several writes to shared memory that all happen or none, whenever their writer is killed.

    0     committed u64, applied u64, length u64, checksum u64
    32    the writes of the transaction under way: offset u64, length u32, bytes

A transaction's writes go to the journal, `committed` is stored, the writes are made, `applied` is stored. A writer
killed before `committed` changed nothing; killed after it, the next one makes the writes again, which is harmless
because they are plain values.
"""

from __future__ import annotations

import struct

import xxhash

from pipeline.errors import LedgerError

REDO_LOG_HEADER_BYTES = 32
_COMMITTED, _APPLIED, _LENGTH, _CHECKSUM = range(4)
_WRITE = struct.Struct("<QI")


class RedoLog:
    """Transactions over a piece of shared memory that one process writes; the journal lies at its start."""

    def __init__(self, memory: memoryview, nbytes: int) -> None:
        """Open it, finishing the transaction that a killed writer left behind.

        Args:
            memory: What is written, the journal included.
            nbytes: Room of the journal, its header included.

        Raises:
            LedgerError: If the transaction that was left behind is torn.
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
        """Add a write to the transaction; it is made by `commit`."""
        self._writes.append((offset, data))

    def commit(self) -> None:
        """Make all writes since the last commit.

        Raises:
            LedgerError: If there is no room for them.
        """
        writes, self._writes = self._writes, []
        body = b"".join([_WRITE.pack(offset, len(data)) + data for offset, data in writes])
        if REDO_LOG_HEADER_BYTES + len(body) > self._nbytes:
            raise LedgerError(f"a transaction of {len(body):,} B does not fit into a journal of {self._nbytes:,} B")
        self.memory[REDO_LOG_HEADER_BYTES : REDO_LOG_HEADER_BYTES + len(body)] = body
        self.marks[_LENGTH] = len(body)
        self.marks[_CHECKSUM] = xxhash.xxh3_64_intdigest(body)
        # From this store on the transaction happened; before it, it did not.
        self.marks[_COMMITTED] += 1
        for offset, data in writes:
            self.memory[offset : offset + len(data)] = data
        self.marks[_APPLIED] = self.marks[_COMMITTED]

    def close(self) -> None:
        """Let go of the memory; what it holds stays."""
        self.marks.release()
        self.memory.release()

    def _redo(self) -> None:
        if self.marks[_COMMITTED] == self.marks[_APPLIED]:
            return
        body = bytes(self.memory[REDO_LOG_HEADER_BYTES : REDO_LOG_HEADER_BYTES + self.marks[_LENGTH]])
        if xxhash.xxh3_64_intdigest(body) != self.marks[_CHECKSUM]:
            raise LedgerError("the journal's committed transaction is torn")
        start = 0
        while start < len(body):
            offset, length = _WRITE.unpack_from(body, start)
            start += _WRITE.size
            self.memory[offset : offset + length] = body[start : start + length]
            start += length
        self.marks[_APPLIED] = self.marks[_COMMITTED]
