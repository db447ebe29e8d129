"""The order of prompts, by integer arithmetic alone: a permutation for each epoch, and several sources by weight."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

_FEISTEL_ROUNDS = 8
_MASK_64 = (1 << 64) - 1
SPLITMIX64_STEP = 0x9E3779B97F4A7C15
"""The difference of the states of two numbers that follow each other."""
# Weights whose common denominator is larger are rounded to this many parts.
_MOST_PARTS = 4096
_MIXING = 0x6D6978


class SourcePosition(NamedTuple):
    """A position as the number of its source, and the prompt's number in the sequence of that source."""

    source: int
    number: int


class Mixture:
    """The source of each position: of each block of positions, every source gets its share exactly.

    A block is as short as the weights allow: 3 and 1 give blocks of 4 positions, 3 of the first source and 1 of the
    second, in an order that follows from (seed, number of the block). Sources with weights are never exhausted: each
    begins its next epoch on its own.
    """

    def __init__(self, weights: Sequence[float], seed: int, *, is_mixed: bool = True) -> None:
        """Compute the shares.

        Args:
            weights: Weight of each source, above 0.
            seed: Any int.
            is_mixed: Whether the positions of a block are mixed; else they go from source to source.
        """
        self._is_mixed = is_mixed and len(weights) > 1
        self._seed = splitmix64((seed & _MASK_64) ^ _MIXING)
        self._shares = shares_of(weights)
        self._starts = list(itertools.accumulate(self._shares, initial=0))

    def locate(self, position: int) -> SourcePosition:
        """Return source and number of a position, 0 or more."""
        block, slot = divmod(position, self._starts[-1])
        mixed = permuted(slot, self._starts[-1], seed=self._seed, epoch=block) if self._is_mixed else slot
        source = next(number for number, start in enumerate(self._starts[1:]) if mixed < start)
        return SourcePosition(source, block * self._shares[source] + mixed - self._starts[source])


def shares_of(weights: Sequence[float]) -> list[int]:
    """Return the positions of each source in a block, at least 1; their ratio is that of the weights.

    Weights such as 0.7 count as decimal fractions. If the block would be longer than 4,096 positions, the shares are
    rounded by the largest remainder; those that would be below 1 may make it longer by one each.

    Args:
        weights: Weight of each source, above 0.
    """
    if len(weights) == 1:
        return [1]
    exact = [Fraction(str(weight)) for weight in weights]
    parts = [weight / sum(exact) for weight in exact]
    size = math.lcm(*(part.denominator for part in parts))
    if size <= _MOST_PARTS:
        return [int(part * size) for part in parts]
    shares = [max(1, int(part * _MOST_PARTS)) for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda number: parts[number] * _MOST_PARTS - shares[number])
    for number in reversed(by_remainder[len(parts) - max(0, _MOST_PARTS - sum(shares)) :]):
        shares[number] += 1
    return shares


def source_seed(seed: int, source: int, sources: int) -> int:
    """Return the seed of the order of one source; a single source has the run's."""
    return seed if sources == 1 else splitmix64((seed & _MASK_64) ^ splitmix64(source + 1))


def permuted(slot: int, size: int, *, seed: int, epoch: int) -> int:
    """Return `slot` under a pseudo-random permutation of ``range(size)``, in constant memory and some 10 us.

    A Feistel network of 8 rounds over the next even power of two, walked until the value falls below `size` again
    (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002: cycle walking); rounds mix by splitmix64.

    Args:
        slot: From 0 up to, not including, `size`.
        size: Length of the permutation, at least 1.
        seed: Any int.
        epoch: Any int; another epoch is another permutation.

    Returns:
        The index, from 0 up to, not including, `size`.
    """
    # Halves of fewer than 3 bits leave the network too few different permutations.
    half_bits = max(3, (max(size - 1, 1).bit_length() + 1) // 2)
    half_mask = (1 << half_bits) - 1
    key = splitmix64(splitmix64(seed & _MASK_64) ^ (epoch & _MASK_64))
    value = slot
    while True:
        left, right = value >> half_bits, value & half_mask
        for round_number in range(_FEISTEL_ROUNDS):
            left, right = right, left ^ (splitmix64(key ^ (round_number << 56) ^ right) & half_mask)
        value = left << half_bits | right
        if value < size:
            return value


def splitmix64(state: int) -> int:
    """Return one output of splitmix64 (Steele, Lea and Flood, OOPSLA 2014) from a state."""
    state = (state + SPLITMIX64_STEP) & _MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return state ^ (state >> 31)
