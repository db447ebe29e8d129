"""Signals that end a process: blocked, unblocked, turned into an orderly exit, ignored."""

from __future__ import annotations

import signal

_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def hold_signals() -> None:
    """Block SIGTERM, SIGINT and SIGHUP until `release_signals`: their handlers are not set up before."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING_SIGNALS)


def release_signals() -> None:
    """Unblock SIGTERM, SIGINT and SIGHUP; pending signals are delivered."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING_SIGNALS)


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
