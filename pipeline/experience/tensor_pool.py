"""Memory of the tensors of batches, reused once no tensor uses it.

The allocator returns the pages of a large tensor to the system when the tensor is freed, and the next tensor faults in
each page again: three quarters of the time of a batch of 8,192 tokens a row were page faults.

    free chunks of one size --pop--> chunk <-- lease <-- array over it <-- part <-- storage <-- tensor, its views
               ^                                 |
               +------ append, when it ends -----+

A lease is a new object for each allocation. numpy treats it as the memory's owner and refers to it from the array and
from each view of the array. A storage of torch refers to its array until the last tensor, view, tensor saved by
autograd or DLPack capsule is freed. The lease is therefore freed when no object refers to the memory. No reference
count is read: since CPython 3.14 the interpreter borrows references to local variables, and a chunk in use may have the
count of a free one.

A lease may be freed in any thread and at any allocation, also while its thread executes this module. For that reason
there is no lock: `list.append`, `list.pop` and `dict.setdefault` are atomic, with or without the GIL, and no Python
code runs within them. The lists are consistent at every fork, and the child has its own copies.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import torch

from pipeline.experience.extent_format import Array, array_dtype, as_array, as_tensor

# Below this size the allocator keeps its pages.
_LEAST_BYTES = 128 << 10


class _Chunk:
    """Memory, and the list of free chunks that it returns to."""

    __slots__ = ("address", "free", "memory")

    def __init__(self, memory: Array, free: list[_Chunk]) -> None:
        self.memory = memory
        self.address = memory.ctypes.data
        self.free = free


class _Lease:
    """One allocation of a chunk: the chunk is free again when this object is freed.

    `__del__` takes a tenth of the time of `weakref.finalize`, and has no registry that grows with the leases.
    """

    __slots__ = ()
    chunk: _Chunk

    def __del__(self) -> None:
        self.chunk.free.append(self.chunk)


class _Size:
    """The free chunks of one size, and the class of their leases: a ctypes array, which numpy takes as a buffer."""

    __slots__ = ("free", "lease_type")

    def __init__(self, size: int) -> None:
        self.free: list[_Chunk] = []
        self.lease_type: Any = type("_SizedLease", (_Lease, ctypes.c_ubyte * size), {"__slots__": ("chunk",)})


class BatchMemory:
    """Chunks of memory, each used by the tensors of one allocation at a time; safe for any number of threads."""

    def __init__(self, *, most_free_bytes: int = 512 << 20) -> None:
        """Start without chunks.

        Args:
            most_free_bytes: Free bytes that are kept for reuse. Above it chunks are released, one size after another,
                in the order in which they became free.
        """
        self._most_free_bytes = most_free_bytes
        self._sizes: dict[int, _Size] = {}

    def empty(
        self, count: int, shape: tuple[int, ...], dtype: str, *, pin_memory: bool = False
    ) -> tuple[list[torch.Tensor], Array]:
        """Return uninitialized tensors; their memory is not reused as long as a reference to one, or to a view, exists.

        Args:
            count: Number of tensors.
            shape: Shape of each tensor.
            dtype: Their torch dtype, as named in extent headers.
            pin_memory: Whether they are page-locked; torch itself reuses such memory.

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
        # Each tensor from its own part: pickling writes the whole storage, which then ends where the tensor does.
        if dtype == "bfloat16":
            return [as_tensor(part, dtype) for part in array], array
        return list(map(torch.from_numpy, array)), array

    def _lease(self, nbytes: int) -> Any:
        # Sizes are rounded up to eighths of a power of two: batches of nearly one size share chunks.
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
        """Return the bytes of the free chunks."""
        return sum(size * len(known.free) for size, known in self._sizes.copy().items())


# One pool a process: batches of all kinds and sources share it.
MEMORY = BatchMemory()
