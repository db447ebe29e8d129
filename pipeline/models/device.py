"""The device of a process, and its allocator's memory."""

from __future__ import annotations

import os

import torch


def process_device() -> torch.device:
    """Return this process's device: the one GPU that its CUDA_VISIBLE_DEVICES names, or the CPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return torch.device("cuda:0" if visible != "" and torch.cuda.is_available() else "cpu")


def allocator_bytes() -> dict[str, int]:
    """Return the allocated and reserved bytes of PyTorch's allocator on this GPU; empty if no GPU is in use."""
    if not torch.cuda.is_initialized():
        return {}
    return {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
