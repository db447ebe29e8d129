"""The page's data of a run that is not running, from its folder alone.

run.json, checkpoints/latest.json     the run, its step, version and checkpoint
history.msgpack                       the charts; the steps behind its end, all if it is missing or damaged, are
metrics.jsonl                         those of this file, whose last line has the values beside the charts
evaluations.jsonl, samples/           the last evaluation that a line of metrics.jsonl has, the rollouts
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from pipeline.errors import counted
from pipeline.runtime.latest_checkpoint import best_checkpoint, readable_latest
from pipeline.runtime.run_folder import RunNote
from pipeline.storage.files import UNREADABLE
from pipeline.supervisor.page import SampleFeed
from pipeline.telemetry.evaluations import FILE_NAME as EVALUATIONS
from pipeline.telemetry.evaluations import GAUGES, Evaluation, Summary, newest, read_evaluations
from pipeline.telemetry.history import EVALUATION, LEARNING, History, Point, points_after
from pipeline.telemetry.history import FILE_NAME as HISTORY

_METRICS: Final = "metrics.jsonl"
_REWARD: Final = "reward/"
LEARNING_FIELDS: Final = {
    name: gauge.removeprefix("rlhfd_") for name, (gauge, _) in LEARNING.items() if name != EVALUATION
} | {"kl": "kl_nats"}
"""The fields of a line of ``metrics.jsonl`` by the names in `pipeline.telemetry.history.LEARNING`."""

Fields = dict[str, Any]


class EndedPage:
    """Answers the requests of the page of a run that is not running; all but the samples is read once.

    Args:
        folder: Folder of the run.
        note: Description of the run.
    """

    def __init__(self, folder: Path, note: RunNote) -> None:
        self._feed = SampleFeed(folder)
        history = History(folder / HISTORY, note.identity)
        last, version = Fields(), math.inf
        for fields, point in _points(folder / _METRICS, next(reversed(history.points()), Point(0.0, 0.0))):
            if (evaluation := fields.get("evaluation")) is None:
                last = fields
            else:
                version = evaluation.get("version", version)
            if point is not None:
                history.add(point)
        self._points = history.points()
        evaluated = newest(read_evaluations(folder / EVALUATIONS), version)
        self._state = _state(folder, note, last, evaluated, self._points)

    def live(self, after_s: float) -> bytes:
        """Return the last state of the run, and the points of its history behind that of a Unix time, as JSON."""
        points = [point.shown() for point in points_after(self._points, after_s)]
        return msgspec.json.encode({**self._state, "history": points})

    def samples(self, cursor: str) -> bytes:
        """Return the newest rollouts recorded since an earlier answer, and the next cursor, as JSON."""
        return self._feed.since(cursor)


def _state(folder: Path, note: RunNote, last: Fields, evaluated: Evaluation | None, points: list[Point]) -> Fields:
    latest = readable_latest(folder / "checkpoints")
    checkpoint = "" if latest is None else str(folder / "checkpoints" / latest.path)
    is_complete = latest is not None and latest.complete
    # An external trainer writes neither lines nor checkpoints.
    steps = [last.get("step"), None if latest is None else latest.step, points[-1].step if points else 0]
    step = next(found for found in steps if found is not None)
    reward = next((point.shown()["reward"] for point in reversed(points) if point.rewards), None)
    why = [
        f"The run has taken all of its {counted(step, 'step')}."
        if is_complete
        else f"The run has stopped at step {step:,}."
    ]
    if latest is None:
        why.append("It has no checkpoint.")
    else:
        why.append(f"Its checkpoint of step {latest.step:,}, a folder for from_pretrained: {checkpoint}")
    rows = sum(point.staleness_rows for point in points)
    status: Fields = {
        "state": "ended",
        "run": note.name,
        "run_id": "" if latest is None else latest.run,
        "checkpoint": checkpoint,
        "ended_unix_s": max(note.started_unix_s, _number(last, "time_unix_s"), points[-1].end_s if points else 0.0),
        "algorithm": note.algorithm,
        "model": note.model,
        "step": step,
        "max_steps": step if is_complete else 0,
        "policy_version": None if latest is None else latest.version,
        "reward_mean": last.get("reward_mean", reward),
        "reward_trend": None,
        "learning": {name: last[field] for name, field in LEARNING_FIELDS.items() if last.get(field) is not None},
        "reward_functions": _reward_functions(last),
        "evaluation": None if evaluated is None else _shown(evaluated, folder),
        "tokens_per_s": last.get("tokens_per_s"),
        "staleness_mean_versions": sum(point.staleness_sum for point in points) / rows if rows else None,
        "buffer": {"ready_items": None, "capacity_items": 0, "leased_items": 0, "unaccounted": 0},
        "processes": [],
    }
    return {"status": status, "why": why}


def _reward_functions(last: Fields) -> dict[str, Any]:
    """Return the means of the functions and of their further numbers; of a single function its numbers alone.

    Its score is the reward, as on the page of a running instance.
    """
    means = {name.removeprefix(_REWARD): value for name, value in last.items() if name.startswith(_REWARD)}
    functions = [name for name in means if not any(name.startswith(f"{function}.") for function in means)]
    left_out = functions if len(functions) == 1 else []
    return {name: value for name, value in means.items() if value is not None and name not in left_out}


def _shown(evaluation: Evaluation, folder: Path) -> Fields:
    best = best_checkpoint(folder / "checkpoints")
    return {
        "version": evaluation.version,
        "k": evaluation.k,
        **_means(evaluation.total),
        "files": {one.name: _means(one) for one in evaluation.files},
        "done": 0,
        "prompts": 0,
        "best": "" if best is None else str(best),
    }


def _means(summary: Summary) -> Fields:
    return {name: getattr(summary, name) for name in GAUGES}


def _points(path: Path, after: Point) -> Iterator[tuple[Fields, Point | None]]:
    """Yield each line of ``metrics.jsonl``, and its point if it is behind a point of the history.

    The point of an evaluation lasts no time and lies at the end of its step; the points of later steps have its value.
    """
    end_s, evaluated = after.end_s, dict[str, tuple[float, float]]()
    for fields in _lines(path):
        step, unix_s = fields["step"], fields["time_unix_s"]
        if (evaluation := fields.get("evaluation")) is not None:
            right = (evaluation.get("total") or {}).get("pass_at_1")
            evaluated = {} if right is None else {"pass_at_1": (right, 1.0)}
            is_later = unix_s > after.end_s
            at_s = end_s or unix_s
            yield fields, Point(at_s, at_s, 0.0, step, learning=evaluated) if is_later else None
            continue
        if step <= after.step:
            yield fields, None
            continue
        rows, mean, deviation = (_number(fields, name) for name in ("rows", "reward_mean", "reward_stddev"))
        tokens, speed = _number(fields, "response_length_mean_tokens") * rows, _number(fields, "tokens_per_s")
        # The first step of a start has no speed: its time is not known, and it lasts none.
        start_s = max(end_s, unix_s - (tokens / speed if speed else 0.0))
        end_s = max(start_s, unix_s)
        # Those of the time that it lasts: of points that are merged, tokens and seconds are added.
        tokens = speed * (end_s - start_s)
        known = {name: (fields[field], 1.0) for name, field in LEARNING_FIELDS.items() if fields.get(field) is not None}
        has_reward, staleness = fields.get("reward_mean") is not None, fields.get("staleness_mean_versions")
        point = Point(
            start_s, end_s, end_s - start_s, step, float(has_reward), mean, deviation * deviation + mean * mean, tokens,
            staleness_sum=(staleness or 0.0) * rows, staleness_rows=0.0 if staleness is None else rows,
            learning=known | evaluated,
        )  # fmt: skip
        yield fields, point


def _number(fields: Fields, name: str) -> float:
    """Return a number of a line; 0 if it is null or missing."""
    return float(fields.get(name) or 0.0)


def _lines(path: Path) -> Iterator[Fields]:
    """Yield the lines of a file that decode; the last one may be torn."""
    try:
        with path.open("rb") as file:
            for line in file:
                with contextlib.suppress(*UNREADABLE):
                    fields = msgspec.json.decode(line, type=Fields)
                    if isinstance(fields.get("step"), int) and isinstance(fields.get("time_unix_s"), int | float):
                        yield fields
    except FileNotFoundError:
        return
