"""The columns of a rollout's rows for their rewards, and the column of each reward function for `info`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from pipeline.errors import ShapeError
from pipeline.rollout.reward.numbers import columns_of

OnParts = Callable[[Tensor, Sequence[Mapping[str, float]]], None]
"""Called with the parts of the next rows and with the further numbers of each."""
PREFIX: Final = "reward."
"""Begins the names in `info`: ``reward.NAME``."""


class RewardParts:
    """Collects the parts of mini-batches in the order of rows."""

    def __init__(self) -> None:
        self._found: list[Tensor] = []
        self._numbers: list[Mapping[str, float]] = []

    def append(self, parts: Tensor, numbers: Sequence[Mapping[str, float]]) -> None:
        """Add the parts of the next rows, ``(b, functions)`` float32, and the further numbers of each of them."""
        self._found.append(parts)
        self._numbers += numbers

    def keep(self, rows: Tensor) -> None:
        """Keep these rows, ``(n,)`` int64, alone."""
        self._found = [torch.cat(self._found)[rows]] if self._found else []
        self._numbers = [self._numbers[row] for row in rows.tolist()] if self._numbers else []

    def info(self, reward_model: Any, *, has_turns: bool = False) -> dict[str, Tensor]:
        """Return a column of each part, ``(B,)`` float32, and of each further number, NaN where a row has none.

        A single part has no column without turns: it is the score.
        """
        labels, numbers = getattr(reward_model, "labels", ()), columns_of(self._numbers)
        if not self._found or len(labels) < (1 if has_turns else 2):
            return numbers
        columns = torch.cat(self._found).unbind(dim=1)
        return numbers | {f"{PREFIX}{label}": column.clone() for label, column in zip(labels, columns, strict=True)}


def repeated(name: str, given: Sequence[Any] | None, prompts: int, group_size: int) -> list[Any]:
    """Return one element a row of one element a prompt, the G rows of a prompt contiguous; None: each is None.

    Raises:
        ShapeError: If there is not one element a prompt.
    """
    elements = [None] * prompts if given is None else list(given)
    if len(elements) != prompts:
        raise ShapeError(f"{name} has {len(elements)} elements, input_ids has {prompts} rows")
    return [element for element in elements for _ in range(group_size)]
