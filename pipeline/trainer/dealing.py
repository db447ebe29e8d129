"""The rows of a step, dealt to the trainer's ranks for equal work: as many for each, and nearly equal sums of squares.

The attention of a row takes work in proportion to the square of its length. Ranks wait for the slowest one in each
step, so that the largest sum of squared lengths decides.

Before a step each rank tells the others its rows' lengths and places, and gathers the rows dealt. No row travels
between ranks. All of them read the arena, and the rows of a lease stay there until a version is published that includes
it: after the step, in whose collectives every rank takes part once it has its rows.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as distributed

from pipeline.experience.ragged import RaggedRows
from pipeline.runtime.messages import ExtentRows
from pipeline.trainer.connection import Batch, Connection
from pipeline.trainer.state import RankProgress


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


class RankRows(msgspec.Struct, frozen=True):
    """The rows of a rank's batches in one step.

    Attributes:
        lengths: Tokens of each row without padding, for each batch.
        parts: The extents and rows of each batch, in the same order.
        fields: The names of the fields of each batch.
        deaths: The largest number of trainers that died at a row.
    """

    lengths: list[list[int]]
    parts: list[list[ExtentRows]]
    fields: list[list[str]]
    deaths: int


Exchange = Callable[[RankRows], list[RankRows]]
"""A collective: sends the rows of this rank to every rank; returns those of all ranks, in their order."""


@dataclasses.dataclass(frozen=True, slots=True)
class Dealt:
    """The rows that a rank trains in a step.

    Attributes:
        batches: The rows of each batch, as many batches and of as many rows as the leased ones.
        leased: Largest sum of squared lengths of a rank's leased rows, as a multiple of the mean.
        trained: The same of the rows that each rank trains.
    """

    batches: list[RaggedRows]
    leased: float
    trained: float


class RankBalance:
    """Deals the rows of each step to the ranks."""

    def __init__(self, connection: Connection, device: torch.device, exchange: Exchange) -> None:
        """Store the arguments.

        Args:
            connection: This rank's connection.
            device: Device of the batches.
            exchange: The exchange with all ranks, `rows_of_all_ranks`.
        """
        self._connection = connection
        self._device = device
        self._exchange = exchange

    def deal(self, batches: Sequence[Batch]) -> Dealt:
        """Return the rows of a step that this rank trains; a collective.

        Each rank keeps its own rows if batches of the step have different fields, as after a restart with another
        configuration. It also does if a trainer died at one of them: the lease at which a rank dies is quarantined, and
        must be the one that has the row.

        Args:
            batches: This rank's leased batches of the step.

        Raises:
            DecodeError: If rows of another rank are damaged, which that rank did not find.
        """
        own = [batch.rows for batch in batches]
        every = self._exchange(
            RankRows(
                [rows.lengths for rows in own],
                [list(batch.parts) for batch in batches],
                [_fields(rows) for rows in own],
                max(batch.deaths for batch in batches),
            )
        )
        lengths = [list(itertools.chain.from_iterable(rows.lengths)) for rows in every]
        leased = imbalance(lengths)
        fields = [names for rows in every for names in rows.fields]
        if any(rows.deaths for rows in every) or any(names != fields[0] for names in fields):
            return Dealt(own, leased, leased)
        dealt, flat = deal(lengths), list(itertools.chain.from_iterable(lengths))
        trained = imbalance([[flat[row] for row in rows] for rows in dealt])
        places = [(part, row) for rows in every for parts in rows.parts for part in parts for row in part.rows]
        rank, found = self._connection.rank, []
        first = rank * len(lengths[rank])
        wanted = iter(dealt[rank])
        for rows in own:
            count = len(rows)
            rows_dealt = list(itertools.islice(wanted, count))
            if rows_dealt != list(range(first, first + count)):
                parts = _joined([places[row] for row in rows_dealt])
                found.append(self._connection.gather(parts, self._device))
            else:
                found.append(rows)
            first += count
        return Dealt(found, leased, trained)


def rows_of_all_ranks(own: RankRows) -> list[RankRows]:
    """Return every rank's rows, in order of ranks; a collective."""
    received: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(received, own)
    return received


def _fields(rows: RaggedRows) -> list[str]:
    """Return the kind of rows and the names of their fields; batches with equal ones can be mixed."""
    vision = [] if rows.vision is None else ["vision", *rows.vision.present()]
    return [*sorted(rows.named), *vision]


def _joined(places: Sequence[tuple[ExtentRows, int]]) -> list[ExtentRows]:
    """Return one entry per run of consecutive rows of an extent."""
    parts: list[ExtentRows] = []
    for part, row in places:
        if parts and parts[-1].offset == part.offset:
            parts[-1].rows.append(row)
        else:
            parts.append(msgspec.structs.replace(part, rows=[row]))
    return parts


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The collectives of all ranks; the defaults are those of one rank.

    Attributes:
        agree: Called by all ranks before each step; returns True if every rank passed True. A rank that drains passes
            False, so that no rank waits in a collective for a rank that has ended.
        leave: Leaves the group of the ranks; called once, after all agreed to end, before the last checkpoint.
        gather: Called by all ranks after each step; returns every rank's progress, in order of ranks.
        balance: Deals the rows of each step to the ranks; None if each rank trains the rows of its own leases.
    """

    agree: Callable[[bool], bool] = lambda ready: ready
    leave: Callable[[], None] = lambda: None
    gather: Callable[[RankProgress], list[RankProgress]] = lambda own: [own]
    balance: RankBalance | None = None
