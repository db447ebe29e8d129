"""``metrics.jsonl``: one line of JSON for each optimizer step of a run, each step once, in order.

    trainer                        file
    takes step n
    appends the line of n          ... n-1, n
    publishes the weights of n     from here on no successor takes step n again

The line comes before the publish, so that no published step lacks its line, whenever the trainer is killed. A successor
that starts after step m removes the lines after m, and the part of a line at the end, before its first step.

An evaluation has a line of its own, with the key ``evaluation`` and the step of the evaluated weights, behind that
step's line and before the next one's; it is there once, too.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from pipeline.storage.step_lines import StepLines
from pipeline.telemetry.evaluations import Evaluation
from pipeline.trainer.hooks import TakenStep, TrainerHook
from pipeline.trainer.step_stats import StepStats

FILE_NAME: Final = "metrics.jsonl"

log = logging.getLogger(__name__)


class _Line(msgspec.Struct):
    """The part of a line that a start reads."""

    step: int
    evaluation: msgspec.Raw = msgspec.Raw()


class StepLog(StepLines, TrainerHook):
    """The lines of one run (`pipeline.storage.step_lines`)."""

    def __init__(
        self,
        path: Path,
        *,
        after_step: int,
        is_new_run: bool = False,
        clock_s: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the file, and remove the lines of steps that are taken again; see `StepLines`.

        A file that cannot be opened is a warning in the log, and opened at a later line. So are lines that are missing
        before `after_step`: a disk lost them, or another program.

        Args:
            path: Path of the file; it is made if there is none.
            after_step: Steps that training continues from; lines after it are removed.
            is_new_run: Whether the lines present are of another run: they are kept as ``metrics.jsonl.before``.
            clock_s: Unix time.
            monotonic_s: Monotonic time, by which the speed is measured.
        """
        self._clock_s = clock_s
        self._monotonic_s = monotonic_s
        self._before_s: float | None = None
        self._evaluated_step: int | None = None
        try:
            super().__init__(path, after_step=after_step, is_new_run=is_new_run)
        except OSError as error:
            self._is_failing = True
            log.warning("the file of steps' lines cannot be opened, they wait: path=%s error=%s", path, error.strerror)

    def _open(self) -> None:
        super()._open()
        last = msgspec.json.decode(self.last, type=_Line) if self.last else None
        last_step = 0 if last is None else last.step
        if last is not None and bytes(last.evaluation):
            self._evaluated_step = self._evaluated_step or last_step
            first = msgspec.json.decode(self._waiting[0], type=_Line) if self._waiting else None
            if first is not None and first.step == last_step and bytes(first.evaluation):
                # The file was not open to tell that it has this line.
                del self._waiting[0]
        if last_step < self._after_step:
            log.warning("lines of steps are missing: path=%s last_step=%d continues_after_step=%d size_bytes=%d",
                        self._path, last_step, self._after_step, self.found_bytes)  # fmt: skip

    def taken(self, taken: TakenStep) -> None:
        """Add the line of a step."""
        now_s, before_s, stats = self._monotonic_s(), self._before_s, taken.stats
        self._before_s = now_s
        tokens = stats.response_length_mean_tokens * stats.rows
        tokens_per_s = round(tokens / (now_s - before_s), 2) if before_s is not None and now_s > before_s else None
        self.write(line_of(taken.step, stats, self._clock_s(), {**taken.row_means, "tokens_per_s": tokens_per_s}))

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Add the line of the evaluation of a step's weights, unless it is there."""
        if step != self._evaluated_step:
            self._evaluated_step = step
            fields = {"step": step, "time_unix_s": evaluation.time_unix_s, "evaluation": evaluation}
            self.write(msgspec.json.encode(fields) + b"\n")


def line_of(
    step: int,
    stats: StepStats,
    unix_s: float,
    more: Mapping[str, float | None] = MappingProxyType({}),
) -> bytes:
    """Return the line of a step: the statistics of all ranks, NaN and infinity as null, fields in a fixed order.

    Args:
        step: Number of the step.
        stats: Statistics of the step.
        unix_s: Unix time of its end.
        more: Further numbers by name.
    """
    fields: dict[str, Any] = {"step": step, "time_unix_s": round(unix_s, 3)}
    for field in dataclasses.fields(stats):
        # Fields that begin with "row_" are of one rank.
        if field.name != "step" and not field.name.startswith("row_"):
            fields[field.name] = getattr(stats, field.name)
    fields |= more
    for name, value in fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            fields[name] = None
    return msgspec.json.encode(fields) + b"\n"
