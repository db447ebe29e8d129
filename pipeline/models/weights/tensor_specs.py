"""The specifications of tensors in a slot: dtype, shape and offset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a slot, the same in every slot."""

    name: str
    dtype: str
    shape: list[int]
    offset: int
    nbytes: int


def tensor_views(memory: memoryview, specs: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
    """Return tensors over the bytes in which they lie."""
    return {
        spec.name: torch.frombuffer(
            memory[spec.offset : spec.offset + spec.nbytes], dtype=getattr(torch, spec.dtype)
        ).reshape(spec.shape)
        for spec in specs
    }


def tensor_specs(tensors: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    """Return the specifications of tensors that lie one after the other, each from a multiple of 64 bytes on."""
    specs, offset = [], 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        specs.append(TensorSpec(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset, nbytes))
        offset += (nbytes + 63) // 64 * 64
    return specs
