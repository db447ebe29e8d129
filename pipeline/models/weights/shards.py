"""A rank's ranges of the tensors of a model, and the ranks that together hold all of it. One rank holds one shard."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Shard(NamedTuple):
    """One rank's range of a tensor.

    Attributes:
        local: The rank's elements, live; their dtype may differ from the published one.
        shape: Shape of the whole tensor.
        start: First element of the range in the whole tensor.
        dtype: Dtype in which the tensor is published and saved.
        split: Whether it is split over the ranks; a tensor that is not is held whole by each.
    """

    local: Tensor
    shape: tuple[int, ...]
    start: int
    dtype: torch.dtype
    split: bool = True

    @classmethod
    def whole(cls, tensor: Tensor) -> Shard:
        """Return a tensor of which each rank holds all."""
        return cls(tensor, tuple(tensor.shape), 0, tensor.dtype, split=False)

    @property
    def elements(self) -> slice:
        """The range, in elements of the whole tensor."""
        return slice(self.start, self.start + self.local.numel())

    def without_elements(self) -> Shard:
        """Return an empty range of the same tensor: nothing of it is written or read."""
        return self._replace(local=self.local.new_empty(0))

    def whole_on_meta(self) -> Tensor:
        """Return a tensor of the whole shape and the published dtype, without memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def as_shards(tensors: Mapping[str, Tensor | Shard]) -> dict[str, Shard]:
    """Return tensors by name as shards, those that are whole as one shard each."""
    return {name: Shard.whole(given) if isinstance(given, Tensor) else given for name, given in tensors.items()}


@dataclasses.dataclass(eq=False)
class Group:
    """The collectives of all ranks that publish together; of itself it is that of one rank, which holds whole models.

    Attributes:
        rank: This rank.
        world_size: Number of ranks.
    """

    rank: int = 0
    world_size: int = 1

    def broadcast(self, values: Sequence[int]) -> list[int]:
        """Return rank 0's values, each in 63 bits; every rank passes as many."""
        return list(values)

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return every rank's values, unsigned 64-bit, in order of ranks; every rank passes as many."""
        return [list(values)]

    def agree(self, ready: bool) -> bool:
        """Return whether every rank passed True."""
        return ready
