"""What PyTorch's allocator holds on this process's GPU, as gauges; a process without one shows none."""

from __future__ import annotations

import torch

from pipeline.telemetry.slab import SlotWriter


def show_memory(writer: SlotWriter) -> None:
    """Show the allocator's memory on the current device, if this process computes on a GPU."""
    if torch.cuda.is_initialized():
        writer.gauge("rlhfd_torch_memory_bytes", state="allocated").set(torch.cuda.memory_allocated())
        writer.gauge("rlhfd_torch_memory_bytes", state="reserved").set(torch.cuda.memory_reserved())
