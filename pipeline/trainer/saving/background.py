"""A checkpoint is written by a thread while training goes on, from a version that shared memory holds.

The tensors are views of the version's slots, not copies. `wait` is called before a publish that would overwrite one of
the slots, before the next checkpoint, and at the end.

The thread sets no heartbeat: a step that hangs beside it must be found. A wait for the thread passes its progress on,
so that a checkpoint may take any time as long as bytes move, and a write that hangs is found as well.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import CheckpointError
from pipeline.models.weights.held import HeldVersion
from pipeline.progress import Telemetry
from pipeline.storage.weights_header import WeightsVersion
from pipeline.trainer.state import Progress

_LOOK_S = 0.1

log = logging.getLogger(__name__)


class Point(NamedTuple):
    """The point of training that a checkpoint is of.

    Attributes:
        progress: The progress of training with its weights.
        version: Their version.
        complete: Whether all steps of the run were taken.
    """

    progress: Progress
    version: WeightsVersion
    complete: bool


CheckpointWriter = Callable[[Point, HeldVersion | None, Telemetry], Path | None]
"""Writes a checkpoint (`pipeline.trainer.checkpoints`) and returns its folder; None on another rank than the first.

It writes the version in shared memory, which nothing but this call reads, or without one the live tensors. The
telemetry is told of progress while bytes move, and may raise to end the write. A checkpoint that cannot be written is a
CheckpointError.
"""


class Outcome(NamedTuple):
    """The end of a checkpoint's write.

    Attributes:
        step: The checkpoint's step.
        duration_s: Time of the write.
        path: The checkpoint's folder; None if it could not be written, or on another rank than the first.
        error: The reason for which it could not be written, as text: the exception's frames hold the slots' tensors.
            Empty if it was written.
    """

    step: int
    duration_s: float
    path: Path | None
    error: str = ""


class _AbandonedError(Exception):
    """Ends a write whose trainer has failed."""


class BackgroundCheckpoint(Telemetry):
    """Writes one checkpoint at a time; used by one thread. The write tells it of progress.

    Args:
        write: Writes a checkpoint.

    Attributes:
        held: The version from which a checkpoint is being written; None without one.
    """

    def __init__(self, write: CheckpointWriter) -> None:
        super().__init__()
        self._write = write
        self._written: Future[Outcome | None] | None = None
        self._writer = 0
        self.held: HeldVersion | None = None
        self._moves = 0
        self._is_abandoned = False

    def begin(self, point: Point, held: HeldVersion) -> None:
        """Begin to write a checkpoint; the one before must have been collected.

        Args:
            point: The point of training.
            held: The version in shared memory; its slots must not be written to until `wait` returns.
        """
        assert self._written is None
        self.held = held
        # At the interpreter's exit its thread is waited for: inside safetensors it must not be cut off.
        pool = ThreadPoolExecutor(1, thread_name_prefix=f"checkpoint of step {point.progress.step}")
        self._written = pool.submit(self._write_beside, point)
        pool.shutdown(wait=False)

    def _write_beside(self, point: Point) -> Outcome | None:
        self._writer = threading.get_ident()
        try:
            return self.write_at_once(point, self)
        except _AbandonedError:
            log.warning("a checkpoint is given up, its trainer has failed: step=%d", point.progress.step)
            return None

    def write_at_once(self, point: Point, telemetry: Telemetry) -> Outcome:
        """Write a checkpoint in the calling thread: without a version that is held, of the live tensors.

        Args:
            point: The point of training.
            telemetry: Told of progress while bytes move.
        """
        assert self._written is None or telemetry is self
        started_s = time.monotonic()
        try:
            path, error = self._write(point, self.held, telemetry), ""
        except CheckpointError as failed:
            path, error = None, str(failed)
        return Outcome(point.progress.step, time.monotonic() - started_s, path, error)

    def collect(self) -> Outcome | None:
        """Return the end of the write, once; None if no write has ended since.

        Raises:
            Exception: An unexpected error of the write.
        """
        if self._written is None or not self._written.done():
            return None
        written, self._written, self.held = self._written, None, None
        return written.result()

    def wait(self, telemetry: Telemetry) -> None:
        """Wait for the end of the write.

        Args:
            telemetry: Told of progress whenever the write has made some; not while no byte moves.
        """
        before = self._moves
        while self._written is not None and not self._written.done():
            wait([self._written], _LOOK_S)
            if self._moves != before:
                before = self._moves
                telemetry.progress()

    def abandon(self) -> None:
        """End the write at its next progress; nothing of the checkpoint is left then."""
        self._is_abandoned = True

    def progress(self, **numbers: Any) -> None:
        """Count progress of the thread, whose write ends here once it is abandoned."""
        self._moves += 1
        if self._is_abandoned and threading.get_ident() == self._writer:
            raise _AbandonedError
