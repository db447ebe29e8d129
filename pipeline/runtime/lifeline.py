"""The end of a child with its parent and of a group with its leader, at any death of these; adoption of orphans."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Collection

import setproctitle

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


def end_group_with_this() -> None:
    """Have the kernel's SIGKILL of this process, or its own end, be that of its process group, whose leader it is.

    A fork of this process watches it, in a group of its own; to be called before there are threads.
    """
    leader = os.getpid()
    assert os.getpgrp() == leader
    if os.fork():
        return
    try:
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        setproctitle.setproctitle("rlhfd: guard of a group")
        # Above all the end of a link, which this process would keep open.
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == leader:
            signal.sigwait([signal.SIGTERM])
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
    finally:
        # Never return into the code of the process that forked this one.
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
