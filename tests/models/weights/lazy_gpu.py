"""A fake GPU: copies begun on it are executed in order, and only when a mark after them is waited for.

So a copy that is used without a wait, or whose source is changed too early, gives wrong bytes.
"""

from __future__ import annotations

import threading

import torch


class LazyGpu:
    """A `CudaDriver` over memory of the CPU.

    Attributes:
        copied_bytes: Bytes of the copies begun.
        recorded: Marks made.
        registered: Page-locked memory: bytes by address.
        registrations: Calls of `register`.
    """

    def __init__(self, *tensors: torch.Tensor, refuses: bool = False) -> None:
        """Take these tensors for tensors of the GPU; `refuses`: no memory can be page-locked."""
        self.copied_bytes = self.recorded = self.registrations = 0
        self.registered: dict[int, int] = {}
        self._refuses = refuses
        self._held = {tensor.data_ptr() for tensor in tensors}
        self._stream: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._lock = threading.Lock()

    @property
    def in_flight(self) -> int:
        """Copies begun and not executed."""
        return len(self._stream)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is the GPU's."""
        return tensor.data_ptr() in self._held

    def register(self, address: int, nbytes: int) -> bool:
        """Page-lock memory."""
        self.registrations += 1
        assert address not in self.registered, "CUDA refuses memory that is registered already"
        if not self._refuses:
            self.registered[address] = nbytes
        return not self._refuses

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        assert self.in_flight == 0
        del self.registered[address]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin a copy."""
        self.copied_bytes += source.nbytes
        self._stream.append((target, source))

    def record(self, device: torch.device) -> _Mark:
        """Mark the end of the copies begun."""
        self.recorded += 1
        return _Mark(self, list(self._stream))

    def wait_for(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Execute the copies before a mark; the stream is in order, so those are its first ones."""
        with self._lock, torch.no_grad():
            for copy in copies:
                if any(copy is left for left in self._stream):
                    copy[0].copy_(copy[1])
            self._stream = [left for left in self._stream if not any(left is copy for copy in copies)]


class _Mark:
    def __init__(self, gpu: LazyGpu, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._gpu = gpu
        self._copies = copies

    def synchronize(self) -> None:
        self._gpu.wait_for(self._copies)
