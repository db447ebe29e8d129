"""The forkserver of engines: it has imported vLLM, and the engines' processes of an instance are forks of it.

    supervisor -- forkserver -- guard -- engine
                                  |
    worker -----------------------+      a connection, for the life of the engine

The import of vLLM takes 9 to 21 s of a core, which each start of an engine would take anew. This process computes
nothing, has one thread and no CUDA in use, so a fork loses nothing. Roles are not forked from it: vLLM changes
settings of torch.

The guard kills the engine as soon as the worker's end of the connection is closed, by its death too, and tells the
worker the exit code of the engine. The kernel kills the engine with the guard. The end of the forkserver concerns no
engine that has begun; a worker whose engine has not begun then executes it.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import setproctitle

from pipeline.runtime.child_entry import leave
from pipeline.runtime.forking import CUDA, ForkRequest, next_request, request_fork
from pipeline.runtime.forkserver_process import begin_forkserver, can_serve, unfit_to_serve
from pipeline.runtime.lifeline import PARENT_VARIABLE, die_with_parent
from pipeline.runtime.signals import stop_signal

_LIBRARIES: Final = "pipeline.rollout.generation.vllm.core"
_PROCESS: Final = "pipeline.rollout.generation.vllm.process"
_PACKET = 64
_WAITING = 64
"""Workers that may wait for the end of the import."""


class _Imported(NamedTuple):
    """The module of an engine's process, and the variables that the import of vLLM has set."""

    process: Any
    variables: dict[bytes, bytes]


class ForkedEngine:
    """An engine's process, which the forkserver forks; used as `subprocess.Popen` is.

    Attributes:
        pid: The process; 0 before it has begun.
    """

    def __init__(self, path: Path, link: int, settings: str, environment: Mapping[str, str]) -> None:
        """Ask for it, without a wait.

        Args:
            path: The forkserver's socket.
            link: Descriptor of the engine's end of its link, which the caller keeps open until it has begun.
            settings: The settings of its start, as JSON.
            environment: All its variables.

        Raises:
            OSError: If no forkserver listens.
        """
        self.pid = 0
        self._code: int | None = None
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._connection.connect(os.fspath(path))
            # vLLM's output belongs into the worker's log.
            request_fork(self._connection, settings, environment, link, 2)
        except OSError:
            self._connection.close()
            raise

    def has_begun(self, timeout_s: float) -> bool:
        """Return whether the process has begun, at most after this time; a forkserver that is stopped is killed.

        Raises:
            ConnectionResetError: If the forkserver has ended before.
        """
        if not self.pid and self._is_told(timeout_s):
            # A forkserver that has not taken the connection resets it.
            if not (pid := self._connection.recv(_PACKET)):
                raise ConnectionResetError
            self.pid = int(pid)
        elif not self.pid and stop_signal(forkserver := _peer(self._connection)) is not None:
            # The supervisor starts another one. It may have died since the look, which the next look finds.
            with contextlib.suppress(ProcessLookupError):
                os.kill(forkserver, signal.SIGKILL)
        return bool(self.pid)

    def wait(self, timeout_s: float) -> int:
        """Return the exit code, or minus the signal, of a process that has begun.

        Raises:
            subprocess.TimeoutExpired: If it runs on after this time.
        """
        if self._code is None:
            if not self._is_told(timeout_s):
                raise subprocess.TimeoutExpired("vllm", timeout_s)
            # Without a word the guard was killed, and the engine with it.
            self._code = int(self._connection.recv(_PACKET) or -signal.SIGKILL)
        return self._code

    def kill(self) -> None:
        """Have the guard kill it; before it has begun, take the request back."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection, by which the process ends if it has not."""
        self._connection.close()

    def _is_told(self, timeout_s: float) -> bool:
        return bool(_readable(timeout_s, self._connection.fileno()))


def _peer(connection: socket.socket) -> int:
    """Return the pid of the process at the other end: the one that called `listen`, or `connect`."""
    return int(struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


def _readable(timeout_s: float | None, *descriptors: int) -> list[int]:
    """Return the descriptors that can be read, at most after this time; a worker may have more than `select` takes."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(None if timeout_s is None else 1000 * timeout_s)]


# The forkserver's side.


def main(reports: int, path: str, name: str) -> int:
    """Fork engines until the supervisor ends; return an exit code if this process must not be forked.

    Args:
        reports: Descriptor for reports to the supervisor.
        path: Path of the socket.
        name: Name of the instance, for titles.
    """
    begin_forkserver(f"{name}: forkserver of engines")
    # The start of vLLM alone has a dozen warnings, none of which its user can act on.
    logging.getLogger("vllm").setLevel(logging.ERROR)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        with contextlib.suppress(FileNotFoundError):
            # Of a forkserver that was killed.
            os.unlink(path)
        # Before the import: requests wait for its end.
        former = os.umask(0o177)
        listener.bind(path)
        os.umask(former)
        listener.listen(_WAITING)
        before = dict(os.environb)
        importlib.import_module(_LIBRARIES)
        process = importlib.import_module(_PROCESS)
        # In an engine that was executed vLLM sets them as well.
        set_by_import = {name: value for name, value in os.environb.items() if before.get(name) != value}
        # vLLM asks the driver for the cards as it is imported, by NVML, and forks such processes itself.
        reason = unfit_to_serve(CUDA)
        if not can_serve(reports, reason and f"vLLM's import {reason}"):
            return 1
        # Nobody waits for a guard.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                os.close(reports)
                _guard(connection, _Imported(process, set_by_import), name)
            connection.close()


def _guard(connection: socket.socket, imported: _Imported, name: str) -> NoReturn:
    """Fork an engine, kill it when the worker is gone, and tell the worker how it has ended."""
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        setproctitle.setproctitle(f"{name}: guard of an engine")
        if (found := next_request(connection, 2)) is not None:
            request, descriptors = found
            _watch(connection, imported, request, *descriptors)
    except BaseException:
        # Nothing else says why: at a limit of processes, say.
        traceback.print_exc()
        raise
    finally:
        # Never return into the loop of the process that forked this one.
        os._exit(0)


def _watch(connection: socket.socket, imported: _Imported, request: ForkRequest, link: int, output: int) -> None:
    guard = os.getpid()
    try:
        worker = os.pidfd_open(_peer(connection))
    except ProcessLookupError:
        # It has died since.
        return
    if (pid := os.fork()) == 0:
        connection.close()
        _engine(request, imported, link, output, guard)
    for descriptor in (link, output):
        os.close(descriptor)
    engine = os.pidfd_open(pid)
    with contextlib.suppress(OSError):
        connection.send(str(pid).encode())
    # The worker sends nothing: its end is readable once it is closed. A fork of the worker may hold it open.
    if engine not in _readable(None, engine, worker, connection.fileno()):
        signal.pidfd_send_signal(engine, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        connection.send(str(code).encode())


def _engine(request: ForkRequest, imported: _Imported, link: int, output: int, guard: int) -> NoReturn:
    """Set this process up as one that the worker has executed, and run the engine."""
    code = 1
    try:
        os.environb.clear()
        os.environb.update({**request.environment, **imported.variables})
        os.environ[PARENT_VARIABLE] = str(guard)
        die_with_parent()
        os.sched_setaffinity(0, request.cpus)
        for number in (1, 2):
            os.dup2(output, number)
        os.close(output)
        imported.process.forked(link, request.work)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # noqa: BLE001 - as the interpreter does it
        sys.excepthook(*sys.exc_info())
    finally:
        leave(code)


if __name__ == "__main__":
    die_with_parent()
    leave(main(int(sys.argv[1]), *sys.argv[2:]))
