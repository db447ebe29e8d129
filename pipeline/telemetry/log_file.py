"""The log on disk: ``rlhfd.log``, renamed to ``rlhfd.log.1`` once it has half of the room; mode 0600."""

from __future__ import annotations

import collections
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from pipeline.storage.files import is_at, write_at_end
from pipeline.telemetry import log_lines

MOST_BYTES: Final = 16 << 20
"""Bytes of the log and its predecessor together."""

_POLL_S = 0.2


def path_in(state_dir: Path) -> Path:
    """Return the path of the log of a state directory."""
    return state_dir / "log" / "rlhfd.log"


class LogFile:
    """Appends lines; the file and its predecessor have at most `limit_bytes` together.

    Attributes:
        lost: Lines that could not be written.
    """

    def __init__(self, path: Path, limit_bytes: int = MOST_BYTES) -> None:
        """Open the file for appending; make it if it is missing.

        Raises:
            OSError: If it cannot be opened or made.
        """
        self._path = path
        self._half_bytes = max(limit_bytes // 2, 1)
        self.lost = 0
        self._file = self._open()

    def append(self, text: str) -> bool:
        """Write a line; return whether it was written."""
        data = text.encode(errors="replace")[: self._half_bytes - 1] + b"\n"
        try:
            if not is_at(self._file, self._path):
                self._open_again()
            if (end := os.fstat(self._file).st_size) + len(data) > self._half_bytes:
                with contextlib.suppress(FileNotFoundError):  # removed by another program
                    os.replace(self._path, predecessor(self._path))
                self._open_again()
                end = 0
            write_at_end(self._file, data, end)
        except OSError:
            self.lost += 1
            return False
        return True

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _open_again(self) -> None:
        before, self._file = self._file, self._open()
        os.close(before)

    def _open(self) -> int:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(self._path, flags, 0o600)


def predecessor(path: Path) -> Path:
    """Return the path of the file with the older lines."""
    return path.with_name(f"{path.name}.1")


def read(path: Path, count: int, role: str = "", *, follow: bool = False) -> Iterator[list[str]]:
    """Yield the last lines of a log and, with `follow`, all lines that are appended later, for ever.

    Args:
        path: The log.
        count: Number of the last lines.
        role: Role or process of the lines, as in `log_lines.is_of`.
        follow: Whether to wait for more lines.

    Raises:
        FileNotFoundError: If there is no log.
    """
    file = path.open("rb")
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: file.close())
        wanted = _Wanted(role)
        last: collections.deque[str] = collections.deque(maxlen=count)
        with contextlib.suppress(FileNotFoundError), predecessor(path).open("rb") as before:
            last.extend(filter(wanted, _lines(before)))
        last.extend(filter(wanted, _lines(file)))
        if last:
            yield list(last)
        while follow:
            # Checked before the file is read to its end: no line is appended to a file that was replaced before.
            is_replaced = not is_at(file.fileno(), path)
            if lines := list(_lines(file)):
                if found := list(filter(wanted, lines)):
                    yield found
            elif is_replaced and path.exists():
                file.close()
                file = path.open("rb")
            else:
                time.sleep(_POLL_S)


class _Wanted:
    """Whether a line is of a role; a line without a process, as in a traceback, belongs to the line before it."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._is_wanted = not role

    def __call__(self, line: str) -> bool:
        if process := log_lines.process_of(line):
            self._is_wanted = log_lines.is_of(process, self._role)
        return self._is_wanted


def _lines(file: BinaryIO) -> Iterator[str]:
    """Yield the complete lines from here on; an incomplete last line is left to the next call."""
    while line := file.readline():
        if not line.endswith(b"\n"):
            file.seek(-len(line), os.SEEK_CUR)
            return
        yield line[:-1].decode(errors="replace")
