"""The dealing of a step's rows to the ranks: as many rows for each, and nearly equal sums of squared lengths.

The attention of a row takes work in proportion to the square of its length. Ranks wait for the slowest one in each
step, so that the largest sum of squares decides.
"""

from __future__ import annotations

from collections.abc import Sequence


def deal(lengths: Sequence[Sequence[int]]) -> list[list[int]]:
    """Deal rows to ranks: the longest first, each to the rank with the least work that has room for one more row.

    The result follows from the lengths alone. Rows of equal length are dealt in their order, ranks of equal work take
    rows in theirs. If the largest sum would not be lower than with each rank's own rows, each rank keeps its own.

    Args:
        lengths: Tokens of the rows of each rank, ``lengths[rank]``, as many rows for each rank.

    Returns:
        The rows of each rank, ascending; row i of rank r is ``r * rows + i`` with `rows` rows a rank.

    Raises:
        ValueError: If the ranks have different numbers of rows.
    """
    rows = len(lengths[0])
    if any(len(of_rank) != rows for of_rank in lengths):
        raise ValueError(f"ranks have different numbers of rows: {[len(of_rank) for of_rank in lengths]}")
    works = [length * length for of_rank in lengths for length in of_rank]
    dealt: list[list[int]] = [[] for _ in lengths]
    sums = [0] * len(lengths)
    # The sort is stable.
    for row in sorted(range(len(works)), key=lambda row: -works[row]):
        rank = min((rank for rank, own in enumerate(dealt) if len(own) < rows), key=lambda rank: (sums[rank], rank))
        dealt[rank].append(row)
        sums[rank] += works[row]
    if max(sums) >= max(squares(lengths)):
        return [list(range(rank * rows, (rank + 1) * rows)) for rank in range(len(lengths))]
    return [sorted(own) for own in dealt]


def squares(lengths: Sequence[Sequence[int]]) -> list[int]:
    """Return the sum of squared lengths of each rank."""
    return [sum(length * length for length in of_rank) for of_rank in lengths]


def imbalance(lengths: Sequence[Sequence[int]]) -> float:
    """Return the largest sum of squared lengths of a rank as a multiple of the mean; 1 without a token."""
    sums = squares(lengths)
    return max(sums) * len(sums) / sum(sums) if any(sums) else 1.0
