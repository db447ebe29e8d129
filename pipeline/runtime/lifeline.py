"""The end of a child with its parent, of a group with its leader, and of all that a process has started with it.

Each holds at any death, SIGKILL too. Also the adoption of orphans.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from typing import Final, NoReturn

import setproctitle

from pipeline.runtime.signals import stat_of

PARENT_VARIABLE = "RLHFD_PARENT"
"""Variable of a child's environment: the pid of the process that started it."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SWEEP_S = 3.0
_OLDER: Final[set[int]] = set()
"""Descendants from before this process adopted orphans, which are none of its own."""


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


def run_guarded(run: Callable[[], object], title: str) -> NoReturn:
    """Run a function in a fork of this process, kill all that it has started when the fork or the parent ends, and end.

    This process becomes the guard, and ends as the fork has ended: it adopts each orphan of the fork, so that a daemon
    in a session of its own is found too. To be called in a child that has no threads and no children.

    Args:
        run: Does not return.
        title: This process's title in lists of processes.
    """
    code: int | None = None
    try:
        parent = int(os.environ[PARENT_VARIABLE])
        # Not in the group of the parent or of the fork: a signal to one of these must not end the guard.
        os.setsid()
        former = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        adopt_orphans()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        os.environ[PARENT_VARIABLE] = str(os.getpid())
        if (child := os.fork()) == 0:
            os.setsid()
            die_with_parent()
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
            run()
        setproctitle.setproctitle(title)
        while code is None and os.getppid() == parent:
            signal.sigwait((signal.SIGCHLD, signal.SIGTERM))
            for pid, status in _reaped():
                if pid == child:
                    code = os.waitstatus_to_exitcode(status)
        end_descendants()
        if code is not None and code < 0:
            # Without a core file.
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            faulthandler.disable()
            if code != -signal.SIGKILL:
                signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (-code,))
            os.kill(os.getpid(), -code)
    except BaseException:
        # Nothing else says why: at a limit of processes, say.
        traceback.print_exc()
        raise
    finally:
        # Never return into the code of the process that forked this one.
        os._exit(1 if code is None else code & 0xFF)


def end_descendants(spared: Collection[int] = ()) -> None:
    """Kill and reap all descendants; one that waits for a device, or is another user's, may live on.

    Args:
        spared: Children that live on with their descendants. So do those from before `adopt_orphans`.
    """
    deadline_s = time.monotonic() + _SWEEP_S
    while time.monotonic() < deadline_s and _has_children():
        if not (found := _descendants(os.getpid(), {*spared, *_OLDER})):
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        # No child but these: others of the spared ones are waited for elsewhere.
        if not sum(map(_is_reaped, found)):
            time.sleep(0.001)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _is_reaped(pid: int) -> bool:
    """Reap a process if it is a child, and dead; return whether it was."""
    with contextlib.suppress(ChildProcessError):
        return bool(os.waitpid(pid, os.WNOHANG)[0])
    return False


def _reaped() -> Iterator[tuple[int, int]]:
    """Reap the dead children; yield the pid and the status of each."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found


def _descendants(pid: int, spared: Collection[int] = ()) -> list[int]:
    """Return the children of a process and their descendants, without those that are spared and theirs."""
    children: dict[int, list[int]] = {}
    for each in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            if each not in spared:
                children.setdefault(int(stat_of(each)[1]), []).append(each)
    found = children.get(pid, [])[:]
    for each in found:
        found += children.get(each, ())
    return found


def adopt_orphans() -> None:
    """Become the parent of all orphaned descendants, in place of init."""
    # A shell that has executed this program may have left it children.
    _OLDER.clear()
    _OLDER.update(_descendants(os.getpid()) if _has_children() else ())
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
