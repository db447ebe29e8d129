"""The order of prompts: several sources by weight, each in an order of its own."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.prompts.order import Mixture, shares_of, source_seed


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([5.0], [1]),
        ([1.0, 1.0], [1, 1]),
        ([3.0, 1.0], [3, 1]),
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([0.5, 1.5], [1, 3]),
        ([7473.0, 1319.0], [3482, 614]),
        ([1e9, 1.0], [4095, 1]),
    ],
)
def test_shares_have_the_ratio_of_the_weights_in_the_shortest_block(weights: list[float], shares: list[int]) -> None:
    assert shares_of(weights) == shares


@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=6))
def test_a_share_differs_from_its_weight_by_fewer_positions_than_sources_and_is_never_none(
    weights: list[float],
) -> None:
    shares = shares_of(weights)

    total, size = sum(map(Fraction, map(str, weights))), sum(shares)
    assert min(shares) >= 1
    for weight, share in zip(weights, shares, strict=True):
        # Rounded only where the block would be longer; a small source takes its one position from the others.
        assert abs(share - Fraction(str(weight)) / total * size) < (len(weights) if size >= 4096 else 1e-9)


@given(
    weights=st.lists(st.integers(1, 9), min_size=1, max_size=5), seed=st.integers(), blocks=st.integers(0, 2**40),
)  # fmt: skip
def test_each_block_has_each_source_by_its_share_and_skips_none_of_its_prompts(
    weights: list[int], seed: int, blocks: int
) -> None:
    mixture = Mixture([float(weight) for weight in weights], seed)
    shares = shares_of([float(weight) for weight in weights])
    size = sum(shares)

    found = [mixture.locate(blocks * size + slot) for slot in range(size)]

    for source, share in enumerate(shares):
        numbers = sorted(one.number for one in found if one.source == source)
        assert numbers == list(range(blocks * share, (blocks + 1) * share))


def test_the_mixture_is_fixed_for_ever_and_another_seed_gives_another_one() -> None:
    first, other = Mixture([3.0, 1.0, 1.0], 0), Mixture([3.0, 1.0, 1.0], 1)

    order = [first.locate(position) for position in range(10)]

    assert [one.source for one in order] == [2, 0, 0, 1, 0, 0, 0, 1, 2, 0]
    assert [one.number for one in order] == [0, 1, 0, 0, 2, 3, 5, 1, 1, 4]
    assert order != [other.locate(position) for position in range(10)]


def test_blocks_are_ordered_independently() -> None:
    mixture = Mixture([1.0, 1.0], 3)

    first = Counter(mixture.locate(2 * block).source for block in range(2000))

    assert 900 < first[0] < 1100


def test_a_single_source_has_the_runs_own_seed_whatever_its_weight() -> None:
    assert source_seed(7, 0, 1) == 7
    assert [Mixture([0.3], 7).locate(position) for position in range(3)] == [(0, 0), (0, 1), (0, 2)]
    assert len({source_seed(7, number, 3) for number in range(3)} | {7}) == 4
