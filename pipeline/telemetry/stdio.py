"""Standard output and error that never wait for their reader: ^S on a terminal or a stopped `tee` blocks no loop.

A thread writes them from a queue. Text that does not fit into the queue is left out and counted; once the queue is
empty, a line reports the number. The run's log has these lines all the same. A check before each write whether it would
block is not enough: a terminal with room for one byte counts as writable, and a longer write to it then waits.
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
    """Make writes to standard output and error return at once, also without a reader; regular files stay unchanged.

    At the end the queued text is written; without a reader it is given up after two seconds.
    """
    before = sys.stdout, sys.stderr
    streams: list[NonBlockingStream] = []
    sys.stdout, sys.stderr = _non_blocking(sys.stdout, streams), _non_blocking(sys.stderr, streams)
    try:
        yield
    finally:
        deadline_s = time.monotonic() + _LAST_LINES_S
        for stream in streams:
            stream.finish(deadline_s - time.monotonic())
        sys.stdout, sys.stderr = before


def _non_blocking(stream: TextIO, streams: list[NonBlockingStream]) -> TextIO:
    """Return a non-blocking stream to the same file; two streams of one file share it, which keeps lines in order."""
    try:
        file = os.fstat(stream.fileno())
    except (AttributeError, OSError, ValueError):  # closed, or none
        return stream
    if stat.S_ISREG(file.st_mode):
        return stream
    for present in streams:
        if os.path.samestat(os.fstat(present.fileno()), file):
            return cast("TextIO", present)
    streams.append(NonBlockingStream(stream.fileno(), stream.encoding or "utf-8"))
    return cast("TextIO", streams[-1])


class NonBlockingStream(io.TextIOBase):
    """Writes text to a descriptor, in order, from a thread of its own; takes writes of any thread."""

    def __init__(self, descriptor: int, encoding: str = "utf-8") -> None:
        """Write to `descriptor`, which stays open."""
        self._descriptor = descriptor
        self._encoding = encoding
        self._changed = threading.Condition()
        # The first text stays here until it is written.
        self._waiting: collections.deque[str] = collections.deque()
        self._waiting_characters = 0
        self._left_out = 0
        self._errno = 0
        self._is_finished = False
        self._thread = threading.Thread(target=self._run, name="stdio", daemon=True)
        # Signals belong to the main thread: if it blocks them, none may be delivered to this thread.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Encoding of the text."""
        return self._encoding

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return whether the descriptor is a terminal."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """Return whether the stream can be written to."""
        return True

    def write(self, text: str) -> int:
        """Queue text, all or nothing; return its length in both cases.

        Raises:
            OSError: If an earlier write has failed: the reader is gone.
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
        """Accept no more text; return when all is written, at the latest after `timeout_s`."""
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
            self._report_left_out(self._written())

    def _write_all(self, data: bytes) -> None:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        while data:
            try:
                # Not through a Python file: its lock, held by a thread that waits here, would make the exit fail.
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # another process has set O_NONBLOCK
                poll.poll()

    def _written(self) -> int:
        """Remove the first text from the queue; return the number of texts left out once the queue is empty, else 0."""
        with self._changed:
            self._waiting_characters -= len(self._waiting.popleft())
            self._changed.notify_all()
            return self._left_out if not self._waiting and not self._is_finished else 0

    def _report_left_out(self, count: int) -> None:
        if not count:
            return
        log.warning("output that was not read in time was left out: lines=%d", count)
        with self._changed:
            self._left_out -= count
            self._changed.notify_all()

    def _break_off(self, number: int) -> None:
        with self._changed:
            self._errno = number
            self._waiting.clear()
            self._left_out = 0
            self._changed.notify_all()
