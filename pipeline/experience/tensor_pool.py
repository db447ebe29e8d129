"""Memory for the tensors of batches, used again once no tensor lies in it.

The allocator gives a large tensor's pages back as it is freed, and the next one pays for each page again: three
quarters of the time of a batch of 8,192 tokens a row went there.

    free chunks of one size --pop--> chunk <-- lease <-- array over it <-- part <-- storage <-- tensor, its views
               ^                                 |
               +-------- append, at its end -----+

A lease is a new object for each hand-out. numpy takes it for the memory's owner and refers to it from the array and
from each view of the array; a storage of torch refers to its array until the last tensor, view, tensor saved by
autograd or DLPack capsule is gone. The lease therefore ends when nothing can reach the memory any more. No reference
count is read: since CPython 3.14 the interpreter borrows references to local variables, and a chunk in use may have the
count of a free one.

A lease may end in any thread and at any allocation, also while its thread is within this module. For that reason there
is no lock: `list.append`, `list.pop` and `dict.setdefault` are one step each, with or without the interpreter's lock,
and no Python code runs within them. A fork finds the lists whole, and the child has lists of its own.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import torch

from pipeline.experience.extent_format import Array, array_dtype, as_array, as_tensor

# Below, the allocator keeps its pages.
_LEAST_BYTES = 128 << 10


class _Chunk:
    """Memory, and the list of free chunks to which it belongs."""

    __slots__ = ("address", "free", "memory")

    def __init__(self, memory: Array, free: list[_Chunk]) -> None:
        self.memory = memory
        self.address = memory.ctypes.data
        self.free = free


class _Lease:
    """One hand-out of a chunk: the chunk is free again when this object ends.

    `__del__` takes a tenth of the time of `weakref.finalize`, and no registry grows with it.
    """

    __slots__ = ()
    chunk: _Chunk

    def __del__(self) -> None:
        self.chunk.free.append(self.chunk)


class _Size:
    """The free chunks of one size, and the class of their leases: an array of ctypes, which numpy takes as a buffer."""

    __slots__ = ("free", "lease_type")

    def __init__(self, size: int) -> None:
        self.free: list[_Chunk] = []
        self.lease_type: Any = type("_SizedLease", (_Lease, ctypes.c_ubyte * size), {"__slots__": ("chunk",)})


class BatchMemory:
    """Chunks of memory, each under the tensors of one hand-out at a time; for any number of threads."""

    def __init__(self, *, most_free_bytes: int = 512 << 20) -> None:
        """Begin with none.

        Args:
            most_free_bytes: Free bytes that are kept for later. Beyond, chunks go back, a size after another, in the
                order in which they became free.
        """
        self._most_free_bytes = most_free_bytes
        self._sizes: dict[int, _Size] = {}

    def empty(
        self, count: int, shape: tuple[int, ...], dtype: str, *, pin_memory: bool = False
    ) -> tuple[list[torch.Tensor], Array]:
        """Return tensors of any values; the memory is theirs as long as one of them, or a view of one, is held.

        Args:
            count: Number of tensors.
            shape: Shape of each.
            dtype: Their torch dtype, as headers name it.
            pin_memory: Whether they are page-locked; torch itself uses such memory again.

        Returns:
            The tensors, and the array (count, *shape) over all of them.
        """
        if pin_memory:
            whole = torch.empty((count, *shape), dtype=getattr(torch, dtype), pin_memory=True)
            return list(whole.unbind()), as_array(whole)
        kind = array_dtype(dtype)
        nbytes = count * math.prod(shape) * kind.itemsize
        lease = None if nbytes < _LEAST_BYTES else self._lease(nbytes)
        array = np.ndarray((count, *shape), kind, lease)
        # Each from its own part: a tensor's storage, which is what is pickled, ends where the tensor does.
        return [as_tensor(part, dtype) for part in array], array

    def _lease(self, nbytes: int) -> Any:
        # An eighth of a power of two: batches of nearly one size share chunks.
        step = 1 << (nbytes.bit_length() - 4)
        size = -(-nbytes // step) * step
        known = self._sizes.get(size) or self._sizes.setdefault(size, _Size(size))
        try:
            chunk = known.free.pop()
        except IndexError:
            self._trim()
            chunk = _Chunk(np.empty(size, np.uint8), known.free)
        lease = known.lease_type.from_address(chunk.address)
        lease.chunk = chunk
        return lease

    def _trim(self) -> None:
        excess_bytes = self.free_bytes() - self._most_free_bytes
        for size, known in self._sizes.copy().items():
            while known.free and excess_bytes > 0:
                # A slice: another thread may have taken the last one.
                del known.free[:1]
                excess_bytes -= size

    def free_bytes(self) -> int:
        """Return the bytes of the chunks that no tensor lies in."""
        return sum(size * len(known.free) for size, known in self._sizes.copy().items())


# Of this process: batches of all kinds and sources share it.
MEMORY = BatchMemory()
