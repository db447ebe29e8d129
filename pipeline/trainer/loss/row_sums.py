"""Sums and means over the actions of each row, of columns that hold the rows end to end."""

from __future__ import annotations

import torch
from torch import Tensor


def row_sums(values: Tensor, counts: Tensor) -> Tensor:
    """Return the sum of each row, the same on any device and beside any other rows; differentiable.

    Args:
        values: ``(N,)`` float32, row after row.
        counts: ``(B,)`` int64, the actions of each row; their sum is N.

    Returns:
        ``(B,)`` float32, added in float64; 0 for a row without an action.
    """
    # Without a look at the counts, which would wait for a GPU.
    return torch.segment_reduce(values.double(), "sum", lengths=counts, unsafe=True, initial=0.0).to(values.dtype)


def row_means(values: Tensor, counts: Tensor) -> Tensor:
    """Return the mean of each row, ``(B,)``; 0 for a row without an action. Arguments are those of `row_sums`."""
    return row_sums(values, counts) / counts.clamp(min=1)


def of_actions(values: Tensor, counts: Tensor, actions: int) -> Tensor:
    """Return the value ``(B,)`` of each row at each of its actions, ``(N,)`` with N = `actions`."""
    return values.repeat_interleave(counts, output_size=actions)
