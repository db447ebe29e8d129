"""Which device a process computes on."""

from __future__ import annotations

import os

import torch


def process_device() -> torch.device:
    """Return this process's device: the one GPU that its CUDA_VISIBLE_DEVICES names, or the CPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return torch.device("cuda:0" if visible != "" and torch.cuda.is_available() else "cpu")
