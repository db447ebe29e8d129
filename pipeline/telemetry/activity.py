"""A process's wall time by activity: every nanosecond since its start belongs to exactly one activity."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

from pipeline.errors import FieldError
from pipeline.telemetry.metrics import OTHER, START
from pipeline.telemetry.slab import SlotWriter


class Activities(ABC):
    """The present activity of a process.

    Args:
        first: The first activity.
    """

    def __init__(self, first: str) -> None:
        self._activity = first

    @property
    def activity(self) -> str:
        """The present activity."""
        return self._activity

    @abstractmethod
    def enter(self, activity: str) -> str:
        """End the present activity, begin another one and return the one that ended."""

    @contextlib.contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Count the block as an activity; then, also after an error, resume the previous one, "other" after "start"."""
        interrupted = self.enter(activity)
        try:
            yield
        finally:
            self.enter(OTHER if interrupted == START else interrupted)


class ActivityClock(Activities):
    """Adds a process's wall time to rlhfd_process_time_seconds_total, at each change of activity.

    Invariant: after each change the activities add up to the time since the start, in whole nanoseconds. In between,
    readers of the slab add the present activity's time so far (`pipeline.telemetry.slab`), so that an activity that
    never ends is counted too. The clock belongs to the process's main thread.

    The first activity is "start": from the time at which the supervisor began the process (`MetricsSlab.begin`), if it
    did, until the next activity. Time between activities is "other".

    Args:
        writer: The process's metrics.
        activities: Activities of this role, all declared in the catalogue; "start" and "other" are added.
        clock_ns: Monotonic nanoseconds.
    """

    def __init__(
        self,
        writer: SlotWriter,
        activities: Sequence[str],
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        super().__init__(START)
        names = dict.fromkeys([*activities, START, OTHER])
        self._writer = writer
        self._counters = {name: writer.counter("rlhfd_process_time_seconds_total", activity=name) for name in names}
        self._spent_ns = dict.fromkeys(names, 0)
        self._clock_ns = clock_ns
        started_ns = writer.started_ns()
        if started_ns is None:
            started_ns = clock_ns()
            writer.enter(START, started_ns, 0)
        self._booked_ns = started_ns

    def enter(self, activity: str) -> str:
        """End the present activity, begin another one and return the one that ended.

        Raises:
            FieldError: If the activity was not declared to this clock.
        """
        if activity not in self._counters:
            raise FieldError(f"activity {activity} is none of {', '.join(self._counters)}")
        self._writer.leave()
        now_ns, ended = self._clock_ns(), self._activity
        self._spent_ns[ended] += now_ns - self._booked_ns
        # Stored first: a reader uses this word as soon as the activity has changed.
        self._counters[ended].set_total(self._spent_ns[ended] / 1e9)
        self._activity, self._booked_ns = activity, now_ns
        self._writer.enter(activity, now_ns, self._spent_ns[activity])
        return ended
