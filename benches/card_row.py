"""The place of a part of `bin/card`, and the rows that it yields."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        figure: The measured quantity.
        measured: The value, with its unit.
        against: The value that it is compared with, "" for none.
        failed: The reason for which the part has failed, "" for none.
    """

    figure: str
    measured: str = ""
    against: str = ""
    failed: str = ""


@dataclasses.dataclass(frozen=True)
class Place:
    """The place in which a part runs.

    Attributes:
        folder: An empty folder of its own.
        model: The folder with the random model, its tokenizer and prompts.
        device: Name of the card, "" for the CPU.
        small: Whether all sizes are those of `SMALL=1`.
    """

    folder: Path
    model: Path
    device: str
    small: bool

    def size(self, small: _T, large: _T) -> _T:
        """Return one of two sizes."""
        return small if self.small else large

    def deadline_s(self, on_card_s: float) -> float:
        """Return the deadline that a card has, or ten times that on a CPU: none is lent, and others may be busy."""
        return on_card_s if self.device else 10 * on_card_s
