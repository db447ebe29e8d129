"""Restarts of dead processes: backoff with jitter, and a limit after which the slot has failed."""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import Final

from pipeline.config.schema import DaemonConfig

_MOST_DELAYS: Final = 120
"""Longest wait before a restart, as a multiple of the first: a minute by default."""


@dataclasses.dataclass(frozen=True)
class RestartLimits:
    """Bounds of the restarts of one slot.

    Attributes:
        first_delay_s: Wait before the first restart; doubles with each further restart.
        longest_delay_s: Cap of the wait.
        healthy_s: Progress for this long, from ready on, resets the wait to `first_delay_s`.
        starts: Starts within `window_s` after which the slot has failed, and deaths in a row without `healthy_s`.
        window_s: Length of that window; starts of a large model may take so long that it never holds that many.
    """

    first_delay_s: float = 0.5
    longest_delay_s: float = 60.0
    healthy_s: float = 300.0
    starts: int = 5
    window_s: float = 600.0

    @classmethod
    def of(cls, config: DaemonConfig) -> RestartLimits:
        """Return the bounds of a configuration."""
        first_s = config.restart_delay_s
        return cls(first_delay_s=first_s, longest_delay_s=_MOST_DELAYS * first_s, starts=config.restart_limit)


class RestartPolicy:
    """One slot's history of starts and deaths; the caller passes the time and the random numbers."""

    def __init__(self, limits: RestartLimits, rng: random.Random) -> None:
        self._limits = limits
        self._rng = rng
        self._starts: collections.deque[float] = collections.deque()
        self._delay_s = limits.first_delay_s
        self._unhealthy = 0

    def limit(self, limits: RestartLimits) -> None:
        """Apply other bounds from now on; a wait outside of the new ones is the nearest of them."""
        is_first = self._delay_s == self._limits.first_delay_s
        bounded_s = min(max(self._delay_s, limits.first_delay_s), limits.longest_delay_s)
        self._delay_s = limits.first_delay_s if is_first else bounded_s
        self._limits = limits

    def started(self, now_s: float) -> None:
        """Record a start."""
        self._starts.append(now_s)

    def died(self, now_s: float, lived_s: float) -> float | None:
        """Record a death.

        Args:
            now_s: Monotonic time.
            lived_s: Time from ready to the last progress; 0 if the process was never ready.

        Returns:
            The wait before the next start, in s; None if the slot has failed.
        """
        limits = self._limits
        self._unhealthy += 1
        if lived_s >= limits.healthy_s:
            self._delay_s, self._unhealthy = limits.first_delay_s, 0
        while self._starts and now_s - self._starts[0] > limits.window_s:
            self._starts.popleft()
        if max(len(self._starts), self._unhealthy) >= limits.starts:
            return None
        delay_s = self._delay_s * self._rng.uniform(0.8, 1.2)
        self._delay_s = min(2 * self._delay_s, limits.longest_delay_s)
        return delay_s
