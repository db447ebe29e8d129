"""The end of a child with its parent, at any death of the parent; adoption of orphans."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Collection

PARENT_VARIABLE = "RLHFD_PARENT"
"""Variable of a child's environment: the pid of the process that started it."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    """Have the kernel send SIGKILL when the parent dies; to be called before any slow import."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[PARENT_VARIABLE]):
        # The parent died before the call.
        os._exit(0)


def adopt_orphans() -> None:
    """Become the parent of all orphaned descendants, in place of init."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_orphans(own: Collection[int]) -> int:
    """Reap the dead children that no other code of this process waits for; return their number.

    Args:
        own: Pids of the children that other code of this process waits for.
    """
    reaped = 0
    with contextlib.suppress(ChildProcessError):
        # WNOWAIT: a child in `own` is not reaped here. It hides the dead children after it until it is reaped.
        while (dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and dead.si_pid not in own:
            os.waitpid(dead.si_pid, 0)
            reaped += 1
    return reaped
