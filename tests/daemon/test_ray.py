"""A daemon whose workers' models compute on a real Ray cluster: the same numbers, the same handling of deaths."""

import contextlib
import os
import re
import shutil
import signal
import socket
from pathlib import Path

import pytest

from pipeline.models.weights.store import WeightsReader
from tests.daemon import test_environment
from tests.daemon.test_determinism import run
from tests.daemon.test_kills import balanced, finish
from tests.support.daemon import SMALL, Daemon, descendants, is_alive, telling_reward, total, wait_until
from tests.support.ray_cluster import RayCluster

pytestmark = pytest.mark.integration
# The weights that a step of real runs leaves as they are: nearly all.
SMALL_CHANGES = ("model.dtype=bfloat16", "trainer.learning_rate=1e-6")
SETTINGS = (*SMALL, "trainer.max_steps=0", "daemon.restart_delay_s=0.05")
PLACED = re.compile(
    r"(rollout-\d) pipeline\.rollout\.ray: rolls out in the cluster: machine=\S+ actor_pid=(\d+) gpus=0"
)


@pytest.fixture(autouse=True)
def default_folder(tmp_path, monkeypatch):
    """Ray's default folder as every daemon sees it: missing before the test and after it."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "no-ray"))
    yield
    assert not tmp_path.joinpath("no-ray").exists()


@pytest.fixture(scope="module")
def cluster():
    with RayCluster((2,)) as cluster:
        yield cluster


def name_of(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    return ""


def holders(cluster):
    """The processes that hold weights for daemons."""
    return [pid for pid in descendants(cluster.pid) if "WeightsHolder" in name_of(pid)]


def relays(cluster):
    """The processes that hold weights for all workers of a machine."""
    return [pid for pid in descendants(cluster.pid) if "WeightsRelay" in name_of(pid)]


def sent_bytes(metrics):
    """The bytes of weights sent to machines, of whole versions and of differences."""
    return tuple(total(metrics, "rlhfd_weight_sent_bytes_total", kind=kind) for kind in ("whole", "difference"))


def left_of(cluster):
    """The processes of actors, and those that actors have started."""
    titles = ("ray::RolloutActor", "ray::_RolloutActor", "ray::WeightsHolder", "ray::WeightsRelay", "rlhfd: ")
    return [pid for pid in descendants(cluster.pid) if name_of(pid).startswith(titles)]


def actors(daemon):
    """The pid of each worker's latest actor."""
    return {name: int(pid) for name, pid in PLACED.findall(daemon.errors)}


def go_on_without(daemon, actor_pid, *, steps=5):
    """Wait until an actor is gone, another one has its place, and training has gone on."""
    step = daemon.status()["step"]
    daemon.wait_until(lambda: not is_alive(actor_pid), "the actor is gone")
    daemon.wait_until(lambda: actor_pid not in actors(daemon).values(), "another actor has its place")
    daemon.wait_ready()
    daemon.wait_step(step + steps)
    metrics = daemon.metrics()
    assert balanced(metrics), metrics
    assert total(metrics, "rlhfd_items_dropped_total") == 0


@pytest.mark.variant
@pytest.mark.parametrize(("dtype", "rate"), [("float32", 1e-4), ("bfloat16", 1e-5)])
def test_two_workers_in_a_cluster_give_the_same_as_one_here_bit_for_bit(tmp_path, task, cluster, dtype, rate):
    """With PPO, whose critic's weights travel too; GRPO: `test_ray_ranks`. In bfloat16 what changed travels."""
    settings = ("rollout.algorithm=ppo", f"model.dtype={dtype}", f"trainer.learning_rate={rate}")
    here = run(tmp_path / "here", task, *settings)
    there = run(tmp_path / "there", task, *settings, "rollout.workers=2", *cluster.settings)

    assert here == there
    placed = PLACED.findall((tmp_path / "there" / "daemon.err").read_text())
    assert {name for name, _ in placed} == {"rollout-0", "rollout-1"}


@pytest.mark.variant
def test_whatever_becomes_of_an_actor_it_is_replaced_and_nothing_is_lost(tmp_path, task, cluster):
    # A gateway sees an activity that lasts longer than two looks at its actor.
    telling, _ = telling_reward(tmp_path, pause_s=0.05)
    settings = (*SETTINGS, *cluster.settings, telling, "daemon.hang_timeout_s=4")
    with Daemon(tmp_path, *settings, task=task) as daemon:
        daemon.wait_ready()
        daemon.wait_step(2)

        killed = actors(daemon)["rollout-0"]
        scorers = descendants(killed)
        assert scorers, "the reward functions run in processes of the actor's"
        os.kill(killed, signal.SIGKILL)
        go_on_without(daemon, killed)
        assert "rollout-0 ended (exit code 1), restart in" in daemon.errors
        assert f"the actor on {socket.gethostname()} is gone: The actor died unexpectedly" in daemon.errors
        assert "Worker unexpectedly exits" in daemon.errors, "the reason, which Ray tells further down"
        assert not any(map(is_alive, scorers))

        stopped = actors(daemon)["rollout-0"]
        os.kill(stopped, signal.SIGSTOP)
        go_on_without(daemon, stopped)

        orphaned = actors(daemon)["rollout-0"]
        daemon.signal(signal.SIGKILL, "rollout-0")
        go_on_without(daemon, orphaned)

        metrics = daemon.metrics()
        for stage in ("generate", "reward", "ref_logprob"):
            assert total(metrics, "rlhfd_stage_duration_seconds_count", stage=stage) > 0, stage
        assert total(metrics, "rlhfd_process_time_seconds_total", role="rollout", activity="reward") > 0
        assert total(metrics, "rlhfd_weight_sync_bytes_total", transport="ray") > 0
        finish(daemon)


@pytest.mark.timeout(900)
def test_turns_on_actors_with_kills_are_those_of_a_serial_run_bit_for_bit(tmp_path, task, cluster):
    """Of an environment's processes, of an actor, of a gateway."""
    sets = (*test_environment.settings(tmp_path / "serial"), "trainer.learning_rate=1e-3")
    with Daemon(tmp_path / "serial", *sets, task=task, arguments=("--serial",)) as daemon:
        serial = daemon.ended()
    sets = (*test_environment.settings(tmp_path / "there"), "trainer.learning_rate=1e-3", *cluster.settings)
    # The actors have the variables of their cluster.
    slow = test_environment.ENVIRONMENT.replace('os.environ.get("TURN_S", "0")', "0.2")
    (tmp_path / "there" / "answering.py").write_text(slow)
    with Daemon(tmp_path / "there", *sets, "rollout.workers=2", "daemon.restart_delay_s=0.05", task=task) as daemon:
        daemon.wait_step(1)
        daemon.wait_until(lambda: total(daemon.metrics(), "rlhfd_environment_steps_total") > 150, "steps are under way")
        gateways, killed, orphaned = daemon.pids(), actors(daemon)["rollout-0"], actors(daemon)["rollout-1"]
        environments = test_environment.environments_of(killed)
        assert len(environments) == 2 and not test_environment.environments_of(gateways["rollout-0"])
        for pid in environments:
            os.kill(pid, signal.SIGKILL)
        daemon.wait_step(2)
        assert actors(daemon)["rollout-0"] == killed, "the actor has replaced them"
        left = [*test_environment.environments_of(killed), *test_environment.environments_of(orphaned)]
        os.kill(killed, signal.SIGKILL)
        daemon.signal(signal.SIGKILL, "rollout-1")
        daemon.wait_until(lambda: not any(map(is_alive, [killed, orphaned, *left])), "both are gone with theirs")
        daemon.wait_step(3)
        metrics = daemon.metrics()
        there = daemon.ended()
    samples = daemon.ask("samples", "--json").stdout

    assert there == serial and there[0] == str(test_environment.STEPS)
    assert total(metrics, "rlhfd_stage_errors_total", stage="environment") == 0
    assert total(metrics, "rlhfd_environment_steps_total", result="tool_failed") > 0
    assert total(metrics, "rlhfd_groups_total", signal="mixed") > 0, "and something is learned of"
    assert total(metrics, "rlhfd_process_time_seconds_total", role="rollout", activity="environment") > 0
    assert total(metrics, "rlhfd_stage_duration_seconds_count", stage="environment") > 0
    assert total(metrics, "rlhfd_items_dropped_total") == 0 and balanced(metrics), metrics
    assert '"observed":[false' in samples
    wait_until(lambda: not left_of(cluster), 30.0, "nothing of the run is left on the machines")


@pytest.mark.variant
def test_weights_go_on_when_who_held_them_is_killed_and_actors_end_with_the_daemon(tmp_path, task, cluster):
    settings = (*SETTINGS, *cluster.settings, *telling_reward(tmp_path), *SMALL_CHANGES)
    with Daemon(tmp_path, *settings, "rollout.workers=2", task=task) as daemon:
        daemon.wait_ready()
        daemon.wait_step(2)
        workers = {name: pid for name, pid in daemon.pids().items() if name.startswith("rollout")}
        nbytes = WeightsReader(daemon.shm_dir / "weights").nbytes
        for killed, find in enumerate((holders, relays)):
            assert sent_bytes(daemon.metrics())[0] == (1 + killed) * nbytes, "once for both workers"
            (holding,) = find(cluster)
            again = daemon.errors.count("weights are sent again")

            os.kill(holding, signal.SIGKILL)

            step = daemon.status()["step"]
            daemon.wait_until(
                lambda again=again: daemon.errors.count("weights are sent again") > again, "it is noticed"
            )
            daemon.wait_step(step + 5)
            assert {name: pid for name, pid in daemon.pids().items() if name.startswith("rollout")} == workers
        assert sent_bytes(daemon.metrics())[0] == 3 * nbytes
        assert "all references to the actor were removed" not in daemon.errors, "the other one went on"
        assert total(daemon.metrics(), "rlhfd_weight_syncs_total", result="refused") == 0
        metrics = daemon.metrics()
        assert balanced(metrics)
        sealed = total(metrics, "rlhfd_response_length_tokens_sum")
        sampled = total(metrics, "rlhfd_tokens_total", kind="response")
        assert sealed <= sampled <= 2 * sealed, "those of sealed rows, and of the tickets in hand"

        daemon.signal(signal.SIGKILL)
        daemon.wait()
        for pid in actors(daemon).values():
            wait_until(lambda pid=pid: not is_alive(pid), 30.0, "an actor ends with its daemon")
        wait_until(lambda: not holders(cluster) + relays(cluster), 30.0, "what holds weights ends with the daemon")
        shutil.rmtree(daemon.shm_dir)


def test_a_lost_machine_costs_no_row_and_the_run_goes_on_without_it(tmp_path, task):
    with RayCluster((1, 1)) as cluster:
        # A row takes its time, without a core: Ray takes its own to see that a machine is lost.
        reward = telling_reward(tmp_path, pause_s=0.05)
        settings = (*SETTINGS, *cluster.settings, "rollout.workers=2", *reward, *SMALL_CHANGES)
        with Daemon(tmp_path, *settings, task=task) as daemon:
            daemon.wait_ready()
            daemon.wait_step(2)
            # Rows of the first version may be enough for two steps.
            daemon.wait_until(lambda: sent_bytes(daemon.metrics())[1], "a later version is sent")
            nbytes = WeightsReader(daemon.shm_dir / "weights").nbytes
            whole, difference = sent_bytes(daemon.metrics())
            assert whole == 2 * nbytes, "each machine gets it whole once"
            assert difference < 2 * daemon.status()["step"] * 0.1 * nbytes, "and then what a step changes"
            before = actors(daemon)
            # The head, which computes nothing, and two machines.
            here = f"{socket.gethostname()} ({cluster.address.rpartition(':')[0]})"
            daemon.wait_until(lambda: len(daemon.status()["cluster"]["nodes"]) == 3, "its nodes are shown")
            assert daemon.status()["cluster"]["actors"] == {"pending": 0, "placed": 2}
            workers = [node["workers"] for node in daemon.status()["cluster"]["nodes"]]
            assert sorted(workers) == [[], ["rollout-0"], ["rollout-1"]]
            shown = [one["node"] for one in daemon.status()["processes"] if one["role"] == "rollout"]
            assert shown == [here, here]
            metrics = daemon.metrics()
            assert total(metrics, "rlhfd_cluster_nodes", state="alive") == 3
            assert total(metrics, "rlhfd_cluster_nodes", state="left") == 0
            assert total(metrics, "rlhfd_cluster_actors", state="placed") == 2
            assert total(metrics, "rlhfd_cluster_actor_info", node=socket.gethostname()) == 2
            assert daemon.errors.count("node joined the cluster: node=") == 3
            cluster.lose_a_machine()
            lost = daemon.wait_until(
                lambda: next((name for name, pid in before.items() if not is_alive(pid)), ""), "an actor is gone"
            )

            daemon.wait_logged(f"WARNING supervisor pipeline.supervisor.exits: {lost} ended (exit code 1)")
            step = daemon.status()["step"]
            # The other machine's one core is taken: one worker is left, and the log says what the other waits for.
            waits = f"WARNING {lost} pipeline.runtime.ray_cluster: waits for room in the cluster"
            daemon.wait_logged(f"{waits}: gpus=0 cpus=1")
            daemon.wait_logged(f"node left the cluster: node={socket.gethostname()} address=")
            assert re.search(rf"node left the cluster: .* nodes=2 workers={lost}\n", daemon.errors)
            assert f"Node {here} left the cluster, " in daemon.ask("why").stdout
            for name, state in (("nodes", "left"), ("actors", "pending")):
                daemon.wait_until(
                    lambda name=name, state=state: total(daemon.metrics(), f"rlhfd_cluster_{name}", state=state) == 1,
                    f"metrics show one of the {name} as {state}",
                )
            daemon.wait_until(lambda: daemon.status()["state"] == "ready", "it is ready without it")
            daemon.wait_step(step + 5)

            metrics = daemon.metrics()
            assert balanced(metrics), metrics
            assert total(metrics, "rlhfd_items_dropped_total") == 0
            finish(daemon)


@pytest.mark.variant
@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (('rewards=["no_such_module:score"]',), "rewards: cannot import no_such_module"),
        (
            ("rewards=[]", "rollout.environment=no_such_module:Game"),
            "rollout.environment: cannot import no_such_module",
        ),
        # The tests of the real vLLM are in an environment of their own.
        (("rollout.engine=vllm",), "rollout.engine: vllm is not installed here: "),
    ],
    ids=["reward", "environment", "vllm"],
)
def test_what_is_wrong_where_the_actor_is_ends_the_start(tmp_path, task, cluster, wrong, told):
    with Daemon(tmp_path, *SETTINGS, *cluster.settings, *wrong, task=task) as daemon:
        assert daemon.wait(90.0) == 78
        assert f"on {socket.gethostname()}: {told}" in daemon.errors


def test_without_a_cluster_a_start_says_so(tmp_path, task):
    with Daemon(tmp_path, *SETTINGS, "cluster.engine=ray", "cluster.address=127.0.0.1:9", task=task) as daemon:
        assert daemon.wait(90.0) == 78
        assert "cluster.address: no Ray cluster at 127.0.0.1:9" in daemon.errors


def test_without_ray_a_start_says_how_to_get_it(tmp_path, task):
    blocking = "import sys\nsys.modules['ray'] = None\n"
    tmp_path.joinpath("sitecustomize.py").write_text(blocking)
    with Daemon(tmp_path, "cluster.engine=ray", task=task, environment={"PYTHONPATH": str(tmp_path)}) as daemon:
        assert daemon.wait() == 78
        assert "cluster.engine: Ray is not installed here" in daemon.errors


def test_one_process_is_no_cluster(tmp_path, task):
    with Daemon(tmp_path, "cluster.engine=ray", task=task, arguments=("--serial",)) as daemon:
        assert daemon.wait() == 78
        assert "--serial: one process computes all of it; set cluster.engine = local" in daemon.errors
