"""A daemon whose workers' engines are the real vLLM on a Ray cluster: what it learns, and deaths of each process."""

import json
import os
import shutil
import signal

import pytest

from tests.daemon.test_kills import SETTINGS as ENDLESS
from tests.daemon.test_kills import balanced
from tests.daemon.test_ray import PLACED, actors, left_of, name_of
from tests.daemon.test_vllm import ALONE, ENDS, GAIN, LEARNING, LORA, SETTINGS
from tests.daemon.test_vllm import _one_cache as _one_cache
from tests.daemon.test_vllm import task as task
from tests.support.daemon import (
    END_TIMEOUT_S,
    Daemon,
    descendants,
    is_alive,
    only_run,
    telling_reward,
    total,
    wait_until,
)
from tests.support.ray_cluster import RayCluster

pytestmark = [pytest.mark.vllm, pytest.mark.integration]


@pytest.fixture(scope="module")
def cluster():
    with RayCluster((1,)) as cluster:
        yield cluster


def engine_of(daemon, actor):
    """The pid of the engine's process of an actor."""

    def engines():
        return [pid for pid in descendants(actor) if "vllm" in name_of(pid)]

    (pid,) = daemon.wait_until(engines, "the actor has started its engine")
    return pid


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(12, id="each version is in force"),
        # That rows of such an engine are learned from is shown on one machine, too.
        pytest.param(50, id="the reward rises", marks=pytest.mark.variant),
    ],
)
def test_an_engine_alone_on_another_machine_learns_the_embedded_task(tmp_path, task, cluster, record_property, steps):
    """Each version goes from Ray's store into its parameters, and answers the trainer's probe."""
    settings = (*SETTINGS, *LEARNING, *ALONE, *cluster.settings, f"trainer.max_steps={steps}")
    with Daemon(tmp_path, *settings, task=task) as daemon:
        daemon.wait_step(3)
        # The answer for the newest version may be on its way.
        metrics = daemon.wait_until(
            lambda: found if total(found := daemon.metrics(), "rlhfd_engine_probes_total", verdict="ok") >= 3 else None,
            "three answers",
        )
        assert daemon.wait() == 0, daemon.errors[-4000:]
        lines = (only_run(daemon.state_dir) / "metrics.jsonl").read_text().splitlines()

    rewards = [json.loads(line)["reward_mean"] for line in lines]
    first, last = sum(rewards[:ENDS]) / ENDS, sum(rewards[-ENDS:]) / ENDS
    record_property("shown", f"mean reward {first:.3f} in the first {ENDS} steps, {last:.3f} in the last {ENDS}")
    assert len(rewards) == steps and (steps == 12 or last - first >= GAIN), rewards
    assert PLACED.search(daemon.errors) and "the engine alone holds the actor" in daemon.errors
    assert "the engine does not" not in daemon.errors and "old weights" not in daemon.errors, "each version passes"
    assert "is not compared" not in daemon.errors, "and is asked"
    assert total(metrics, "rlhfd_weight_sync_bytes_total", transport="ray") > 0
    assert total(metrics, "rlhfd_items_unaccounted") == 0


@pytest.mark.variant
def test_engine_actor_gateway_and_supervisor_are_killed_nothing_is_lost_and_nothing_is_left(tmp_path, task, cluster):
    settings = (*ENDLESS, *SETTINGS, *LORA, *ALONE, *telling_reward(tmp_path), "rollout.weight_updates=in_flight")
    # Ray does not tell a kill from a crash: the death of an actor counts an attempt of the ticket in work.
    settings = (*settings, "rollout.max_attempts=5")
    with Daemon(tmp_path, *settings, *cluster.settings, task=task) as daemon:
        daemon.wait_ready()
        daemon.wait_step(3)

        for victim in ("engine", "actor", "gateway"):
            actor, worker = actors(daemon)["rollout-0"], daemon.pids()["rollout-0"]
            engine = engine_of(daemon, actor)
            os.kill({"engine": engine, "actor": actor, "gateway": worker}[victim], signal.SIGKILL)
            if victim == "engine":
                daemon.wait_logged("engine vllm: its process was killed by signal 9; the log may say why")
            daemon.wait_until(
                lambda pids=(actor, engine, worker): not any(map(is_alive, pids)), f"all are gone with the {victim}"
            )
            daemon.wait_until(lambda actor=actor: actors(daemon)["rollout-0"] != actor, "another actor has its place")
            daemon.wait_ready()
            daemon.wait_step(daemon.status()["step"] + 3)

        (worker,) = [process for process in daemon.status()["processes"] if process["role"] == "rollout"]
        assert worker["engine"]["room"] == 256 and worker["engine"]["tokens_out_per_s"] > 0
        metrics = daemon.metrics()
        assert total(metrics, "rlhfd_engine_tokens_total", direction="out") > 0
        assert total(metrics, "rlhfd_engine_probes_total", verdict="ok") > 3
        assert total(metrics, "rlhfd_engine_probes_total") == total(metrics, "rlhfd_engine_probes_total", verdict="ok")
        assert total(metrics, "rlhfd_process_starts_total", role="rollout") == 4
        assert total(metrics, "rlhfd_items_dropped_total") == 0
        assert total(metrics, "rlhfd_tickets_total", result="failed") == 0, "no ticket is at fault"
        assert balanced(metrics)

        family = [*daemon.family(), engine_of(daemon, actors(daemon)["rollout-0"])]
        daemon.signal(signal.SIGKILL)
        daemon.wait()
        wait_until(lambda: not any(map(is_alive, family)), END_TIMEOUT_S, "no process of it is left")
        shutil.rmtree(daemon.shm_dir)
        wait_until(lambda: not left_of(cluster), END_TIMEOUT_S, "nor of its actors")
