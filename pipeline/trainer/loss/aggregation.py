"""From one loss an action to the loss of a step, by name.

    token_mean     mean over the actions trained                     (DAPO, arXiv:2503.14476 eq. 8)
    sequence_mean  mean over the responses trained of their means    (GRPO, arXiv:2402.03300 eq. 3)
    dr_grpo        sum, divided by all rows and a constant length    (Dr. GRPO, arXiv:2503.20783, section 3.2)

The divisors are those of the whole step, over all batches, micro-batches and ranks: the losses of its parts, and their
gradients, add up to those of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from torch import Tensor

from pipeline.trainer.loss.row_sums import row_means


class StepTotals(NamedTuple):
    """The divisors of a step.

    Attributes:
        actions: Actions trained.
        sequences: Rows trained that have an action.
        rows: All rows of the step, also those left out for their group's equal scores.
        constant_tokens: Constant length of a response, for `dr_grpo`.
    """

    actions: float
    sequences: float
    rows: float
    constant_tokens: int


Aggregation = Callable[[Tensor, Tensor, StepTotals], Tensor]
"""From losses ``(N,)`` and the actions of each row ``(B,)`` of some rows to their share of a step's loss, a scalar."""


def token_mean(losses: Tensor, counts: Tensor, totals: StepTotals) -> Tensor:
    """Return the sum over the actions, divided by the actions trained."""
    return losses.sum() / totals.actions


def sequence_mean(losses: Tensor, counts: Tensor, totals: StepTotals) -> Tensor:
    """Return the sum over the rows of the mean over their actions, divided by the rows trained."""
    return row_means(losses, counts).sum() / totals.sequences


def dr_grpo(losses: Tensor, counts: Tensor, totals: StepTotals) -> Tensor:
    """Return the sum over the actions, divided by all rows times a constant length.

    Rows without a signal count as rows: else the weight of an action would depend on how many groups are mixed.
    """
    return losses.sum() / (totals.rows * totals.constant_tokens)


AGGREGATIONS: Final[Mapping[str, Aggregation]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "dr_grpo": dr_grpo,
}
"""The aggregations by their names in `trainer.loss_aggregation`."""
