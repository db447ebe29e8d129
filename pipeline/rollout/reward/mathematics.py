"""The process of the reward `math`, with limits: it compares results of responses with answers (`math_process`)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

from pipeline.errors import RewardError
from pipeline.rollout.reward import math_process
from pipeline.runtime.lifeline import PARENT_VARIABLE

_START_TIMEOUT_S: Final = 120.0
_KILL_S: Final = 10.0
_MEMORY_BYTES: Final = 1 << 30
"""Maximum memory in which a row is read and compared; a response that needs more has 0."""
_SLOWEST: Final = 20.0
"""Wall seconds that a CPU second may take on a machine with other work, before the process counts as stuck."""


class MathProcess:
    """The process that compares results; it is started at the first row, and ends with this object or this process.

    Args:
        timeout_s: CPU seconds of a row.
        memory_bytes: Address space of the process.
    """

    def __init__(self, *, timeout_s: float, memory_bytes: int = _MEMORY_BYTES) -> None:
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._owner = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], Any] = lambda: None

    def is_right(self, answer: str, response: str, tags: Sequence[str]) -> bool:
        """Return whether a response has the result of an answer; one that reaches a limit has not.

        Args:
            answer: The right result.
            response: Text with a result.
            tags: As for `answer_of`.

        Raises:
            RewardError: If the answer cannot be read within the limits, or the process does not answer.
        """
        body = json.dumps([answer, response, list(tags)]).encode()
        try:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(struct.pack("I", len(body)) + body)
            process.stdin.flush()
            reply = self._reply(process.stdout.fileno())
            was_read = reply == math_process.READ
            if was_read:
                reply = self._reply(process.stdout.fileno())
        except BaseException as error:
            # A reply of this row must not be that of the next one.
            self.close()
            if isinstance(error, OSError):
                raise RewardError(f"math has no process: {error}") from error
            raise
        if not was_read:
            raise RewardError(f"math cannot read the answer {answer[:80]!r}", bare="math cannot read the answer")
        return reply == math_process.RIGHT

    def close(self) -> None:
        """End the process; the next row starts another one."""
        self._end()
        self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self.close()
            self._owner = os.getpid()
            self._process = subprocess.Popen(
                [*(sys.executable, "-P", "-m", math_process.__name__), str(self._timeout_s), str(self._memory_bytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, PARENT_VARIABLE: str(os.getpid()), "OPENBLAS_NUM_THREADS": "1"},
            )
            self._end = weakref.finalize(self, _ended, self._process, self._owner)
        return self._process

    def _reply(self, descriptor: int) -> bytes:
        timeout_s = _START_TIMEOUT_S + _SLOWEST * self._timeout_s
        # Not select: it takes no descriptor above 1,023.
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        deadline_s = time.monotonic() + timeout_s
        while not waiting.poll(1000 * max(0.0, deadline_s - time.monotonic())):
            if time.monotonic() > deadline_s:
                raise RewardError(f"math has no result after {timeout_s:g} s: the machine has no time for it")
        if not (reply := os.read(descriptor, 1)):
            raise RewardError("the process of math has ended")
        return reply


def _ended(process: subprocess.Popen[bytes], owner: int) -> None:
    # A fork of the owner has the object, too.
    if os.getpid() != owner:
        return
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_S)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
