"""The running mean and deviation of numbers of which each step brings some: returns, scores.

    m = (1 - a) m + a (mean of the step's numbers)        s, of their squares, likewise        w = (1 - a) w + a
    mean = m / w        deviation = sqrt(s / w - mean^2)

Exponential averages without the bias of their start, as in MAPPO's ``ValueNorm`` (arXiv:2103.01955): each step counts
once, however many numbers it has. a = 3e-4 and the least deviation, 1e-4, are those of PopArt (arXiv:1809.04474): of
the last thousand steps the oldest one weighs 0.74 of the newest.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple, Self

import torch
from torch import Tensor

SCORES: Final = "scores.moments"
"""Published name of the moments of scores, beside the weights of a version."""

RATE: Final = 3e-4
LEAST_STDDEV: Final = 1e-4
_ROUNDING = 1e-13


class Moments(NamedTuple):
    """The moments after some steps.

    Attributes:
        weighted_mean: m.
        weighted_square: s.
        weight: w, 0 before the first step.
    """

    weighted_mean: float = 0.0
    weighted_square: float = 0.0
    weight: float = 0.0

    @classmethod
    def of(cls, state: Tensor) -> Self:
        """Return the moments in a state, ``(3,)`` float64."""
        return cls(*state.tolist())

    @staticmethod
    def new_state() -> Tensor:
        """Return the state of no moments, ``(3,)`` float64."""
        return torch.zeros(len(Moments._fields), dtype=torch.float64)

    def keep(self, state: Tensor) -> None:
        """Write the moments into a state."""
        state.copy_(torch.tensor(self, dtype=torch.float64))

    def after(self, count: float, total: float, squares: float) -> Moments:
        """Return the moments after a further step.

        Args:
            count: Numbers of the step.
            total: Their sum.
            squares: Sum of their squares.

        Returns:
            The moments; these ones if the step has no number, or one that is NaN or infinite.
        """
        if count <= 0 or not math.isfinite(total) or not math.isfinite(squares):
            return self
        return Moments(
            (1 - RATE) * self.weighted_mean + RATE * total / count,
            (1 - RATE) * self.weighted_square + RATE * squares / count,
            (1 - RATE) * self.weight + RATE,
        )

    @property
    def mean(self) -> float:
        """The mean, 0 before the first step."""
        return self.weighted_mean / self.weight if self.weight else 0.0

    @property
    def scale(self) -> float:
        """The divisor of numbers: their deviation, 1e-4 at least; 1 as long as all are equal."""
        if not self.weight:
            return 1.0
        square = self.weighted_square / self.weight
        variance = square - self.mean**2
        return max(math.sqrt(variance), LEAST_STDDEV) if variance > _ROUNDING * square else 1.0
