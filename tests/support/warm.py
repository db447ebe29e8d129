"""Starts of `rlhfd` without the import of its libraries, which takes six seconds of a core: most of a short test.

One process for each process of pytest loads them (`tests.support.warm_server`); an instance is a fork of it, and so are
ranks of a process group (`tests.support.forked_ranks`). What such a start cannot show is shown by tests that execute
the program: the memory of supervisor and buffer, which load no torch, the time and the moments of a start, the
forkserver's start, hashes that differ from process to process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.runtime.forkserver import forkserver_environment

_SERVER = Path(__file__).with_name("warm_server.py")
# The titles of its forks take the room of these words.
_ROOM = "the title of a fork is written over this"
_READY_S, _FORK_S = 300.0, 60.0


class WarmProcess:
    """An `rlhfd` that a server has forked, as `subprocess.Popen` would have it.

    Attributes:
        pid: The process.
        returncode: Exit code, or minus the signal; None while it runs, as far as `poll` and `wait` have seen.
    """

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._link.settimeout(_FORK_S)
        self.pid = int(self._link.recv(64))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout_s: float) -> int:
        """Wait for the end; return the exit code."""
        if self.returncode is None:
            if not select.select([self._link], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired("rlhfd", timeout_s)
            self.returncode = int(self._link.recv(64))
            self._link.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal; no effect once the end was seen."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


class WarmServer:
    """The process whose forks are instances."""

    def __init__(self) -> None:
        """Start it, without a wait for its imports."""
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", _SERVER, str(theirs.fileno()), _ROOM],
                env={
                    **forkserver_environment(os.environ),
                    "PYTHONPATH": os.pathsep.join(
                        [str(_SERVER.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
                    ),
                },
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._is_ready = False

    def close(self) -> None:
        """End it."""
        self._link.close()
        self._process.wait(_FORK_S)

    def start(
        self,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        output: int,
        errors: int,
        mounts: Path | None = None,
    ) -> WarmProcess:
        """Start an instance.

        Args:
            command: The program's path and its arguments.
            folder: Its working directory.
            environment: All its variables.
            output: Descriptor of its standard output.
            errors: Descriptor of its standard error.
            mounts: The mount namespace in which it runs, if it is not this one.
        """
        if not self._is_ready:
            self._link.settimeout(_READY_S)
            assert self._link.recv(64) == b"ready", "the server has ended, see above"
            self._is_ready = True
        request = {
            "command": list(command),
            "folder": os.fspath(folder),
            "environment": dict(environment),
            "mounts": None if mounts is None else os.fspath(mounts),
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._link, [json.dumps(request).encode()], [theirs.fileno(), output, errors])
        return WarmProcess(ours)


_servers: list[WarmServer] = []
_is_allowed = False


def allow(is_allowed: bool, *, begins: bool) -> None:
    """Say whether the next test's instances may be forks; to be called before the test's resources are noted.

    Args:
        is_allowed: Whether they may be.
        begins: Start the server, which serves the tests after this one too, unless there is one.
    """
    global _is_allowed
    _is_allowed = is_allowed
    if is_allowed and begins and not _servers:
        _servers.append(WarmServer())


def server() -> WarmServer | None:
    """Return the server of this process; None if this test may not use it, or no test has asked for it yet."""
    return _servers[0] if _servers and _is_allowed else None


def end() -> None:
    """End the server, if there is one."""
    while _servers:
        _servers.pop().close()
