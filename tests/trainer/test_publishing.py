"""Versions beside training: a thread publishes, the next batch is computed meanwhile, and only its change waits."""

import logging
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from pipeline.errors import CheckpointError, WeightsError
from pipeline.models.weights import slot_copy
from pipeline.runtime.messages import Welcome
from pipeline.storage.weights_header import WeightsVersion
from pipeline.telemetry.reader import MetricsReader
from pipeline.telemetry.slab import SlotWriter
from pipeline.trainer.resume import Start
from pipeline.trainer.saving import publishing
from tests.models.weights.lazy_gpu import LazyGpu
from tests.trainer.test_trainer import Bench, CountingLearner, Evaluations, NotedModels


class MovingLearner(CountingLearner):
    """Moves the weight and one moment by one a step, as soon as they may change."""

    def __init__(self, model):
        super().__init__(model)
        self.moment = torch.zeros(3)
        self.computed = lambda: None
        self.may_change = lambda: None

    def tensors(self):
        return {"moment": self.moment}

    def update(self, experiences, before_change):
        self.computed()
        before_change()
        self.may_change()
        with torch.no_grad():
            self.moment += 1
        return super().update(experiences, before_change)


class Gate:
    """Holds the thread that publishes, from the begin of a publish until it is opened."""

    def __init__(self, trainer, error=None, takes=lambda: None):
        self.open = threading.Event()
        self.threads = []
        self._publish, self._error, self._takes = trainer._connection.versions.publish, error, takes
        trainer._connection.versions.publish = self

    def __call__(self, *arguments, **options):
        self.threads.append(threading.current_thread())
        assert self.open.wait(60.0), "the gate was never opened"
        self._takes()
        if self._error is not None:
            raise self._error
        return self._publish(*arguments, **options)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setattr(publishing, "BESIDE_FROM_BYTES", 1)
    bench = Bench(tmp_path)
    bench.learner = MovingLearner(bench.model)
    yield bench
    bench.close()


def steps(bench, trainer, count):
    for _ in range(60):
        if trainer.step >= count:
            return
        bench.turns(trainer, 1)
    raise AssertionError(f"{trainer.step} steps")


def held(trainer):
    """The number, the weight and the moment of the newest version."""
    versions = trainer._connection.versions
    newest = versions.newest()
    weight, moment = {"actor.weight": torch.zeros(1, 2)}, {"moment": torch.zeros(3)}
    versions.restore(weight)
    state = {"progress": torch.zeros(3, dtype=torch.int64), **moment}
    assert versions.restore_training(newest, state)
    return newest.version, weight["actor.weight"], moment["moment"]


def test_a_run_that_ends_with_its_prompts_awaits_the_evaluation_of_the_version_under_way(tmp_path, monkeypatch):
    monkeypatch.setattr(publishing, "BESIDE_FROM_BYTES", 1)
    bench, follower = Bench(tmp_path, prompts=20), Evaluations()
    bench.learner, follower.complete = MovingLearner(bench.model), {0}
    trainer = bench.trainer(max_epochs=1, hooks=[follower])
    steps(bench, trainer, 1)
    trainer._publishing.finish()
    gate = Gate(trainer)
    steps(bench, trainer, 2)
    bench.turns(trainer, 3)
    assert trainer.complete and trainer.version.version == 1 and not trainer.finished

    gate.open.set()
    trainer._publishing.wait(60.0)
    bench.turns(trainer, 1)
    assert trainer.version.version == 2 and not trainer.finished
    follower.complete.add(2)
    bench.run(trainer)

    assert follower.found == [0, 2]
    bench.close()


@pytest.mark.parametrize("device", ["cpu", "card"])
def test_the_next_batch_is_computed_while_a_version_is_published_and_only_its_change_waits(bench, monkeypatch, device):
    if device == "card":
        card = LazyGpu(bench.model.weight, bench.learner.moment)
        # Its copies are executed when they are waited for.
        monkeypatch.setattr(slot_copy, "process_driver", lambda: card)
    before = bench.model.weight.detach().clone()
    trainer = bench.trainer(max_steps=0)
    gate, seen = Gate(trainer), []
    steps(bench, trainer, 1)

    assert bench.house.ledger.totals.policy_version == 0 and bench.house.ledger.totals.trained == 0
    assert MetricsReader(bench.slab).read().value("rlhfd_train_steps_total") == 0, "it counts with its version"
    bench.learner.computed = lambda: (seen.append(trainer._connection.newest().version), gate.open.set())
    bench.learner.may_change = lambda: seen.append(held(trainer))
    steps(bench, trainer, 2)

    assert seen[0] == 0, "the second batch was computed before the first version"
    version, weight, moment = seen[1]
    assert version == 1 and torch.equal(weight, before + 1) and torch.equal(moment, torch.ones(3))
    trainer.close()
    bench.house.turn(work=False)
    assert gate.threads[0] is not threading.main_thread()
    assert held(trainer)[0] == 2 and torch.equal(held(trainer)[1], before + 1 + 1)
    reading = MetricsReader(bench.slab).read()
    assert reading.value("rlhfd_train_steps_total") == 2
    assert bench.house.ledger.totals.trained == 16


def test_the_buffer_knows_a_version_while_the_next_batch_is_computed_and_is_told_once(bench):
    trainer = bench.trainer(max_steps=0)
    gate, known = Gate(trainer), []
    steps(bench, trainer, 1)
    duplicates = bench.house.counts.duplicates

    def told():
        gate.open.set()
        deadline_s = time.monotonic() + 60.0
        while bench.house.ledger.totals.policy_version < 1 and time.monotonic() < deadline_s:
            bench.house.turn(work=False)
        known.append(bench.house.ledger.totals.policy_version)

    bench.learner.computed = told
    steps(bench, trainer, 2)
    bench.learner.computed = lambda: None
    trainer.close()
    bench.house.turn(work=False)

    assert known == [1] and bench.house.ledger.totals.policy_version == 2
    assert bench.house.counts.duplicates == duplicates


def test_a_buffer_that_starts_after_it_was_told_is_told_again(bench):
    trainer = bench.trainer(max_steps=0)
    gate = Gate(trainer)
    steps(bench, trainer, 1)
    gate.open.set()
    trainer._publishing.wait()
    # The message is in the dead buffer's mailbox.
    bench.house.start_buffer()
    bench.house.post["buffer"].receive()
    bench.house.post["trainer-0"].send(Welcome(bench.house.buffer.incarnation))

    trainer.wait(0.0)
    trainer.poll()

    bench.house.turn(work=False)
    assert bench.house.ledger.totals.policy_version == 1
    trainer.close()


def test_an_error_of_the_thread_ends_training_before_anything_has_changed(bench):
    trainer = bench.trainer(max_steps=0)
    gate = Gate(trainer, WeightsError("no room is left"))
    steps(bench, trainer, 1)
    gate.open.set()

    with pytest.raises(WeightsError, match="no room is left"):
        steps(bench, trainer, 2)

    assert len(bench.learner.batches) == 1 and torch.equal(bench.learner.moment, torch.ones(3))
    trainer.abandon()
    trainer._connection.close()
    bench.house.turn(work=False)
    totals = bench.house.ledger.totals
    assert (totals.policy_version, totals.trained, bench.house.ledger.leased) == (0, 0, 0), "the batch is handed back"


def test_after_an_error_of_training_the_version_of_the_step_before_is_published_still(bench):
    trainer = bench.trainer(max_steps=0)
    gate = Gate(trainer)
    steps(bench, trainer, 1)
    threading.Timer(0.0, gate.open.set).start()

    trainer.abandon()

    assert trainer._connection.newest().version == 1


def test_an_error_of_both_is_logged(bench, caplog):
    trainer = bench.trainer(max_steps=0)
    gate = Gate(trainer, WeightsError("no room is left"))
    steps(bench, trainer, 1)
    gate.open.set()

    with caplog.at_level(logging.ERROR, "pipeline"):
        trainer.abandon()

    assert "version 1 is not published: no room is left" in caplog.text


def test_a_stop_waits_for_the_version_and_its_batch_counts_as_trained(bench):
    trainer = bench.trainer(max_steps=0)
    gate = Gate(trainer)
    steps(bench, trainer, 1)
    wait = trainer._publishing.wait
    trainer._publishing.wait = lambda *timeout: (gate.open.set(), wait(*timeout))

    trainer.stop()
    trainer.close()

    bench.house.turn(work=False)
    assert bench.saved == [1], "the last checkpoint"
    assert (bench.house.ledger.totals.policy_version, bench.house.ledger.totals.trained) == (1, 8)


def test_a_buffer_that_starts_meanwhile_does_not_deliver_the_batch_again(bench):
    trainer = bench.trainer(max_steps=0)
    gate = Gate(trainer)
    steps(bench, trainer, 1)
    bench.house.start_buffer()
    bench.house.post["trainer-0"].send(Welcome(bench.house.buffer.incarnation))

    trainer.wait(0.0)
    bench.house.turn()
    assert bench.house.counts.ended.get("holder_died", 0) == 0
    gate.open.set()
    trainer.stop()
    trainer.close()

    bench.house.turn(work=False)
    assert bench.house.ledger.totals.trained == 8


@pytest.mark.parametrize("waited_s", [0.0, 7.0])
def test_the_wait_for_a_version_and_the_time_of_its_thread_are_exported(bench, monkeypatch, waited_s):
    """A publish of 7 s, over before training changes anything, or begun when it waits."""
    clock, wait = SimpleNamespace(now_s=0.0), publishing.wait
    monkeypatch.setattr(publishing, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    trainer = bench.trainer(max_steps=0)
    gate = Gate(trainer, takes=lambda: setattr(clock, "now_s", clock.now_s + 7.0))

    def published(pending, timeout_s=None):
        gate.open.set()
        return wait(pending, 60.0)

    if waited_s:
        monkeypatch.setattr(publishing, "wait", published)
    else:
        bench.learner.computed = lambda: (
            trainer._publishing.is_pending and published([trainer._publishing._pending.written])
        )
    steps(bench, trainer, 2)

    gate.open.set()
    reading = MetricsReader(bench.slab).read()
    # Version 0 took no time.
    assert reading.histogram_mean("rlhfd_weight_sync_duration_seconds", phase="publish") == 3.5
    assert reading.histogram_mean("rlhfd_train_phase_duration_seconds", phase="publish") == waited_s / 2
    assert reading.histogram_mean("rlhfd_weight_sync_duration_seconds", phase="state") is not None
    trainer.close()


def test_of_every_third_version_the_state_is_kept_and_of_each_with_a_checkpoint(bench):
    kept = []
    trainer = bench.trainer(max_steps=8, keep_state_every=3, save_every=5)
    bench.save = lambda point, held, telemetry: (
        kept.append((point.progress.step, held is not None)) or bench.house.weights_path
    )
    versions, seen = trainer._connection.versions, []
    bench.learner.may_change = lambda: seen.append((versions.newest().version, versions.kept().version))

    bench.run(trainer)

    assert seen == [(0, 0), (1, 0), (2, 0), (3, 3), (4, 3), (5, 5), (6, 6), (7, 6)]
    assert versions.kept().version == 8, "the last one"
    assert kept == [(5, True), (8, True)]


def test_the_state_of_a_stopped_run_that_no_disk_takes_is_that_of_its_last_version(bench):
    trainer = bench.trainer(max_steps=0, keep_state_every=3)
    versions = trainer._connection.versions

    def full(*_, **__):
        raise CheckpointError("no space is left")

    bench.save = full
    steps(bench, trainer, 5)

    assert not trainer.close()
    assert (versions.newest().version, versions.kept().version) == (5, 5)


def test_a_thread_that_hangs_while_no_batch_comes_is_found(bench, monkeypatch):
    trainer = bench.trainer(max_steps=0)
    gate = Gate(trainer)
    steps(bench, trainer, 1)
    beats = []
    monkeypatch.setattr(SlotWriter, "beat", lambda writer: beats.append(writer))

    for _ in range(3):
        trainer.beat()
        trainer.wait(0.0)

    assert beats == [], "no heartbeat while nothing but the thread works"
    gate.open.set()
    trainer._publishing.finish()
    trainer.beat()
    assert beats
    trainer.close()


def test_a_small_version_and_those_of_one_process_are_published_in_place(bench, monkeypatch):
    trainer = bench.trainer(max_steps=0)
    gate = Gate(trainer)
    gate.open.set()
    trainer.publish_in_place()
    steps(bench, trainer, 1)
    monkeypatch.setattr(publishing, "BESIDE_FROM_BYTES", 1 << 20)
    trainer._publishing.is_beside = True
    steps(bench, trainer, 2)

    assert gate.threads == [threading.main_thread()] * 2
    trainer.close()


class Beside(NotedModels):
    """A rank's shards whose versions a thread publishes, but for the first one."""

    def __init__(self, order):
        super().__init__(order, weights_bytes=1)
        self.open = threading.Event()

    def writing(self, wanted, training):
        if not wanted.version:
            return super().writing(wanted, training)
        self.order.append(f"begin {wanted.version} through {wanted.trained_through}")

        def write():
            assert threading.current_thread() is not threading.main_thread()
            assert self.open.wait(60.0)
            self.order.append(f"turned {wanted.version}")
            return wanted._replace(fingerprint=7)

        return write


def test_sharded_ranks_compute_the_next_batch_while_their_threads_publish(bench):
    sharding = Beside([])
    trainer = bench.trainer(max_steps=0, models=sharding)
    steps(bench, trainer, 1)
    bench.learner.computed = lambda: (sharding.order.append("computed"), sharding.open.set())
    bench.learner.may_change = lambda: sharding.order.append("may change")
    steps(bench, trainer, 2)

    assert sharding.order[:5] == ["publish", "begin 1 through 1", "computed", "turned 1", "may change"]
    trainer._publishing.finish()
    bench.house.turn(work=False)
    assert bench.house.ledger.totals.trained == 16


@pytest.mark.parametrize(("rank", "reported"), [(0, [3]), (1, [])])
def test_of_the_ranks_that_publish_together_the_first_one_reports(bench, rank, reported):
    connection, sent = bench.trainer(max_steps=0)._connection, []
    connection.rank, connection.session._send = rank, sent.append

    connection.end_version(WeightsVersion(3, 7))

    assert [message.version for message in sent] == reported


def test_sharded_ranks_keep_the_state_of_every_nth_version_too(bench):
    sharding, given = Beside([]), []
    sharding.open.set()
    writing = sharding.writing
    sharding.writing = lambda wanted, training: (
        given.append((wanted.version, training is not None)) or writing(wanted, training)
    )
    trainer = bench.trainer(max_steps=0, models=sharding, keep_state_every=3)
    steps(bench, trainer, 6)

    assert given == [(0, True), (1, False), (2, False), (3, True), (4, False), (5, False), (6, True)]
    trainer._publishing.finish()


def test_a_successor_that_finds_two_slots_of_weights_keeps_the_state_of_every_version(bench):
    first = bench.trainer(max_steps=0)
    steps(bench, first, 1)
    first.close()
    trainer = bench.trainer(max_steps=0, keep_state_every=3, start=Start(first.progress, None))
    versions, seen = trainer._connection.versions, []
    bench.learner.may_change = lambda: seen.append((versions.newest().version, versions.kept().version))

    steps(bench, trainer, 5)

    assert seen == [(version, version) for version in range(1, 5)]
    trainer.close()
