"""Rows are dealt to ranks: as many to each, never more unequal than in order, by the lengths alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.trainer.dealing import deal, imbalance, squares

LENGTHS = st.tuples(st.integers(1, 8), st.integers(1, 16)).flatmap(
    lambda shape: st.lists(
        st.lists(st.integers(0, 5000), min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0]
    )
)


def lengths_of(dealt: list[list[int]], lengths: list[list[int]]) -> list[list[int]]:
    flat = [length for of_rank in lengths for length in of_rank]
    return [[flat[row] for row in rows] for rows in dealt]


@given(LENGTHS)
def test_each_row_goes_to_one_rank_and_each_rank_has_as_many(lengths: list[list[int]]) -> None:
    dealt = deal(lengths)

    assert sorted(row for rows in dealt for row in rows) == list(range(sum(map(len, lengths))))
    assert [len(rows) for rows in dealt] == [len(of_rank) for of_rank in lengths]
    assert dealt == [sorted(rows) for rows in dealt]


@given(LENGTHS)
def test_no_rank_has_more_work_than_the_most_loaded_one_in_order(lengths: list[list[int]]) -> None:
    dealt = lengths_of(deal(lengths), lengths)

    assert max(squares(dealt)) <= max(squares(lengths))
    assert sum(squares(dealt)) == sum(squares(lengths))
    assert imbalance(dealt) <= imbalance(lengths)


@given(LENGTHS)
def test_the_same_rows_are_dealt_alike_and_rows_dealt_stay_where_they_are_or_get_more_equal(
    lengths: list[list[int]],
) -> None:
    assert deal(lengths) == deal([list(of_rank) for of_rank in lengths])

    dealt = lengths_of(deal(lengths), lengths)
    assert imbalance(lengths_of(deal(dealt), dealt)) <= imbalance(dealt)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_rows_of_equal_length_and_those_of_one_rank_stay_in_order(ranks: int) -> None:
    in_order = [list(range(4 * rank, 4 * rank + 4)) for rank in range(ranks)]

    assert deal([[7] * 4 for _ in range(ranks)]) == in_order
    assert deal([[9, 1, 5, 2]]) == [[0, 1, 2, 3]]


def test_a_dealing_by_hand() -> None:
    # Squares 100, 81 | 1, 4: the longest alone with the shortest.
    assert deal([[10, 9], [1, 2]]) == [[0, 2], [1, 3]]
    # Equal rows: the first of them to the first rank.
    assert deal([[5, 5], [1, 1]]) == [[0, 2], [1, 3]]


def test_ranks_with_different_numbers_of_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[2, 1\]"):
        deal([[1, 2], [3]])


def test_ragged_rows_become_nearly_equal() -> None:
    rng = random.Random(3)
    for ranks, rows in ((2, 16), (4, 32), (8, 64)):
        for _ in range(20):
            lengths = [[min(int(rng.lognormvariate(6, 1)), 8192) for _ in range(rows)] for _ in range(ranks)]
            dealt = lengths_of(deal(lengths), lengths)
            works = sorted(length * length for of_rank in lengths for length in of_rank)
            # No dealing is better than the mean, or than the longest row among the shortest ones.
            bound = max(sum(works) / ranks, works[-1] + sum(works[: rows - 1]))

            assert max(squares(dealt)) <= 1.05 * bound
