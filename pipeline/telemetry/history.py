"""The history of a run: a bounded number of points, coarser with age, kept over restarts.

A point holds sums, never means: the sum of two points is the point of both spans, and only time resolution is lost. A
point of the finest level spans two seconds. 120 points of a level are kept; then its two oldest become one point of the
next level, which spans twice the time. A day is some 1,000 points, a month some 1,500. Time in which a paused run rests
has no point.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from pipeline.storage.files import UNREADABLE, write_whole
from pipeline.telemetry.metrics import OTHER
from pipeline.telemetry.reader import HistogramReading, Reading

FILE_NAME: Final = "history.msgpack"
SPAN_S: Final = 2.0
_PER_LEVEL: Final = 120
_LEVELS: Final = 20
_MOST_BYTES: Final = 64 << 20
_SUMS: Final = (
    "seconds", "rewards", "reward_sum", "reward_squares", "tokens", "ready_item_seconds", "staleness_sum",
    "staleness_rows",
)  # fmt: skip
"""Fields of a point that are plain sums."""

Spent = Mapping[tuple[str, ...], float]

EVALUATION: Final = "pass_at_1"
"""The one value of `LEARNING` that the buffer has; the trainer has the others."""
LEARNING: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "loss": ("rlhfd_loss", {"kind": "total"}),
    "kl": ("rlhfd_kl_mean_nats", {}),
    "entropy": ("rlhfd_entropy_nats", {}),
    "response_length": ("rlhfd_response_length_mean_tokens", {}),
    "clipped": ("rlhfd_clipped_ratio", {}),
    "cut": ("rlhfd_cut_ratio", {}),
    "without_signal": ("rlhfd_groups_without_signal_ratio", {}),
    "gradient_norm": ("rlhfd_gradient_norm", {}),
    EVALUATION: ("rlhfd_evaluation_pass_at_1_ratio", {"file": "all"}),
}
"""The values of a step that are shown beside its reward, each with its gauge and labels; the last evaluation's, too."""


def learning_of(reading: Reading) -> dict[str, float]:
    """Return the values of the last step by their names in `LEARNING`; unknown values are left out."""
    found = {name: reading.value(gauge, **labels) for name, (gauge, labels) in LEARNING.items()}
    return {name: value for name, value in found.items() if value is not None}


class Point(msgspec.Struct, array_like=True):
    """One span of time; all fields but the times and `step` are sums.

    Attributes:
        start_s: Unix time.
        end_s: Unix time.
        seconds: Observed seconds; less than from start to end if the daemon was down, or the run rested, in between.
        step: Optimizer steps at the end, without those that a rollback undid.
        rewards: Number of mean rewards of a step; before an external trainer's connect, of a span's rollouts.
        reward_sum: Sum of these rewards.
        reward_squares: Sum of the mean squares of the rewards behind them, for the spread.
        tokens: Response tokens generated.
        ready_item_seconds: Rows that waited for a trainer, times the seconds of their wait.
        staleness_sum: Sum of the staleness of trained rows, in versions.
        staleness_rows: Number of those rows.
        spent_s: Seconds of the processes of a role by activity.
        learning: Sum and number of each value of `LEARNING`.
    """

    start_s: float
    end_s: float
    seconds: float = 0.0
    step: int = 0
    rewards: float = 0.0
    reward_sum: float = 0.0
    reward_squares: float = 0.0
    tokens: float = 0.0
    ready_item_seconds: float = 0.0
    staleness_sum: float = 0.0
    staleness_rows: float = 0.0
    spent_s: dict[str, dict[str, float]] = {}
    learning: dict[str, tuple[float, float]] = {}

    def plus(self, later: Point) -> Point:
        """Return the point of both spans."""
        spent = {role: dict(activities) for role, activities in self.spent_s.items()}
        for role, activities in later.spent_s.items():
            mine = spent.setdefault(role, {})
            for activity, seconds in activities.items():
                mine[activity] = mine.get(activity, 0.0) + seconds
        learning = dict(self.learning)
        for name, (total, count) in later.learning.items():
            before = learning.get(name, (0.0, 0.0))
            learning[name] = (before[0] + total, before[1] + count)
        sums = {name: getattr(self, name) + getattr(later, name) for name in _SUMS}
        return Point(self.start_s, later.end_s, step=later.step, spent_s=spent, learning=learning, **sums)

    def shown(self) -> dict[str, Any]:
        """Return the values for a chart: means, rates and shares; unknown values are left out."""
        point: dict[str, Any] = {"start_s": round(self.start_s, 1), "end_s": round(self.end_s, 1), "step": self.step}
        point["seconds"] = round(self.seconds, 1)
        if self.rewards:
            mean = self.reward_sum / self.rewards
            point["reward"] = round(mean, 5)
            point["reward_spread"] = round(max(0.0, self.reward_squares / self.rewards - mean * mean) ** 0.5, 5)
        for name, (total, count) in self.learning.items():
            point[name] = float(f"{total / count:.5g}")
        if self.seconds:
            point["tokens_per_s"] = round(self.tokens / self.seconds, 2)
            point["ready_items"] = round(self.ready_item_seconds / self.seconds, 2)
        if self.staleness_rows:
            point["staleness"] = round(self.staleness_sum / self.staleness_rows, 4)
        point["shares"] = {role: shares(activities) for role, activities in self.spent_s.items()}
        return point


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each activity in their sum."""
    total = sum(seconds.values())
    return {name: round(value / total, 4) for name, value in seconds.items() if value > 0} if total > 0 else {}


class _Kept(msgspec.Struct):
    """The content of the file: the run's identity, and the points of each level, the finest first."""

    identity: str
    levels: list[list[Point]]


class History:
    """Points of one run, of this start and all earlier ones.

    Args:
        path: Path of the file; a damaged file, or one of another run, is started anew.
        identity: Identity of the run, as in `pipeline.config.identity.identity_of`.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self._path = path
        self._identity = identity
        self._levels = self._load()

    def add(self, point: Point) -> None:
        """Add the newest point."""
        for level in range(_LEVELS):
            if level == len(self._levels):
                self._levels.append([])
            points = self._levels[level]
            points.append(point)
            if len(points) <= _PER_LEVEL:
                return
            point = points.pop(0).plus(points.pop(0))
        # Beyond the last level: more than a century.

    def points(self, after_s: float = 0.0) -> list[Point]:
        """Return the points behind the one that ends at a Unix time, the oldest first."""
        return points_after([*self], after_s)

    def __iter__(self) -> Iterator[Point]:
        for level in reversed(self._levels):
            yield from level

    def save(self) -> None:
        """Write all points; the file is replaced as a whole or not at all.

        Raises:
            OSError: If it cannot be written.
        """
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(self._path, msgspec.msgpack.encode(_Kept(self._identity, self._levels)), flush=False)

    def _load(self) -> list[list[Point]]:
        with contextlib.suppress(OSError, *UNREADABLE):
            if self._path.stat().st_size <= _MOST_BYTES:
                kept = msgspec.msgpack.decode(self._path.read_bytes(), type=_Kept)
                if kept.identity == self._identity:
                    return kept.levels
        return []


def points_after(points: list[Point], after_s: float) -> list[Point]:
    """Return the points behind the newest one that ends at a Unix time, as `Point.shown` rounds it.

    The wall clock may have been set back since. Where that point has become part of a coarser one, those are returned
    that end later.
    """
    for at in reversed(range(len(points))):
        if round(points[at].end_s, 1) == after_s:
            return points[at + 1 :]
    return [point for point in points if point.end_s > after_s]


class HistoryRecorder:
    """Turns readings of the metrics into points.

    Args:
        history: History that the points are added to.
        is_external: Whether the trainer is an external one.
    """

    def __init__(self, history: History, *, is_external: bool = False) -> None:
        self._history = history
        self._is_external = is_external
        self._known_step = next((point.step for point in reversed(history.points())), 0)
        self._before: _Totals | None = None
        self._began_s = 0.0
        self._last_s = 0.0
        self._step = -1.0
        self._behind_weights: float | None = None
        self._evaluated_version: float | None = None
        self._is_paused = False
        self._point = Point(0.0, 0.0)

    def add(self, now_s: float, unix_s: float, reading: Reading, ready_items: int) -> bool:
        """Add a reading.

        Args:
            now_s: Monotonic time; ascends.
            unix_s: Unix time of the same instant.
            reading: Reading of all metrics.
            ready_items: Rows that wait for a trainer.

        Returns:
            Whether the reading completed a point.
        """
        if self._before is None:
            self._see_step(reading)
            self._begin(now_s, unix_s, reading, _Totals(reading))
            return False
        self._is_paused = self._is_paused and _is_paused(reading)
        self._point.ready_item_seconds += ready_items * (now_s - self._last_s)
        self._last_s = now_s
        self._see_step(reading)
        if now_s - self._began_s < SPAN_S:
            return False
        totals = _Totals(reading)
        self._finish(now_s, unix_s, totals)
        self._begin(now_s, unix_s, reading, totals)
        return True

    def _begin(self, now_s: float, unix_s: float, reading: Reading, totals: _Totals) -> None:
        self._is_paused = _is_paused(reading)
        self._before = totals
        self._began_s = self._last_s = now_s
        self._point = Point(unix_s, unix_s)

    def _see_step(self, reading: Reading) -> None:
        steps = reading.value("rlhfd_train_steps_total")
        step = steps or 0.0
        mean, deviation = reading.value("rlhfd_reward_mean"), reading.value("rlhfd_reward_stddev") or 0.0
        if step != self._step and mean is not None:
            if self._step >= 0:
                self._point.rewards += 1
                self._point.reward_sum += mean
                self._point.reward_squares += deviation * deviation + mean * mean
                for name, value in learning_of(reading).items():
                    total, count = self._point.learning.get(name, (0.0, 0.0))
                    self._point.learning[name] = (total + value, count + 1.0)
            self._step = step
        elif mean is None:
            # No step was taken since the trainer started: the next one is new.
            self._step = step
        self._see_evaluation(reading)
        if (behind_weights := reading.value("rlhfd_train_step")) is not None:
            self._behind_weights = behind_weights
        # The count of all steps never falls; of an external trainer there is no other. Before a trainer is up in a new
        # slab, neither is known: the step is that of the start before.
        if (known := steps if self._behind_weights is None else self._behind_weights) is not None:
            self._known_step = int(known)
        self._point.step = self._known_step

    def _see_evaluation(self, reading: Reading) -> None:
        """Add the value of a new evaluation, which comes behind its step: that of the last step has no later one."""
        version = reading.value("rlhfd_evaluation_version")
        if version is None or version == self._evaluated_version:
            return
        is_new, self._evaluated_version = self._evaluated_version is not None, version
        if is_new and (right := learning_of(reading).get(EVALUATION)) is not None:
            self._point.learning[EVALUATION] = (right, 1.0)

    def _finish(self, now_s: float, unix_s: float, totals: _Totals) -> None:
        before, point = self._before, self._point
        assert before is not None
        # By the monotonic clock: points must not overlap after the wall clock was set.
        point.seconds = now_s - self._began_s
        point.start_s, point.end_s = unix_s - point.seconds, unix_s
        point.tokens = _grown(totals.tokens, before.tokens)
        point.staleness_sum, point.staleness_rows = map(_grown, totals.staleness, before.staleness)
        if self._is_external:
            self._add_rollouts(totals, before)
        for (role, _, activity), seconds in totals.spent.items():
            spent = seconds - before.spent.get((role, _, activity), 0.0)
            if spent > 0:
                mine = point.spent_s.setdefault(role, {})
                mine[activity] = mine.get(activity, 0.0) + spent
        if not (self._is_paused and _rests(point)):
            self._history.add(point)

    def _add_rollouts(self, totals: _Totals, before: _Totals) -> None:
        """Add the values of the span's rollouts that an external trainer does not show."""
        point = self._point
        # Its steps have rewards, from its connect on. A sum of rewards is not known once one of them was negative.
        if not totals.has_steps and totals.rewards[0] >= before.rewards[0]:
            total, rollouts = map(_grown, totals.rewards, before.rewards)
            if rollouts:
                mean = total / rollouts
                # One mean, as that of a step: spans before and after the connect have the same weight.
                point.reward_sum, point.rewards, point.reward_squares = mean, 1.0, mean * mean
        length, responses = map(_grown, totals.lengths, before.lengths)
        if responses:
            point.learning["response_length"] = (length, responses)


def _is_paused(reading: Reading) -> bool:
    return bool(reading.value("rlhfd_paused"))


def _rests(point: Point) -> bool:
    """Return whether workers and trainers did nothing but wait: of a paused run no point is kept."""
    done = [name for role in ("rollout", "trainer") for name in point.spent_s.get(role, {})]
    is_idle = all(name.startswith("wait_") or name in ("asleep", OTHER) for name in done)
    return is_idle and not point.tokens and not point.rewards


def _grown(now: float, before: float) -> float:
    """Return the growth of a total; 0 for one that begins anew, as in a slab that another program has cut off."""
    return max(0.0, now - before)


class _Totals:
    """Totals that only grow, at one instant."""

    def __init__(self, reading: Reading) -> None:
        times = reading.families["rlhfd_process_time_seconds_total"]
        self.spent: Spent = {key: value for key, value in times.items() if isinstance(value, float)}
        self.tokens = reading.value("rlhfd_tokens_total", kind="response") or 0.0
        self.has_steps = reading.value("rlhfd_train_steps_total") is not None
        self.staleness = _sum_and_count(reading, "rlhfd_policy_staleness_versions", ("train",))
        self.rewards = _sum_and_count(reading, "rlhfd_reward", None)
        self.lengths = _sum_and_count(reading, "rlhfd_response_length_tokens", None)


def _sum_and_count(reading: Reading, name: str, labels: tuple[str, ...] | None) -> tuple[float, float]:
    found = [
        value
        for key, value in reading.families.get(name, {}).items()
        if isinstance(value, HistogramReading) and labels in (None, key)
    ]
    total = sum(math.nan if value.total is None else value.total for value in found)
    return total, sum(value.count for value in found)
