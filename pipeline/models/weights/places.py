"""The places of tensors in a slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch


class TensorPlace(msgspec.Struct, frozen=True, array_like=True):
    """The place of one tensor, the same in every slot."""

    name: str
    dtype: str
    shape: list[int]
    offset: int
    nbytes: int


def tensor_views(memory: memoryview, places: Sequence[TensorPlace]) -> dict[str, torch.Tensor]:
    """Return tensors over the bytes in which they lie."""
    return {
        place.name: torch.frombuffer(
            memory[place.offset : place.offset + place.nbytes], dtype=getattr(torch, place.dtype)
        ).reshape(place.shape)
        for place in places
    }


def tensor_places(tensors: Mapping[str, torch.Tensor]) -> list[TensorPlace]:
    """Return the places of tensors that lie one after the other, each from a multiple of 64 bytes on."""
    places, offset = [], 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        places.append(TensorPlace(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset, nbytes))
        offset += (nbytes + 63) // 64 * 64
    return places
