"""Page-locked memory, which a card reads and writes without a core: copies are asynchronous, and several times as fast.

A slot of shared memory is registered with CUDA when it is first copied from or to a card, and stays so until it is
closed. Measured on an H200: 17 GB/s once, then 55 GB/s a copy each way. Where CUDA refuses, copies go through the
driver's own buffers, and one warning a process says why.
"""

from __future__ import annotations

import contextlib
import functools
import logging

import torch
from torch import Tensor

_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every card of the process."""

log = logging.getLogger(__name__)


def page_locked(nbytes: int) -> Tensor:
    """Return a page-locked buffer, ``(nbytes,)`` uint8; if CUDA refuses, log a warning and return a pageable one."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        _warn(nbytes, str(error))
        return torch.empty(nbytes, dtype=torch.uint8)


class CudaDriver:
    """CUDA, on the current stream of each device; copies of one device are executed in the order of the calls."""

    def __init__(self) -> None:
        self._is_refused = False

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in the memory of a card."""
        return tensor.is_cuda

    def register(self, address: int, nbytes: int) -> bool:
        """Page-lock memory; return whether it is. After the first refusal, which is logged, no memory is."""
        if self._is_refused:
            return False
        cudart = torch.cuda.cudart()
        error = cudart.cudaHostRegister(address, nbytes, _PORTABLE)
        if int(error) == 0:
            return True
        self._is_refused = True
        _warn(nbytes, str(cudart.cudaGetErrorString(error)))
        # The runtime keeps the error and reports it to the next launch, whichever that is: here to one of no use.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        return False

    def unregister(self, address: int) -> None:
        """Undo `register`; no copy is under way."""
        torch.cuda.cudart().cudaHostUnregister(address)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Begin a copy on the current stream."""
        target.copy_(source, non_blocking=True)

    def record(self, device: torch.device) -> torch.cuda.Event:
        """Record an event on the current stream of a device."""
        event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
        return event


class CardCopies:
    """Copies between a card and the host, executed in the order of `begin`; at the end of the context all are complete.

    Args:
        driver: The card's driver.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._devices: set[torch.device] = set()
        self._events: dict[str, torch.cuda.Event] = {}

    def begin(self, name: str, target: Tensor, source: Tensor) -> None:
        """Begin to copy a tensor, of which at least one side is on a card."""
        device = source.device if self._driver.holds(source) else target.device
        self._devices.add(device)
        self._driver.copy(target, source)
        self._events[name] = self._driver.record(device)

    def wait(self, name: str) -> None:
        """Wait until the last copy of this name is complete, in any thread; return at once if there is none."""
        if (event := self._events.get(name)) is not None:
            event.synchronize()

    def __enter__(self) -> CardCopies:
        return self

    def __exit__(self, *_: object) -> None:
        for device in self._devices:
            self._driver.record(device).synchronize()


@functools.cache
def process_driver() -> CudaDriver:
    """Return the driver of this process."""
    return CudaDriver()


def _warn(nbytes: int, error: str) -> None:
    log.warning("no page-locked memory, copies to and from the card are slower: bytes=%d error=%s",
                nbytes, error.partition("\n")[0])  # fmt: skip
