"""``metrics.jsonl``: one line of JSON for each optimizer step of a run, each step once, in order.

    trainer                        file
    takes step n
    appends the line of n          ... n-1, n
    publishes the weights of n     from here on no successor takes step n again

The line comes before the publish, so that no published step lacks its line, whenever the trainer is killed. A successor
that starts after step m removes the lines after m, and the part of a line at the end, before its first step.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from pipeline.storage.files import UNREADABLE
from pipeline.trainer.step_stats import StepStats

FILE_NAME: Final = "metrics.jsonl"
_MOST_WAITING: Final = 4096

log = logging.getLogger(__name__)


class _Line(msgspec.Struct):
    """The part of a line that a start reads."""

    step: int


class StepLog:
    """The lines of one run. A line that cannot be written waits for the next step; the run goes on.

    Attributes:
        lost: Lines that were given up, because too many waited for a disk with room.
    """

    def __init__(
        self, path: Path, *, after_step: int, is_new_run: bool = False, clock_s: Callable[[], float] = time.time
    ) -> None:
        """Open the file, and remove the lines of steps that are taken again.

        Args:
            path: Path of the file; it is made if there is none.
            after_step: Steps that training continues from; lines after it are removed.
            is_new_run: Whether the lines present are of another run: they are kept as ``metrics.jsonl.before``.
            clock_s: Unix time.

        Raises:
            OSError: If the file cannot be opened or cut.
        """
        self._clock_s = clock_s
        self._waiting: list[bytes] = []
        self._is_failing = False
        self.lost = 0
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_new_run and path.exists() and path.stat().st_size:
            path.rename(path.with_name(f"{path.name}.before"))
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._size = _bytes_through(self._descriptor, after_step)
            os.ftruncate(self._descriptor, self._size)
        except BaseException:
            os.close(self._descriptor)
            raise

    def append(self, step: int, stats: StepStats) -> None:
        """Add the line of a step."""
        self._waiting.append(line_of(step, stats, self._clock_s()))
        if len(self._waiting) > _MOST_WAITING:
            del self._waiting[0]
            self.lost += 1
        data = left = b"".join(self._waiting)
        try:
            if self._is_failing:
                # Part of a line may have been written.
                os.ftruncate(self._descriptor, self._size)
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            if not self._is_failing:
                log.warning("the line of a step was not written, it waits for the next one: path=%s error=%s",
                            self._path, error.strerror)  # fmt: skip
            self._is_failing = True
            return
        self._size += len(data)
        self._waiting.clear()
        if self._is_failing:
            log.info("the lines of steps are written again: path=%s lost=%d", self._path, self.lost)
        self._is_failing = False

    def flush(self) -> None:
        """Flush all lines to disk: a checkpoint must not be on disk without the lines of its steps."""
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            log.warning("the lines of steps were not flushed: path=%s error=%s", self._path, error.strerror)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def line_of(step: int, stats: StepStats, unix_s: float) -> bytes:
    """Return the line of a step: the statistics of all ranks, NaN and infinity as null, fields in a fixed order."""
    fields: dict[str, Any] = {"step": step, "time_unix_s": round(unix_s, 3)}
    for field in dataclasses.fields(stats):
        # Fields that begin with "row_" are of one rank.
        if field.name != "step" and not field.name.startswith("row_"):
            value = getattr(stats, field.name)
            fields[field.name] = None if isinstance(value, float) and not math.isfinite(value) else value
    return msgspec.json.encode(fields) + b"\n"


def _bytes_through(descriptor: int, step: int) -> int:
    """Return the size of the file up to and including the last whole line of a step up to `step`."""
    size = os.fstat(descriptor).st_size
    if not size:
        return 0
    with mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) as data:
        end = data.rfind(b"\n") + 1
        while end:
            start = data.rfind(b"\n", 0, end - 1) + 1
            try:
                if msgspec.json.decode(data[start:end], type=_Line).step <= step:
                    return end
            except UNREADABLE:
                pass  # a block that a crash of the machine has left unwritten
            end = start
    return 0
