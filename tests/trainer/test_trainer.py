"""A trainer rank's decisions, with a learner that only counts, against a real buffer on a real arena."""

import collections
import dataclasses
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipeline.config.schema import Config
from pipeline.runtime.latest_checkpoint import best_checkpoint
from pipeline.telemetry.evaluations import EvaluationFile
from pipeline.telemetry.metrics import SlotName
from pipeline.telemetry.reader import MetricsReader
from pipeline.telemetry.slab import MetricsSlab
from pipeline.trainer.dealing import Ranks
from pipeline.trainer.metrics import TrainerMetrics
from pipeline.trainer.resume import Start
from pipeline.trainer.saving.best import EvaluationFollower
from pipeline.trainer.saving.rank_models import RankModels
from pipeline.trainer.state import Progress, RankProgress, after_step, digest_after
from pipeline.trainer.step_log import StepLog
from pipeline.trainer.step_stats import StepStats
from pipeline.trainer.trainer import Trainer
from tests.support.protocol import House
from tests.trainer.test_best import evaluation
from tests.trainer.test_checkpoints import save


class CountingLearner:
    """Moves the one weight by one a step."""

    def __init__(self, model):
        self.model = model
        self.batches = []

    def tensors(self):
        return {}

    def update(self, batches, before_change):
        self.batches.append(list(batches))
        with torch.no_grad():
            self.model.weight += 1
        rewards = torch.cat([rows.tensor("reward") for rows in batches])
        zeros = {field.name: 0.0 for field in dataclasses.fields(StepStats)}
        return StepStats(
            **{
                **zeros,
                "step": len(self.batches),
                "reward_mean": float(rewards.mean()),
                "rows": len(rewards),
                "tokens_trained": 5,
                "nonfinite": (),
                "row_importance_ratios": (1.0,),
                "row_kl_nats": (0.1,),
                "row_gap_nats": (),
            }
        )


class Bench:
    def __init__(self, folder, *, prompts=0):
        self.house = House(folder, prompts=prompts)
        self.slab = MetricsSlab.create(folder / "metrics", [SlotName("supervisor"), SlotName("trainer", 0)])
        self.model = torch.nn.Linear(2, 1, bias=False)
        self.learner = CountingLearner(self.model)
        self.saved, self.complete = [], []

    def trainer(
        self,
        *,
        agree=lambda ready: ready,
        leave=lambda: None,
        gather=lambda own: [own],
        hooks=(),
        turn=None,
        start=Start(),  # noqa: B008 - immutable
        device="cpu",
        probe=None,
        models=None,
        **settings,
    ):
        config = Config.model_validate({"trainer": settings})
        self.slab.begin("trainer", 0)
        steps = config.trainer.gradient_accumulation_steps * config.trainer.publish_every
        connection = self.house.connect(prefetch=steps + 1, weight_slots=config.trainer.weight_slots)
        return Trainer(
            config,
            self.learner,
            connection,
            models or RankModels(config, {"actor": self.model}, connection, torch.device(device)),
            TrainerMetrics(self.slab.writer("trainer", 0), rank=0, reward_source="function"),
            device=torch.device(device),
            ranks=Ranks(agree, leave, gather),
            hooks=hooks,
            turn=turn,
            probe=probe,
            start=start,
            save=lambda *given: self.save(*given),
        )

    def save(self, point, held, telemetry):
        self.saved.append(point.progress.step)
        self.complete.append(point.complete)
        return self.house.weights_path

    def turns(self, trainer, count):
        for _ in range(count):
            self.house.turn()
            trainer.wait(0.0)
            trainer.poll()
        self.house.turn()

    def run(self, trainer):
        for _ in range(60):
            if trainer.finished:
                break
            self.turns(trainer, 1)
        trainer.close()
        self.house.turn(work=False)

    def close(self):
        self.house.close()
        self.slab.close()


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def test_each_step_publishes_a_version_that_counts_its_batch_as_trained(bench):
    trainer = bench.trainer(max_steps=3)

    bench.run(trainer)

    totals = bench.house.ledger.totals
    assert trainer.complete
    assert (totals.policy_version, totals.trained) == (3, 24)
    assert trainer.version.fingerprint != 0


def test_with_publish_every_two_rows_count_as_trained_with_the_version_that_includes_them(bench):
    trainer = bench.trainer(publish_every=2, max_steps=0)
    while trainer.step < 1:
        bench.turns(trainer, 1)
    bench.house.turn()
    assert bench.house.ledger.totals.trained == 0

    while trainer.step < 2:
        bench.turns(trainer, 1)
    bench.house.turn()

    assert bench.house.ledger.totals.trained == 16
    assert bench.house.ledger.totals.policy_version == 1


def test_after_a_stop_between_two_versions_the_next_one_has_all_its_steps_again(bench):
    """The buffer leases so many batches for the version of the resume, whatever the number of its step."""
    trainer = bench.trainer(publish_every=2, start=Start(Progress(step=5), 3))
    published = {}
    while trainer.step < 9:
        bench.turns(trainer, 1)
        published.setdefault(trainer.version.version, trainer.step)

    assert published == {3: 5, 4: 7, 5: 9}
    trainer.close()


def test_accumulated_batches_make_one_step(bench):
    trainer = bench.trainer(gradient_accumulation_steps=2, max_steps=1)

    bench.run(trainer)

    assert [len(batches) for batches in bench.learner.batches] == [2]
    assert bench.house.ledger.totals.trained == 16


def test_a_rank_that_drains_makes_all_stop_before_the_step(bench):
    trainer = bench.trainer(agree=lambda ready: False)

    bench.turns(trainer, 4)

    assert trainer.finished
    assert trainer.step == 0
    trainer.close()
    bench.house.turn(work=False)
    assert bench.house.ledger.totals.trained == 0
    assert bench.house.ledger.leased == 0, "its batch is handed back"


def test_a_stopped_trainer_lets_the_others_go_exactly_once(bench):
    said = []
    trainer = bench.trainer(agree=lambda ready: said.append(ready) or ready)

    trainer.stop()
    trainer.close()

    assert said == [False]


def test_ranks_part_after_they_have_agreed_and_before_the_last_checkpoint(bench):
    said = []
    trainer = bench.trainer(
        agree=lambda ready: said.append(ready) or ready, leave=lambda: said.append(f"saved {bench.saved}")
    )
    bench.turns(trainer, 4)
    taken = trainer.step

    trainer.stop()
    trainer.close()

    assert taken > 0
    assert said == [*[True] * taken, False, "saved []"]
    assert bench.saved == [taken]


def test_checkpoints_come_every_so_many_steps_and_at_the_end(bench):
    trainer = bench.trainer(save_every=2, max_steps=5)

    bench.run(trainer)

    assert bench.saved == [2, 4, 5]


def test_equal_experience_gives_an_equal_digest(tmp_path):
    digests = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        bench = Bench(tmp_path / name)
        trainer = bench.trainer(max_steps=2)
        bench.run(trainer)
        digests.append(trainer.progress.digest)
        bench.close()

    assert digests[0] == digests[1] != 0


def test_the_digest_of_batches_on_a_card_is_of_the_rows_as_they_were_gathered(tmp_path, monkeypatch):
    """On the meta device, which has no bytes to copy back."""
    monkeypatch.setattr(CountingLearner, "update", lambda self, experiences, **_: _idle(experiences))
    digests = {}
    for device in ("cpu", "meta"):
        (tmp_path / device).mkdir()
        bench = Bench(tmp_path / device)
        trainer = bench.trainer(max_steps=2, device=device)
        bench.run(trainer)
        assert trainer.complete
        digests[device] = trainer.progress.digest
        bench.close()

    assert digests["meta"] == digests["cpu"] != 0


def _idle(experiences):
    zeros = {field.name: 0.0 for field in dataclasses.fields(StepStats)}
    rows = {"nonfinite": (), "row_importance_ratios": (), "row_kl_nats": (), "row_gap_nats": ()}
    return StepStats(**{**zeros, **rows, "step": 1, "rows": len(experiences), "tokens_trained": 1})


@pytest.mark.parametrize("place", [0, 1])
def test_two_ranks_continue_one_digest_of_both_and_the_higher_position(bench, place):
    """A successor restores the first rank's progress on every rank."""
    other, own = RankProgress(77, 1_000_000), []

    def gather(progress):
        own.append(progress)
        there = other._replace(sums=progress.sums)
        return [there, progress] if place else [progress, there]

    trainer = bench.trainer(max_steps=2, gather=gather)
    bench.run(trainer)

    (first, second), experiences = own, [batches[0] for batches in bench.learner.batches]
    assert first.digest == digest_after(0, experiences[:1])
    ranks = [other, first] if place else [first, other]
    assert second.digest == digest_after(after_step(1, ranks).digest, experiences[1:])
    assert trainer.progress.position == other.position
    assert after_step(1, [first, other]).digest != after_step(1, [other, first]).digest, "in order of ranks"
    assert after_step(1, [first]) == (1, first.digest, first.position), "of one rank, its own"


def test_what_was_learned_is_counted(bench):
    bench.run(bench.trainer(max_steps=2))

    reading = MetricsReader(bench.slab).read()
    assert reading.value("rlhfd_train_steps_total") == 2
    assert reading.value("rlhfd_train_experiences_total") == 16
    assert reading.value("rlhfd_tokens_total", kind="trained") == 10
    assert reading.value("rlhfd_policy_version", role="trainer", worker="0") == 2


def test_steps_between_two_versions_count_with_the_next_version_and_once_after_a_kill(bench):
    def counts():
        reading = MetricsReader(bench.slab).read()
        names = ("rlhfd_train_steps_total", "rlhfd_train_experiences_total", "rlhfd_train_step")
        return [*map(reading.value, names), reading.value("rlhfd_tokens_total", kind="trained")]

    killed = bench.trainer(publish_every=4, max_steps=0)
    while killed.step < 3:
        bench.turns(killed, 1)
    assert counts() == [0, 0, 0, 0]

    successor = bench.trainer(publish_every=4, max_steps=0, start=Start(version=None))
    while successor.step < 5:
        bench.turns(successor, 1)
    assert counts() == [4, 32, 4, 20]
    successor.close()

    assert counts() == [5, 40, 5, 25], "the last step is published at the end"


def test_a_step_with_nan_is_counted_and_the_run_goes_on(bench):
    update, nan = bench.learner.update, float("nan")
    rows = {"row_importance_ratios": (nan, 1.0), "row_kl_nats": (nan, float("inf")), "row_gap_nats": (nan, 0.5)}
    bench.learner.update = lambda batches, **more: dataclasses.replace(
        stats := update(batches, **more), loss=nan, nonfinite=("loss",), **(rows if stats.step == 1 else {})
    )

    bench.run(bench.trainer(max_steps=2))

    reading = MetricsReader(bench.slab).read()
    assert reading.value("rlhfd_train_steps_total") == 2
    assert reading.value("rlhfd_nonfinite_total", where="loss") == 2
    # The ratio of the first step's other row, and that of the second step.
    (ratios,) = reading.families["rlhfd_importance_ratio"].values()
    assert (ratios.count, ratios.total) == (2, 2.0)


def test_the_line_of_a_step_has_means_over_the_rows_of_all_ranks(bench, tmp_path):
    """The other rank has as many rows, with a sum of each column that is higher by 4."""
    rows = []

    def gather(progress):
        sums, counts = progress.sums[: len(progress.sums) // 2], progress.sums[len(progress.sums) // 2 :]
        rows.append(counts)
        return [progress, progress._replace(sums=(*(total + 4.0 for total in sums), *counts))]

    trainer = bench.trainer(max_steps=1, gather=gather, hooks=[StepLog(tmp_path / "metrics.jsonl", after_step=0)])
    bench.run(trainer)

    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    stale = float(np.maximum(0 - bench.learner.batches[0][0].columns["info.policy_version"], 0).mean())
    assert line["staleness_mean_versions"] == stale + 4.0 / (2 * 8)
    reading = MetricsReader(bench.slab).read()
    for name, count in zip(("cut_ratio", "groups_without_signal_ratio"), rows[0], strict=False):
        assert reading.value(f"rlhfd_{name}") == line[name] and (line[name] is None) == (count == 0)


def test_the_position_is_that_of_the_newest_batch_even_if_prompts_were_taken_back(bench):
    positions = iter([40, 24])
    trainer = bench.trainer(max_steps=2)
    poll = trainer._connection.poll
    trainer._connection.poll = lambda **options: (
        None if (batch := poll(**options)) is None else batch._replace(position=next(positions))
    )

    bench.run(trainer)

    assert trainer.progress == (2, trainer.progress.digest, 24)


def test_no_reader_sees_a_count_of_steps_below_those_before_a_resume(bench):
    bench.slab.begin("trainer", 0)
    metrics = TrainerMetrics(bench.slab.writer("trainer", 0), rank=0, reward_source="function")
    reader = MetricsReader(bench.slab)
    assert reader.read().value("rlhfd_train_steps_total") is None

    metrics.began(7, steps_before=1000)

    assert reader.read().value("rlhfd_train_steps_total") == 1000
    assert reader.read().value("rlhfd_policy_version", role="trainer", worker="0") == 7


def test_the_step_behind_the_weights_falls_at_a_rollback_and_counts_on_from_there(bench):
    reader = MetricsReader(bench.slab)
    bench.run(bench.trainer(max_steps=4))
    assert reader.read().value("rlhfd_train_step") == 4

    again = bench.trainer(max_steps=4, start=Start(Progress(2), 2, rollback=True))
    assert reader.read().value("rlhfd_train_step") == 2
    bench.run(again)

    assert reader.read().value("rlhfd_train_step") == 4
    assert reader.read().value("rlhfd_train_steps_total") == 6, "all that were taken"


def test_tokens_of_a_step_of_two_ranks_count_once(tmp_path):
    slab = MetricsSlab.create(tmp_path / "metrics", [SlotName("trainer", rank) for rank in range(2)])
    for rank in range(2):
        slab.begin("trainer", rank)
        metrics = TrainerMetrics(slab.writer("trainer", rank), rank=rank, reward_source="function")
        metrics.began(0)
        # Each rank has the tokens of all of them.
        metrics.stepped(1, dataclasses.replace(_idle([]), tokens_trained=1000), [], collections.defaultdict(float))

    assert MetricsReader(slab).read().value("rlhfd_tokens_total", kind="trained") == 1000
    slab.close()


def test_updates_and_kl_of_a_step_are_exported(bench):
    bench.slab.begin("trainer", 0)
    metrics = TrainerMetrics(bench.slab.writer("trainer", 0), rank=0, reward_source="function")
    reader = MetricsReader(bench.slab)
    metrics.began(0)

    for kl_nats in (0.125, float("nan")):
        moments = {"return_mean": 7.0, "return_stddev": 3.0, "reward_running_mean": -1.0, "reward_running_stddev": 2.0}
        stats = dataclasses.replace(_idle([]), updates=3, kl_coef=0.5, policy_kl_nats=kl_nats, **moments)
        metrics.stepped(1, stats, [], {"cut_ratio": 0.25, "groups_without_signal_ratio": float("nan")})

    found = reader.read()
    names = ("rlhfd_step_updates", "rlhfd_kl_coef", "rlhfd_policy_kl_nats", "rlhfd_cut_ratio")
    assert [found.value(name) for name in names] == [3, 0.5, 0.125, 0.25]
    assert (found.value("rlhfd_return_mean"), found.value("rlhfd_return_stddev")) == (7.0, 3.0)
    assert (found.value("rlhfd_reward_running_mean"), found.value("rlhfd_reward_running_stddev")) == (-1.0, 2.0)


def test_the_line_of_a_step_is_written_before_its_weights_are_published(bench, tmp_path):
    path = tmp_path / "metrics.jsonl"
    trainer = bench.trainer(max_steps=2, hooks=[StepLog(path, after_step=0)])
    versions, lines_at_publish = trainer._connection.versions, []
    publish = versions.publish
    versions.publish = lambda *given: lines_at_publish.append(steps_in(path)) or publish(*given)

    bench.run(trainer)

    assert lines_at_publish == [[1], [1, 2]]
    last = json.loads(path.read_text().splitlines()[-1])
    assert last["rows"] == 8 and last["tokens_trained"] == 5 and "row_kl_nats" not in last


def test_lines_are_flushed_before_the_checkpoint_that_includes_their_steps(bench, tmp_path):
    step_log, order = StepLog(tmp_path / "metrics.jsonl", after_step=0), []
    trainer = bench.trainer(max_steps=2, save_every=1, hooks=[step_log])
    flush, save = step_log.flush, bench.save
    step_log.flush = lambda: order.append(("flushed", steps_in(tmp_path / "metrics.jsonl"))) or flush()
    bench.save = lambda point, *rest: order.append(("saved", point.progress.step)) or save(point, *rest)

    bench.run(trainer)

    assert order == [("flushed", [1]), ("saved", 1), ("flushed", [1, 2]), ("saved", 2)]


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


class Evaluations(EvaluationFollower):
    """The evaluations of versions 0, 2, 4, ...; each is complete once `complete` has its version."""

    def __init__(self, *, best=()):
        super().__init__(Path(), Path(), every=2)
        self.best, self.complete, self.found, self.kept = best, set(), [], []

    def awaits(self, version):
        return version.version % 2 == 0 and version.version not in self.complete

    def take(self, version):
        if version.version % 2 or version.version in self.found:
            return None
        self.found.append(version.version)
        return evaluation(version.version, 3)

    def is_best(self, found):
        return found.version in self.best

    def keep(self, checkpoint):
        self.kept.append(checkpoint.name)


def test_the_best_version_is_saved_before_the_next_step_and_then_kept(bench, tmp_path):
    step_log = StepLog(tmp_path / "metrics.jsonl", after_step=0)
    follower = Evaluations(best=(0, 2, 4))
    trainer = bench.trainer(max_steps=5, hooks=[step_log, follower], save_every=4)
    follower.complete = {0, 2, 4}

    bench.run(trainer)

    assert follower.found == [0, 2, 4] and bench.saved == [2, 4, 5]
    # The model as it was given has no checkpoint; that of step 4 was due anyway.
    assert follower.kept == ["step-000002", "step-000004"]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], "evaluation" in line) for line in lines] == [
        (0, True), (1, False), (2, False), (2, True), (3, False), (4, False), (4, True), (5, False)
    ]  # fmt: skip
    assert [line["evaluation"]["version"] for line in lines if "evaluation" in line] == [0, 2, 4]


def test_a_run_ends_after_the_evaluation_of_its_last_version_and_takes_no_further_step(bench, tmp_path):
    step_log = StepLog(tmp_path / "metrics.jsonl", after_step=0)
    follower = Evaluations(best=(2,))
    trainer = bench.trainer(max_steps=2, hooks=[step_log, follower])
    follower.complete = {0}
    bench.turns(trainer, 12)
    assert trainer.complete and not trainer.finished and trainer.step == 2

    follower.complete.add(2)
    assert trainer.finished
    bench.run(trainer)

    assert trainer.step == 2 and bench.saved == [2] and follower.kept == ["step-000002"]
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["evaluation"]["version"] == 2


def test_the_best_version_is_found_by_its_checkpoint_even_if_that_is_still_being_written(bench, tmp_path):
    """The write of step 1 goes on until the evaluation of step 2 is compared, if that does not wait for it."""
    file = EvaluationFile(tmp_path / "evaluations.jsonl")
    follower = EvaluationFollower(tmp_path / "evaluations.jsonl", tmp_path / "checkpoints", every=1)
    is_best, compared, is_compared_again = follower.is_best, [], threading.Event()

    def noted(found):
        compared.append(found.version)
        if len(compared) == 2:
            is_compared_again.set()
        return is_best(found)

    def slowly(point, *rest):
        progress, version, _ = point
        if progress.step == 1:
            is_compared_again.wait(0.5)
        fingerprint = f"{version.fingerprint:016x}"
        return save(tmp_path / "checkpoints", progress.step, version=version.version, fingerprint=fingerprint)

    follower.is_best = noted
    trainer, bench.save = bench.trainer(max_steps=3, hooks=[follower]), slowly
    for step, right in ((1, 6), (2, 5), (3, 4)):
        while trainer.step < step:
            bench.turns(trainer, 1)
        file.add(evaluation(step, right, fingerprint=trainer.version.fingerprint))
    bench.run(trainer)

    assert compared == [1, 2, 3]
    assert best_checkpoint(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step-000001"


class NotedModels:
    """A rank's shards that note their collectives."""

    is_sharded = publishes = True

    def __init__(self, order, weights_bytes=0):
        self.order = order
        self.versions = SimpleNamespace(
            nbytes=weights_bytes, weights_bytes=weights_bytes, state_s=0.0, may_lack_state=lambda: True
        )

    def meet(self):
        self.order.append("meet")

    def due(self, is_due):
        return is_due

    def writing(self, wanted, training):
        def write():
            self.order.append("publish")
            return wanted._replace(fingerprint=7)

        return write


def test_ranks_meet_before_the_probe_which_the_first_one_may_be_late_for(bench):
    order = []

    bench.trainer(probe=lambda: order.append("probe"), models=NotedModels(order))

    assert order == ["meet", "probe", "publish"]


def test_the_first_version_and_each_16th_have_an_answer_to_the_probe(bench):
    probed = []

    trainer = bench.trainer(probe=lambda: probed.append(len(bench.learner.batches)), max_steps=33)
    bench.run(trainer)

    assert trainer.step == 33 and probed == [0, 16, 32]


def test_a_run_that_drains_waits_for_no_evaluation(bench):
    trainer = bench.trainer(max_steps=2, hooks=[Evaluations()])
    bench.turns(trainer, 12)
    assert trainer.complete and not trainer.finished

    trainer.stop()

    assert trainer.finished
    bench.run(trainer)


@pytest.mark.parametrize("save_every", [0, 1])
@pytest.mark.parametrize("batches", [1, 2])
def test_training_ends_once_the_prompts_of_all_passes_are_trained_as_far_as_they_fill_a_step(
    tmp_path, batches, save_every
):
    bench = Bench(tmp_path, prompts=30)
    trainer = bench.trainer(gradient_accumulation_steps=batches, max_epochs=1, save_every=save_every)

    bench.run(trainer)

    totals = bench.house.ledger.totals
    assert trainer.finished and trainer.complete
    steps = 3 // batches
    assert (trainer.step, totals.trained, totals.sealed) == (steps, 8 * batches * steps, 30)
    assert bench.house.ledger.leased == 0
    assert bench.saved[-1] == trainer.step and bench.complete[-1], "a start finds that the run is complete"
    bench.close()


def test_the_version_of_the_last_steps_is_evaluated_if_the_prompts_end_between_two_versions(tmp_path):
    bench, follower = Bench(tmp_path, prompts=30), Evaluations(best=(2,))
    follower.complete = {0}
    trainer = bench.trainer(publish_every=2, max_epochs=1, hooks=[follower])

    bench.turns(trainer, 15)
    assert trainer.complete and trainer.version.version == 2 and not trainer.finished
    assert bench.house.ledger.totals.trained == 24
    follower.complete.add(2)
    bench.run(trainer)

    assert trainer.step == 3 and follower.found == [0, 2] and set(follower.kept) == {"step-000003"}
    bench.close()


def test_a_rank_without_its_last_batch_ends_all_ranks_and_each_says_that_training_is_complete(tmp_path):
    bench = Bench(tmp_path, prompts=12)
    said = []

    def agree(ready):
        said.append(ready)
        return ready and len(said) < 2

    trainer = bench.trainer(agree=agree, max_epochs=1)
    bench.run(trainer)

    assert (trainer.step, said) == (1, [True, False])
    assert trainer.complete
    bench.close()
