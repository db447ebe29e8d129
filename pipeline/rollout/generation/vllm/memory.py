"""Tensors from a worker to its engine's process: in a file in memory that both map."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence

from torch import Tensor

from pipeline.models.weights.places import TensorPlace, tensor_places, tensor_views


def put(name: str, tensors: Mapping[str, Tensor]) -> tuple[int, list[TensorPlace]]:
    """Copy tensors into a file in memory.

    Args:
        name: Of the file, as lists of open files show it.
        tensors: At least one, by name.

    Returns:
        The file's descriptor, and the places of the tensors. The caller closes the descriptor once the other process
        has mapped the file, which then lives as long as these tensors.
    """
    places = tensor_places(tensors)
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, places[-1].offset + max(places[-1].nbytes, 1))
        memory = mmap.mmap(descriptor, 0)
        for key, view in tensor_views(memoryview(memory), places).items():
            view.copy_(tensors[key])
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, places


def path_of(descriptor: int) -> str:
    """Return the path under which a child of this process opens a file that is open here."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def mapped(path: str, places: Sequence[TensorPlace]) -> dict[str, Tensor]:
    """Return the tensors of a file, without a copy."""
    with open(path, "rb") as file:
        memory = memoryview(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE))
    return tensor_views(memory, places)
