"""Who hangs: a process that makes no progress or is late at its start, a ticket beyond its time, a run that stands.

Pure: processes as they stand and the time come in, verdicts come out. What is done about them is `pipeline.supervisor.watchdog`'s.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from pipeline.telemetry.metrics import Progress

Reason = Literal["no progress", "stopped", "not ready in time", "ticket overdue", "the run stands still"]

_BUFFER_ENDS_S = 60.0
"""Silence of a buffer that writes the spool, with a beat at each piece; all that is left to end waits for it."""


@dataclasses.dataclass(frozen=True)
class HangLimits:
    """What is waited for, and for how long; 0 turns a rule off.

    Attributes:
        hang_timeout_s: Silence of a process that is ready, or that is stopped.
        startup_timeout_s: From start to ready.
        ticket_grace_s: How long after its deadline a ticket may be worked on.
        progress_timeout_s: How long no row is sealed, trained or dropped, no step taken and no version published.
    """

    hang_timeout_s: float
    startup_timeout_s: float
    ticket_grace_s: float
    progress_timeout_s: float


@dataclasses.dataclass(frozen=True)
class Standing:
    """A process as it stands.

    Attributes:
        is_ready: Whether it said so; before that only its start is judged, and that it is stopped.
        stopped_since_s: Since when it is seen in the kernel's state T (monotonic), as after SIGSTOP; None if it is not.
        starting_since_s: When it was started (monotonic), None for one that is past its start or not alive.
        is_ending: Whether it was told to end.
    """

    name: str
    role: str
    pid: int
    is_ready: bool
    progress: Progress
    stopped_since_s: float | None = None
    starting_since_s: float | None = None
    is_ending: bool = False

    @property
    def is_stopped(self) -> bool:
        """Whether it is in the kernel's state T."""
        return self.stopped_since_s is not None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A process that hangs: at what, and since when (monotonic)."""

    name: str
    pid: int
    reason: Reason
    stage: str
    working_on: int
    since_s: float

    @classmethod
    def on(cls, process: Standing, reason: Reason, since_s: float) -> Verdict:
        """Return the verdict on a process."""
        progress = process.progress
        stage = "start" if process.starting_since_s is not None else progress.activity or "other"
        return cls(process.name, process.pid, reason, stage, progress.working_on, since_s)


def hung(
    processes: Sequence[Standing], now_s: float, limits: HangLimits, *, watched_since_s: float = 0.0
) -> list[Verdict]:
    """Return a verdict on each process that hangs.

    A rank that waits in a collective is silent because another one is: that one hangs, or has no data yet. Only where
    all ranks wait in it, the one that came first is named. Ranks start together: their time runs from the last one's
    start, and where some of them are stopped, those are to blame.

    Args:
        processes: All of them, those that are still starting or yet to come too; not who has ended for good.
        now_s: Monotonic time.
        limits: What may last how long.
        watched_since_s: Silence before this moment does not count: the watcher itself was not running.
    """
    verdicts = []
    for process in processes:
        deadline_s = process.progress.deadline_s
        if process.is_ready and deadline_s and now_s > max(deadline_s, watched_since_s) + limits.ticket_grace_s:
            verdicts.append(Verdict.on(process, "ticket overdue", process.progress.since_s))
    verdicts += _late(processes, now_s, limits, watched_since_s)
    judged = {verdict.name for verdict in verdicts}
    silent = [
        process
        for process in processes
        if (silent_since_s := _silent_since(process)) is not None
        and now_s - max(silent_since_s, watched_since_s) > _silence_s(process, limits)
    ]
    waiting = [process for process in silent if process.progress.in_collective and not process.is_stopped]
    culprits = [process for process in silent if process not in waiting]
    ranks = [process for process in processes if process.role == "trainer"]
    if waiting and len(waiting) == len(ranks):
        culprits.append(min(waiting, key=lambda process: process.progress.beat_s))
    for process in culprits:
        if process.name not in judged:
            reason: Reason = "stopped" if process.is_stopped else "no progress"
            verdicts.append(Verdict.on(process, reason, _silent_since(process) or 0.0))
    return verdicts


def _silence_s(process: Standing, limits: HangLimits) -> float:
    longest_s = limits.hang_timeout_s or math.inf
    return min(longest_s, _BUFFER_ENDS_S) if process.role == "buffer" and process.is_ending else longest_s


def _silent_since(process: Standing) -> float | None:
    """Return since when a process is silent; nobody expects a word of one that starts, unless it is stopped."""
    if process.is_ready:
        return process.progress.beat_s
    return None if process.starting_since_s is None else process.stopped_since_s


def _late(processes: Sequence[Standing], now_s: float, limits: HangLimits, watched_since_s: float) -> list[Verdict]:
    ranks = [process for process in processes if process.role == "trainer"]
    last_s = max([rank.starting_since_s or 0.0 for rank in ranks], default=0.0)
    # One that is not there yet is waited for by those that are.
    all_there = all(rank.is_ready or rank.starting_since_s is not None for rank in ranks)
    some_stopped = any(rank.is_stopped for rank in ranks)
    verdicts = []
    for process in processes:
        since_s = process.starting_since_s
        if since_s is None:
            continue
        if process in ranks:
            if not all_there or (some_stopped and not process.is_stopped):
                continue
            since_s = last_s
        if now_s > max(since_s, watched_since_s) + limits.startup_timeout_s:
            verdicts.append(Verdict.on(process, "stopped" if process.is_stopped else "not ready in time", since_s))
    return verdicts


class PauseWatch:
    """When the watcher last began to watch without a pause: its own silence is nobody else's hang."""

    def __init__(self, longest_gap_s: float) -> None:
        self._longest_gap_s = longest_gap_s
        self._seen_s: float | None = None
        self.since_s = 0.0

    def limit(self, longest_gap_s: float) -> None:
        """Let another gap count as a pause from now on."""
        self._longest_gap_s = longest_gap_s

    def look(self, now_s: float) -> bool:
        """Note that the watcher runs; return whether it had paused."""
        paused = self._seen_s is None or now_s - self._seen_s > self._longest_gap_s
        self._seen_s = now_s
        if paused:
            self.since_s = now_s
        return paused


class RunWatch:
    """Whether a run moves: a first time without progress somebody is restarted, a second time the run gives up.

    Attributes:
        quiet_since_s: Since when nothing has moved although it could have.
        strikes: How often that took too long, since something moved last.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._marks: tuple[float, ...] = ()
        self.quiet_since_s = 0.0
        self.strikes = 0

    def limit(self, timeout_s: float) -> None:
        """Let another timeout hold from now on, 0 for none."""
        self._timeout_s = timeout_s

    def look(self, now_s: float, marks: tuple[float, ...], *, is_judged: bool) -> bool:
        """Take note of how far the run has come; return whether it stands still for too long, once each time.

        Args:
            now_s: Monotonic time.
            marks: Counts of which any change is progress.
            is_judged: False while nobody can be blamed: something starts, or somebody outside is waited for.
        """
        if marks != self._marks:
            self._marks, self.strikes, self.quiet_since_s = marks, 0, now_s
        if not is_judged:
            self.quiet_since_s = now_s
        if not self._timeout_s or now_s - self.quiet_since_s <= self._timeout_s:
            return False
        self.strikes += 1
        self.quiet_since_s = now_s
        return True
