"""A child that does not outlive its parent, however the parent dies; orphans that find a parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Collection

PARENT_VARIABLE = "RLHFD_PARENT"
"""In the environment of a child: the pid of whoever started it."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent dies; to be called before anything slow is imported."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[PARENT_VARIABLE]):
        # It died before we could ask.
        os._exit(0)


def adopt_orphans() -> None:
    """Become the parent of whatever a descendant leaves behind, in place of init."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_orphans(own: Collection[int]) -> int:
    """Reap dead children that nobody else waits for; return how many.

    Args:
        own: Pids of the children that somebody here waits for.
    """
    reaped = 0
    with contextlib.suppress(ChildProcessError):
        # WNOWAIT: one of our own is only looked at. It hides those behind it, until it is waited for.
        while (dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and dead.si_pid not in own:
            os.waitpid(dead.si_pid, 0)
            reaped += 1
    return reaped
