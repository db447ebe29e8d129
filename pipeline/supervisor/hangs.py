"""Hang detection: a process without progress or late at its start, an overdue ticket, a run without progress.

Pure: observations and the time in, verdicts out. `pipeline.supervisor.watchdog` acts on the verdicts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final, Literal

from pipeline.config.schema import Config
from pipeline.telemetry.metrics import Progress

Reason = Literal["no progress", "stopped", "not ready in time", "ticket overdue", "the run stands still"]

_BUFFER_ENDS_S = 60.0
"""Limit for a buffer that writes the spool, with a heartbeat at each extent: the rest of the shutdown waits for it."""

_PASSES: Final = "rollout.logits_forward_tokens (rollout.logits_forward_batch_size, where it is set)"
_SMALLER: Final = {
    "generate": "lower rollout.inference_batch_size or rollout.max_length",
    "environment": "lower rollout.environment_timeout_s",
    "logprob": f"lower {_PASSES}",
    "ref_logprob": f"lower {_PASSES}",
    "value": f"lower {_PASSES}",
    "reward": f"lower rollout.reward_timeout_s, or {_PASSES}",
    "train": "lower trainer.micro_batch_tokens (trainer.micro_batch_size, where it is set)",
}


@dataclasses.dataclass(frozen=True)
class Observation:
    """One process at one moment.

    Attributes:
        is_ready: Whether it has reported ready; before that only the rules for a start and for a stop apply.
        stopped_since_s: Monotonic time since which it is seen in the kernel's state T, as after SIGSTOP; None if not.
        starting_since_s: Monotonic time of its start; None if it is past its start, or not alive.
        is_ending: Whether it was sent SIGTERM.
        stopped_by: Name of the signal that has stopped it; empty if it is not stopped.
    """

    name: str
    role: str
    pid: int
    is_ready: bool
    progress: Progress
    stopped_since_s: float | None = None
    starting_since_s: float | None = None
    is_ending: bool = False
    stopped_by: str = ""

    @property
    def is_stopped(self) -> bool:
        """Whether it is in the kernel's state T (stopped)."""
        return self.stopped_since_s is not None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A process that hangs: the stage, and the monotonic time since which it hangs."""

    name: str
    pid: int
    reason: Reason
    stage: str
    working_on: int
    since_s: float

    @classmethod
    def on(cls, process: Observation, reason: Reason, since_s: float) -> Verdict:
        """Return the verdict on a process."""
        progress = process.progress
        stage = "start" if process.starting_since_s is not None else progress.activity or "other"
        return cls(process.name, process.pid, reason, stage, progress.working_on, since_s)


def hung(
    processes: Sequence[Observation], now_s: float, config: Config, *, watched_since_s: float = 0.0
) -> list[Verdict]:
    """Return a verdict on each process that hangs.

    A rank that waits in a collective has no heartbeat because another rank is missing: that rank hangs, or has no data
    yet. Only if all ranks wait in the collective, the first one in it is named. If some ranks are stopped, only those
    hang, since a pass of shards waits for them anywhere. Ranks start together: the time limit of their start runs from
    the last rank's start.

    Args:
        processes: All processes, also those that are starting or in backoff; none that has ended for good.
        now_s: Monotonic time.
        config: The configuration, which has the time limits; a `daemon.hang_timeout_s` of 0 turns its rule off.
        watched_since_s: Silence before this moment does not count: the supervisor itself was not running.

    Returns:
        The verdicts, at most one a process.
    """
    verdicts = []
    # A blocking engine has two tickets in hand: the second may have waited as long as the first took.
    grace_s = config.rollout.ticket_timeout_s
    for process in processes:
        deadline_s = process.progress.deadline_s
        if process.is_ready and deadline_s and now_s > max(deadline_s, watched_since_s) + grace_s:
            verdicts.append(Verdict.on(process, "ticket overdue", process.progress.since_s))
    verdicts += _late(processes, now_s, config, watched_since_s)
    judged = {verdict.name for verdict in verdicts}
    silent = [
        process
        for process in processes
        if (silent_since_s := _silent_since(process)) is not None
        and now_s - max(silent_since_s, watched_since_s) > _silence_s(process, config)
    ]
    waiting = [process for process in silent if waits_for_rank(process, processes)]
    culprits = [process for process in silent if process not in waiting]
    ranks = [process for process in processes if process.role == "trainer"]
    if waiting and len(waiting) == len(ranks):
        culprits.append(min(waiting, key=lambda process: process.progress.beat_s))
    for process in culprits:
        if process.name not in judged:
            reason: Reason = "stopped" if process.is_stopped else "no progress"
            verdicts.append(Verdict.on(process, reason, _silent_since(process) or 0.0))
    return verdicts


def waits_for_rank(process: Observation, processes: Sequence[Observation]) -> bool:
    """Return whether a silent process waits for another rank: in a collective, or while one of the ranks is stopped."""
    some_stopped = any(other.is_stopped for other in processes if other.role == process.role == "trainer")
    return (some_stopped or process.progress.in_collective) and not process.is_stopped


def _silence_s(process: Observation, config: Config) -> float:
    longest_s = config.daemon.hang_timeout_s or math.inf
    return min(longest_s, _BUFFER_ENDS_S) if process.role == "buffer" and process.is_ending else longest_s


def _silent_since(process: Observation) -> float | None:
    """Return the time of the last heartbeat; None for a process that is starting, unless it is stopped."""
    if process.is_ready:
        return process.progress.beat_s
    return None if process.starting_since_s is None else process.stopped_since_s


def _late(processes: Sequence[Observation], now_s: float, config: Config, watched_since_s: float) -> list[Verdict]:
    ranks = [process for process in processes if process.role == "trainer"]
    last_s = max([rank.starting_since_s or 0.0 for rank in ranks], default=0.0)
    # Ranks that are up wait for a rank that has not been started yet.
    all_started = all(rank.is_ready or rank.starting_since_s is not None for rank in ranks)
    some_stopped = any(rank.is_stopped for rank in ranks)
    verdicts = []
    for process in processes:
        since_s = process.starting_since_s
        if since_s is None:
            continue
        if process in ranks:
            if not all_started or (some_stopped and not process.is_stopped):
                continue
            since_s = last_s
        if now_s > max(since_s, watched_since_s) + config.daemon.startup_timeout_s:
            verdicts.append(Verdict.on(process, "stopped" if process.is_stopped else "not ready in time", since_s))
    return verdicts


class PauseWatch:
    """Pauses of the supervisor itself: time in which it did not run is no hang of another process.

    Attributes:
        since_s: Monotonic time of the end of the last pause.
        gap_s: Time between the last two looks.
    """

    def __init__(self) -> None:
        self._seen_s: float | None = None
        self.since_s = self.gap_s = 0.0

    def look(self, now_s: float, longest_gap_s: float) -> bool:
        """Record that the supervisor runs; return whether it had paused, for longer than this gap."""
        paused = self._seen_s is None or now_s - self._seen_s > longest_gap_s
        self.gap_s = 0.0 if self._seen_s is None else now_s - self._seen_s
        self._seen_s = now_s
        if paused:
            self.since_s = now_s
        return paused


class RunWatch:
    """Progress of a run: after the first timeout a process is restarted, after the second the run gives up.

    Attributes:
        quiet_since_s: Monotonic time since which the run has made no progress although it could have.
        strikes: Timeouts since the last progress.
    """

    def __init__(self) -> None:
        self._marks: tuple[float, ...] = ()
        self.quiet_since_s = 0.0
        self.strikes = 0

    def look(self, now_s: float, marks: tuple[float, ...], timeout_s: float, *, is_judged: bool) -> bool:
        """Compare the counts with the last ones; return whether the timeout has passed, once each time.

        Args:
            now_s: Monotonic time.
            marks: Counts; a change of any of them is progress.
            timeout_s: The timeout, 0 for none.
            is_judged: False while a standstill is not a fault: a process is starting, or the external trainer is due.
        """
        if marks != self._marks:
            self._marks, self.strikes, self.quiet_since_s = marks, 0, now_s
        if not is_judged:
            self.quiet_since_s = now_s
        if not timeout_s or now_s - self.quiet_since_s <= timeout_s:
            return False
        self.strikes += 1
        self.quiet_since_s = now_s
        return True


def after_hang(reason: str, stage: str) -> str:
    """Return the keys that help after a kill for hanging; empty if none does.

    Args:
        reason: Reason of the verdict (`pipeline.supervisor.hangs.Reason`).
        stage: The activity of the process.
    """
    if reason == "ticket overdue":
        return "raise rollout.ticket_timeout_s, or lower rollout.batch_size or rollout.max_length"
    if reason != "no progress" or stage not in _SMALLER:
        return ""
    return f"{_SMALLER[stage]}, or raise daemon.hang_timeout_s"
