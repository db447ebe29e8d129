"""Turns on a card that trainer and engine share: a rank steps, or engines are awake, never both.

The turns are locks on bytes of one file, held by open file descriptions. The kernel frees those of a process that dies.

    byte          exclusive                                   shared
    r             rank r, during its step                     each worker whose engine is awake, on all of these bytes
    RANKS + r     rank r, from its request until its step     -
                  has ended

    rank      idle -ask-> asking -take, no engine is awake-> stepping -give_back-> idle
    engine    asleep -take, no rank asks or steps-> awake -give_back-> asleep

A rank asks once all ranks have their batches, so that it needs no engine any more before its step has ended. So an
engine that is asleep yields to it, and one that is awake needs no rank to finish the tickets in hand: neither waits for
the other one for ever. A process of an engine's own inherits the lock by the descriptor named in `CARD_VARIABLE`: a
worker that is killed is asleep for the ranks once that process has ended, too. No other process may: one that outlives
its parent would keep the turn. Programs do not inherit descriptors, and forks by Python close these.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import struct
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

CARD_VARIABLE: Final = "RLHFD_CARD_LOCK"
"""Names the file descriptor that an engine's process inherits."""
TURN_S: Final = 0.02
"""Time between two looks at the lock by a process that waits for its turn."""

_RANKS = 1 << 16
_OWN: weakref.WeakSet[RankTurn | EngineTurn] = weakref.WeakSet()
_FLOCK = struct.Struct("hhqqi4x")


class RankTurn:
    """The turn of a trainer rank.

    Attributes:
        descriptor: The file's; -1 once it is closed.
        is_asking: Whether the rank has asked and does not step yet.
    """

    def __init__(self, folder: Path, rank: int, free: Callable[[], None] = lambda: None) -> None:
        """Open the file.

        Args:
            folder: The instance's.
            rank: The rank's number.
            free: Gives memory that is cached for the next step back to the card.
        """
        self.descriptor = _open(folder)
        _OWN.add(self)
        self._rank = rank
        self._free = free
        self.is_asking = False

    def take(self) -> bool:
        """Ask for the turn, and take it if every engine sleeps; return whether the rank has it."""
        _lock(self.descriptor, fcntl.F_WRLCK, _RANKS + self._rank, 1)
        self.is_asking = not _lock(self.descriptor, fcntl.F_WRLCK, self._rank, 1)
        return not self.is_asking

    def give_back(self) -> None:
        """Free the memory of the step, and let engines wake."""
        self._free()
        self.is_asking = False
        for byte in (self._rank, _RANKS + self._rank):
            _lock(self.descriptor, fcntl.F_UNLCK, byte, 1)

    def close(self) -> None:
        """Close the file, which gives the turn back."""
        self.is_asking = False
        _OWN.discard(self)
        os.close(self.descriptor)
        self.descriptor = -1


class EngineTurn:
    """The turn of a worker's engine.

    Attributes:
        descriptor: The file's; -1 once it is closed.
        is_awake: Whether the engine has the turn.
    """

    def __init__(self, folder: Path) -> None:
        """Open the file, and name its descriptor to the processes of an engine."""
        self.descriptor = _open(folder)
        _OWN.add(self)
        self.is_awake = False
        os.environ[CARD_VARIABLE] = str(self.descriptor)

    def take(self) -> bool:
        """Take the turn unless a rank asks for it or steps; return whether the engine has it."""
        if not self.is_awake and not self.is_wanted():
            self.is_awake = _lock(self.descriptor, fcntl.F_RDLCK, 0, _RANKS)
        return self.is_awake

    def is_wanted(self) -> bool:
        """Return whether a rank asks for the turn or steps."""
        asked = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, _RANKS, _RANKS, 0)
        found = fcntl.fcntl(self.descriptor, fcntl.F_OFD_GETLK, asked)
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def give_back(self) -> None:
        """Let a rank step: the engine sleeps."""
        self.is_awake = False
        _lock(self.descriptor, fcntl.F_UNLCK, 0, _RANKS)

    def close(self) -> None:
        """Close the file. The turn stays with a process of the engine that is still alive."""
        self.is_awake = False
        _OWN.discard(self)
        if os.environ.get(CARD_VARIABLE) == str(self.descriptor):
            del os.environ[CARD_VARIABLE]
        os.close(self.descriptor)
        self.descriptor = -1


def inherited() -> tuple[int, ...]:
    """Return the descriptor that a process of an engine inherits, to hold the turn until it has ended; none without."""
    named = os.environ.get(CARD_VARIABLE)
    return () if named is None else (int(named),)


def keep_inherited() -> None:
    """Let no process of this one, which is an engine's, inherit the turn."""
    for descriptor in inherited():
        os.set_inheritable(descriptor, False)
        os.register_at_fork(after_in_child=functools.partial(_drop, descriptor))


def _drop(descriptor: int) -> None:
    """Close a descriptor of the parent's, in its fork."""
    os.environ.pop(CARD_VARIABLE, None)
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _drop_own() -> None:
    for turn in [*_OWN]:
        _OWN.discard(turn)
        _drop(turn.descriptor)


os.register_at_fork(after_in_child=_drop_own)


def _open(folder: Path) -> int:
    return os.open(folder / "card", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _lock(file: int, kind: int, start: int, length: int) -> bool:
    """Set a lock on bytes, or remove it; return False if another process's is in the way."""
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))
    except BlockingIOError:
        return False
    return True
