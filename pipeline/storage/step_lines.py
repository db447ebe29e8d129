"""A file of JSON lines that belong to optimizer steps: each step once, in order, whatever is killed.

A line has the key ``step``. A successor of a killed trainer, which continues after step m, removes the lines of later
steps and the part of a line at the end, before its first step.
"""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path
from typing import Final

import msgspec

from pipeline.storage.files import UNREADABLE, is_at, not_taken, write_at_end

_MOST_WAITING: Final = 4096

log = logging.getLogger(__name__)


class StepLines:
    """A file of lines, opened at once. A line that cannot be written waits for the next one, a flush or the close.

    Attributes:
        lost: Lines that were given up, because too many waited for a disk with room, or until the close.
        found_bytes: Size of the file that was found at the opening.
        last: The last line that was found at the opening, without those removed; empty if there was none.
    """

    def __init__(self, path: Path, *, after_step: int, is_new_run: bool = False) -> None:
        """Open the file, and remove the lines of steps that are taken again.

        Args:
            path: Path of the file; it is made if there is none.
            after_step: Steps that training continues from; lines after it are removed.
            is_new_run: Whether the lines present are of another run: they are kept as ``NAME.before``, or
                ``NAME-2.before`` and so on beside those of earlier runs.

        Raises:
            OSError: If the file cannot be opened or cut.
        """
        self._waiting: list[bytes] = []
        self._is_failing = False
        self.lost = self.found_bytes = self._size = 0
        self.last = b""
        self._path, self._after_step, self._is_new_run = path, after_step, is_new_run
        self._descriptor = -1
        self._open()

    def _open(self) -> None:
        """Open the file as a start does."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._is_new_run and self._path.exists() and self._path.stat().st_size:
            self._path.rename(not_taken(self._path.with_name(f"{self._path.name}.before")))
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self.found_bytes = os.fstat(descriptor).st_size
            self._size, self.last = _bytes_through(descriptor, self.found_bytes, self._after_step)
            os.ftruncate(descriptor, self._size)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def _open_again(self) -> None:
        """Open the file anew that another program has moved or removed."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        before, self._descriptor = self._descriptor, os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.close(before)
        self._size = os.fstat(self._descriptor).st_size
        log.warning("the file of steps' lines was moved or removed, they go to a new one: path=%s", self._path)

    def write(self, line: bytes) -> None:
        """Append a line, which ends with a newline, behind those that wait."""
        self._waiting.append(line)
        if len(self._waiting) > _MOST_WAITING:
            del self._waiting[0]
            self.lost += 1
        self._write_waiting()

    def _write_waiting(self) -> None:
        try:
            if self._descriptor < 0:
                self._open()
            elif not is_at(self._descriptor, self._path):
                self._open_again()
            data = b"".join(self._waiting)
            write_at_end(self._descriptor, data, self._size)
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
        if self._waiting:
            self._write_waiting()
        if self._descriptor < 0:
            return
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            log.warning("the lines of steps were not flushed: path=%s error=%s", self._path, error.strerror)

    def close(self) -> None:
        """Close the file; lines that wait are written now, or lost."""
        if self._waiting:
            self._write_waiting()
        if self._waiting:
            self.lost += len(self._waiting)
            log.warning("lines of steps are lost: path=%s lines=%d", self._path, len(self._waiting))
            self._waiting.clear()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _Line(msgspec.Struct):
    """The part of a line that a start reads."""

    step: int


def _bytes_through(descriptor: int, size: int, step: int) -> tuple[int, bytes]:
    """Return the size of the file up to and including the last whole line of a step up to `step`, and that line."""
    if not size:
        return 0, b""
    with mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) as data:
        end = data.rfind(b"\n") + 1
        while end:
            start = data.rfind(b"\n", 0, end - 1) + 1
            try:
                if msgspec.json.decode(data[start:end], type=_Line).step <= step:
                    return end, data[start:end]
            except UNREADABLE:
                pass  # a block that a crash of the machine has left unwritten
            end = start
    return 0, b""
