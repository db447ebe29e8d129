"""The course of the learning rate over a run's steps, as a share of the maximum."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

Schedule = Literal["linear", "cosine", "constant"]


class Decay(NamedTuple):
    """The learning rate rises on a line, falls, then stays.

    Attributes:
        schedule: Way of the fall.
        warmup_steps: Steps of the rise; the last of them has ratio 1.
        steps: Steps, the rise included, after which the ratio is `final_ratio`; 0 for no fall.
        final_ratio: Ratio after the fall.
    """

    schedule: Schedule
    warmup_steps: int
    steps: int
    final_ratio: float

    def ratio(self, step: int, *, first: int = 0) -> float:
        """Return the learning rate of a step as a ratio of the largest, from 0 to 1.

        Args:
            step: Steps taken before this one, `first` or more.
            first: Steps before the course begins, of a model that is trained later; the fall ends where it would.
        """
        step, steps = step - first, self.steps and max(self.steps - first, 1)
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if steps == 0:
            return 1.0
        if step >= steps:
            return self.final_ratio
        top = max(self.warmup_steps - 1, 0)
        share = (step - top) / (steps - top)
        if self.schedule == "cosine":
            # The form of transformers' `get_cosine_schedule_with_warmup`, down to the final ratio.
            share = (1.0 - math.cos(math.pi * share)) / 2
        return 1.0 - (1.0 - self.final_ratio) * share
