"""Tensors from a worker to its engine's process: in a file in memory that both map."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence

from torch import Tensor

from pipeline.models.weights.tensor_specs import TensorSpec, tensor_specs, tensor_views


def put(name: str, tensors: Mapping[str, Tensor]) -> tuple[int, list[TensorSpec]]:
    """Copy tensors into a file in memory.

    Args:
        name: Name of the file, as lists of open files show it.
        tensors: At least one, by name.

    Returns:
        The file's descriptor, and the tensors in it. The caller closes the descriptor once the other process
        has mapped the file, which then lives as long as these tensors.
    """
    specs = tensor_specs(tensors)
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, specs[-1].offset + max(specs[-1].nbytes, 1))
        memory = mmap.mmap(descriptor, 0)
        for key, view in tensor_views(memoryview(memory), specs).items():
            view.copy_(tensors[key])
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, specs


def path_of(descriptor: int) -> str:
    """Return the path under which a child of this process opens a file that is open here."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def mapped(path: str, specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    """Return the tensors of a file, without a copy."""
    with open(path, "rb") as file:
        memory = memoryview(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE))
    return tensor_views(memory, specs)
