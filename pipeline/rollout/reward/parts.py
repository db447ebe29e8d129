"""The columns of a rollout's rows for their rewards, and the column of each reward function for `info`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from pipeline.errors import ShapeError

PREFIX: Final = "reward."
"""Begins the names in `info`: ``reward.NAME``."""


class RewardParts:
    """Collects the parts of mini-batches in the order of rows."""

    def __init__(self) -> None:
        self._found: list[Tensor] = []

    def append(self, parts: Tensor) -> None:
        """Add the parts of the next rows, ``(b, functions)`` float32."""
        self._found.append(parts)

    def keep(self, rows: Tensor) -> None:
        """Keep these rows, ``(n,)`` int64, alone."""
        self._found = [torch.cat(self._found)[rows]] if self._found else []

    def info(self, reward_model: Any, *, has_turns: bool = False) -> dict[str, Tensor]:
        """Return a column of each part, ``(B,)`` float32; none of a single part, which is the score without turns."""
        labels = getattr(reward_model, "labels", ())
        if not self._found or len(labels) < (1 if has_turns else 2):
            return {}
        columns = torch.cat(self._found).unbind(dim=1)
        return {f"{PREFIX}{label}": column.clone() for label, column in zip(labels, columns, strict=True)}


def repeated(name: str, given: Sequence[Any] | None, prompts: int, group_size: int) -> list[Any]:
    """Return one element a row of one element a prompt, the G rows of a prompt contiguous; None: each is None.

    Raises:
        ShapeError: If there is not one element a prompt.
    """
    elements = [None] * prompts if given is None else list(given)
    if len(elements) != prompts:
        raise ShapeError(f"{name} has {len(elements)} elements, input_ids has {prompts} rows")
    return [element for element in elements for _ in range(group_size)]
