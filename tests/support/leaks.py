"""Processes, shared memory, file descriptors, variables of the environment and the umask, before a test and after it.

Processes are ours by parent, or by a mark in the environment that descendants inherit: an orphan, whose parent died, is
found by it. A segment counts only if no live process of another owner holds it, and it is not that of a runtime
directory in a folder of another test session, whose daemon may be between two lives: a daemon or a test session running
beside this one is not taken for a leak.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.runtime.lock import shm_directory

_MARK = "RLHFD_TEST_SESSION"
_SEGMENT_PREFIX = "rlhfd"
_GRACE_S = 10.0
# Opened once by a library and kept for the life of the process.
_LIBRARY_DESCRIPTORS = ("/dev/nvidia", "/dev/dri/", "/dev/shm/cuda", "/dev/urandom", "/dev/random", "/sys/", "/proc/")
# Those that change the tests behind one; libraries set others once, as they are imported, and keep them.
_VARIABLES = ("RLHFD_", "_RLHFD_", "GLOO_SOCKET_", "NCCL_SOCKET_", "CUDA_VISIBLE_")

_own: set[Path] = set()


def mark_descendants() -> None:
    """Mark every process started from here on as ours, also after a change of its parent."""
    os.environ[_MARK] = str(os.getpid())
    # setproctitle would write the title over the environment that the mark is read from.
    os.environ["SPT_NOENV"] = "1"


@functools.cache
def open_cuda() -> None:
    """Use each part of CUDA once that opens pipes, sockets and event descriptors at its first use and keeps them.

    CUDA's devices are known by their names; of these descriptors no name tells the owner.
    """
    import torch

    if not torch.cuda.is_available():
        return
    one = torch.ones(64, 64, device="cuda")
    torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True).cuda(non_blocking=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        (one @ one).sum().item()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one + one
    graph.replay()
    torch.cuda.current_stream().record_event().synchronize()
    torch.cuda.synchronize()


@dataclass(frozen=True)
class Holdings:
    """A snapshot; `leaks` compares the present with it."""

    pids: frozenset[int]
    segments: frozenset[Path]
    descriptors: frozenset[tuple[int, str]]
    variables: Mapping[str, str]
    umask: str

    @classmethod
    def now(cls) -> Holdings:
        """Take the snapshot."""
        return cls(frozenset(_pids()), frozenset(_segments()), frozenset(_descriptors()), _variables(), _umask())

    def leaks(self, *, descriptors: bool = True, grace_s: float = _GRACE_S) -> list[str]:
        """Return a line for each resource that still exists after `grace_s`; processes among them are killed.

        Args:
            descriptors: Count file descriptors too; over a whole session libraries keep a few.
            grace_s: Time for resources that are about to end, such as a process that was just killed.
        """
        deadline = time.monotonic() + grace_s
        while True:
            processes = {pid: _command(pid) for pid in _pids() if self._is_leaked(pid)}
            segments = [path for path in _segments() if path not in self.segments and not _is_held_by_others(path)]
            opened = self._new_descriptors() if descriptors else []
            if not (processes or segments or opened) or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        segments = [path for path in segments if not _is_of_another_session(path)]
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return [
            *(f"process {pid} is still running: {command}" for pid, command in processes.items()),
            *(f"shared memory is left: {path}" for path in segments),
            *(f"file descriptor {number} is still open: {target}" for number, target in opened),
            *self._changed_variables(),
            *([] if (umask := _umask()) == self.umask else [f"umask is {umask}, it was {self.umask}"]),
        ]

    def _changed_variables(self) -> list[str]:
        now = _variables()
        names = sorted(name for name in self.variables | now if self.variables.get(name) != now.get(name))
        return [f"variable {name} is {now.get(name)!r}, it was {self.variables.get(name)!r}" for name in names]

    def _is_leaked(self, pid: int) -> bool:
        if pid in self.pids or not _is_ours(pid):
            return False
        # Processes that a shared daemon started during one of its tests end with the daemon.
        parent = _parent(pid)
        return not (parent in self.pids and parent != os.getpid() and _is_ours(parent))

    def _new_descriptors(self) -> list[tuple[int, str]]:
        before = len(self.descriptors)
        if len(now := _descriptors()) > before:
            held = now & self.descriptors
            gc.collect()
            now = _descriptors()
            # Garbage of before the snapshot, closed by this collection, would hide a leak of as many.
            before -= len(held - now)
        new = sorted(entry for entry in now - self.descriptors if not entry[1].startswith(_LIBRARY_DESCRIPTORS))
        return new if len(now) > before else []


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _is_ours(pid: int) -> bool:
    with contextlib.suppress(OSError):
        state, parent = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
        if state in "ZX":
            return False
        if int(parent) == os.getpid():
            return True
        mark = f"{_MARK}={os.getpid()}".encode()
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return 0


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def _segments() -> set[Path]:
    return set(Path("/dev/shm").glob(f"{_SEGMENT_PREFIX}*"))


def own_folder(folder: Path) -> None:
    """Note the folder of this session's tests, ``basetemp``: segments of runtime directories in it are ours."""
    _own.add(folder)


def _is_of_another_session(segment: Path) -> bool:
    """Return whether the segment is that of a runtime directory in a folder of another session or worker."""
    # By their numbers: pytest-current is a link to one of them.
    for session in Path(tempfile.gettempdir()).glob("pytest-of-*/pytest-[0-9]*"):
        for folder, names, _ in os.walk(session):
            if Path(folder) in _own:
                names.clear()
            elif shm_directory(folder) == segment:
                return True
    return False


def _is_held_by_others(segment: Path) -> bool:
    needle = str(segment)
    for pid in _pids():
        if pid == os.getpid() or _is_ours(pid):
            continue
        with contextlib.suppress(OSError):
            if needle in Path(f"/proc/{pid}/maps").read_text():
                return True
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(link).startswith(needle):
                        return True
    return False


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}


def _umask() -> str:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((line.split()[1] for line in lines if line.startswith("Umask:")), "")


def _descriptors() -> set[tuple[int, str]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        # The descriptor that listed the folder is closed by now.
        with contextlib.suppress(OSError):
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return found
