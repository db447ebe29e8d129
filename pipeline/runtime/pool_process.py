"""The forkserver of a `pipeline.runtime.pool`: prepares once, forks the processes of the pool, replaces dead ones.

    forkserver -- guard -- process -- whatever the code of the user starts

It never runs code of the user, so it has no thread and no device that a fork could break. Between it and each process
is a guard, which ends all that its process has started, daemons too: at the end of the process, and at that of the
forkserver, the worker or the supervisor. At the end of a guard that was killed, the forkserver does so.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec
import setproctitle

from pipeline.config import user_modules
from pipeline.errors import ExitCode, LinkEndedError, RlhfdError
from pipeline.runtime.lifeline import PARENT_VARIABLE, adopt_orphans, die_with_parent, end_descendants, run_guarded
from pipeline.runtime.link import Link


class Forked(msgspec.Struct, frozen=True, array_like=True):
    """A process was forked, and the worker's end of its link comes with this.

    Attributes:
        index: Number of the process in the pool.
        code: Exit code of the process before it, or minus the signal; None for the first one.
    """

    index: int
    code: int | None


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first message of a process: it serves, or the code of the user cannot be loaded.

    Attributes:
        pid: The process.
        error: The reason; empty if it serves.
        facts: Facts about the code of the user.
    """

    pid: int
    error: str = ""
    facts: dict[str, Any] = {}


Serve = Callable[[socket.socket], object]
"""Answers the messages of a link until its end."""

Load = Callable[[], tuple[Serve, dict[str, Any]]]
"""Loads the code of the user, in each process; returns facts about it, too. It raises `RlhfdError` for bad code."""

Prepare = Callable[..., Load]
"""Prepares the forkserver: loads what all its processes share. A function at the top of its module."""


def main(descriptor: int, prepare: Prepare, count: int, title: str, *arguments: Any) -> None:
    """Keep this many processes alive until the worker exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A signal to the group of a run in one process, as `timeout` and `scancel` send it, has the run end in order.
    os.setpgid(0, 0)
    # The output of the user's code goes into the worker's log.
    os.dup2(2, 1)
    setproctitle.setproctitle(f"rlhfd: forkserver of {title}")
    control = socket.socket(fileno=descriptor)
    load = prepare(*arguments)
    # Garbage collections in a forked process would write to, and so copy, every shared page.
    gc.freeze()
    gc.enable()
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    adopt_orphans()

    def fork(index: int, code: int | None = None) -> int:
        # One link a process: the next process must not read the unread rest of a dead one's messages.
        own, workers = socket.socketpair()
        with own, workers:
            if (pid := os.fork()) == 0:
                control.close()
                workers.close()
                run_guarded(functools.partial(_serve, own, load, title), f"rlhfd: guard of {title}")
            socket.send_fds(control, [msgspec.msgpack.encode(Forked(index, code))], [workers.fileno()])
        return pid

    try:
        guards = {fork(index): index for index in range(count)}
        while True:
            pid, status = os.wait()
            if (index := guards.pop(pid, None)) is not None:
                guards[fork(index, os.waitstatus_to_exitcode(status))] = index
                # A guard that was killed has left behind what it was to end. Last: no successor waits for that.
                end_descendants(guards)
    except (BrokenPipeError, ConnectionResetError):
        # The worker has exited.
        return


def _serve(end: socket.socket, load: Load, title: str) -> NoReturn:
    """Load the code of the user and serve until the worker closes the link; runs in the forked process."""
    code: int = ExitCode.FAILED
    try:
        setproctitle.setproctitle(f"rlhfd: {title}")
        # No fork of this process may speak over the link, or hold it when this process has ended.
        os.register_at_fork(after_in_child=end.close)
        # As in the worker.
        user_modules.extend_path()
        link = Link(end, msgspec.msgpack.Decoder())
        try:
            serve, facts = load()
        except RlhfdError as error:
            link.send(Ready(os.getpid(), str(error)))
            # The worker ends this process.
            link.receive(None)
        else:
            link.send(Ready(os.getpid(), facts=facts))
            serve(end)
    except LinkEndedError:
        code = ExitCode.OK
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else ExitCode.FAILED if ended.code else ExitCode.OK
        if ended.code and not isinstance(ended.code, int):
            # As the interpreter does it.
            sys.stderr.write(f"{ended.code}\n")
    except BaseException:  # noqa: BLE001 - the worker's log has it, and the exit code says the rest
        traceback.print_exc()
    finally:
        # Never return into the loop of the process that forked this one.
        os._exit(code & 0xFF)


if __name__ == "__main__":
    die_with_parent()
    # The imports make no garbage; collections would take a seventh of their time.
    gc.disable()
    given, module, function, *rest = json.loads(sys.argv[1])
    main(given, getattr(importlib.import_module(module), function), *rest)
