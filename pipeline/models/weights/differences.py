"""The difference between two versions of weights: the 16-bit words of a slot that changed, with their new values.

    counts   for each block of 65,536 words, the number of them that changed
    places   the number of each in its block, 2 bytes
    values   the new words, in the order of their places

A bfloat16 weight is a word. Of float32 weights nearly all low words change in a step, so that their difference has more
bytes than it is worth.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.errors import WeightsError
from pipeline.models.weights.copies import WeightsCopy
from pipeline.storage.weights_header import Age, WeightsVersion

_BLOCK_WORDS = 1 << 16
_PART_BLOCKS = 256
_SAMPLED_BLOCKS = 256
_MAX_THREADS = 4

_Words = npt.NDArray[np.uint16]


class _Part(NamedTuple):
    """The difference of up to 256 blocks.

    Attributes:
        counts: ``(blocks,)`` uint32.
        places: ``(sum of counts,)`` uint16.
        values: ``(sum of counts,)`` uint16.
    """

    counts: npt.NDArray[np.uint32]
    places: _Words
    values: _Words

    @property
    def nbytes(self) -> int:
        return self.counts.nbytes + self.places.nbytes + self.values.nbytes


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference of a version from an earlier one.

    Attributes:
        base: The earlier version.
        version: The later version.
        parts: The changed words, in the order of the slot.
    """

    base: Age
    version: WeightsVersion
    parts: Sequence[_Part]

    @property
    def nbytes(self) -> int:
        """Bytes of the difference."""
        return sum(part.nbytes for part in self.parts)


def difference(base: WeightsCopy, later: WeightsCopy, most_bytes: int) -> Difference | None:
    """Return the difference between two versions; None if it has more than `most_bytes`.

    Some evenly spaced blocks are compared first, so that a difference of most weights costs no time.

    Args:
        base: The version that the receiver holds.
        later: The version that it is to hold.
        most_bytes: Bytes of a difference that is worth sending.
    """
    if base.specs != later.specs or base.data.nbytes != later.data.nbytes:
        return None
    old, new = base.data.view(np.uint16), later.data.view(np.uint16)
    blocks = -(-len(new) // _BLOCK_WORDS)
    sampled = range(0, blocks, -(-blocks // _SAMPLED_BLOCKS))
    if sum(_part(old, new, block, block + 1).nbytes for block in sampled) * blocks > most_bytes * len(sampled):
        return None
    with _threads() as pool:
        firsts = range(0, blocks, _PART_BLOCKS)
        parts = list(pool.map(lambda first: _part(old, new, first, min(first + _PART_BLOCKS, blocks)), firsts))
    made = Difference(base.version.age, later.version, parts)
    return made if made.nbytes <= most_bytes else None


def applied(base: WeightsCopy, differences: Sequence[Difference]) -> WeightsCopy:
    """Return the version to which differences lead from `base`, with its verified fingerprint.

    Args:
        base: The version of the first difference's base. Its bytes are overwritten unless they are read-only; after an
            error they are of no version.
        differences: Each with the version of the one before as its base; at least one.

    Raises:
        WeightsError: If a difference has another base, or the bytes are not the published ones.
    """
    data, age = base.data if base.data.flags.writeable else base.data.copy(), base.version.age
    for one in differences:
        if one.base != age:
            raise WeightsError(f"a difference from version {one.base[0]} does not fit version {age[0]}")
        _apply(one, data.view(np.uint16))
        age = one.version.age
    copy = WeightsCopy(differences[-1].version, base.specs, data)
    copy.fetch({}, partial=True)
    return copy


def _part(old: _Words, new: _Words, first: int, end: int) -> _Part:
    """Return the difference of the blocks from `first` up to `end`."""
    counts, places, values = list[int](), list[_Words](), list[_Words]()
    for start in range(first * _BLOCK_WORDS, min(end * _BLOCK_WORDS, len(new)), _BLOCK_WORDS):
        block = new[start : start + _BLOCK_WORDS]
        changed = np.flatnonzero(old[start : start + _BLOCK_WORDS] != block)
        counts.append(len(changed))
        places.append(changed.astype(np.uint16))
        values.append(block[changed])
    return _Part(np.array(counts, np.uint32), np.concatenate(places), np.concatenate(values))


def _apply(changes: Difference, words: _Words) -> None:
    with _threads() as pool:
        try:
            list(pool.map(lambda part: _apply_part(*part), zip(changes.parts, _slices(words), strict=True)))
        except (ValueError, IndexError) as error:
            raise WeightsError(f"the difference to version {changes.version.version} is damaged: {error}") from error


def _apply_part(part: _Part, words: _Words) -> None:
    first = 0
    for block, count in enumerate(part.counts.tolist()):
        changed = slice(first, first + count)
        words[block * _BLOCK_WORDS :][:_BLOCK_WORDS][part.places[changed].astype(np.intp)] = part.values[changed]
        first += count


def _slices(words: _Words) -> list[_Words]:
    """Return the words of each part."""
    size = _PART_BLOCKS * _BLOCK_WORDS
    return [words[start : start + size] for start in range(0, len(words), size)]


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0))))
