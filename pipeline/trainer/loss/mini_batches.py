"""The updates of a step and their rows, which are the same for any number of ranks and batches.

A step has the rows of all batches of all ranks, in the order of their leases. Each epoch deals them out anew, in an
order that follows from step and epoch alone: a step that a killed trainer left is taken again with the same
mini-batches. Each row is in one mini-batch of an epoch; the sizes of two mini-batches differ by one row at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.trainer.batch import TrainingBatch
from pipeline.trainer.loss.aggregation import StepTotals

_EPOCHS = 1 << 16


def mini_batch_of_rows(
    rows: Sequence[Sequence[int]], rank: int, mini_batches: int, *, step: int, epoch: int
) -> list[Tensor]:
    """Return the mini-batch of each row of one rank in an epoch.

    Args:
        rows: Rows of each batch of each rank: ``rows[batch][rank]``.
        rank: The rank.
        mini_batches: Mini-batches of an epoch.
        step: Steps taken before this one.
        epoch: Epochs of the step before this one.

    Returns:
        For each batch of the rank ``(rows,)`` int64, from 0 to mini_batches - 1.
    """
    total = sum(sum(of_ranks) for of_ranks in rows)
    generator = torch.Generator().manual_seed(step * _EPOCHS + epoch)
    dealt = torch.randperm(total, generator=generator) * mini_batches // max(total, 1)
    # The lease of batch b on rank r is b * ranks + r.
    by_lease = dealt.split([each for of_ranks in rows for each in of_ranks])
    return [by_lease[batch * len(of_ranks) + rank] for batch, of_ranks in enumerate(rows)]


class MiniBatches:
    """The updates of each step on one rank."""

    def __init__(
        self,
        epochs: int,
        mini_batches: int,
        process_group: dist.ProcessGroup | None,
        sum_over_ranks: Callable[[Tensor], list[float]],
    ) -> None:
        """Store the arguments.

        Args:
            epochs: Passes over the rows of a step.
            mini_batches: Updates of an epoch.
            process_group: The ranks that take each step together; None for this process alone.
            sum_over_ranks: A collective: adds up a vector over the ranks.
        """
        self._epochs = epochs
        self._mini_batches = mini_batches
        self._ranks = 1 if process_group is None else dist.get_world_size(process_group)
        self._rank = 0 if process_group is None else dist.get_rank(process_group)
        self._sum_over_ranks = sum_over_ranks

    def of_step(
        self, batches: list[TrainingBatch], whole: StepTotals, rows_trained: float, step: int
    ) -> Iterator[tuple[list[TrainingBatch], StepTotals]]:
        """Yield the rows and the divisors of each update; a collective.

        A mini-batch without an action is left out, unless the whole step has none.

        Args:
            batches: The batches of this rank.
            whole: The divisors of the whole step.
            rows_trained: Rows of all ranks that are not left out.
            step: Steps taken before this one.
        """
        if not whole.actions or self._mini_batches == 1:
            yield from [(batches, whole)] * self._epochs
            return
        rows = self._rows_of_ranks(batches)
        for epoch in range(self._epochs):
            dealt = mini_batch_of_rows(rows, self._rank, self._mini_batches, step=step, epoch=epoch)
            for number in range(self._mini_batches):
                parts = [
                    batch.rows(np.flatnonzero(of_rows.numpy() == number))
                    for batch, of_rows in zip(batches, dealt, strict=True)
                ]
                actions, sequences, kept = self._sum_over_ranks(sum(map(_sizes, parts), torch.zeros(3)))
                if actions:
                    # Rows left out for their group's equal scores count for each update in proportion.
                    yield parts, StepTotals(actions, sequences, whole.rows * kept / rows_trained, whole.constant_tokens)

    def _rows_of_ranks(self, batches: list[TrainingBatch]) -> list[list[int]]:
        """Return the rows of each batch of each rank, ``[batch][rank]``."""
        rows = torch.zeros((len(batches), self._ranks), dtype=torch.float64)
        rows[:, self._rank] = torch.tensor([len(batch) for batch in batches], dtype=torch.float64)
        summed = torch.tensor(self._sum_over_ranks(rows.flatten())).view_as(rows)
        return summed.long().tolist()


def _sizes(batch: TrainingBatch) -> Tensor:
    """Return the actions, the rows with actions and the rows of a batch, ``(3,)`` float64."""
    counts = batch.flat.counts
    return torch.tensor([int(counts.sum()), np.count_nonzero(counts), len(counts)], dtype=torch.float64)
