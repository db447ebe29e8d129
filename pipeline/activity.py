"""What a process spends its wall time on: every nanosecond since its start belongs to exactly one activity."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from pipeline.errors import FieldError
from pipeline.metrics_writer import MetricWriter

OTHER = "other"


class ActivityClock:
    """Books a process's wall time to rlhfd_process_time_seconds_total.

    Invariant: after each booking the activities add up to the time since the start, in whole nanoseconds.

    `enter` and `during` belong to the process's main thread. `tick` may come from another one, such as the heartbeat's:
    without it a long activity would show only at its end.

    Args:
        writer: The process's metrics.
        activities: What this role does, all declared in the catalogue; "other" comes by itself.
        since_ns: When the process started, by the same clock; the time until now counts as "other".
        clock_ns: Monotonic nanoseconds.
    """

    def __init__(
        self,
        writer: MetricWriter,
        activities: Sequence[str],
        *,
        since_ns: int | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        names = dict.fromkeys([*activities, OTHER])
        self._counters = {name: writer.counter("rlhfd_process_time_seconds_total", activity=name) for name in names}
        self._spent_ns = dict.fromkeys(names, 0)
        self._clock_ns = clock_ns
        self._booked_ns = clock_ns() if since_ns is None else since_ns
        self._activity = OTHER
        self._lock = threading.Lock()

    @property
    def activity(self) -> str:
        """What the process does now."""
        return self._activity

    def enter(self, activity: str) -> str:
        """End the present activity, begin another one and return the one that ended.

        Raises:
            FieldError: If this clock was not told of it.
        """
        if activity not in self._counters:
            raise FieldError(f"activity {activity} is none of {', '.join(self._counters)}")
        with self._lock:
            self._book()
            ended, self._activity = self._activity, activity
        return ended

    @contextlib.contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Spend the block on an activity, then go on with the one before, however the block ends."""
        interrupted = self.enter(activity)
        try:
            yield
        finally:
            self.enter(interrupted)

    def tick(self) -> None:
        """Book the present activity up to now."""
        with self._lock:
            self._book()

    def _book(self) -> None:
        now_ns = self._clock_ns()
        self._spent_ns[self._activity] += now_ns - self._booked_ns
        self._booked_ns = now_ns
        self._counters[self._activity].set_total(self._spent_ns[self._activity] / 1e9)
