"""Restarts of dead processes: backoff with jitter, and a limit after which the slot has failed."""

from __future__ import annotations

import collections
import random
from typing import Final

from pipeline.config.schema import DaemonConfig

HEALTHY_S: Final = 300.0
_WINDOW_S: Final = 600.0
_MOST_DELAYS: Final = 120
"""Longest wait before a restart, as a multiple of the first: a minute by default."""


class RestartPolicy:
    """One slot's history of starts and deaths; the caller passes the time and the random numbers.

    The wait doubles with each restart. The slot has failed after `daemon.restart_limit` starts within ten minutes, or
    as many deaths in a row of a process that made no progress for five minutes from ready on: starts of a large model
    may take so long that ten minutes never hold that many.
    """

    def __init__(self, config: DaemonConfig, rng: random.Random) -> None:
        self._config = config
        self._rng = rng
        self._starts: collections.deque[float] = collections.deque()
        self._delay_s = config.restart_delay_s
        self._unhealthy = 0

    def limit(self, config: DaemonConfig) -> None:
        """Apply other bounds from now on; a wait outside of the new ones is the nearest of them."""
        first_s = config.restart_delay_s
        is_first = self._delay_s == self._config.restart_delay_s
        self._delay_s = first_s if is_first else min(max(self._delay_s, first_s), _MOST_DELAYS * first_s)
        self._config = config

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
        first_s = self._config.restart_delay_s
        self._unhealthy += 1
        if lived_s >= HEALTHY_S:
            self._delay_s, self._unhealthy = first_s, 0
        while self._starts and now_s - self._starts[0] > _WINDOW_S:
            self._starts.popleft()
        if max(len(self._starts), self._unhealthy) >= self._config.restart_limit:
            return None
        delay_s = self._delay_s * self._rng.uniform(0.8, 1.2)
        self._delay_s = min(2 * self._delay_s, _MOST_DELAYS * first_s)
        return delay_s
