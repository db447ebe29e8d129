"""Processes that run code of the user and can be killed: each has a link, and a successor when it ends.

    worker                         forkserver (`pipeline.runtime.pool_process`)
      ProcessPool    <-----         Forked, with a descriptor: a process was forked, the one before has ended
                                    its processes
      link           <-----         Ready once
                     <---->         messages, whose meaning is that of the caller

A process has a limit of time for the work in hand, and is killed at its end (`PoolProcess.watch`). It is replaced
within milliseconds by a fork of a process that is prepared and has never run code of the user. All that the code of a
process has started, daemons too, is killed with it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec

from pipeline.errors import ConfigError, DeadlineError, DecodeError, LinkEndedError, RlhfdError
from pipeline.progress import Telemetry
from pipeline.runtime import pool_process
from pipeline.runtime.forking import ForkedChild, unfit_to_fork
from pipeline.runtime.lifeline import PARENT_VARIABLE
from pipeline.runtime.link import Link
from pipeline.runtime.pool_process import Forked, Prepare, Ready

STARTUP_TIMEOUT_S = 120.0
_GRACE_S = 2.0
_END_S = 8.0
_KILLS = 2
_PACKET_BYTES = 1024
_EARLY_ENDS = 3
"""Processes that may end one after another before they are ready."""

M = TypeVar("M")
_forked = msgspec.msgpack.Decoder(Forked)


class Ended(NamedTuple):
    """The end of a process that was ready.

    Attributes:
        code: Exit code, or minus the signal.
        took_s: Seconds since the last byte of the process, or since it was watched.
    """

    code: int
    took_s: float


def how_ended(code: int) -> str:
    """Return the end of a process as a predicate."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


class PoolProcess(Generic[M]):
    """A process of a pool, and its successors.

    Attributes:
        index: Number of the process in the pool, and of its successors.
        pid: The process; 0 before it is ready.
        facts: Facts about the code of the user; None before the first process is ready.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.pid = 0
        self.facts: dict[str, Any] | None = None
        self._link: Link[Ready | M] | None = None
        # A link to which code of the user has written: it is read no more.
        self._damaged_link: Link[Ready | M] | None = None
        self._early_ends = 0
        self._watch(STARTUP_TIMEOUT_S)

    @property
    def is_ready(self) -> bool:
        """Whether the process serves."""
        return bool(self.pid)

    def watch(self, limit_s: float) -> None:
        """Have the process killed this many seconds after now, or after its last byte; one that starts has its own."""
        # The last messages of a process are handled when its successor has begun already.
        if self.is_ready:
            self._watch(limit_s)

    def _watch(self, limit_s: float) -> None:
        self._began_s, self._limit_s, self._kills = time.monotonic(), limit_s, 0
        self._deadline_s = self._began_s + limit_s

    def allow(self, limit_s: float) -> None:
        """Have the process killed no sooner than this many seconds after now."""
        self._limit_s = max(self._limit_s, limit_s)
        self._deadline_s = max(self._deadline_s, time.monotonic() + limit_s)

    def post(self, message: msgspec.Struct) -> None:
        """Send a message without waiting: the process may be stopped, or at work."""
        # A dead process reads nothing: its end is an event.
        with contextlib.suppress(LinkEndedError):
            if self._link is not None:
                self._link.post(message)


Event: TypeAlias = tuple[PoolProcess[M], Ready | Ended | M]


class ProcessPool(Generic[M]):
    """Processes that serve.

    Not thread-safe; close it. Its processes die with this one.

    Args:
        prepare: Prepares the forkserver.
        arguments: Arguments of `prepare`, JSON values.
        decoder: Decodes `Ready` and the messages of the processes.
        processes: Number of processes.
        title: Kind of the processes, for lists of processes and messages.
        late: Subject and verb of the message about a late start.
        loads: The process that loads the code of the user, as the subject of a message.
        telemetry: Told of progress at least once a second while `step` waits.
        variables: Variables of the environment of all its processes.
        may_fork: Whether the forkserver may be a fork of this process, from the time before it has threads or a GPU: a
            fork takes milliseconds, a new process the seconds of its imports.

    Attributes:
        processes: The processes.
        forkserver: Forks them.
    """

    def __init__(
        self,
        prepare: Prepare,
        arguments: Sequence[Any],
        decoder: msgspec.msgpack.Decoder[Ready | M],
        *,
        processes: int,
        title: str,
        late: str,
        loads: str,
        telemetry: Telemetry,
        variables: Mapping[str, str],
        may_fork: bool,
    ) -> None:
        self.processes = [PoolProcess[M](index) for index in range(processes)]
        self._decoder = decoder
        self._title, self._late, self._loads = title, late, loads
        self._telemetry = telemetry
        # A message is one packet, with its descriptor.
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_END_S)
        with other:
            self.forkserver = _started(other.fileno(), [processes, title, *arguments], prepare, variables, may_fork)

    def wait_ready(self, step: Callable[[float], object], timeout_s: float = STARTUP_TIMEOUT_S) -> None:
        """Wait until every process is ready.

        Args:
            step: Calls `step`, whose errors it raises, and handles the events.
            timeout_s: Longest time.

        Raises:
            DeadlineError: If that takes longer.
        """
        deadline_s = time.monotonic() + timeout_s
        while not all(process.is_ready for process in self.processes):
            step(max(0.0, deadline_s - time.monotonic()))
            if time.monotonic() > deadline_s:
                raise DeadlineError(f"{self._late} within {timeout_s:g} s")

    def step(self, timeout_s: float) -> list[Event[M]]:
        """Return the events that are there; without one wait for the first, at most a second.

        Returns:
            Messages of the processes, the first of each a `Ready`, and the ends of those that were ready.

        Raises:
            ConfigError: If the code of the user cannot be loaded, or ends the process that loads it.
            DeadlineError: If a process is not ready in time, or the forkserver does not tell of a death.
            RlhfdError: If processes end one after another before they are ready, or the forkserver has ended.
        """
        now_s = time.monotonic()
        # At most a second: the worker's heartbeat goes on while this pool, their watchdog, waits for its processes.
        wait_s = min(1.0, timeout_s, *(process._deadline_s - now_s for process in self.processes))
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            for process in self.processes:
                if process._link is not None:
                    selector.register(process._link, process._link.events, process)
            ready = selector.select(max(0.0, wait_s))
        # A look that neither waits nor finds anything is no progress: an engine that hangs would look alive.
        if timeout_s > 0 or any(events & selectors.EVENT_READ for _, events in ready):
            self._telemetry.progress()
        found: list[Event[M]] = []
        for key, events in ready:
            if key.data is not None and events & selectors.EVENT_WRITE:
                with contextlib.suppress(LinkEndedError):
                    key.data._link.flush()
            if key.data is not None and events & selectors.EVENT_READ:
                found += self._heard(key.data)
        # All of them: a process whose end waits here is dead, and its number may be another one's.
        told = select.poll()
        told.register(self._control, select.POLLIN)
        while told.poll(0):
            found += self._told()
        for process in self.processes:
            self._kill_if_overdue(process)
        return found

    def close(self) -> None:
        """End the processes, and all that their code has started."""
        if self._control.fileno() < 0:
            return
        # They die with it, hanging ones too.
        self.forkserver.kill()
        self.forkserver.wait()
        # The processes that it has forked last; how the ones before them have ended matters no more.
        with contextlib.suppress(OSError):
            while (taken := self._take_forked()) is not None:
                forked, link = taken
                self._replace_link(self.processes[forked.index], link)
        self._control.close()
        deadline_s = time.monotonic() + _END_S
        for link in [process._link for process in self.processes if process._link is not None]:
            # The guard holds the other end, too, until it has killed the rest.
            with contextlib.suppress(LinkEndedError, DecodeError):
                while (left_s := deadline_s - time.monotonic()) > 0:
                    link.receive(left_s)
            link.close()
        for process in self.processes:
            if process._damaged_link is not None:
                process._damaged_link.close()

    def _heard(self, process: PoolProcess[M]) -> list[Event[M]]:
        """Return the messages of a process."""
        assert process._link is not None
        try:
            messages = process._link.receive()
        except (LinkEndedError, DecodeError) as error:
            link, process._link = process._link, None
            # The end of a process is told next, whether it was within a message or not. One that goes on, whose code
            # has written to the link, is overdue. It would end by itself, as if nothing had been wrong, if it found
            # its link closed before it is killed.
            if isinstance(error, DecodeError) and process.is_ready:
                process._damaged_link = link
                process.watch(0.0)
            else:
                link.close()
            return []
        if process.is_ready:
            # The process answers, it does not hang: its time begins anew.
            process.watch(process._limit_s)
        for message in messages:
            if isinstance(message, Ready):
                if message.error:
                    raise ConfigError(message.error)
                process.pid, process.facts, process._early_ends = message.pid, message.facts, 0
                process.watch(math.inf)
        return [(process, message) for message in messages]

    def _told(self) -> list[Event[M]]:
        """Take the link of a process that was forked; return the last messages and the end of the one before."""
        if (taken := self._take_forked()) is None:
            raise RlhfdError(f"the process that starts {self._title} processes has ended; the log may say why")
        forked, link = taken
        process = self.processes[forked.index]
        found = [] if process._link is None else self._heard(process)
        took_s = time.monotonic() - process._began_s
        self._replace_link(process, link)
        if forked.code is not None and process.is_ready:
            found.append((process, Ended(forked.code, took_s)))
        elif forked.code is not None:
            self._count_early_end(process, forked.code)
        process.pid = 0
        process._watch(STARTUP_TIMEOUT_S)
        return found

    def _take_forked(self) -> tuple[Forked, Link[Ready | M]] | None:
        """Return the next process that was forked, with its link; None once the forkserver has ended."""
        data, descriptors, _, _ = socket.recv_fds(self._control, _PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        return (_forked.decode(data), Link(socket.socket(fileno=descriptors[0]), self._decoder)) if data else None

    def _replace_link(self, process: PoolProcess[M], link: Link[Ready | M]) -> None:
        for former in (process._link, process._damaged_link):
            if former is not None:
                former.close()
        process._link, process._damaged_link = link, None

    def _count_early_end(self, process: PoolProcess[M], code: int) -> None:
        process._early_ends += 1
        text = f"{self._loads} {how_ended(code)}"
        if process.facts is None and code != -signal.SIGKILL:
            raise ConfigError(text)
        # One was ready before, or was killed: for want of memory, say. That is no matter of the code.
        if process._early_ends > _EARLY_ENDS:
            raise RlhfdError(f"{text}, {process._early_ends} times in a row")

    def _kill_if_overdue(self, process: PoolProcess[M]) -> None:
        """Kill a process that is overdue; a `Forked` tells of its death."""
        if time.monotonic() < process._deadline_s:
            return
        if not process.is_ready:
            raise DeadlineError(f"{self._late} within {STARTUP_TIMEOUT_S:g} s")
        if process._kills == _KILLS:
            raise DeadlineError(
                f"the process that starts {self._title} processes has not answered for {_KILLS * _GRACE_S:g} s"
            )
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process._kills += 1
        process._deadline_s = time.monotonic() + _GRACE_S


def _started(
    descriptor: int, arguments: list[Any], prepare: Prepare, variables: Mapping[str, str], may_fork: bool
) -> ForkedChild | subprocess.Popen[bytes]:
    """Start the forkserver with the other end of its socket."""
    if may_fork and not unfit_to_fork():
        return ForkedChild(lambda: pool_process.main(descriptor, prepare, *arguments), [descriptor], variables)
    return subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", pool_process.__name__),
            json.dumps([descriptor, prepare.__module__, prepare.__name__, *arguments]),
        ],
        stdin=subprocess.DEVNULL,
        pass_fds=[descriptor],
        env={**os.environ, PARENT_VARIABLE: str(os.getpid()), **variables},
    )
