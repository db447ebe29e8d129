"""The device of a process, and its allocator's memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Final

import torch

from pipeline.errors import ConfigError

_ALLOCATOR_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

log = logging.getLogger(__name__)


def process_device() -> torch.device:
    """Return this process's device: the first GPU that its CUDA_VISIBLE_DEVICES names, or the CPU.

    Raises:
        ConfigError: If CUDA_VISIBLE_DEVICES names a GPU that PyTorch cannot use: a run would silently use the CPU.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible != "" and torch.cuda.is_available():
        return torch.device("cuda:0")
    # CUDA ignores the list from the first invalid number on: "-1" means no GPU.
    if not visible or visible.startswith("-1"):
        return torch.device("cpu")
    raise ConfigError(
        f"this process was given GPU {visible} (CUDA_VISIBLE_DEVICES) and cannot use it: {_cuda_problem()}; "
        'CUDA_VISIBLE_DEVICES="" runs on the CPU'
    )


def device_name(device: torch.device) -> str:
    """Return the name of a device: that of the GPU in the driver's words, or its type, such as "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def grow_segments(device: torch.device, environ: Mapping[str, str]) -> bool:
    """Have this process's allocator map memory of its card page by page, where its user has set nothing else.

    Segments of fixed sizes are kept for later requests of the same sizes, and passes of ragged rows hardly make any: a
    trainer held 8 to 44 % more than its plan. Call it before the first tensor is on the card. It is no variable of the
    environment: vLLM's processes must not inherit it, since the memory that they free asleep is of fixed segments. Nor
    is it for a process that captures graphs, whose pools are segments of their own. Where the driver cannot map such
    memory, as for many virtual cards, a warning says so, and segments are fixed.

    Args:
        device: The device of the process.
        environ: The variables of the process.

    Returns:
        Whether it does.
    """
    if device.type != "cuda" or any(environ.get(name) for name in _ALLOCATOR_VARIABLES):
        return False
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        _first_tensor(device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        log.warning("segments of the card's memory do not grow, more of it is reserved: error=%s",
                    str(error).partition("\n")[0])  # fmt: skip
        return False
    return True


def _first_tensor(device: torch.device) -> torch.Tensor:
    return torch.empty(1, device=device)


def allocator_bytes() -> dict[str, int]:
    """Return the allocated and reserved bytes of PyTorch's allocator on this GPU; empty if no GPU is in use."""
    if not torch.cuda.is_initialized():
        return {}
    return {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}


def free_cached() -> None:
    """Give the memory that PyTorch's allocator has cached back to this GPU, if one is in use."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _cuda_problem() -> str:
    """Return the reason why CUDA cannot be initialized in this process, on one line."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        # A PyTorch without CUDA raises AssertionError.
        return " ".join(str(error).split()).rstrip(".")
    return "CUDA shows no device"
