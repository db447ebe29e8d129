"""Signals of a process: held, released, turned into an orderly end, ignored."""

from __future__ import annotations

import signal

_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def hold_signals() -> None:
    """Let signals that ask for the end wait for `release_signals`: nobody could answer them properly meanwhile."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING_SIGNALS)


def release_signals() -> None:
    """Let those through that waited, and those to come."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING_SIGNALS)


def unwind_on_signals() -> None:
    """From here on end with 0 at a signal that asks for the end, by way of every ``finally``."""

    def unwind(*_: object) -> None:
        ignore_signals()
        raise SystemExit(0)

    for number in _ENDING_SIGNALS:
        signal.signal(number, unwind)
    release_signals()


def ignore_signals() -> None:
    """Let no signal that asks for the end interrupt it; programs started from here on would ignore them too."""
    for number in _ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
