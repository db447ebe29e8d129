"""Roles as child processes of this machine: one pidfd each; they die with their supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from pipeline.errors import ConfigError
from pipeline.runtime.lifeline import PARENT_VARIABLE
from pipeline.runtime.role import Report
from pipeline.storage.files import UNREADABLE

_MAX_LINE_BYTES = 64 << 10
_DESCRIPTORS = 128
_DESCRIPTORS_A_CHILD = 8
_DESCRIPTORS_A_SCORER = 4
_MOST_DESCRIPTORS = 65536
_report_decoder = msgspec.json.Decoder(Report)


def allow_descriptors(children: int, scorers: int, clients: int = 0) -> None:
    """Raise this process's limit of open files, which children inherit, as far as it may be.

    Args:
        children: Processes of the instance: the supervisor holds pipes of each, the buffer sockets.
        scorers: Reward processes of one worker, which holds sockets of each.
        clients: Connections that the supervisor's HTTP server holds at most.

    Raises:
        ConfigError: If it stays below what they need, naming both numbers.
    """
    needed = _DESCRIPTORS + max(_DESCRIPTORS_A_CHILD * children + clients, _DESCRIPTORS_A_SCORER * scorers)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    most = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if max(soft, most) < needed:
        raise ConfigError(
            f"the limit of open files is {max(soft, most):,}, {needed:,} are needed: raise it (ulimit -n, LimitNOFILE=)"
        )
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class LaunchSpec(msgspec.Struct, frozen=True):
    """All that a child needs to become a role."""

    role: str
    index: int
    folder: str
    generation: int = 0
    prompts: int = 0
    cpus: list[int] = []


class Process(Protocol):
    """A child of this process, which alone may reap it."""

    @property
    def pid(self) -> int:
        """Process id."""

    def wait(self) -> int:
        """Reap it once it is dead; return its exit code, or minus the signal."""


Starter = Callable[[int, int], Process]
"""Starts a process, given the child's ends of the pipes for its reports and for its lines."""


def executed(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], *, pass_fds: Sequence[int] = ()
) -> Starter:
    """Return what starts ``python -m module REPORTS ARGUMENTS...``, with these variables set on top of ours."""

    def start(reports: int, lines: int) -> Process:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(reports), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=lines,
            stderr=lines,
            pass_fds=(reports, *pass_fds),
            env=child_environment(environment),
            # Its own session: a ^C on the terminal is the supervisor's to handle, not the children's.
            start_new_session=True,
        )

    return start


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return our variables with these on top, as a child of ours is to see them."""
    variables = {**os.environ, **environment, PARENT_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
    # A child that could tell systemd that it is ready would speak for the whole service.
    variables.pop("NOTIFY_SOCKET", None)
    return variables


class LocalChild:
    """One running child. Its callbacks come from the event loop, the last of them `on_exit`, once."""

    def __init__(
        self,
        start: Starter,
        *,
        on_report: Callable[[Report], None],
        on_line: Callable[[str], None],
        on_exit: Callable[[int], None],
    ) -> None:
        """Start the child.

        Args:
            start: Starts its process.
            on_report: Called with each report of the child.
            on_line: Called with each line it prints.
            on_exit: Called with its exit code, or minus the signal, after all its lines and reports.

        Raises:
            OSError: If there is no process or file descriptor to be had; nothing is left open then.
        """
        self._on_report = on_report
        self._on_line = on_line
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        pipes = _pipes()
        reports, reports_child, lines, lines_child = pipes
        try:
            self._process = start(reports_child, lines_child)
        except OSError:
            for descriptor in pipes:
                os.close(descriptor)
            raise
        os.close(reports_child)
        os.close(lines_child)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._readers = {reports: b"", lines: b""}
        self._reports, self._lines = reports, lines
        for descriptor in self._readers:
            os.set_blocking(descriptor, False)
            self._loop.add_reader(descriptor, self._read, descriptor)
        self._loop.add_reader(self._pidfd, self._exited)

    @property
    def pid(self) -> int:
        """Process id; ours until `on_exit`, because nobody else reaps it."""
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; a child that is gone already is left alone."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def _read(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(descriptor)
            return
        *whole, rest = (self._readers[descriptor] + data).split(b"\n")
        self._readers[descriptor] = rest[-_MAX_LINE_BYTES:]
        for line in whole:
            self._deliver(descriptor, line)

    def _deliver(self, descriptor: int, line: bytes) -> None:
        if descriptor == self._lines:
            self._on_line(line.decode(errors="replace"))
            return
        try:
            report = _report_decoder.decode(line)
        except UNREADABLE:
            self._on_line(f"unreadable report: {line[:200]!r}")
            return
        self._on_report(report)

    def _exited(self) -> None:
        self._loop.remove_reader(self._pidfd)
        code = self._process.wait()
        for descriptor in (self._reports, self._lines):
            self._finish(descriptor)
        os.close(self._pidfd)
        self._on_exit(code)

    def _finish(self, descriptor: int) -> None:
        """Read what the dead child left in a pipe; a grandchild that holds it open is not waited for."""
        self._loop.remove_reader(descriptor)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(descriptor, 1 << 16):
                self._readers[descriptor] += data
        for line in self._readers.pop(descriptor).split(b"\n"):
            if line:
                self._deliver(descriptor, line)
        os.close(descriptor)


def _pipes() -> tuple[int, int, int, int]:
    first = os.pipe()
    try:
        return (*first, *os.pipe())
    except OSError:
        for descriptor in first:
            os.close(descriptor)
        raise
