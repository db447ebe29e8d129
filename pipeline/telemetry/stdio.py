"""Standard output and error that never wait for their reader: ^S on a terminal or a stopped `tee` holds up no loop.

A thread writes them from a queue. What finds no room there is left out and counted, and once all that waited is written
a line says how many; the run's log has them all the same. To ask before each write whether it would block is not
enough: a terminal is called writable that has room for one byte, and a longer write to it then waits.
"""

from __future__ import annotations

import collections
import contextlib
import io
import logging
import os
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from typing import Final, TextIO, cast

_MOST_CHARACTERS: Final = 1 << 20
_LAST_LINES_S: Final = 2.0

log = logging.getLogger(__name__)


@contextlib.contextmanager
def never_blocking() -> Iterator[None]:
    """Let writes to standard output and error return at once, whoever reads; regular files stay as they are.

    At the end whoever reads gets what still waits; where nobody does, the end comes a moment later without.
    """
    before = sys.stdout, sys.stderr
    outlets: list[NonBlockingStream] = []
    sys.stdout, sys.stderr = _by_outlet(sys.stdout, outlets), _by_outlet(sys.stderr, outlets)
    try:
        yield
    finally:
        deadline_s = time.monotonic() + _LAST_LINES_S
        for outlet in outlets:
            outlet.finish(deadline_s - time.monotonic())
        sys.stdout, sys.stderr = before


def _by_outlet(stream: TextIO, outlets: list[NonBlockingStream]) -> TextIO:
    """Return the way to a stream's place that never blocks; one for both keeps their lines in order, if it is one."""
    try:
        place = os.fstat(stream.fileno())
    except (AttributeError, OSError, ValueError):  # closed, or none
        return stream
    if stat.S_ISREG(place.st_mode):
        return stream
    for outlet in outlets:
        if os.path.samestat(os.fstat(outlet.fileno()), place):
            return cast("TextIO", outlet)
    outlets.append(NonBlockingStream(stream.fileno(), stream.encoding or "utf-8"))
    return cast("TextIO", outlets[-1])


class NonBlockingStream(io.TextIOBase):
    """Writes text to a descriptor, in order, from a thread of its own; takes writes of any thread."""

    def __init__(self, descriptor: int, encoding: str = "utf-8") -> None:
        """Write to `descriptor`, which stays open."""
        self._descriptor = descriptor
        self._encoding = encoding
        self._changed = threading.Condition()
        # The first one stays here until it is written.
        self._waiting: collections.deque[str] = collections.deque()
        self._waiting_characters = 0
        self._left_out = 0
        self._errno = 0
        self._is_finished = False
        self._thread = threading.Thread(target=self._run, name="outlet", daemon=True)
        # Signals are the main thread's: where it holds them back, none may get through here.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """How text becomes bytes."""
        return self._encoding

    def fileno(self) -> int:
        """Return the descriptor that is written to."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether that is a terminal."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """Whether it may be written to."""
        return True

    def write(self, text: str) -> int:
        """Have text written, whole or not at all; return its length either way.

        Raises:
            OSError: If an earlier write has failed: whoever read it is gone.
        """
        with self._changed:
            if self._errno:
                raise OSError(self._errno, os.strerror(self._errno))
            if self._waiting_characters + len(text) > _MOST_CHARACTERS:
                self._left_out += 1
            else:
                self._waiting.append(text)
                self._waiting_characters += len(text)
                self._changed.notify_all()
        return len(text)

    def finish(self, timeout_s: float) -> None:
        """Take the last text; return when all is written, at `timeout_s` at the latest."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._left_out, timeout_s)
            self._is_finished = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_finished)
                if not self._waiting:
                    return
                text = self._waiting[0]
            try:
                self._write_all(text.encode(self._encoding, "backslashreplace"))
            except OSError as error:
                self._break_off(error.errno or 0)
                return
            self._tell_left_out(self._written())

    def _write_all(self, data: bytes) -> None:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        while data:
            try:
                # Not by way of a Python file: its lock, held by a thread that waits here, would fail the exit.
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # somebody else has made it so
                poll.poll()

    def _written(self) -> int:
        """Take the first text off the queue; return how many were left out, once none waits any more."""
        with self._changed:
            self._waiting_characters -= len(self._waiting.popleft())
            self._changed.notify_all()
            return self._left_out if not self._waiting and not self._is_finished else 0

    def _tell_left_out(self, count: int) -> None:
        if not count:
            return
        log.warning("output that nobody read in time was left out: lines=%d", count)
        with self._changed:
            self._left_out -= count
            self._changed.notify_all()

    def _break_off(self, number: int) -> None:
        with self._changed:
            self._errno = number
            self._waiting.clear()
            self._left_out = 0
            self._changed.notify_all()
