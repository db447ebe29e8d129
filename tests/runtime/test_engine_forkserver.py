"""The forkserver of engines with a program in place of vLLM's; with vLLM itself see tests/rollout/generation/vllm."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.runtime import engine_forkserver
from pipeline.runtime.engine_forkserver import ForkedEngine
from pipeline.runtime.lifeline import PARENT_VARIABLE
from tests.support.daemon import END_TIMEOUT_S, is_alive, parent, title, wait_until
from tests.support.vllm_engines import Forkserver

LIBRARIES = """
import os
os.environ["OF_THE_IMPORT"] = "set"
"""
PROCESS = """
import json, os, signal, socket, sys
def forked(descriptor, settings):
    told = {"settings": settings, "variables": dict(os.environ), "cpus": sorted(os.sched_getaffinity(0)),
            "child_signal": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL}
    print("of the engine", flush=True)
    link = socket.socket(fileno=descriptor)
    link.sendall(json.dumps(told).encode() + b"\\n")
    if settings == "fails":
        raise ZeroDivisionError
    sys.exit(int(link.recv(8) or b"0"))
"""
SERVER = """
import sys
from pipeline.runtime import engine_forkserver
from pipeline.runtime.lifeline import die_with_parent
die_with_parent()
engine_forkserver._LIBRARIES, engine_forkserver._PROCESS = "libraries_of_test", "process_of_test"
sys.exit(engine_forkserver.main(int(sys.argv[1]), sys.argv[2], "test"))
"""


def server_in(folder: Path, libraries: str = LIBRARIES) -> Forkserver:
    """Return a forkserver whose libraries are those above."""
    folder.joinpath("libraries_of_test.py").write_text(libraries)
    folder.joinpath("process_of_test.py").write_text(PROCESS)
    found = os.pathsep.join([str(folder), str(Path(__file__).parents[2])])
    return Forkserver(folder / "engines.sock", program=("-c", SERVER), PYTHONPATH=found)


class Worker:
    """An engine, and the worker's end of its link."""

    def __init__(self, server: Forkserver, settings: str = "{}", **variables: str) -> None:
        self.link, self.theirs = socket.socketpair()
        self.link.settimeout(END_TIMEOUT_S)
        self.engine = ForkedEngine(server.path, self.theirs.fileno(), settings, variables)

    def begin(self) -> None:
        while not self.engine.has_begun(1.0):
            pass
        self.theirs.close()

    def told(self) -> Any:
        with self.link.makefile("rb") as lines:
            return json.loads(lines.readline())

    def close(self) -> None:
        self.engine.close()
        self.link.close()
        self.theirs.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forkserver]:
    with contextlib.closing(server_in(tmp_path_factory.mktemp("engines"))) as made:
        assert made.report() == {"state": "ready"}
        yield made


def test_an_engine_has_the_variables_of_its_worker_and_of_the_import_its_processors_and_its_output(
    server: Forkserver, capfd: pytest.CaptureFixture[str]
) -> None:
    allowed = os.sched_getaffinity(0)
    # A process of one core asks, as a pinned worker does.
    os.sched_setaffinity(0, {min(allowed)})
    try:
        worker = Worker(server, "settings", OF_THE_WORKER="here", OF_THE_IMPORT="other")
    finally:
        os.sched_setaffinity(0, allowed)
    with contextlib.closing(worker):
        worker.begin()
        told = worker.told()
        guard = parent(worker.engine.pid)
        assert title(guard) == "test: guard of an engine" and parent(guard) == server.process.pid
        worker.link.sendall(b"7")
        assert worker.engine.wait(END_TIMEOUT_S) == 7

    variables = told["variables"]
    assert told["settings"] == "settings" and told["cpus"] == [min(allowed)] and told["child_signal"]
    assert variables.pop(PARENT_VARIABLE) == str(guard)
    assert variables == {"OF_THE_WORKER": "here", "OF_THE_IMPORT": "set"}
    assert "of the engine" in capfd.readouterr().err
    wait_until(lambda: not is_alive(guard), END_TIMEOUT_S, "the guard ends with its engine")


def test_each_end_of_an_engine_is_told_as_that_of_a_child(
    server: Forkserver, capfd: pytest.CaptureFixture[str]
) -> None:
    with contextlib.closing(Worker(server, "fails")) as failed, contextlib.closing(Worker(server)) as closed:
        for worker in (failed, closed):
            worker.begin()
        assert failed.engine.wait(END_TIMEOUT_S) == 1
        assert "ZeroDivisionError" in capfd.readouterr().err
        with pytest.raises(subprocess.TimeoutExpired):
            closed.engine.wait(0.05)

        closed.engine.kill()

        assert [closed.engine.wait(END_TIMEOUT_S) for _ in range(2)] == [-signal.SIGKILL] * 2
        assert not is_alive(closed.engine.pid)


def test_the_import_is_waited_for_and_an_engine_outlives_the_forkserver(tmp_path: Path) -> None:
    wait = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
    with contextlib.closing(server_in(tmp_path, wait)) as server:
        assert server.path.stat().st_mode & 0o077 == 0
        with contextlib.closing(Worker(server)) as early:
            assert not early.engine.has_begun(0.1)
            (tmp_path / "go").touch()
            early.begin()

            os.kill(server.process.pid, signal.SIGSTOP)
            with contextlib.closing(Worker(server)) as late:
                assert not late.engine.has_begun(0.1), "a look that finds it stopped kills it"
                with pytest.raises(ConnectionResetError):
                    late.engine.has_begun(END_TIMEOUT_S)
            assert server.process.wait() == -signal.SIGKILL
            with pytest.raises(ConnectionRefusedError):
                ForkedEngine(server.path, 0, "", {})

            early.told()
            early.link.sendall(b"3")
            assert early.engine.wait(END_TIMEOUT_S) == 3


def test_a_stopped_forkserver_that_dies_before_it_is_killed_is_found_to_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    importing = tmp_path / "importing"
    libraries = f"import time\nopen({str(importing)!r}, 'x').close()\ntime.sleep(1000)\n"
    with contextlib.closing(server_in(tmp_path, libraries)) as server:
        wait_until(importing.exists, END_TIMEOUT_S, "it listens")

        def dies(pid: int) -> str:
            server.process.kill()
            server.process.wait()
            return "SIGSTOP"

        with contextlib.closing(Worker(server)) as worker:
            # Before the reset, which has_begun would see first.
            monkeypatch.setattr(engine_forkserver, "_readable", lambda timeout_s, *descriptors: [])
            monkeypatch.setattr(engine_forkserver, "stop_signal", dies)
            assert not worker.engine.has_begun(0.0)
            monkeypatch.undo()
            with pytest.raises(ConnectionResetError):
                worker.engine.has_begun(END_TIMEOUT_S)


@pytest.mark.parametrize(
    ("libraries", "problem"),
    [
        ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True, name='mine').start()\n",
         "vLLM's import has started what a fork would lose: thread mine"),
        ("import torch\ntorch.cuda._is_in_bad_fork = lambda: True\n",
         "vLLM's import has asked CUDA for its devices, after which a forked process cannot use a GPU"),
    ],
    ids=["thread", "CUDA"],
)  # fmt: skip
def test_a_process_that_must_not_be_forked_says_so_and_ends(tmp_path: Path, libraries: str, problem: str) -> None:
    with contextlib.closing(server_in(tmp_path, libraries)) as server:
        assert server.report() == {"state": "unusable", "error": problem}
        assert server.process.wait() == 1
