"""Ranks: the processes that vLLM starts for tensor parallelism, one a card, children of the engine's process.

They end with the engine's process by SIGKILL from the kernel (`process`), and the engine's process ends with each of
them: a model of which one part is missing computes nothing, and vLLM would wait for the part.

They share memory under names in /dev/shm. No process opens a name after the engine's start, so the names are unlinked
then: whatever ends afterwards, nothing is left. Until then Python's resource tracker unlinks them once all processes
have ended. Sockets and the file by which ranks find each other are in a folder of the instance.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.connection
import multiprocessing.process
import multiprocessing.resource_tracker as tracker
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SHARED = re.compile(r" (/dev/shm/(psm_[^/\s]+))$", re.MULTILINE)
_TURN_S = 0.01

log = logging.getLogger(__name__)


def start_tracker() -> None:
    """Start Python's resource tracker in a process group of its own; to be called before there is shared memory.

    A group that is killed with its leader would otherwise take the tracker with it, which then unlinks nothing.
    """
    group = os.getpgrp()
    os.setpgid(0, 0)
    try:
        tracker.ensure_running()
    finally:
        # The leader of the group may have died meanwhile: then this process is about to end, too.
        with contextlib.suppress(PermissionError):
            os.setpgid(0, group)


@contextlib.contextmanager
def scratch_files(folder: str) -> Iterator[None]:
    """Have the temporary files of this process in a folder, which is emptied first; "" changes nothing."""
    if not folder:
        yield
        return
    shutil.rmtree(folder, ignore_errors=True)
    Path(folder).mkdir(parents=True)
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        yield
    finally:
        tempfile.tempdir = before


def forget_names() -> None:
    """Unlink the shared memory of Python that this process maps; another process may have done it."""
    for path, name in sorted(set(_SHARED.findall(Path("/proc/self/maps").read_text()))):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
            # The first to unlink it: the tracker, which all ranks share, has it once.
            tracker.unregister(f"/{name}", "shared_memory")


def watch(executor: Any) -> threading.Thread:
    """End this process as soon as a rank has ended, in the same way: by SIGKILL, or with an exit code.

    Args:
        executor: vLLM's.

    Returns:
        The thread that watches.
    """
    ranks: list[multiprocessing.process.BaseProcess] = [worker.proc for worker in executor.workers]
    thread = threading.Thread(target=_end_with, args=(ranks,), name="ranks", daemon=True)
    thread.start()
    return thread


def _end_with(ranks: list[multiprocessing.process.BaseProcess]) -> None:
    ended = multiprocessing.connection.wait([rank.sentinel for rank in ranks])
    rank = next(rank for rank in ranks if rank.sentinel in ended)
    while rank.exitcode is None:
        # A thread of vLLM waits for it, too.
        time.sleep(_TURN_S)
    log.error("a rank of the engine has ended: name=%s pid=%s exit_code=%s", rank.name, rank.pid, rank.exitcode)
    if rank.exitcode == -signal.SIGKILL:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(1)


def compute_on_cpu() -> None:
    """Have this rank compute with the weights as they are loaded, and exchange by gloo.

    vLLM's own exchange on CPUs spins, and its memory has names that a killed rank leaves behind.
    """
    import vllm._custom_ops as custom_operators
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    custom_operators._supports_onednn = False
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
