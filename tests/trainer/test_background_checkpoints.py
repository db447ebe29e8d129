"""Checkpoints beside training: from the published slots, whole, waited for, and never a heartbeat of training."""

import threading
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from pipeline.config.schema import Config
from pipeline.errors import CheckpointError
from pipeline.models.critic import Critic
from pipeline.models.lora import adapt, published
from pipeline.models.weights.held import state_dicts
from pipeline.models.weights.store import flatten
from pipeline.progress import Telemetry
from pipeline.runtime.checkpoint_note import read_note, verify
from pipeline.runtime.latest_checkpoint import checkpoints_dir
from pipeline.storage.weights_header import WeightsVersion
from pipeline.telemetry.reader import MetricsReader
from pipeline.trainer import process
from pipeline.trainer.connection import Connection
from pipeline.trainer.learner import Learner
from pipeline.trainer.saving import background
from pipeline.trainer.saving.background import BackgroundCheckpoint, Point
from pipeline.trainer.saving.rank_models import RankModels
from pipeline.trainer.state import Progress, tensors_of
from tests.support import tiny
from tests.support.told import Told
from tests.trainer.test_checkpoints import Tokenizer, files_of_at_most
from tests.trainer.test_resume import CPU, Site
from tests.trainer.test_trainer import Bench, bench  # noqa: F401 - a fixture

SECOND = Progress(2, 7, 20)


@pytest.fixture
def site(tmp_path):
    site = Site(tmp_path)
    yield site
    site.house.close()


class Models(NamedTuple):
    models: dict
    learner: Learner
    connection: Connection
    publish: Callable
    write: Callable
    config: Config

    @property
    def root(self):
        return checkpoints_dir(self.config)

    def held(self):
        return self.connection.versions.held(tensors_of(self.learner, SECOND))

    @torch.no_grad()
    def change(self, seed):
        draws = torch.Generator().manual_seed(seed)
        weights = [tensor for model in self.models.values() for tensor in published(model).values()]
        for tensor in [*self.learner.tensors().values(), *weights]:
            tensor.copy_(torch.randn(tensor.shape, generator=draws))


def trained(site, monkeypatch, *, algorithm="ppo", tied=False, rank=0):
    """Return models, their publisher and their checkpoints' writer."""
    monkeypatch.setattr(process, "TokenizerFiles", lambda path: Tokenizer())
    model = {"actor": "unused", "lora_rank": rank, "lora_targets": ["q_proj", "down_proj"]}
    config = site.config().model_copy(update={"model": site.config().model.model_copy(update=model)})
    actor = tiny.llama(3, tie_word_embeddings=tied)
    models = {"actor": actor} | ({"critic": Critic.from_actor(actor)} if algorithm == "ppo" else {})
    adapt(actor, config.model, seed=0)
    learner = Learner(config.trainer, algorithm, actor, models.get("critic"))
    connection = site.house.connect()

    def publish(version):
        return connection.publish(
            actor=published(actor),
            critic=models["critic"].state_dict() if "critic" in models else None,
            training=tensors_of(learner, SECOND),
            version=version,
        )

    write = process.checkpoint_writer(config, RankModels(config, models, connection, CPU), learner)
    return Models(models, learner, connection, publish, write, config)


@pytest.mark.parametrize(
    ("algorithm", "tied", "rank"),
    [("ppo", False, 0), ("grpo", True, 0), ("grpo", False, 2)],
    ids=["critic", "tied", "lora"],
)
def test_a_checkpoint_from_the_slots_is_the_one_of_the_published_step_byte_by_byte(
    site, monkeypatch, algorithm, tied, rank
):
    run = trained(site, monkeypatch, algorithm=algorithm, tied=tied, rank=rank)
    run.change(5)
    version = run.publish(1)
    at_once = read_note(run.write(Point(SECOND, version, False), None, Telemetry.none()))

    held = run.held()
    run.change(6)
    folder = run.write(Point(SECOND, version, False), held, Telemetry.none())

    beside = read_note(folder)
    verify(folder, beside)
    assert beside.files == at_once.files
    assert len(beside.files) >= 4
    assert folder.parent == run.root


def test_names_of_tied_weights_share_a_tensor_of_the_slot_and_empty_ones_are_the_models():
    one, empty = torch.ones(2), torch.empty(0)
    live = {"head": one, "embedding": one.view(2), "other": torch.zeros(2), "none": empty}
    slot = {name: tensor.clone() for name, tensor in flatten(actor=live).items()}

    found = state_dicts(slot, actor=live, critic=None)

    assert found.keys() == {"actor"} and found["actor"].keys() == live.keys()
    assert found["actor"]["embedding"] is found["actor"]["head"] is slot["actor.head"]
    assert found["actor"]["other"] is slot["actor.other"] and found["actor"]["none"] is empty


def test_a_version_is_held_until_the_second_publish_after_it(site, monkeypatch):
    run = trained(site, monkeypatch)
    assert run.held() is None
    run.publish(1)
    held = run.held()
    before = {name: tensor.clone() for name, tensor in {**held.weights, **held.training}.items()}

    assert not held.is_next()
    run.change(6)
    run.publish(2)

    assert held.is_next(), "two slots hold the training state"
    now = {**held.weights, **held.training}
    assert all(torch.equal(now[name], tensor) for name, tensor in before.items())
    assert not torch.equal(now["actor.lm_head.weight"], run.models["actor"].lm_head.weight)


def test_a_version_without_its_training_state_is_not_held(site, monkeypatch):
    run = trained(site, monkeypatch)
    run.publish(1)

    run.connection.publish(actor=run.models["actor"].state_dict(), critic=run.models["critic"].state_dict())

    assert run.held() is None


def test_training_goes_on_beside_a_checkpoint_up_to_the_publish_that_would_overwrite_it(
    bench,  # noqa: F811
    monkeypatch,
):
    """The write of step 2 ends once the publish of step 4 waits for it, that of step 4 once the end does."""
    seen, waits = {}, threading.Semaphore(0)

    def slowly(point, held, telemetry):
        assert waits.acquire(timeout=60.0), "nothing waits for the checkpoint"
        # Copies: the state of step 2 lies where that of step 4 comes.
        state = held.training["progress"].tolist(), held.weights["actor.weight"].clone()
        seen[point.progress.step] = (len(bench.learner.batches), *state, point.complete)
        return bench.house.weights_path

    first = bench.model.weight.detach().clone()
    trainer = bench.trainer(save_every=2, max_steps=4)
    wait = trainer._checkpoints.wait
    monkeypatch.setattr(trainer._checkpoints, "wait", lambda telemetry: (waits.release(), wait(telemetry)))
    bench.save = slowly
    bench.run(trainer)

    assert seen[2][0] == 4, "steps 3 and 4 were trained meanwhile"
    assert seen[2][1][0] == 2 and torch.equal(seen[2][2], first + 1 + 1)
    assert (seen[4][0], seen[4][3]) == (4, True), "the last one is waited for"
    assert seen[4][1][0] == 4 and torch.equal(seen[4][2], first + 1 + 1 + 1 + 1)
    reading = MetricsReader(bench.slab).read()
    assert reading.value("rlhfd_checkpoints_total", result="ok") == 2
    assert reading.value("rlhfd_checkpoint_wait_seconds_total") > 0


def test_without_a_training_state_in_shared_memory_a_checkpoint_is_written_at_once(bench):  # noqa: F811
    threads = []
    trainer = bench.trainer(save_every=1, max_steps=2, keep_state="disk")
    bench.save = lambda point, held, telemetry: (
        threads.append((threading.current_thread(), held)) or bench.house.weights_path
    )

    bench.run(trainer)

    assert threads == [(threading.main_thread(), None)] * 2


def test_a_write_that_fails_beside_training_is_counted_and_repeated_at_the_end(bench, caplog):  # noqa: F811
    tried = []

    def since_success():
        return MetricsReader(bench.slab).read().value("rlhfd_checkpoint_failures_since_success")

    def failing(point, *rest):
        tried.append(point.progress.step)
        if len(tried) == 1:
            raise CheckpointError("the disk is full")
        assert since_success() == 1
        return bench.house.weights_path

    trainer = bench.trainer(save_every=3, max_steps=3)
    bench.save = failing
    bench.run(trainer)

    assert tried == [3, 3]
    assert "the disk is full" in caplog.text
    reading = MetricsReader(bench.slab).read()
    assert reading.value("rlhfd_checkpoints_total", result="error") == 1
    assert reading.value("rlhfd_checkpoints_total", result="ok") == 1
    assert since_success() == 0


def test_an_unexpected_error_of_the_write_is_raised_where_its_end_is_collected():
    def broken(*given):
        raise ZeroDivisionError

    saving = BackgroundCheckpoint(broken)
    saving.begin(Point(SECOND, WeightsVersion(2, 0), False), None)
    saving.wait(Telemetry.none())

    with pytest.raises(ZeroDivisionError):
        saving.collect()
    assert saving.collect() is None


class Heartbeats:
    """A writer that moves bytes for a while, then hangs until it may end."""

    def __init__(self, moves):
        self.moves = moves
        self.has_moved, self.may_end = threading.Event(), threading.Event()

    def __call__(self, point, held, telemetry):
        for _ in range(self.moves):
            telemetry.progress()
        self.has_moved.set()
        assert self.may_end.wait(60.0)
        telemetry.progress()
        return None


def test_a_wait_passes_on_progress_and_only_progress(monkeypatch):
    writer, told = Heartbeats(3), Told()
    saving = BackgroundCheckpoint(writer)
    saving.begin(Point(SECOND, WeightsVersion(2, 0), False), None)
    assert writer.has_moved.wait(60.0)
    wait, looks = background.wait, threading.Semaphore(0)
    monkeypatch.setattr(background, "wait", lambda *limit: (wait(*limit), looks.release()))

    waiting = threading.Thread(target=saving.wait, args=(told,))
    waiting.start()
    # At the third one the first two are judged.
    assert all(looks.acquire(timeout=60.0) for _ in range(3))
    while_it_hangs = len(told.beats)
    writer.may_end.set()
    waiting.join(60.0)

    assert while_it_hangs == 0, "the moves were before the wait, and none since"
    assert len(told.beats) <= 1
    assert saving.collect().step == 2
    assert saving.collect() is None


def test_the_write_of_a_failed_trainer_ends_and_leaves_nothing(site, monkeypatch):
    run = trained(site, monkeypatch)
    version, may_go_on = run.publish(1), threading.Event()

    def held_up(*given):
        assert may_go_on.wait(60.0)
        return run.write(*given)

    saving = BackgroundCheckpoint(held_up)
    saving.begin(Point(SECOND, version, False), run.held())
    saving.abandon()
    may_go_on.set()
    saving.wait(Telemetry.none())

    assert saving.collect() is None
    assert list(run.root.iterdir()) == []


def test_a_full_disk_beside_training_leaves_nothing(site, monkeypatch):
    run = trained(site, monkeypatch)
    version = run.publish(1)
    saving = BackgroundCheckpoint(run.write)
    with files_of_at_most(1 << 12):
        saving.begin(Point(SECOND, version, False), run.held())
        saving.wait(Telemetry.none())

    outcome = saving.collect()
    assert outcome.path is None and "could not be written" in outcome.error
    assert list(run.root.iterdir()) == []
