"""Forks of this process that run one function: the conditions, and the state that such a child must not share."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import NoReturn

from pipeline.runtime.lifeline import PARENT_VARIABLE, die_with_parent

_DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def unfit_to_fork() -> str:
    """Return the reason why this process must not be forked, as a predicate; "" if it may be."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"has started {threads - 1} threads, which a fork would lose"
    # CUDA is initialized once a process, and does not work in a fork of it.
    opened = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    if any(path.startswith("/dev/nvidia") for path in opened):
        return "has opened a GPU, which a forked process cannot use"
    return ""


class ForkedChild:
    """A fork of this process; it dies with this process.

    Args:
        run: Runs in the child, whose exit code is 1 if it raises, else 0.
        descriptors: Descriptors that stay open in the child, besides standard output and error.
        environment: Variables set in the child.
    """

    def __init__(self, run: Callable[[], object], descriptors: Collection[int], environment: Mapping[str, str]) -> None:
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _run(run, descriptors, {**environment, PARENT_VARIABLE: str(parent)})

    def kill(self) -> None:
        """Kill it."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Reap it after its death; return its exit code, or minus the signal."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _run(run: Callable[[], object], descriptors: Collection[int], environment: Mapping[str, str]) -> NoReturn:
    code = 1
    try:
        os.environ.update(environment)
        die_with_parent()
        # Objects of the parent are never freed here: one of them might close a descriptor of this process.
        gc.freeze()
        signal.set_wakeup_fd(-1)
        faulthandler.unregister(signal.SIGUSR1)
        for caught in _DEFAULT_SIGNALS:
            signal.signal(caught, signal.SIG_DFL)
        _reset_logging()
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number not in descriptors:
                # The descriptor of the listing itself is closed already.
                with contextlib.suppress(OSError):
                    os.close(number)
        run()
        code = 0
    finally:
        if code:
            traceback.print_exc()
        # Never return into the parent's code.
        os._exit(code)


def _reset_logging() -> None:
    """Remove the handlers: one of them counts warnings in the parent's metrics."""
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
    root.setLevel(logging.WARNING)
    logging.captureWarnings(False)
