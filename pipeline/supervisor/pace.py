"""The steps of a running instance, and the rate of a counter."""

from __future__ import annotations

import collections

from pipeline.telemetry.window import Window


class Steps:
    """The step that is shown, and the rewards of the steps of the run.

    A rollback undoes steps, which are taken again: then the step falls, and the rewards of the undone steps go.

    Args:
        most: Steps whose rewards are kept.

    Attributes:
        step: Optimizer steps behind the newest weights.
        rewards: Number and mean reward of each step, the oldest first.
    """

    def __init__(self, most: int) -> None:
        self.step = 0
        self.rewards: collections.deque[tuple[int, float]] = collections.deque(maxlen=most)
        self._taken = 0.0

    def add(self, step: float | None, taken: float | None, reward: float | None) -> None:
        """Add a reading.

        Args:
            step: Optimizer steps behind the weights of the trainer; None while it has none: the last step stays.
            taken: All steps that were taken, undone ones too; it never falls. None before the trainer knows them.
            reward: Mean reward of the last step; None before the trainer's first.
        """
        self.step = self.step if step is None else int(step)
        while self.rewards and self.rewards[-1][0] > self.step:
            self.rewards.pop()
        if taken and taken != self._taken and reward is not None:
            self._taken = taken
            self.rewards.append((self.step, reward))

    def tenths(self) -> tuple[float, float] | None:
        """Return the mean rewards of the first and of the last tenth of the steps; None for fewer than ten steps."""
        rewards = [reward for _, reward in self.rewards]
        if not (tenth := len(rewards) // 10):
            return None
        return sum(rewards[:tenth]) / tenth, sum(rewards[-tenth:]) / tenth


class RateWindow(Window[float]):
    """The rate of a counter that never falls over a window of time: Prometheus' ``rate(counter[window])``.

    The increase between the first and the last sample in the window, divided by the time between them. Prometheus
    extrapolates to the window's edges and divides by the window. Both agree once samples fill the window; before that
    Prometheus divides by time that has not passed yet.
    """

    def rate(self) -> float | None:
        """Return the increase a second at the last sample; None with fewer than two samples in the window."""
        if len(self.kept) < 2:
            return None
        (first_s, first), (last_s, last) = self.kept[0], self.kept[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else None
