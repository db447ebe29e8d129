"""An external trainer's rank is seen from outside: its steps, versions, rewards, activity, and its leave."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time

import pytest
import torch

from pipeline.runtime.transport import trainer_name
from pipeline.supervisor.external import ExternalTrainer, process_row
from pipeline.telemetry.metrics import SlotName
from pipeline.telemetry.reader import MetricsReader
from pipeline.telemetry.slab import MetricsSlab
from pipeline.trainer.external_metrics import ExternalMetrics
from tests.support.protocol import House

STATE = {"weight": torch.zeros(2)}
# A trainer that is killed while it trains: its lock goes with it, its slot stays begun.
KILLED = """
import fcntl, os, signal, sys
from pathlib import Path
from pipeline.trainer.external_metrics import ExternalMetrics
folder = Path(sys.argv[1])
descriptor = os.open(folder / "trainer-0.lock", os.O_RDWR | os.O_CREAT)
fcntl.flock(descriptor, fcntl.LOCK_EX)
metrics = ExternalMetrics(folder / "metrics", rank=0, reward_source="function")
with metrics.waiting():
    print("connected", flush=True)
    sys.stdin.read()
"""


class Bench:
    """A buffer with a worker, a slab, and a watcher of rank 0."""

    def __init__(self, folder):
        self.folder = folder
        self.house = House(folder)
        self.slab = MetricsSlab.create(folder / "metrics", [SlotName("supervisor"), SlotName("trainer", 0)])
        self.reader = MetricsReader(self.slab)
        self.rewards_at_leave = []
        self.trainer = ExternalTrainer(
            folder, self.slab, 1, on_left=lambda: self.rewards_at_leave.append(self.value("rlhfd_reward_mean"))
        )

    def value(self, name, **labels):
        return self.reader.read().value(name, **labels)

    def seen(self, now_s=0.0):
        (rank,) = self.trainer.look(now_s)
        return rank


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    yield bench
    bench.house.close()
    bench.slab.close()


@pytest.fixture
def locked(bench):
    """The lock of rank 0, as a connected trainer holds it."""
    descriptor = os.open(bench.folder / f"{trainer_name(0)}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield descriptor
    os.close(descriptor)


def connect(bench):
    metrics = ExternalMetrics(bench.folder / "metrics", rank=0, reward_source="function")
    return bench.house.connect(metrics=metrics)


@pytest.mark.parametrize("ragged", [False, True])
def test_steps_versions_and_rewards_of_an_own_trainer_are_counted(bench, locked, ragged):
    bench.house.ragged = ragged
    connection = connect(bench)
    # Weights that include no batch are no step.
    connection.publish(actor=STATE)
    assert (bench.value("rlhfd_train_steps_total"), bench.value("rlhfd_reward_mean")) == (0, None)

    first = bench.house.batch(connection)
    assert bench.seen().progress.activity == "train"
    assert bench.seen().progress.working_on == first.lease
    second = bench.house.batch(connection)
    connection.publish(actor=STATE)

    scores = torch.cat([batch.experience.info["score"].float() for batch in (first, second)])
    assert bench.value("rlhfd_train_steps_total") == 1
    assert bench.value("rlhfd_policy_version", role="trainer", worker="0") == 2
    assert bench.value("rlhfd_reward_mean") == pytest.approx(float(scores.mean()))
    assert bench.value("rlhfd_reward_stddev") == pytest.approx(float(scores.std(correction=0)))
    assert bench.value("rlhfd_train_experiences_total") == 16
    trained = sum(int(batch.experience.action_mask.sum()) for batch in (first, second))
    assert bench.value("rlhfd_tokens_total", kind="trained") == trained


@pytest.mark.parametrize("ragged", [False, True])
def test_metrics_hold_the_scores_of_a_batch_and_not_its_memory(bench, locked, ragged):
    bench.house.ragged = ragged
    connection = connect(bench)

    bench.house.batch(connection)

    (scores,) = connection._metrics._scores
    assert scores.shape == (8,) and scores.untyped_storage().nbytes() == 8 * 4


def test_a_rank_that_publishes_nothing_keeps_no_scores(bench, tmp_path):
    slab = MetricsSlab.create(tmp_path / "of-rank-1", [SlotName("supervisor"), SlotName("trainer", 1)])
    metrics = ExternalMetrics(tmp_path / "of-rank-1", rank=1, reward_source="function")
    connection = bench.house.connect(metrics=metrics)

    for _ in range(2):
        bench.house.batch(connection)

    assert not metrics._scores
    assert MetricsReader(slab).read().value("rlhfd_train_experiences_total") == 16
    slab.close()


def test_batches_that_are_handed_back_do_not_count_for_the_reward(bench, locked):
    connection = connect(bench)
    first = bench.house.batch(connection)
    bench.house.batch(connection)

    connection.hand_back(1)
    connection.publish(actor=STATE)

    assert bench.value("rlhfd_reward_mean") == pytest.approx(float(first.experience.info["score"].float().mean()))


def test_weights_that_undo_a_version_are_no_step_and_drop_the_rewards_of_its_batches(bench, locked):
    connection = connect(bench)
    bench.house.batch(connection)
    connection.publish(actor=STATE)
    reward = bench.value("rlhfd_reward_mean")
    bench.house.batch(connection)

    connection.publish(actor=STATE, version=1, rollback=True)

    assert bench.value("rlhfd_policy_version", role="trainer", worker="0") == 1
    assert (bench.value("rlhfd_train_steps_total"), bench.value("rlhfd_reward_mean")) == (1, reward)
    third = bench.house.batch(connection)
    connection.publish(actor=STATE)
    assert bench.value("rlhfd_train_steps_total") == 2
    assert bench.value("rlhfd_reward_mean") == pytest.approx(float(third.experience.info["score"].float().mean()))


def test_a_trainer_is_connected_until_it_closes_and_has_left_then(bench, locked):
    assert (bench.seen().state, bench.seen().pid) == ("absent", 0)
    connection = connect(bench)
    bench.house.batch(connection)
    connection.publish(actor=STATE)
    assert (bench.seen(5.0).state, bench.seen(5.0).pid) == ("connected", os.getpid())
    assert process_row(bench.seen(7.0), 8.0, 4096) == {
        "name": "trainer-0", "role": "trainer", "index": 0, "pid": os.getpid(), "state": "connected", "restarts": 0,
        "uptime_s": 3.0, "resident_bytes": 4096, "devices": "its own", "last_exit": None,
    }  # fmt: skip

    reward = bench.value("rlhfd_reward_mean")
    connection.close()
    fcntl.flock(locked, fcntl.LOCK_UN)

    assert (bench.seen(9.0).state, bench.seen(11.0).since_s) == ("left", 9.0)
    assert bench.seen().progress.activity == ""
    assert bench.rewards_at_leave == [reward]
    # Counts stay, gauges go.
    assert (bench.value("rlhfd_train_steps_total"), bench.value("rlhfd_reward_mean")) == (1, None)


def test_a_killed_trainer_has_left_and_its_time_counts_no_further(bench):
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(bench.folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"connected\n"
        assert (bench.seen().state, bench.seen().progress.activity) == ("connected", "wait_data")
        process.kill()
        process.wait()

    assert (bench.seen().state, bench.seen().pid) == ("left", process.pid)
    spent_s = bench.value("rlhfd_process_time_seconds_total", role="trainer", worker="0", activity="wait_data")
    deadline_s = time.monotonic() + 0.05
    while time.monotonic() < deadline_s:
        pass
    again_s = bench.value("rlhfd_process_time_seconds_total", role="trainer", worker="0", activity="wait_data")
    assert again_s == spent_s > 0


def test_a_successor_goes_on_with_the_counts(bench, locked):
    for _ in range(2):
        connection = connect(bench)
        bench.house.batch(connection)
        connection.publish(actor=STATE)
        connection.close()

    assert bench.value("rlhfd_train_steps_total") == 2


def test_a_trainer_that_outlives_its_supervisor_is_seen_by_the_next_one(bench, locked):
    connection = connect(bench)
    bench.house.batch(connection)
    connection.publish(actor=STATE)

    next_slab = MetricsSlab.reopen(bench.folder / "metrics", bench.slab.layout.slots)
    assert not next_slab.is_live("trainer", 0)
    bench.house.batch(connection)
    connection.publish(actor=STATE)

    (rank,) = ExternalTrainer(bench.folder, next_slab, 1).look(0.0)
    assert rank.state == "connected"
    assert MetricsReader(next_slab).read().value("rlhfd_train_steps_total") == 2
    next_slab.close()
