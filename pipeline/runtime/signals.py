"""Signals that end a process: blocked, turned into an orderly exit, ignored; processes that have ended or are stopped.

SIGCHLD has its default, by which the kernel keeps exit codes. SIGUSR1 and SIGUSR2 end no process of rlhfd's own.
"""

from __future__ import annotations

import signal
from pathlib import Path

from pipeline.errors import StoppedError

_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_EXIT_CODE = 49
"""Place of the exit code after the command's name in /proc/PID/stat; of a stopped process it is the stop signal."""


def keep_exit_codes() -> None:
    """Have the kernel keep the exit codes of children, where the program that started this one ignores SIGCHLD.

    Children inherit that, and none of them would learn how its own children ended.
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def hold_signals() -> None:
    """Block SIGTERM, SIGINT and SIGHUP until `release_signals`: their handlers are not set up before."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING_SIGNALS)


def outlive_user_signals() -> None:
    """Ignore SIGUSR1 and SIGUSR2; programs started from now on inherit this.

    Job schedulers warn of the end of a job by them, as Slurm with ``--signal=USR1@120``: by default each ends a process
    at once, without a checkpoint.
    """
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def release_signals() -> None:
    """Unblock SIGTERM, SIGINT and SIGHUP; pending signals are delivered."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING_SIGNALS)


def end_if_asked() -> None:
    """Exit with 0, through every ``finally``, if a signal has come that `hold_signals` blocks."""
    if signal.sigpending().intersection(_ENDING_SIGNALS):
        ignore_signals()
        raise SystemExit(0)


def unwind_on_signals() -> None:
    """From now on exit with 0 at SIGTERM, SIGINT or SIGHUP, through every ``finally``."""

    def unwind(*_: object) -> None:
        ignore_signals()
        raise SystemExit(0)

    for number in _ENDING_SIGNALS:
        signal.signal(number, unwind)
    release_signals()


def ignore_signals() -> None:
    """Ignore SIGTERM, SIGINT and SIGHUP; programs started from now on inherit this."""
    for number in _ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def stat_of(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat behind the name, which may have spaces, brackets and half of a character.

    Raises:
        OSError: If there is no such process.
    """
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def has_ended(pid: int) -> bool:
    """Return whether a process has ended: also one whose end its parent, or the first process, has not yet taken."""
    try:
        return stat_of(pid)[0] in (b"Z", b"X")
    except OSError:
        return True


def stop_signal(pid: int) -> str | None:
    """Return the name of the signal that has stopped a process; None if it is not stopped.

    Args:
        pid: The process; in the kernel's state T, not in t, a debugger's.

    Returns:
        As ``"SIGTSTP"``; ``"by a signal"`` if the kernel does not tell which one.
    """
    try:
        fields = stat_of(pid)
        if fields[0] != b"T":
            return None
        return signal.Signals(int(fields[_EXIT_CODE])).name
    except (OSError, IndexError):
        return None
    except ValueError:
        return "by a signal"


def waits_for_disk(pid: int) -> bool:
    """Return whether a process is in the kernel's state D, as in a call to a file system that does not answer."""
    try:
        return stat_of(pid)[0] == b"D"
    except (OSError, IndexError):
        return False


def refuse_stopped(pid: int) -> None:
    """Raise if a signal has stopped the instance with this pid.

    Raises:
        StoppedError: If it is stopped.
    """
    if by := stop_signal(pid):
        raise StoppedError(f"pid {pid} is {stopped_text(pid, by)}")


def stopped_text(pid: int, by: str) -> str:
    """Return the state of a stopped process, with the command that continues it."""
    return f"stopped ({by}), kill -CONT {pid}"
