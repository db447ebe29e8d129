"""A ring of page-locked buffers: each copy between a GPU and shared memory passes through it.

DMA needs page-locked memory. Shared memory itself is not page-locked: registering files of hundreds of GB takes
minutes, and kernels refuse it for files of some file systems. One ring serves the whole process; its buffers are
allocated at the first copy. While a GPU fills or reads one buffer, threads copy and hash another
(`pipeline.models.weights.slot_copy`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_BUFFERS = 3
_BUFFER_BYTES = 1 << 26

log = logging.getLogger(__name__)


class CudaDriver:
    """CUDA, on the current stream of each device; copies of one device are executed in the order of the calls."""

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in the memory of a GPU."""
        return tensor.is_cuda

    def allocate(self, nbytes: int) -> Tensor:
        """Return a page-locked buffer; if CUDA refuses, log a warning and return a pageable one."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            log.warning("no page-locked memory, copies to and from the card are slower: bytes=%d error=%s",
                        nbytes, str(error).partition("\n")[0])  # fmt: skip
            return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Begin a copy on the current stream."""
        target.copy_(source, non_blocking=True)

    def convert(self, target: Tensor, source: Tensor) -> None:
        """Begin a copy on the current stream."""
        target.copy_(source)

    def record(self, device: torch.device) -> torch.cuda.Event:
        """Record an event on the current stream of a device."""
        event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
        return event


class RingBuffer:
    """One buffer of the ring; it may be used again once its copies are complete.

    Attributes:
        tensor: ``(buffer_bytes,)`` uint8, page-locked if possible.
        array: The same memory as a numpy array.
    """

    def __init__(self, driver: CudaDriver, nbytes: int) -> None:
        self.tensor = driver.allocate(nbytes)
        self.array: Any = self.tensor.numpy()
        self._driver = driver
        self._devices: set[torch.device] = set()
        self._events: list[torch.cuda.Event] = []

    def copy_in(self, start: int, source: Tensor) -> None:
        """Begin a copy of a GPU's bytes, ``(n,)`` uint8, to ``[start, start + n)``."""
        self._driver.copy(self.tensor[start : start + len(source)], source)
        self._devices.add(source.device)

    def copy_out(self, start: int, target: Tensor) -> None:
        """Begin a copy of the bytes ``[start, start + n)`` to a GPU's memory, ``(n,)`` uint8."""
        self._driver.copy(target, self.tensor[start : start + len(target)])
        self._devices.add(target.device)

    def record(self) -> None:
        """Mark the end of the copies begun."""
        self._events += [self._driver.record(device) for device in self._devices]
        self._devices.clear()

    def wait(self) -> None:
        """Wait until the copies begun are complete; each mark is waited for once."""
        for event in self._events:
            event.synchronize()
        self._events.clear()


class PinnedRing:
    """The buffers, used by one copy of a slot at a time.

    Attributes:
        buffer_bytes: Bytes of one buffer.
        buffers: Number of buffers.
    """

    def __init__(
        self, driver: CudaDriver | None = None, *, buffers: int = _BUFFERS, buffer_bytes: int = _BUFFER_BYTES
    ) -> None:
        """Allocate nothing yet.

        Args:
            driver: The driver of the GPU; None for CUDA's.
            buffers: Number of buffers, at least 2.
            buffer_bytes: Bytes of one buffer.
        """
        self.buffers = buffers
        self.buffer_bytes = buffer_bytes
        self._driver = CudaDriver() if driver is None else driver
        self._allocated: list[RingBuffer] = []
        self._lock = threading.Lock()

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in the memory of a GPU, so that its copies pass through the ring."""
        return self._driver.holds(tensor)

    def convert(self, target: Tensor, source: Tensor) -> None:
        """Begin a copy within a GPU's memory, after the copies begun before it."""
        self._driver.convert(target, source)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other threads from the buffers; at the end all copies begun are complete."""
        with self._lock:
            try:
                yield
            finally:
                for buffer in self._allocated:
                    buffer.record()
                    buffer.wait()

    def buffer(self, number: int) -> RingBuffer:
        """Return the buffer of the n-th piece of a slot; pieces that are `buffers` apart share one."""
        place = number % self.buffers
        while len(self._allocated) <= place:
            self._allocated.append(RingBuffer(self._driver, self.buffer_bytes))
        return self._allocated[place]


@functools.cache
def process_ring() -> PinnedRing:
    """Return the ring of this process."""
    return PinnedRing()
