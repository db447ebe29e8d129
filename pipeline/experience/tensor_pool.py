"""Memory for the tensors of batches, used again once nobody holds them.

The allocator gives a large tensor's pages back as it is freed, and the next one pays for each page again: three
quarters of the time of a batch of 8,192 tokens a row went there.
"""

from __future__ import annotations

import math
import sys
import threading

import numpy as np
import torch

from pipeline.experience.extent_format import Array, array_dtype, as_array, as_tensor

# Below, the allocator keeps its pages.
_LEAST_BYTES = 128 << 10
# A chunk of the list that nobody else holds: the list, the loop's variable and the question itself.
_OWN_REFERENCES = 3


class BatchMemory:
    """Chunks of memory, each under one tensor at a time; for any number of threads."""

    def __init__(self, *, most_free_bytes: int = 512 << 20) -> None:
        """Begin with none.

        Args:
            most_free_bytes: What is kept for later; beyond, the chunks that were made first go back.
        """
        self._most_free_bytes = most_free_bytes
        self._chunks: dict[int, list[Array]] = {}
        self._lock = threading.Lock()

    def empty(
        self, count: int, shape: tuple[int, ...], dtype: str, *, pin_memory: bool = False
    ) -> tuple[list[torch.Tensor], Array]:
        """Return tensors of any values; the memory is theirs as long as one of them, or a view of one, is held.

        Args:
            count: How many.
            shape: Of each.
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
        chunk = None if nbytes < _LEAST_BYTES else self._take(nbytes)
        array = np.ndarray((count, *shape), kind, chunk)
        # Each from its own part: a tensor's storage, which is what is pickled, ends where the tensor does.
        return [as_tensor(part, dtype) for part in array], array

    def _take(self, nbytes: int) -> Array:
        # An eighth of a power of two: batches of nearly one size share chunks.
        step = 1 << (nbytes.bit_length() - 4)
        size = -(-nbytes // step) * step
        with self._lock:
            for chunk in self._chunks.get(size, ()):
                if sys.getrefcount(chunk) == _OWN_REFERENCES:
                    return chunk
            self._trim()
            chunk = np.empty(size, np.uint8)
            self._chunks.setdefault(size, []).append(chunk)
            return chunk

    def _trim(self) -> None:
        free_bytes = self.free_bytes()
        for chunks in self._chunks.values():
            kept = []
            for chunk in chunks:
                if free_bytes > self._most_free_bytes and sys.getrefcount(chunk) == _OWN_REFERENCES:
                    free_bytes -= chunk.nbytes
                else:
                    kept.append(chunk)
            chunks[:] = kept

    def free_bytes(self) -> int:
        """Return how much is kept that no tensor lies in."""
        return sum(
            chunk.nbytes
            for chunks in self._chunks.values()
            for chunk in chunks
            if sys.getrefcount(chunk) == _OWN_REFERENCES
        )


# Of this process: batches of all kinds and sources share it.
MEMORY = BatchMemory()
