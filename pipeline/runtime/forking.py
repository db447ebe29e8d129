"""Forks: of this process, that run one function, and of a forkserver, on request; the conditions of both.

A request to a forkserver lies in a file in memory: a packet takes some 200 kB, and variables may be more. Its
descriptor comes in a packet with the others of the request.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from pipeline.runtime.lifeline import PARENT_VARIABLE, die_with_parent

# jemalloc's, which pyarrow brings: it only gives memory back early, and jemalloc takes its locks around each fork.
_DISPENSABLE: Final = frozenset({"jemalloc_bg_thd"})
_DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_PACKET: Final = b"fork"
GPU: Final = "/dev/nvidia"
CUDA: Final = "/dev/nvidia-uvm"
"""The device that CUDA opens as it is initialized, and no library that only asks for the names and sizes of cards."""


def unfit_to_fork(device: str = GPU) -> str:
    """Return the reason why this process must not be forked, as a predicate; "" if it may be.

    Args:
        device: The beginning of the paths of devices that it must not have open.
    """
    if threads := threads_lost():
        return f"has started what a fork would lose: {', '.join(f'thread {name}' for name in threads.values())}"
    # CUDA is initialized once a process, and does not work in a fork of it.
    opened = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    if any(path.startswith(device) for path in opened):
        return "has opened a GPU, which a forked process cannot use"
    return ""


def threads_lost() -> dict[int, str]:
    """Return the id and name of each thread that a fork of this process would lose, and that the fork would miss."""
    lost = {tid: _native_name(tid) for tid in map(int, os.listdir("/proc/self/task")) if tid != os.getpid()}
    if lost:
        lost |= {thread.native_id: thread.name for thread in threading.enumerate() if thread.native_id in lost}
    return {tid: name for tid, name in lost.items() if name not in _DISPENSABLE}


def _native_name(tid: int) -> str:
    try:
        return Path(f"/proc/self/task/{tid}/comm").read_text(errors="replace").strip()
    except OSError:
        # It has ended since; its number may be that of no thread of Python.
        return "(ended)"


class ForkedProcess:
    """A child of this process that was forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> int:
        """Reap it after its death; return its exit code, or minus the signal."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class ForkedChild(ForkedProcess):
    """A fork of this process; it dies with this process.

    Args:
        run: Runs in the child, whose exit code is 1 if it raises, else 0.
        descriptors: Descriptors that stay open in the child, besides standard output and error.
        environment: Variables set in the child.
    """

    def __init__(self, run: Callable[[], object], descriptors: Collection[int], environment: Mapping[str, str]) -> None:
        parent = os.getpid()
        super().__init__(os.fork())
        if self.pid == 0:
            _run(run, descriptors, {**environment, PARENT_VARIABLE: str(parent)})

    def kill(self) -> None:
        """Kill it."""
        os.kill(self.pid, signal.SIGKILL)


def _run(run: Callable[[], object], descriptors: Collection[int], environment: Mapping[str, str]) -> NoReturn:
    code = 1
    try:
        os.environ.update(environment)
        die_with_parent()
        # Objects of the parent are never freed here: one of them might close a descriptor of this process.
        gc.freeze()
        signal.set_wakeup_fd(-1)
        faulthandler.unregister(signal.SIGUSR1)
        for caught in _DEFAULT_SIGNALS:
            signal.signal(caught, signal.SIG_DFL)
        _reset_logging()
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number not in descriptors:
                # The descriptor of the listing itself is closed already.
                with contextlib.suppress(OSError):
                    os.close(number)
        run()
        code = 0
    finally:
        if code:
            traceback.print_exc()
        # Never return into the parent's code.
        os._exit(code)


def _reset_logging() -> None:
    """Remove the handlers: one of them counts warnings in the parent's metrics."""
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
    root.setLevel(logging.WARNING)
    logging.captureWarnings(False)


class ForkRequest(msgspec.Struct, frozen=True):
    """A request to a forkserver.

    Attributes:
        work: What the fork is to do, as JSON.
        environment: All its variables, which may hold bytes that are no text.
        cpus: The CPUs of the process that asks.
    """

    work: str
    environment: dict[bytes, bytes]
    cpus: list[int]


def request_fork(connection: socket.socket, work: str, environment: Mapping[str, str], *descriptors: int) -> None:
    """Ask the forkserver at the other end for a fork that gets these descriptors.

    Raises:
        OSError: If nobody is there.
    """
    variables = {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}
    request = ForkRequest(work, variables, sorted(os.sched_getaffinity(0)))
    with open(os.memfd_create("fork"), "wb") as body:
        body.write(msgspec.msgpack.encode(request))
        body.flush()
        socket.send_fds(connection, [_PACKET], [body.fileno(), *descriptors])


def next_request(connection: socket.socket, most: int) -> tuple[ForkRequest, list[int]] | None:
    """Wait for the next request; return it with its descriptors, or None once the connection is closed."""
    data, descriptors, _, _ = socket.recv_fds(connection, len(_PACKET), 1 + most)
    if not data:
        return None
    with open(descriptors[0], "rb") as file:
        # Its place is that of the sender's writes.
        file.seek(0)
        return msgspec.msgpack.decode(file.read(), type=ForkRequest), descriptors[1:]
