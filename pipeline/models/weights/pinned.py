"""Page-locked memory: shared memory is registered with CUDA, so that copies to and from a GPU use DMA.

A mapping is registered once in each process that has a GPU, and unregistered before it is unmapped. If CUDA refuses,
usually because of the limit on locked memory, a warning is logged and copies go through CUDA's own staging buffer.
"""

from __future__ import annotations

import atexit
import logging
import resource
from typing import Any

import torch

from pipeline.storage.arena import Arena

_PORTABLE = 1
_SUCCESS = 0

log = logging.getLogger(__name__)


class PinnedMemory:
    """A range of this process's memory, page-locked until `close`.

    Attributes:
        nbytes: Locked bytes; 0 if CUDA refused.
    """

    def __init__(self, address: int, nbytes: int, name: str, *, runtime: Any = None) -> None:
        """Register the range; if CUDA refuses, log one warning with the consequence.

        Args:
            address: Address of the first byte, page-aligned.
            nbytes: Length of the range.
            name: Name of its content, for the warning.
            runtime: The CUDA runtime; None for torch's.
        """
        self._address = address
        self._runtime = torch.cuda.cudart() if runtime is None else runtime
        code = int(self._runtime.cudaHostRegister(address, nbytes, _PORTABLE))
        self.nbytes = nbytes if code == _SUCCESS else 0
        if code == _SUCCESS:
            # A process may exit without closing its mapping; its pages must not stay locked.
            atexit.register(self.close)
            return
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "no limit" if soft == resource.RLIM_INFINITY else f"{soft:,} B"
        log.warning(
            "%s could not be page-locked, copies to and from the card are slower: bytes=%d cuda_error=%d "
            "limit_on_locked_memory=%s (ulimit -l, LimitMEMLOCK)", name, nbytes, code, limit,
        )  # fmt: skip
        if runtime is None:
            _clear_error()

    def close(self) -> None:
        """Unregister the range; a second call does nothing."""
        if self.nbytes:
            self.nbytes = 0
            atexit.unregister(self.close)
            self._runtime.cudaHostUnregister(self._address)


def pin_arena(arena: Arena, device: torch.device) -> PinnedMemory | None:
    """Page-lock an arena's payload in a process that computes on a GPU; return None in any other process."""
    return PinnedMemory(arena.address(), arena.payload_bytes, "the arena") if device.type == "cuda" else None


def _clear_error() -> None:
    # CUDA reports the refusal once more, to the next call: that is this kernel, not one of the model's.
    try:
        torch.zeros(1, device="cuda").add_(1)
    except RuntimeError as error:
        log.debug("CUDA's last error is cleared: %s", error)
