"""A fake GPU: copies begun on it are executed in order, and only when a mark after them is waited for.

So a copy that is used without a wait, or a buffer that is reused too early, gives wrong bytes.
"""

from __future__ import annotations

import torch


class LazyGpu:
    """A `Driver` over memory of the CPU.

    Attributes:
        allocated: Bytes of each buffer.
        copied: Copies begun.
        recorded: Marks made.
        synchronized: Marks waited for.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        """Take these tensors for tensors of the GPU."""
        self.allocated: list[int] = []
        self.copied = self.recorded = self.synchronized = 0
        self._held = {tensor.data_ptr() for tensor in tensors}
        self._stream: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def in_flight(self) -> int:
        """Copies begun and not executed."""
        return len(self._stream)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is the GPU's."""
        return tensor.data_ptr() in self._held

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return a buffer."""
        self.allocated.append(nbytes)
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin a copy."""
        self.copied += 1
        self._stream.append((target, source))

    def convert(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin a copy within the GPU."""
        self._stream.append((target, source))

    def record(self, device: torch.device) -> _Mark:
        """Mark the end of the copies begun."""
        self.recorded += 1
        return _Mark(self, list(self._stream))

    def wait_for(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Execute the copies before a mark; the stream is in order, so those are its first ones."""
        self.synchronized += 1
        with torch.no_grad():
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
