"""The forkserver of engines: a fork answers as an executed engine does, and whoever of its processes is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from pipeline.errors import EngineKilledError
from pipeline.rollout.generation.vllm.engine import EngineProcess, VllmEngine
from tests.rollout.generation.vllm.models import small_llama
from tests.rollout.generation.vllm.test_engine import ids, request, run, settings
from tests.support.daemon import descendants, is_alive, parent, title, wait_until
from tests.support.vllm_engines import Forkserver, forked_engine

pytestmark = [pytest.mark.vllm, pytest.mark.integration]

END_S = 60.0


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    small_llama(0).save_pretrained(folder)
    return folder


def test_a_fork_has_the_workers_output_variables_and_processors(directory, forkserver, capfd, monkeypatch):
    monkeypatch.setenv("RLHFD_OF_THE_WORKER", "here")
    with contextlib.closing(forked_engine(settings(directory), forkserver)) as fork:
        assert title(parent(fork.pid)) == "test: guard of an engine"
        assert b"RLHFD_OF_THE_WORKER=here" not in Path(f"/proc/{fork.pid}/environ").read_bytes(), "a fork's are its own"
        assert os.sched_getaffinity(fork.pid) == os.sched_getaffinity(0)
        guard = parent(fork.pid)
    wait_until(lambda: not is_alive(guard), END_S, "the guard ends with its engine")
    assert "vLLM has started: imports_s=0.0" in capfd.readouterr().err


WORKER = """
import os, sys, time, torch
from pathlib import Path
import msgspec
from pipeline.rollout.generation.interface import Request, Sampling
from pipeline.rollout.generation.vllm import wire
from tests.support.vllm_engines import forked_engine
engine = forked_engine(msgspec.json.decode(sys.argv[1], type=wire.Settings), Path(sys.argv[2]))
engine.submit(Request(0, torch.tensor([5, 6, 7]), 4, 380, Sampling(max_length=0, pad_token_id=0)))
while not engine.load.running:
    engine.step()
if (fork := os.fork()) > 0:
    print(engine.pid, fork, flush=True)
time.sleep(600)
"""


def test_a_fork_dies_with_its_worker_though_a_child_of_the_worker_lives_and_holds_all_that_is_open(
    directory, forkserver
):
    arguments = [sys.executable, "-c", WORKER, msgspec.json.encode(settings(directory)).decode(), forkserver]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[4]) as worker:
        pid, child = map(int, worker.stdout.readline().split())
        guard = parent(pid)
        try:
            worker.kill()
            worker.wait()

            wait_until(lambda: not is_alive(pid) and not is_alive(guard), END_S, "engine and guard are dead")
            assert is_alive(child)
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("killed", ["engine", "guard"])
def test_a_killed_fork_is_told_as_a_killed_engine_whether_or_not_its_guard_lives(directory, forkserver, killed):
    with contextlib.closing(forked_engine(settings(directory), forkserver)) as engine:
        pid, guard = engine.pid, parent(engine.pid)
        os.kill(pid if killed == "engine" else guard, signal.SIGKILL)

        # Long: the engine of a guard that is killed dies with it a moment later, and might have answered.
        with pytest.raises(EngineKilledError, match="was killed by signal 9"):
            run(engine, request(room=380, eos_token_ids=()))
        wait_until(lambda: not is_alive(pid) and not is_alive(guard), END_S, "both are dead")


def test_an_engine_outlives_the_forkserver_and_the_next_one_is_executed_with_the_same_answers(
    directory, tmp_path, caplog
):
    server = Forkserver(tmp_path / "engines.sock")
    with contextlib.closing(server):
        # While vLLM is imported: the request waits, and its worker gives up.
        EngineProcess(settings(directory), forkserver=server.path).close()
        assert server.report() == {"state": "ready"}
        with contextlib.closing(forked_engine(settings(directory), server.path)) as engine:
            own = sorted([engine.pid, parent(engine.pid)])
            wait_until(lambda: sorted(descendants(server.process.pid)) == own, END_S, "of the first request nothing is")
            answers = ids(run(engine, request())[0])
            # Stopped, it takes connections and forks nothing.
            os.kill(server.process.pid, signal.SIGSTOP)
            with contextlib.closing(forked_engine(settings(directory), server.path)) as other:
                assert parent(other.pid) == os.getpid()
                assert server.process.wait() == -signal.SIGKILL, "another one is to be started in its place"
                assert "started without the forkserver of engines, which has ended" in caplog.text
                assert ids(run(other, request())[0]) == answers
            assert ids(run(engine, request())[0]) == answers
            after = EngineProcess(settings(directory), forkserver=server.path)
            assert parent(after.child.pid) == os.getpid()
            after.close()


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_on_a_card_a_fork_has_the_answers_of_an_executed_engine(directory, tmp_path):
    on_card = settings(directory, dtype="bfloat16", on_cpu=False, cache_bytes=64 << 20)
    with contextlib.closing(Forkserver(tmp_path / "engines.sock", on_cpu=False)) as server:
        assert server.report() == {"state": "ready"}
        with contextlib.closing(forked_engine(on_card, server.path)) as fork:
            assert title(parent(fork.pid)) == "test: guard of an engine"
            answers = ids(run(fork, request())[0])
    with contextlib.closing(VllmEngine(on_card)) as executed:
        assert ids(run(executed, request())[0]) == answers
