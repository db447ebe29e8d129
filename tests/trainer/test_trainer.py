"""A trainer rank's decisions, with a learner that only counts, against a real buffer on a real arena."""

import dataclasses

import pytest
import torch

from pipeline.config.schema import Config
from pipeline.telemetry.metrics import SlotName
from pipeline.telemetry.reader import MetricsReader
from pipeline.telemetry.slab import MetricsSlab
from pipeline.trainer.metrics import TrainerMetrics
from pipeline.trainer.state import RankProgress, after_step, digest_after
from pipeline.trainer.step_stats import StepStats
from pipeline.trainer.trainer import Trainer
from tests.trainer.test_connection import House


class CountingLearner:
    """Moves the one weight by one a step."""

    def __init__(self, model):
        self.model = model
        self.batches = []

    def tensors(self):
        return {}

    def update(self, experiences):
        self.batches.append(list(experiences))
        with torch.no_grad():
            self.model.weight += 1
        rewards = torch.cat([experience.reward for experience in experiences])
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
                "row_rewards": tuple(rewards.tolist()),
            }
        )


class Bench:
    def __init__(self, folder):
        self.house = House(folder)
        self.slab = MetricsSlab.create(folder / "metrics", [SlotName("supervisor"), SlotName("trainer", 0)])
        self.model = torch.nn.Linear(2, 1, bias=False)
        self.learner = CountingLearner(self.model)
        self.saved = []

    def trainer(self, *, agree=lambda ready: ready, leave=lambda: None, gather=lambda own: [own], **settings):
        config = Config.model_validate({"trainer": settings})
        self.slab.begin("trainer", 0)
        steps = config.trainer.gradient_accumulation_steps * config.trainer.publish_every
        return Trainer(
            config,
            self.learner,
            self.house.connect(prefetch=steps + 1),
            {"actor": self.model},
            TrainerMetrics(self.slab.writer("trainer", 0), rank=0, reward_source="function"),
            device=torch.device("cpu"),
            agree=agree,
            leave=leave,
            gather=gather,
            save=lambda progress, version, complete: self.saved.append(progress.step) or self.house.weights_path,
        )

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
    assert trainer.fingerprint != 0


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


@pytest.mark.parametrize("place", [0, 1])
def test_two_ranks_continue_one_digest_of_both_and_the_higher_position(bench, place):
    """A successor restores the first rank's progress on every rank."""
    other, own = RankProgress(77, 1_000_000), []

    def gather(progress):
        own.append(progress)
        return [other, progress] if place else [progress, other]

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
