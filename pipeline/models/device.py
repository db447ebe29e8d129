"""The device that a process computes on, and its memory."""

from __future__ import annotations

import os

import torch


def process_device() -> torch.device:
    """Return this process's device: the one GPU that its CUDA_VISIBLE_DEVICES names, or the CPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return torch.device("cuda:0" if visible != "" and torch.cuda.is_available() else "cpu")


def allocator_bytes() -> dict[str, int]:
    """Return the bytes that PyTorch's allocator holds on this GPU, allocated and reserved; nothing without a GPU in use."""
    if not torch.cuda.is_initialized():
        return {}
    return {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
