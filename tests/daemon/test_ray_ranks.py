"""A daemon whose trainer ranks are on several machines of a real Ray cluster: the same numbers, the same books."""

import importlib.metadata
import os
import re
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.daemon.test_determinism import run
from tests.daemon.test_kills import balanced
from tests.support.daemon import SMALL, Daemon, is_alive, telling_reward, total, wait_until
from tests.support.hosts import Hosts
from tests.support.ray_cluster import RayCluster

pytestmark = pytest.mark.integration
TWO = ("trainer.world_size=2", "buffer.sample_batch_size=16", "buffer.max_staleness=0", "daemon.restart_delay_s=0.05")
PLACED = r"trainer-{} pipeline\.trainer\.remote: trains in the cluster: machine=\S+ actor_pid=(\d+)"
STEPS = 14
SHARDED = 'trainer.sharding="full"'
HYBRID = "trainer.world_size=4", "buffer.sample_batch_size=8", 'trainer.sharding="hybrid"'
EACH = "buffer-0", "actor", "trainer-1", "trainer-0"
WAYS = "sent", "received"


@pytest.fixture(autouse=True)
def default_folder(tmp_path, monkeypatch):
    """Ray's default folder as every daemon sees it: missing."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "no-ray"))


@pytest.fixture(scope="module")
def cluster():
    with RayCluster((2,)) as cluster:
        yield cluster


def actor_of(daemon, rank=1):
    """The pid of the process that computes a rank of the other machine now."""
    return int(re.findall(PLACED.format(rank), daemon.errors)[-1])


def kill(daemon, name, rank=1):
    """Kill a process of the run, and wait until another one has its place and a step is taken."""
    step, actor = daemon.status()["step"], actor_of(daemon, rank)
    if name == "actor":
        os.kill(actor, signal.SIGKILL)
    else:
        daemon.signal(signal.SIGKILL, name)
    daemon.wait_until(lambda: not is_alive(actor), "the rank's process ends with the others")
    daemon.wait_until(lambda: actor_of(daemon, rank) != actor, "another one has its place")
    daemon.wait_step(step + 1)


def as_here(tmp_path, task, cluster, *settings, killed, steps=STEPS):
    """Check that two ranks on two machines train as two here, though processes are killed; return the last metrics."""
    here = run(tmp_path / "here", task, *TWO, *settings, f"trainer.max_steps={steps}")
    found, metrics = across(tmp_path / "there", task, cluster, *TWO, *settings, killed=killed, steps=steps)
    assert found == here
    return metrics


def across(there, task, cluster, *settings, killed, ranks=2, steps=STEPS):
    """Train on two machines, though processes are killed; return the end of the training and the last metrics."""
    there.mkdir()
    settings = (*settings, f"trainer.max_steps={steps}", "trainer.nodes=2", *cluster.settings)
    far = ranks // 2
    # The run lasts until the last of them is killed, without a core.
    with Daemon(there, *SMALL, *telling_reward(there, pause_s=0.05), *settings, task=task) as daemon:
        daemon.wait_ready()
        daemon.wait_step(1)
        metrics = daemon.metrics()
        for rank in map(str, range(ranks)):
            assert total(metrics, "rlhfd_process_time_seconds_total", role="trainer", worker=rank, activity="train") > 0

        for name in killed:
            if name == "buffer-0":
                step = daemon.status()["step"]
                daemon.signal(signal.SIGKILL, name)
                daemon.wait_step(step + 1)
            else:
                kill(daemon, name, far)
        metrics = daemon.metrics()
        assert balanced(metrics), metrics
        assert total(metrics, "rlhfd_items_dropped_total") == 0
        last = actor_of(daemon, far)
        found = daemon.ended()
        wait_until(lambda: not is_alive(last), 30.0, "the rank's process ends with the run")
    return found, metrics


@pytest.mark.variant
def test_two_ranks_on_two_machines_train_the_same_as_two_here_whoever_is_killed(tmp_path, task, cluster):
    metrics = as_here(tmp_path, task, cluster, killed=EACH)

    rows = total(metrics, "rlhfd_remote_rank_bytes_total", data="rows_received")
    assert 0 < rows == total(metrics, "rlhfd_remote_rank_bytes_total")


@pytest.mark.parametrize("killed", [("actor",), pytest.param(EACH, marks=pytest.mark.variant)], ids=["one", "each"])
def test_sharded_ranks_on_two_machines_train_the_same_as_two_here_whoever_is_killed(tmp_path, task, cluster, killed):
    metrics = as_here(tmp_path, task, cluster, SHARDED, killed=killed, steps=STEPS if killed == EACH else 7)

    assert total(metrics, "rlhfd_remote_rank_bytes_total", data="rows_received") > 0
    sent, received = (total(metrics, "rlhfd_remote_rank_bytes_total", data=f"shards_{way}") for way in WAYS)
    # Each version has a state, and weights and state of a rank travel once: in a start those of one version.
    starts = len(killed) - killed.count("buffer-0")
    assert received > 0 and received % starts == 0 and sent % (received // starts) == 0


@pytest.mark.variant
@pytest.mark.timeout(900)
def test_copies_of_shards_train_the_same_whoever_is_killed_and_one_machine_publishes(tmp_path, task):
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text("".join((task / "prompts.jsonl").read_text().splitlines(keepends=True)[:9]))
    settings = (*TWO, *HYBRID, "trainer.save_every=5", f'evaluation.files=["{held_out}"]', "evaluation.every=4")
    killed = ("actor", "trainer-0")
    with RayCluster((3,)) as cluster:
        expected, _ = across(tmp_path / "undisturbed", task, cluster, *settings, killed=(), ranks=4)

        found, metrics = across(tmp_path / "killed", task, cluster, *settings, killed=killed, ranks=4)

    assert found == expected
    sent, received = (total(metrics, "rlhfd_remote_rank_bytes_total", data=f"shards_{way}") for way in WAYS)
    # In each start after a kill the two ranks get weights and state of one version.
    assert sent == 0 < received and received % len(killed) == 0
    (checkpoints,) = (tmp_path / "killed" / "state").glob("runs/*/checkpoints")
    assert (checkpoints / "best" / "model.safetensors").is_file()
    assert (checkpoints / f"step-{STEPS:06d}" / "model.safetensors").is_file()


@pytest.mark.variant
def test_a_rank_without_room_waits_and_says_what_for(tmp_path, task, cluster):
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
def test_a_head_that_is_lost_for_longer_than_restarts_last_and_comes_back_changes_no_bit(tmp_path, task):
    here = run(tmp_path / "here", task, *TWO, f"trainer.max_steps={STEPS}")
    there = tmp_path / "there"
    there.mkdir()
    limits = "trainer.nodes=2", "daemon.restart_limit=3"
    settings = (*SMALL, *telling_reward(there), *TWO, f"trainer.max_steps={STEPS}", *limits)
    # Ray waits for a head for a minute before it ends a gateway.
    soon = {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"}
    with Hosts() as hosts, Daemon(there, *settings, *hosts.settings, task=task, environment=soon) as daemon:
        daemon.wait_ready()
        daemon.wait_step(2)

        hosts.lose_the_head()

        for name in ("rollout-0", "trainer-1"):
            daemon.wait_logged(f"{name} pipeline.runtime.ray_cluster: waits for the cluster: cluster.address: ")
        assert balanced(daemon.metrics())
        assert daemon.status()["cluster"]["actors"]["pending"] == 1
        time.sleep(15.0)
        assert daemon.status()["state"] != "draining", "nobody has given up"
        assert len(daemon.status()["cluster"]["nodes"]) == 2
        hosts.begin_again()
        daemon.wait_until(
            lambda: (len(seen["nodes"]), len(seen["left"])) == (2, 2) if (seen := daemon.status()["cluster"]) else None,
            "the nodes of the new head are there, and those of the last one have left",
        )
        assert daemon.ended() == here


@pytest.mark.variant
@pytest.mark.timeout(900)
@pytest.mark.needs("ip")
# Passes of a sharded model wait for all ranks. A rank that is found hung in one has a death at its batch, whose rows
# are then not dealt, and sums are taken in another order: Ray finds the loss of the host first.
@pytest.mark.parametrize(("sharding", "hang_s"), [("none", 20), ("full", 120)])
def test_a_host_that_is_cut_off_and_comes_back_changes_no_bit(tmp_path, task, sharding, hang_s):
    steps = f"trainer.max_steps={STEPS}", f'trainer.sharding="{sharding}"'
    here = run(tmp_path / "here", task, *TWO, *steps)
    there = tmp_path / "there"
    there.mkdir()
    settings = (*SMALL, *telling_reward(there), *TWO, *steps, "trainer.nodes=2", f"daemon.hang_timeout_s={hang_s}")
    with Hosts() as hosts, Daemon(there, *settings, *hosts.settings, task=task) as daemon:
        daemon.wait_ready()
        daemon.wait_step(2)

        hosts.cut(1)

        # Ray ends by itself on a host that it has given up, and on no other one.
        daemon.wait_logged(f"node left the cluster: node={os.uname().nodename} address={hosts.address(1)} ")
        daemon.wait_logged("waits for room in the cluster: machines=1")
        step = daemon.status()["step"]
        assert balanced(daemon.metrics())
        hosts.join(1)
        daemon.wait_step(step + 1)
        assert daemon.ended() == here


@pytest.mark.variant
@pytest.mark.timeout(900)
@pytest.mark.needs("ip")
def test_sharded_ranks_go_on_from_a_checkpoint_that_one_host_alone_has(tmp_path, task):
    settings = (*TWO, SHARDED, "rollout.algorithm=ppo")
    run(tmp_path / "here", task, *settings, f"trainer.max_steps={STEPS // 2}")
    there, nothing = tmp_path / "there", tmp_path / "nothing"
    there.mkdir(), nothing.mkdir()
    shutil.copytree(tmp_path / "here" / "state", there / "state")
    steps = f"trainer.max_steps={STEPS}"
    (tmp_path / "here").rename(tmp_path / "before")
    (tmp_path / "here").mkdir()
    shutil.copytree(tmp_path / "before" / "state", tmp_path / "here" / "state")
    with Daemon(tmp_path / "here", *SMALL, *telling_reward(tmp_path / "here"), *settings, steps, task=task) as daemon:
        here = daemon.ended()
    with (
        Hosts(sees={there / "state": nothing}) as hosts,
        Daemon(
            there, *SMALL, *telling_reward(there), *settings, steps, *hosts.settings, "trainer.nodes=2", task=task
        ) as daemon,
    ):
        daemon.wait_logged(f"resuming: step={STEPS // 2} ")
        daemon.wait_step(STEPS // 2 + 1)
        kill(daemon, "actor")
        assert daemon.ended() == here
        assert "resumed from shared memory" in daemon.errors and "rolled back" not in daemon.errors
    assert not any(nothing.iterdir())


@pytest.mark.variant
@pytest.mark.needs("ip")
def test_a_host_with_another_reference_ends_the_start_with_one_line(tmp_path, task):
    reference, other = tmp_path / "reference", tmp_path / "other"
    shutil.copytree(task / "model", reference)
    shutil.copytree(task / "model", other)
    content = bytearray((other / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (other / "model.safetensors").write_bytes(content)
    settings = (*TWO, f"model.reference={reference}", "model.reference_device=trainer", "trainer.nodes=2")
    with (
        Hosts(sees={reference: other}) as hosts,
        Daemon(tmp_path, *SMALL, *settings, *hosts.settings, task=task) as daemon,
    ):
        assert daemon.wait() == 78, daemon.errors
        told = f"model.reference: {reference} has other weights here than on the daemon's machine"
        (line,) = [line for line in daemon.errors.splitlines() if " ERROR " in line]
        assert told in line


@pytest.mark.variant
@pytest.mark.needs("ip")
@pytest.mark.parametrize("wrong", ["no model", "another release", "other prompts"])
def test_a_host_that_cannot_roll_out_ends_the_start_with_one_line(tmp_path, task, wrong):
    there = tmp_path / "there"
    if wrong == "other prompts":
        place = task / "prompts.jsonl"
        there.write_text(place.read_text()[::-1].replace("9", "8", 1)[::-1])
        told = f"other files than on the daemon's machine: prompts {place}"
    elif wrong == "no model":
        there.mkdir()
        place, told = task, f"model.actor: no such directory: {task / 'model'}"
    else:
        place = Path(str(importlib.metadata.distribution("rlhfd")._path))
        release = importlib.metadata.version("rlhfd")
        shutil.copytree(place, there)
        (there / "METADATA").write_text(
            (place / "METADATA").read_text().replace(f"Version: {release}", "Version: 0.0.7")
        )
        told = f"rlhfd 0.0.7 is installed, on the daemon's machine {release}"
    with Hosts(sees={place: there}) as hosts, Daemon(tmp_path, *SMALL, *hosts.settings, task=task) as daemon:
        assert daemon.wait() == 78, daemon.errors
        (line,) = [line for line in daemon.errors.splitlines() if " ERROR " in line]
        assert f"on {socket.gethostname()}: {told}" in line
