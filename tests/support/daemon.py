"""A real daemon for a test: `rlhfd start` as a process of its own, watched from outside and always ended.

    with Daemon(tmp_path, *SMALL, task=task) as daemon:
        daemon.wait_ready()
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0

The fixture `task` beside it is the embedded task, made once for all workers of a session, so that no start has to make
it. No test writes to it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from unittest import mock

import pytest

from pipeline.errors import RlhfdError
from pipeline.runtime import control, lock
from pipeline.runtime.lock import InstanceRecord, shm_directory
from tests.support import warm


def _program() -> Path:
    """Return the program rlhfd; in an environment without it (RLHFD_VENV), one for the length of the session."""
    installed = Path(sys.executable).with_name("rlhfd")
    if installed.exists():
        return installed
    folder = tempfile.TemporaryDirectory(prefix="rlhfd-program-")
    atexit.register(folder.cleanup)
    made = Path(folder.name, "rlhfd")
    made.write_text(f"#!{sys.executable}\nimport sys\nfrom pipeline.cli.main import main\nsys.exit(main())\n")
    made.chmod(0o755)
    return made


PROGRAM = _program()
SMALL = ("buffer.sample_batch_size=32", "rollout.num_generations=4", "rollout.max_length=16")
"""Settings of small steps. The task's answers fit; without the bound each ticket takes as long as its longest response,
of a model that does not know yet how to end one.
"""

# Limits for an event that never comes; a slow machine needs no limit. A start on two cores takes 10 s alone, and took
# 75 s beside nine busy programs.
START_TIMEOUT_S = 300.0
END_TIMEOUT_S = 300.0
_POLL_S, _MOST_POLL_S = 0.02, 0.1
_TAIL_CHARACTERS = 20_000
_STACKS_S = 1.0
_WARMUP_STEPS = 8

_LASTING = re.compile(
    r"log/rlhfd\.log(\.1)?|runs/[\w.-]+/(run\.json|inputs\.json|metrics\.jsonl((-\d+)?\.before)?|evaluations\.jsonl|history\.msgpack"
    r"|recording/(steps\.jsonl|rows/step-\d{6}\.safetensors)|samples/rollout-\d+\.[\w.]+|spool/\w+\.safetensors"
    r"|checkpoints/(latest\.json|step-\d{6}/.+))|compiled/.+"
)
"""Files that an orderly end may leave in the state directory."""

_ENDED = re.compile(r"training ended: steps=(\d+) weights=(\w+) experiences=(\w+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")

Metrics = dict[tuple[str, frozenset[tuple[str, str]]], float]
_T = TypeVar("_T")


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded task's directory; few prompts, a model of one layer in place of four after a few steps."""
    from pipeline import sort_digits
    from pipeline.trainer import setup

    folder = tmp_path_factory.getbasetemp()
    # A worker's folder lies in that of its session.
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    directory = folder / "task" / "sort-digits"
    with mock.patch.multiple(sort_digits, LAYERS=1, PROMPT_COUNT=1024):
        setup.prepare(directory, warmup_steps=2 * _WARMUP_STEPS)
    return directory


EXACT = 'rewards=["pipeline.sort_digits:exact_answer"]'
"""The reward of the embedded task, for its model by a path."""


def task_settings(task: Path) -> tuple[str, str, str]:
    """Settings by which a daemon runs on a task directory."""
    return (f"model.actor={task / 'model'}", f"prompts.path={task / 'prompts.jsonl'}", EXACT)


def telling_reward(folder: Path, *, pause_s: float = 0.0) -> tuple[str, str]:
    """Write a reward function to a daemon's folder by which responses differ; return the settings that use it.

    The task's model is warmed up so little that every response scores 0 by the task's own reward: the weights would not
    change. With `pause_s` each row takes so long, without a core: a short run lasts long enough to be hit.
    """
    folder.joinpath("telling.py").write_text(
        "import time\n"
        "def score(input_ids, attention_mask, *, response_start, **_):\n"
        f"    time.sleep({pause_s})\n"
        "    return float(input_ids[response_start] % 5)\n"
    )
    return 'rewards=["telling:score"]', "rollout.reward_timeout_s=0"


_CHANGING = """
import importlib.util, os, signal, sys, time

def change_of(name):
    return globals().get("change_" + name.replace(".", "_"))

class Changing:
    def find_spec(self, name, path, target=None):
        if change_of(name) is None:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (load(module), change_of(name)(module))
        return spec

sys.meta_path.insert(0, Changing())
{code}
for name, module in [*sys.modules.items()]:
    if change_of(name) is not None:
        change_of(name)(module)
"""


def loaded_first(folder: Path, code: str) -> dict[str, str]:
    """Return the environment in which every process runs this code before all else.

    A function ``change_package_module(module)`` of it changes that module: as soon as it is imported, or at once in a
    fork of a process that has imported it. Names that others have taken from a module are changed in theirs.
    """
    first = folder / "first"
    first.mkdir()
    first.joinpath("sitecustomize.py").write_text(_CHANGING.replace("{code}", code))
    return {"PYTHONPATH": os.pathsep.join([str(first), *filter(None, [os.environ.get("PYTHONPATH")])])}


HASTY_SETUP = f"""
def change_pipeline_sort_digits(module):
    module.is_prepared.__kwdefaults__["warmup_steps"] = {_WARMUP_STEPS}
def change_pipeline_trainer_setup(module):
    module.prepare.__kwdefaults__["warmup_steps"] = {_WARMUP_STEPS}
"""
"""Code for `loaded_first` by which the embedded task is made in two seconds of a core, in place of eighteen."""

_STOPPING = """
rename = os.rename
def stopping(source, target, **options):
    if {part!r} in str(target):
        try:
            os.close(os.open({once!r}, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            pass
        else:
            # To this thread: another one would stop the process a moment later, after the rename.
            signal.raise_signal(signal.SIGSTOP)
            while {for_ever}:
                signal.raise_signal(signal.SIGSTOP)
    rename(source, target, **options)
os.rename = stopping
"""


def stopping_at_a_checkpoint(folder: Path) -> dict[str, str]:
    """Return the environment in which a trainer stops itself once, before its first checkpoint is in place."""
    return stopping_at_a_rename(folder, "/step-")


def stopping_at_a_rename(folder: Path, part: str, *, for_ever: bool = False) -> dict[str, str]:
    """Return the environment in which a process stops itself (SIGSTOP) once, before a file is in place.

    Whoever watches the folder from outside and stops it then may come too late.

    Args:
        folder: Gets the code; the same for each life of the process, of which the first one to come there stops.
        part: A part of the file's path.
        for_ever: Whether the process stops again whenever it is continued.
    """
    once = str(folder / "has-stopped")
    return loaded_first(folder, _STOPPING.format(part=part, once=once, for_ever=for_ever))


class Daemon:
    """One `rlhfd start`; a context manager that leaves no process, and no shared memory if it had to kill.

    Args:
        folder: Holds runtime and state directory, and the output; working directory, so modules there can be imported.
        sets: Settings ``section.key=value``, in addition to a free metrics port.
        task: A task directory for model and prompts; if left out, `sets` or the defaults name them.
        arguments: Further arguments, such as ``--serial``.
        environment: Variables in addition to the test's own, of which RLHFD_* are left out.
        program: The program to execute. None: that of this environment, forked from a process that has loaded its
            libraries (`tests.support.warm`).
        name: Distinguishes the output of several daemons in one folder; they share runtime and state directory.
        runtime_dir: Runtime directory in place of the one in `folder`.
        printed_to: A descriptor for all output, in place of files; `output` and `errors` are empty then.
        mounts: The mount namespace in which it runs, as a path in /proc. None: that of the test.
    """

    def __init__(
        self,
        folder: Path,
        *sets: str,
        task: Path | None = None,
        arguments: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
        program: Path | None = None,
        name: str = "daemon",
        runtime_dir: Path | None = None,
        printed_to: int | None = None,
        mounts: Path | None = None,
    ) -> None:
        self.folder = folder
        self.runtime_dir = runtime_dir or folder / "run"
        self.state_dir = folder / "state"
        self.shm_dir = shm_directory(self.runtime_dir)
        own = [f"daemon.runtime_dir={self.runtime_dir}", f"daemon.state_dir={self.state_dir}", "metrics.port=0"]
        settings = [*own, *(task_settings(task) if task else ()), *sets]
        words = [word for item in settings for word in ("--set", item)]
        self.command = [str(program or PROGRAM), "start", *words, *arguments]
        self._environment = {**clean_environment(), **(environment or {})}
        self._output, self._errors = folder / f"{name}.out", folder / f"{name}.err"
        self._printed_to = printed_to
        self._mounts = mounts
        self._may_fork = program is None
        self._process: subprocess.Popen[bytes] | warm.WarmProcess | None = None

    def __enter__(self) -> Daemon:
        """Start the daemon without waiting; `wait_ready` and the other methods wait."""
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            stdout, stderr = (
                file.fileno() if self._printed_to is None else self._printed_to for file in (output, errors)
            )
            server = warm.server() if self._may_fork else None
            self._process = (
                server.start(self.command, self.folder, self._environment, stdout, stderr, self._mounts)
                if server is not None
                else subprocess.Popen(
                    [*([] if self._mounts is None else _inside(self._mounts, self.folder)), *self.command],
                    cwd=self.folder,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                )
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill all processes that still run. After a daemon that ended by itself the leak checks see everything."""
        running = self.returncode is None
        if running:
            family = self.family()
            self.process.kill()
            self.process.wait(END_TIMEOUT_S)
            for pid in family:
                wait_until(lambda pid=pid: not is_alive(pid), END_TIMEOUT_S, f"pid {pid} dies with its supervisor")
        if running or error is not None:
            shutil.rmtree(self.shm_dir, ignore_errors=True)

    # The process.

    @property
    def process(self) -> subprocess.Popen[bytes] | warm.WarmProcess:
        """The supervisor's process."""
        assert self._process is not None, "the daemon was not started"
        return self._process

    @property
    def pid(self) -> int:
        """The supervisor's pid."""
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, or minus the signal; None while it runs."""
        return self.process.poll()

    @property
    def output(self) -> str:
        """Standard output so far."""
        return self._output.read_text(errors="replace")

    @property
    def errors(self) -> str:
        """Standard error so far, its children's lines included."""
        return self._errors.read_text(errors="replace")

    @property
    def run_dir(self) -> Path:
        """The folder of its run; there is one run in its state directory."""
        return only_run(self.state_dir)

    def family(self) -> list[int]:
        """Return the pids of its children, and theirs."""
        return descendants(self.pid)

    def pids(self) -> dict[str, int]:
        """Return the pid of each live process by name: ``buffer-0``, ``trainer-0``, ``rollout-0`` ..."""
        return {f"{entry['role']}-{entry['index']}": entry["pid"] for entry in self.processes() if entry["pid"]}

    def processes(self) -> list[dict[str, Any]]:
        """Return the processes as the status shows them."""
        listed: list[dict[str, Any]] = self.status()["processes"]
        return listed

    def leftovers(self) -> list[str]:
        """Return the files that an end in order is not to leave, in runtime and state directory."""
        state = [path.relative_to(self.state_dir).as_posix() for path in self.state_dir.rglob("*") if path.is_file()]
        running = [path.name for path in self.runtime_dir.iterdir()]
        return sorted(running + [name for name in state if not _LASTING.fullmatch(name)])

    def signal(self, number: signal.Signals, name: str | None = None) -> int:
        """Send a signal to the supervisor, or to the process of that name (see `pids`); return its pid."""
        pid = self.pid if name is None else self.pids()[name]
        os.kill(pid, number)
        return pid

    # Waiting.

    def wait(self, timeout_s: float = END_TIMEOUT_S) -> int:
        """Wait until it has ended; return the exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the daemon has not ended within {timeout_s:g} s\n{self._tail()}") from None

    def ended(self) -> tuple[str, str, str]:
        """Wait for its end in order; return steps, fingerprint of the weights and digest of all that was trained on."""
        assert self.wait() == 0, self.errors
        found: list[tuple[str, str, str]] = _ENDED.findall(self.errors)
        assert found, self.errors
        return found[-1]

    def wait_until(
        self, condition: Callable[[], _T], what: str, timeout_s: float = START_TIMEOUT_S, *, poll_s: float | None = None
    ) -> _T:
        """Wait until the condition returns a true value, and return it; fail if the daemon ends before."""

        def met() -> _T:
            ended = self.returncode is not None
            value = condition()
            assert value or not ended, f"the daemon ended with {self.returncode} before {what}\n{self._tail()}"
            return value

        try:
            return wait_until(met, timeout_s, what, poll_s=poll_s)
        except TimeoutError as error:
            self._ask_for_stacks()
            raise AssertionError(f"{error}\n{self._tail()}") from None

    def _ask_for_stacks(self) -> None:
        """Make each child that handles SIGUSR1 log the stacks of its threads: a hang cannot be inspected later."""
        for pid in self.family():
            with contextlib.suppress(OSError):
                fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
                if int(fields["SigCgt"], 16) >> (signal.SIGUSR1 - 1) & 1:
                    os.kill(pid, signal.SIGUSR1)
        time.sleep(_STACKS_S)

    def wait_answering(self, timeout_s: float = START_TIMEOUT_S) -> InstanceRecord:
        """Wait until it answers over its control socket; roles may still be starting."""
        answered = self.wait_until(self._answered, "it answers", timeout_s)
        assert answered is not None
        return answered[0]

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> dict[str, Any]:
        """Wait until every role is ready; return the status."""

        def ready() -> dict[str, Any] | None:
            _, status = self._answered() or (None, {})
            return status if status.get("state") == "ready" else None

        status = self.wait_until(ready, "it is ready", timeout_s)
        assert status is not None
        return status

    def wait_step(self, step: int, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until so many optimizer steps are done."""

        def done() -> bool:
            answered = self._answered()
            return answered is not None and answered[1]["step"] >= step

        self.wait_until(done, f"step {step}", timeout_s)

    def wait_replaced(self, name: str, pid: int) -> int:
        """Wait until another process than `pid` has this name (see `pids`); return its pid."""
        return self.wait_until(
            lambda: (now := self.pids().get(name, pid)) != pid and now, f"{name} is started again, after pid {pid}"
        )

    def wait_logged(self, text: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until standard error holds a text."""
        self.wait_until(lambda: text in self.errors, f"{text!r} is logged", timeout_s)

    # Asking.

    def status(self) -> dict[str, Any]:
        """Ask over the control socket; the command `rlhfd status --json` prints the same (see `ask`)."""
        return control.request(lock.find(self.runtime_dir), "status", 10.0)

    def why(self) -> dict[str, Any]:
        """Return the causes that hold the run back; the command `rlhfd why --json` prints the same."""
        return control.request(lock.find(self.runtime_dir), "why", 10.0)

    def ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command such as ``status --json`` against it."""
        return rlhfd(*words, "--runtime-dir", str(self.runtime_dir), folder=self.folder)

    @property
    def url(self) -> str:
        """The address of its HTTP server."""
        return InstanceRecord.read(self.runtime_dir).url

    def get(self, path: str, accept: str = "*/*", token: str = "") -> tuple[int, str]:
        """Return status code and body of a page; refused connections raise."""
        return get(self.url + path, accept, token)

    def answers_http(self) -> bool:
        """Whether its HTTP server answers."""
        try:
            return self.get("/healthz")[0] == 200
        except OSError:
            return False

    def metrics(self, token: str = "") -> Metrics:
        """Return every sample of a scrape by name and labels."""
        code, text = self.get("/metrics", token=token)
        assert code == 200, text
        return parse(text)

    def _answered(self) -> tuple[InstanceRecord, dict[str, Any]] | None:
        """Return the record and the status of this daemon; None if it does not answer, or another one does."""
        try:
            record = lock.find(self.runtime_dir)
            status = control.request(record, "status", 10.0)
        except (RlhfdError, OSError):
            return None
        return (record, status) if record.pid == self.pid else None

    def _tail(self) -> str:
        parts = {"standard output": self.output, "standard error": self.errors}
        return "\n".join(f"--- {name}\n{text[-_TAIL_CHARACTERS:]}" for name, text in parts.items())


def _inside(mounts: Path, folder: Path) -> list[str]:
    """Return the words before a command that runs in a mount namespace and a folder."""
    return ["nsenter", f"--mount={mounts}", f"--wd={folder}"]


def only_run(state_dir: Path) -> Path:
    """Return the folder of the one run of a state directory."""
    (folder,) = (state_dir / "runs").iterdir()
    return folder


def clean_environment() -> dict[str, str]:
    """Return this process's environment without settings of rlhfd's; the mark of the leak checks stays."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith("RLHFD_") or name.endswith("_SESSION")
    }


def rlhfd(
    *words: str, folder: Path, timeout_s: float = END_TIMEOUT_S, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command of rlhfd to its end; one that loads torch where it can, as a fork (`tests.support.warm`)."""
    command, variables = [str(PROGRAM), *words], {**clean_environment(), **(environment or {})}
    if words[0] == "replay" and (server := warm.server()) is not None:
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            process = server.start(command, folder, variables, output.fileno(), errors.fileno())
            try:
                code = process.wait(timeout_s)
            finally:
                process.kill()
            output.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(command, code, output.read(), errors.read())
    return subprocess.run(
        command,
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def get(url: str, accept: str = "*/*", token: str = "") -> tuple[int, str]:
    """Return status code and body of a URL."""
    access = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, headers={"Accept": accept, **access})
    try:
        with urllib.request.urlopen(request, timeout=10.0) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def parse(text: str) -> Metrics:
    """Return the samples of an exposition in Prometheus' text format, without timestamps or exemplars.

    prometheus_client's parser takes 30 times as long, which a test that waits for a value would spend all along.
    """
    found: Metrics = {}
    for line in text.split("\n"):
        if line and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            found[_series(series)] = float(value)
    return found


@functools.lru_cache(maxsize=1 << 14)
def _series(text: str) -> tuple[str, frozenset[tuple[str, str]]]:
    """Return name and labels of ``name{label="value",...}``."""
    name, _, labels = text.partition("{")
    return name, frozenset((label, _ESCAPED.sub(_unescaped, value)) for label, value in _LABEL.findall(labels))


def _unescaped(found: re.Match[str]) -> str:
    return "\n" if found[1] == "n" else found[1]


def total(metrics: Metrics, name: str, **labels: str) -> float:
    """Return the sum of a name's samples that have these labels; 0 if there are none."""
    return sum(
        value for (found, has), value in metrics.items() if found == name and labels.items() <= dict(has).items()
    )


def wait_until(condition: Callable[[], _T], timeout_s: float, what: str, *, poll_s: float | None = None) -> _T:
    """Wait until the condition returns a true value, and return it.

    Without `poll_s` the pauses between looks grow with the time waited, from 0.02 s to 0.1 s, and with the time of a
    look: it costs the daemon and the test 3 ms of a core, 20 ms where it reads all metrics. A larger one is for a
    condition that starts processes.

    Raises:
        TimeoutError: At the deadline; `what` names the condition.
    """
    began = looked = time.monotonic()
    while not (value := condition()):
        now = time.monotonic()
        if now - began > timeout_s:
            raise TimeoutError(f"waited {timeout_s:g} s in vain until {what}")
        pause_s = min(_MOST_POLL_S, max(_POLL_S, (now - began) / 50, 4 * (now - looked)))
        time.sleep(pause_s if poll_s is None else poll_s)
        looked = time.monotonic()
    return value


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    return False


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "T"
    return False


def descendants(pid: int) -> list[int]:
    """Return the pids of a process's live children, and of theirs."""
    return [below for child in _children(pid) for below in (child, *descendants(child)) if is_alive(below)]


def _children(pid: int) -> Iterator[int]:
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            yield from map(int, thread.read_text().split())


def title(pid: int) -> str:
    """Return a process's title; "" of one that has just gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()
    except OSError:
        return ""


def parent(pid: int) -> int:
    """Return the pid of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])


def status_of(answer: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the output of `rlhfd status --json`."""
    assert answer.returncode == 0, answer.stderr
    shown: dict[str, Any] = json.loads(answer.stdout)
    return shown
