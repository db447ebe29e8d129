"""The process in which the reward `math` reads and compares results: sympy may take forever and all memory.

    reward (`pipeline.rollout.reward.mathematics`)            this process: imports math-verify once, then only forks
      4 bytes of length, [answer, response, tags] as JSON --> its fork: reads and compares, one row after the other
                                                          <-- READ once the answer is read, then one byte of the others
                                                          <-- DIED, if the fork has died of the row: a new one is forked

Limits of a row: CPU seconds, by a timer whose signal ends the fork even within one operation on large integers, and the
address space. CPU seconds, because the result must not depend on the load of the machine. A fork is replaced after
`_ROWS` rows, so that the caches of sympy fill no memory that a row needs.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import resource
import signal
import struct
import sys
from typing import Any, Final, NoReturn

import setproctitle

from pipeline.rollout.reward.answers import answer_of
from pipeline.rollout.reward.math_text import changed_of, is_prose, prepared, quantity_of
from pipeline.runtime.lifeline import PARENT_VARIABLE, die_with_parent

READ, RIGHT, WRONG, UNREADABLE, DIED = b"r", b"1", b"0", b"u", b"d"
"""Replies: the answer is read; the response equals it, or not; the answer cannot be read; a limit was reached."""

_MARKS: Final = ("$", "\\boxed", "\\(", "\\[")
_ROWS: Final = 512
_OVER: Final = 3


def main(cpu_s: float, memory_bytes: int) -> None:
    """Serve rows until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setproctitle.setproctitle("rlhfd: math")
    library = _library()
    # The expressions that the first row would compile.
    _results(library, "$1$")
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    has_row = mmap.mmap(-1, 1)
    while True:
        if (pid := os.fork()) == 0:
            _serve(library, has_row, cpu_s, memory_bytes)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if has_row[0]:
            has_row[0] = 0
            os.write(1, DIED)
        elif code != _OVER:
            # It has ended at the end of the input, or of something that the next one would end of, too.
            return


def _library() -> Any:
    import math_verify

    # It warns at each call that its limits of time are off: they need the main thread, and do not end an operation.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return math_verify


def _serve(library: Any, has_row: mmap.mmap, cpu_s: float, memory_bytes: int) -> NoReturn:
    code = 1
    try:
        die_with_parent()
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for _ in range(_ROWS):
            if not (head := _taken(4)):
                code = 0
                break
            body = _taken(*struct.unpack("I", head))
            has_row[0] = 1
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            reply = _judged(library, *json.loads(body))
            signal.setitimer(signal.ITIMER_PROF, 0)
            has_row[0] = 0
            os.write(1, reply)
        else:
            code = _OVER
    finally:
        # Never return into the loop of the process that forked this one.
        os._exit(code)


def _taken(size: int) -> bytes:
    """Return this many bytes of the input; none at its end."""
    read = bytearray()
    while len(read) < size:
        if not (part := os.read(0, size - len(read))):
            return b""
        read += part
    return bytes(read)


def _judged(library: Any, answer: str, response: str, tags: list[str]) -> bytes:
    gold = _answer_results(library, answer)
    if not gold:
        return UNREADABLE
    os.write(1, READ)
    own = answer_of(response, tags)
    if own.strip().rstrip(".") == answer.strip().rstrip("."):
        return RIGHT
    # A text in a tag is the result, as an answer is. Around any other one is the way to it.
    is_tagged = f"</{tags[-1]}>" in response or f"<{tags[-1]}>" in response
    found = _answer_results(library, own, is_given=False) if is_tagged else _results(library, prepared(own))
    try:
        return RIGHT if found and library.verify(gold, found, timeout_seconds=None) else WRONG
    except RecursionError:
        return WRONG


def _answer_results(library: Any, text: str, *, is_given: bool = True) -> list[Any]:
    """Return what a text means that is a result and little else.

    Args:
        library: math-verify.
        text: The text.
        is_given: Whether words without a result are one: the answer of a row is.
    """
    if quantity := quantity_of(text):
        return _results(library, f"${quantity}$")
    if changed := changed_of(text):
        return _results(library, f"${changed}$")
    text = prepared(text)
    if not text.strip():
        return []
    whole = f"${text.strip()}$"
    if any(mark in text for mark in _MARKS):
        return _results(library, text)
    if not is_prose(text):
        return _results(library, whole) or _results(library, text)
    return _results(library, text) or (_results(library, whole) if is_given else [])


def _results(library: Any, text: str) -> list[Any]:
    results: list[Any] = library.parse(text, parsing_timeout=None)
    return results


if __name__ == "__main__":
    die_with_parent()
    main(float(sys.argv[1]), int(sys.argv[2]))
