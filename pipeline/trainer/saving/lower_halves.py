"""The training state as shared memory holds it: of the float32 copies the bits that the published weights lack.

A weight of bfloat16 is its float32 copy, rounded to the upper 16 of 32 bits, to nearest and of two as near to the even
one. So the state holds the lower 16 bits beside it, and one bit more:

    lower half     the upper half of the copy is
    below 0x8000   the weight: it was rounded towards zero
    above 0x8000   the weight less 1
    0x8000         the weight, or the weight less 1 if the bit is set: a tie

The bits of finite numbers of one sign are integers in the order of the numbers, so subnormal numbers and a copy that is
rounded to infinity are no exceptions. NaN stays NaN, with other bits. x86-64 has the lower half of a number first.

    actor.float32.NAME   is held as   actor.lower.NAME (int16) and actor.ties.NAME (uint8, 8 elements of a row in each)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from pipeline.models.weights.shards import Shard
from pipeline.trainer.sharding.tensor_files import Entry, write_tensors

_T = TypeVar("_T")

_WHOLE, _LOWER, _TIES = "float32", "lower", "ties"
_TIE = -(2**15)
"""0x8000 as int16."""
_PACK = 0x0102040810204080
"""Times this number, the least bits of 8 bytes are the bits of the highest byte, in order."""
_PART_ELEMENTS = 1 << 24
"""Elements whose ties are found at a time: some bytes of each exist meanwhile."""


class LowerHalves:
    """The float32 copies of a rank's training state whose upper halves are published.

    Args:
        weights: The rank's shards of the models, by published name.
        state: The rank's training state.
    """

    def __init__(self, weights: Mapping[str, Shard], state: Mapping[str, Tensor]) -> None:
        self._shards, self._state = weights, state
        self._weights: dict[str, str] = {}
        for name, tensor in state.items():
            weight = name.replace(f".{_WHOLE}.", ".", 1)
            shard = weights.get(weight) if weight != name else None
            if shard is not None and shard.dtype == torch.bfloat16 and shard.local.shape == tensor.shape != ():
                self._weights[name] = weight

    def __bool__(self) -> bool:
        """Return whether there is one."""
        return bool(self._weights)

    def stored(self) -> dict[str, Tensor]:
        """Return the state as it is held: views of the live tensors, and the ties of now."""
        return self._halved(self._state, lambda copy: (copy.view(torch.int16)[..., ::2], ties_of(copy)))

    def targets(self) -> dict[str, Tensor]:
        """Return the tensors that a restore fills: the live ones, and memory for the halves on the same device."""

        def memory(copy: Tensor) -> tuple[Tensor, Tensor]:
            lower = torch.empty(copy.shape, dtype=torch.int16, device=copy.device)
            return lower, torch.empty(_packed_shape(copy), dtype=torch.uint8, device=copy.device)

        return self._halved(self._state, memory)

    def rounded(self) -> dict[str, Shard]:
        """Return the shards that a restore fills: float32 shards, which are copies themselves, as bfloat16."""
        copied = {weight for weight in self._weights.values() if self._shards[weight].local.dtype == torch.float32}
        rounded = {weight: torch.empty_like(self._shards[weight].local, dtype=torch.bfloat16) for weight in copied}
        return {name: shard._replace(local=rounded.get(name, shard.local)) for name, shard in self._shards.items()}

    def join(self, restored: Mapping[str, Tensor], rounded: Mapping[str, Shard]) -> None:
        """Set the live float32 copies from what `targets` and `rounded` have been filled with."""
        for name, weight in self._weights.items():
            lower, ties = restored[_named(name, _LOWER)], restored[_named(name, _TIES)]
            join(self._state[name], rounded[weight].local, lower, ties)

    def shards(self, shards: Mapping[str, Shard]) -> dict[str, Shard]:
        """Return the shards of the state as it is held: names, and which of them are split over the ranks."""
        return self._halved(shards, lambda shard: (shard, shard))

    def whole(
        self, held: Mapping[str, Tensor], weights: Mapping[str, Tensor], shards: Mapping[str, Shard]
    ) -> JoinedState:
        """Return the state of all ranks with float32 copies, each made when it is read.

        Args:
            held: The state as it is held, of all ranks.
            weights: The published weights of the same version.
            shards: The shards of this rank's state, for names, dtypes and shapes.
        """
        return JoinedState(held, weights, shards, self._weights)

    def _halved(self, of_state: Mapping[str, _T], halves: Callable[[_T], tuple[_T, _T]]) -> dict[str, _T]:
        """Return values by the names of the state as it is held: of a copy those of its lower half and its ties."""
        found = dict[str, _T]()
        for name, value in of_state.items():
            if name in self._weights:
                found[_named(name, _LOWER)], found[_named(name, _TIES)] = halves(value)
            else:
                found[name] = value
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class JoinedState(Mapping[str, Tensor]):
    """A training state in shared memory, whose float32 copies are made when they are read.

    Attributes:
        held: The state as it is held.
        weights: The published weights.
        shards: The state's names, dtypes and shapes.
        halved: The weight of each float32 copy, by their names.
    """

    held: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    shards: Mapping[str, Shard]
    halved: Mapping[str, str]

    def write(self, path: Path) -> None:
        """Write the state into a safetensors file, with one float32 copy in memory at a time."""
        entries = [Entry(name, shard.local.dtype, shard.shape) for name, shard in self.shards.items()]
        write_tensors(path, entries, self.values())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.halved:
            return self.held[name]
        weight = self.weights[self.halved[name]]
        whole = torch.empty(weight.shape, dtype=torch.float32)
        join(whole, weight, self.held[_named(name, _LOWER)], self.held[_named(name, _TIES)])
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self.shards)

    def __len__(self) -> int:
        return len(self.shards)


def ties_of(copy: Tensor) -> Tensor:
    """Return the bits of the elements that lie between two bfloat16 numbers and are rounded away from zero.

    Args:
        copy: ``(R, ...)`` float32, contiguous.

    Returns:
        ``(R, C)`` uint8 in host memory; bit i of byte j of a row is of its element 8 j + i.
    """
    rows, width = copy.shape[0], _width(copy)
    halves = copy.view(torch.int16).view(rows, width, 2)
    packed = torch.empty(_packed_shape(copy), dtype=torch.uint8)
    at_once = max(1, _PART_ELEMENTS // max(width, 1))
    for part, target in zip(halves.split(at_once), packed.split(at_once), strict=True):
        bits = torch.zeros(len(part), 8 * packed.shape[1], dtype=torch.uint8, device=copy.device)
        # Rounded to the even one of two: away from zero if the upper half is odd.
        bits[:, :width] = (part[..., 0] == _TIE) & (part[..., 1] & 1).bool()
        target.copy_(bits.view(torch.int64).mul_(_PACK) >> 56)
    return packed


def join(into: Tensor, weight: Tensor, lower: Tensor, ties: Tensor) -> None:
    """Set float32 copies from the weights to which they were rounded, and the bits that these lack.

    Args:
        into: ``(R, ...)`` float32, contiguous.
        weight: ``(R, ...)`` bfloat16.
        lower: ``(R, ...)`` int16.
        ties: ``(R, C)`` uint8, from `ties_of`.
    """
    rows, width = into.shape[0], _width(into)
    halves = into.view(torch.int16).view(rows, width, 2)
    weight, lower = weight.contiguous().view(torch.int16).view(rows, width), lower.reshape(rows, width)
    bit = torch.arange(8, dtype=torch.uint8, device=into.device)
    at_once = max(1, _PART_ELEMENTS // max(width, 1))
    for start in range(0, rows, at_once):
        chosen = slice(start, start + at_once)
        half = lower[chosen]
        tied = ((ties[chosen, :, None] >> bit) & 1).bool().flatten(1)[:, :width]
        is_less = ((half < 0) & (half != _TIE)) | tied
        halves[chosen, :, 0] = half
        halves[chosen, :, 1] = weight[chosen] - is_less.to(torch.int16)


def _width(tensor: Tensor) -> int:
    return tensor.numel() // tensor.shape[0] if tensor.shape[0] else 0


def _packed_shape(tensor: Tensor) -> tuple[int, int]:
    return tensor.shape[0], -(-_width(tensor) // 8)


def _named(name: str, kind: str) -> str:
    return name.replace(f".{_WHOLE}.", f".{kind}.", 1)
