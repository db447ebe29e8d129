"""A daemon whose worker generates with the real vLLM: deaths of the engine, of its worker and of the supervisor."""

import os
import shutil
import signal

import pytest

from tests.daemon.test_kills import SETTINGS as ENDLESS
from tests.daemon.test_kills import balanced
from tests.support.daemon import (
    END_TIMEOUT_S,
    Daemon,
    descendants,
    is_alive,
    task,  # noqa: F401 - a fixture
    total,
    wait_until,
)

pytestmark = [pytest.mark.vllm, pytest.mark.integration]

SETTINGS = (*ENDLESS, "rollout.engine=vllm", "rollout.max_attempts=1", "daemon.restart_delay_s=0.05")


def engine_of(daemon):
    """The pid of the engine's process, the one child of the worker."""
    (pid,) = daemon.wait_until(lambda: descendants(daemon.pids()["rollout-0"]), "the worker has started its engine")
    return pid


def another_worker(daemon, pid):
    daemon.wait_replaced("rollout-0", pid)
    daemon.wait_ready()
    daemon.wait_step(daemon.status()["step"] + 3)


def test_engine_worker_and_supervisor_are_killed_nothing_is_lost_and_nothing_is_left(tmp_path, task):  # noqa: F811
    with Daemon(tmp_path, *SETTINGS, task=task) as daemon:
        daemon.wait_ready()
        daemon.wait_step(3)

        worker, engine = daemon.pids()["rollout-0"], engine_of(daemon)
        os.kill(engine, signal.SIGKILL)
        daemon.wait_logged("engine vllm: its process was killed by signal 9; the log may say why")
        another_worker(daemon, worker)

        engine = engine_of(daemon)
        worker = daemon.signal(signal.SIGKILL, "rollout-0")
        daemon.wait_until(lambda: not is_alive(engine), "the engine is dead")
        another_worker(daemon, worker)

        (worker,) = [process for process in daemon.status()["processes"] if process["role"] == "rollout"]
        assert worker["engine"]["room"] == 256 and worker["engine"]["tokens_out_per_s"] > 0
        metrics = daemon.metrics()
        assert total(metrics, "rlhfd_engine_tokens_total", direction="out") > 0
        assert total(metrics, "rlhfd_engine_probes_total", verdict="ok") > 3
        assert total(metrics, "rlhfd_engine_probes_total") == total(metrics, "rlhfd_engine_probes_total", verdict="ok")
        assert total(metrics, "rlhfd_process_exits_total", role="rollout", reason="signal") == 1
        assert total(metrics, "rlhfd_process_starts_total", role="rollout") == 3
        assert total(metrics, "rlhfd_items_dropped_total") == 0
        assert total(metrics, "rlhfd_tickets_total", result="failed") == 0, "no ticket is at fault"
        assert balanced(metrics)

        family = [*daemon.family(), engine_of(daemon)]
        daemon.signal(signal.SIGKILL)
        daemon.wait()
        wait_until(lambda: not any(map(is_alive, family)), END_TIMEOUT_S, "no process of it is left")
        shutil.rmtree(daemon.shm_dir)
