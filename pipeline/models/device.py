"""Which device a process computes on."""

from __future__ import annotations

import os

import torch

from pipeline.telemetry.slab import SlotWriter


def process_device() -> torch.device:
    """Return this process's device: the one GPU that its CUDA_VISIBLE_DEVICES names, or the CPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return torch.device("cuda:0" if visible != "" and torch.cuda.is_available() else "cpu")


def show_memory(writer: SlotWriter) -> None:
    """Show the allocator's memory on the current device, if this process computes on a GPU."""
    if torch.cuda.is_initialized():
        writer.gauge("rlhfd_torch_memory_bytes", state="allocated").set(torch.cuda.memory_allocated())
        writer.gauge("rlhfd_torch_memory_bytes", state="reserved").set(torch.cuda.memory_reserved())
