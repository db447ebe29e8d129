"""A daemon whose trainer ranks are on several machines of a real Ray cluster: the same numbers, the same books."""

import os
import re
import signal

import pytest

from tests.daemon.test_determinism import ENDED, run
from tests.daemon.test_kills import balanced
from tests.support.daemon import (
    SMALL,
    Daemon,
    is_alive,
    task,  # noqa: F401 - a fixture
    telling_reward,
    total,
    wait_until,
)
from tests.support.hosts import TwoHosts
from tests.support.ray_cluster import RayCluster

pytestmark = pytest.mark.integration
TWO = ("trainer.world_size=2", "buffer.sample_batch_size=16", "buffer.max_staleness=0", "daemon.restart_delay_s=0.05")
PLACED = re.compile(r"trainer-1 pipeline\.trainer\.remote: trains in the cluster: machine=\S+ actor_pid=(\d+)")
STEPS = 14


@pytest.fixture(autouse=True)
def default_folder(tmp_path, monkeypatch):
    """Ray's default folder as every daemon sees it: missing."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "no-ray"))


@pytest.fixture(scope="module")
def cluster():
    with RayCluster((2,)) as cluster:
        yield cluster


def actor_of(daemon):
    """The pid of the process that computes rank 1 now."""
    return int(PLACED.findall(daemon.errors)[-1])


def kill(daemon, name):
    """Kill a process of the run, and wait until another one has its place and a step is taken."""
    step, actor = daemon.status()["step"], actor_of(daemon)
    if name == "actor":
        os.kill(actor, signal.SIGKILL)
    else:
        daemon.signal(signal.SIGKILL, name)
    daemon.wait_until(lambda: not is_alive(actor), "the rank's process ends with the others")
    daemon.wait_until(lambda: actor_of(daemon) != actor, "another one has its place")
    daemon.wait_step(step + 1)


def test_two_ranks_on_two_machines_train_the_same_as_two_here_whoever_is_killed(tmp_path, task, cluster):  # noqa: F811
    steps = f"trainer.max_steps={STEPS}"
    here = run(tmp_path / "here", task, *TWO, steps)
    there = tmp_path / "there"
    there.mkdir()
    settings = (*SMALL, *telling_reward(there), *TWO, steps, *cluster.settings, "trainer.nodes=2")
    with Daemon(there, *settings, task=task) as daemon:
        daemon.wait_ready()
        daemon.wait_step(1)
        metrics = daemon.metrics()
        for rank in ("0", "1"):
            assert total(metrics, "rlhfd_process_time_seconds_total", role="trainer", worker=rank, activity="train") > 0

        for name in ("buffer-0", "actor", "trainer-1", "trainer-0"):
            if name == "buffer-0":
                step = daemon.status()["step"]
                daemon.signal(signal.SIGKILL, name)
                daemon.wait_step(step + 1)
            else:
                kill(daemon, name)
        metrics = daemon.metrics()
        assert balanced(metrics), metrics
        assert total(metrics, "rlhfd_items_dropped_total") == 0
        last = actor_of(daemon)
        assert daemon.wait() == 0, daemon.errors
        wait_until(lambda: not is_alive(last), 30.0, "the rank's process ends with the run")
        found = ENDED.search(daemon.errors)
    assert found is not None, daemon.errors
    assert found.groups() == here


@pytest.mark.variant
def test_a_rank_without_room_waits_and_says_what_for(tmp_path, task, cluster):  # noqa: F811
    settings = (*SMALL, *TWO, *cluster.settings, "trainer.nodes=3", "trainer.world_size=3")
    with Daemon(tmp_path, *settings, task=task) as daemon:
        daemon.wait_logged(
            "WARNING trainer-1 pipeline.runtime.ray_cluster: waits for room in the cluster: "
            "machines=2 ranks_each=1 gpus_each=0"
        )
        assert daemon.status()["state"] == "starting"
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0, daemon.errors


@pytest.mark.variant
@pytest.mark.timeout(900)
@pytest.mark.needs("ip")
def test_a_host_that_is_cut_off_and_comes_back_changes_no_bit(tmp_path, task):  # noqa: F811
    steps = f"trainer.max_steps={STEPS}"
    here = run(tmp_path / "here", task, *TWO, steps)
    there = tmp_path / "there"
    there.mkdir()
    settings = (*SMALL, *telling_reward(there), *TWO, steps, "trainer.nodes=2", "daemon.hang_timeout_s=20")
    with TwoHosts() as hosts, Daemon(there, *settings, *hosts.settings, task=task) as daemon:
        daemon.wait_ready()
        daemon.wait_step(2)

        hosts.cut()

        daemon.wait_logged("waits for room in the cluster: machines=1")
        step = daemon.status()["step"]
        assert balanced(daemon.metrics())
        hosts.join()
        daemon.wait_step(step + 1)
        assert daemon.wait() == 0, daemon.errors
        found = ENDED.search(daemon.errors)
    assert found is not None and found.groups() == here
