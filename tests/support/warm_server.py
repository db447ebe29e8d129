"""The program of `tests.support.warm`: loads all that an instance loads, then forks an `rlhfd` on each request.

    server -- monitor -- rlhfd (supervisor) -- buffer, forkserver -- roles

A fork goes on as the program does: its command line, variables, folder and output are those of the request, and it runs
the ``sitecustomize`` of its PYTHONPATH, with all libraries loaded already. In it
`executed`, which starts a new Python for the buffer and for the forkserver, forks that Python from the supervisor; the
module is run as ``python -m`` runs it. Nothing else is replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import numpy
import setproctitle

from pipeline.cli.main import main
from pipeline.runtime import child_process, forkserver, role_libraries
from pipeline.runtime.child_entry import leave
from pipeline.runtime.forking import ForkedChild, unfit_to_fork
from pipeline.supervisor import fleet
from tests.support import forked_ranks

# `load` first: it hides packages of no use.
_OTHERS = ("pipeline.supervisor.supervisor", "pipeline.buffer.process", "pipeline.serial")
_REQUEST_BYTES = 1 << 20
_CLONE_NEWNS = 0x20000


def serve(link: socket.socket) -> None:
    """Answer requests until the link closes: each brings a socket, and descriptors of the output and of the errors."""
    gc.disable()
    # The room for titles is found by the variables as they lie at the start of a process.
    setproctitle.setproctitle("warm rlhfd")
    role_libraries.load(role_libraries.ROLES.values(), "")
    for name in _OTHERS:
        importlib.import_module(name)
    if reason := unfit_to_fork():
        sys.exit(f"this process {reason}")
    gc.freeze()
    link.send(b"ready")
    while True:
        data, descriptors, _, _ = socket.recv_fds(link, _REQUEST_BYTES, 3)
        with contextlib.suppress(ChildProcessError):
            # Monitors of instances that have ended.
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not data:
            return
        if os.fork() == 0:
            link.close()
            _monitor(json.loads(data), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _monitor(request: dict[str, object], caller: int, output: int, errors: int) -> NoReturn:
    """Fork the program; tell its pid, and its exit code once it has ended."""
    try:
        with socket.socket(fileno=caller) as told:
            if (pid := os.fork()) == 0:
                told.close()
                _rlhfd(request, output, errors)
            os.close(output)
            os.close(errors)
            told.send(str(pid).encode())
            told.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    finally:
        os._exit(0)


def _rlhfd(request: dict[str, object], output: int, errors: int) -> NoReturn:
    command, folder, environment = request["command"], request["folder"], request["environment"]
    assert isinstance(command, list) and isinstance(folder, str) and isinstance(environment, dict)
    with open(os.devnull) as nothing:
        for source, target in ((nothing.fileno(), 0), (output, 1), (errors, 2)):
            os.dup2(source, target)
    for descriptor in (output, errors):
        os.close(descriptor)
    _open_streams()
    os.environ.clear()
    os.environ.update(environment)
    if isinstance(mounts := request["mounts"], str):
        _enter(mounts)
    os.chdir(folder)
    _find_first(environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = command
    setproctitle.setproctitle(" ".join(command[:2]))
    numpy.random.seed()
    gc.enable()
    assert child_process.executed is fleet.executed is forkserver.executed
    fleet.executed = forkserver.executed = _forked  # type: ignore[attr-defined]
    if command[0] == forked_ranks.__name__:
        _to_the_end(lambda: forked_ranks.main(*command[1:]))
    _to_the_end(lambda: main(command[1:], prog_name="rlhfd"))


def _open_streams() -> None:
    """Open standard output and error as Python does; former streams may be those of files, or a supervisor's own."""
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115


def _enter(mounts: str) -> None:
    """Go into another mount namespace."""
    with open(mounts) as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "setns", mounts)


def _find_first(folders: Sequence[str]) -> None:
    """Find modules in these folders first, and run the code by which they customize each Python, as its start does."""
    more = [folder for folder in folders if folder and folder not in sys.path]
    sys.path[:0] = more
    if found := next((file for folder in more if (file := Path(folder, "sitecustomize.py")).exists()), None):
        exec(compile(found.read_text(), found, "exec"), {"__name__": "sitecustomize"})


def _forked(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], *, pass_fds: Sequence[int] = ()
) -> Callable[[int, int], ForkedChild]:
    """Do what `executed` does, by a fork of this process in place of a new Python."""

    def start(reports: int, lines: int) -> ForkedChild:
        def run() -> NoReturn:
            os.setsid()
            for number in (1, 2):
                os.dup2(lines, number)
            os.close(lines)
            parent = os.environ["RLHFD_PARENT"]
            os.environ.clear()
            os.environ.update({**environment, "RLHFD_PARENT": parent})
            signal.signal(signal.SIGINT, signal.default_int_handler)
            faulthandler.disable()
            _open_streams()
            # PYTHONUNBUFFERED, by which children write at once.
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(write_through=True)  # type: ignore[union-attr]
            numpy.random.seed()
            sys.argv = [module, str(reports), *arguments]
            # It runs as the main module; as another one it would be found, with a warning.
            sys.modules.pop(module, None)
            _to_the_end(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))

        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        return ForkedChild(run, (reports, lines, *pass_fds), {})

    return start


def _to_the_end(run: Callable[[], object]) -> NoReturn:
    """Run, and end as the interpreter does; a process of torch takes a third of a second to unload its modules."""
    code: object = 1
    try:
        run()
        code = 0
    except SystemExit as ended:
        code = ended.code
        if code is not None and not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
            code = 1
    except BaseException:  # noqa: BLE001 - as the interpreter does it
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        leave(code or 0)  # type: ignore[arg-type]


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
    leave(0)
