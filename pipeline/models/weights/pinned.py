"""Page-locked memory: what lies in shared memory is registered with CUDA, so that copies to and from a card are DMA.

A mapping is registered once in each process that has a card, and unregistered before it is unmapped. Where CUDA refuses
- the limit on locked memory, as a rule - a warning says so and everything works, through CUDA's own staging buffer.
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
    """A range of this process's memory, page-locked for as long as it is open.

    Attributes:
        nbytes: How much of it is locked; 0 where it could not be.
    """

    def __init__(self, address: int, nbytes: int, what: str, *, runtime: Any = None) -> None:
        """Register the range; say once what it costs if that is refused.

        Args:
            address: Of its first byte, at the start of a page.
            nbytes: Its length.
            what: What it holds, for the warning.
            runtime: CUDA's; left out, torch's.
        """
        self._address = address
        self._runtime = torch.cuda.cudart() if runtime is None else runtime
        code = int(self._runtime.cudaHostRegister(address, nbytes, _PORTABLE))
        self.nbytes = nbytes if code == _SUCCESS else 0
        if code == _SUCCESS:
            # A process may end without closing what it mapped; a page must not stay locked for that.
            atexit.register(self.close)
            return
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "no limit" if soft == resource.RLIM_INFINITY else f"{soft:,} B"
        log.warning(
            "%s could not be page-locked, copies to and from the card are slower: bytes=%d cuda_error=%d "
            "limit_on_locked_memory=%s (ulimit -l, LimitMEMLOCK)", what, nbytes, code, limit,
        )  # fmt: skip
        if runtime is None:
            _forget_error()

    def close(self) -> None:
        """Unregister; do nothing the second time."""
        if self.nbytes:
            self.nbytes = 0
            atexit.unregister(self.close)
            self._runtime.cudaHostUnregister(self._address)


def pin_arena(arena: Arena, device: torch.device) -> PinnedMemory | None:
    """Page-lock an arena's payload in a process that computes on a card; return None in one that does not."""
    return PinnedMemory(arena.address(), arena.payload_bytes, "the arena") if device.type == "cuda" else None


def _forget_error() -> None:
    # CUDA hands a refusal to whoever asks next, too: here that is this kernel, not one of the model's.
    try:
        torch.zeros(1, device="cuda").add_(1)
    except RuntimeError as error:
        log.debug("CUDA's last error is cleared: %s", error)
