"""Samples over a window of time."""

from __future__ import annotations

import collections
from typing import Generic, TypeVar

T = TypeVar("T")


class Window(Generic[T]):
    """Samples of something over a window of time, the oldest first.

    Args:
        window_s: Age up to which a sample is kept.
        every_s: Least time between two samples that are kept.

    Attributes:
        kept: The samples, each after its monotonic time.
    """

    def __init__(self, window_s: float, every_s: float = 0.0) -> None:
        self._window_s, self._every_s = window_s, every_s
        self.kept: collections.deque[tuple[float, T]] = collections.deque()

    def add(self, now_s: float, sample: T) -> None:
        """Add a sample, unless the last one is too recent; `now_s` must ascend."""
        if not self.kept or now_s - self.kept[-1][0] >= self._every_s:
            self.kept.append((now_s, sample))
            while self.kept[0][0] < now_s - self._window_s:
                self.kept.popleft()
