"""The start of a trainer: with real models, a real learner, a real buffer, and checkpoints on a real disk."""

import errno
import functools
import logging
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pipeline.config.changes import told
from pipeline.config.identity import identity_of
from pipeline.config.schema import Config
from pipeline.errors import CheckpointError, ConfigError, WeightsError
from pipeline.models.critic import Critic
from pipeline.models.weights.versions import PolicyVersions
from pipeline.runtime import checkpoint_note
from pipeline.runtime.checkpoint_note import CheckpointNote
from pipeline.runtime.latest_checkpoint import REPLACED, checkpoints_dir, put_back_replaced, read_latest
from pipeline.trainer import resume, update_rules
from pipeline.trainer.checkpoints import save_checkpoint
from pipeline.trainer.learner import Learner
from pipeline.trainer.resume import Resumption, Start
from pipeline.trainer.saving.rank_models import RankModels
from pipeline.trainer.state import Progress, tensors_of
from tests.support import tiny
from tests.support.protocol import House
from tests.trainer.test_checkpoints import Tokenizer

CPU = torch.device("cpu")
OPTIMIZERS = ("adamw", "muon", pytest.param("adamw_8bit", marks=pytest.mark.needs("bitsandbytes")))


class Site:
    """A state directory, an instance's folder, and trainers that start and die in it."""

    def __init__(self, folder, optimizer="adamw"):
        self.folder = folder
        self.optimizer = optimizer
        self.root = checkpoints_dir(self.config())
        self.house = House(folder)

    def config(self, **trainer):
        trainer = {"optimizer": self.optimizer, **trainer}
        return Config.model_validate({"daemon": {"state_dir": str(self.folder / "state")}, "trainer": trainer})

    def trainer(self, *, seed=0, **settings):
        """One trainer: its configuration, models, learner, connection and resumption."""
        config = self.config(**settings)
        actor = tiny.llama(seed)
        models = {"actor": actor, "critic": Critic.from_actor(actor)}
        learner = Learner(config.trainer, "ppo", actor, models["critic"])
        connection = self.house.connect()
        rank_models = RankModels(config, models, connection, CPU)
        return Trainer(config, models, learner, connection, Resumption(config, connection, learner, rank_models))

    def save(self, step, **changes):
        """Save a checkpoint of random tensors at a step; return the tensors."""
        trainer = self.trainer(seed=step)
        tensors = trainer.disturbed(step)
        values = {
            "identity": identity_of(trainer.config), "step": step, "version": step, "position": 10 * step,
            "complete": False, "digest": "0a", "fingerprint": "0b", "config": trainer.config.model_dump(mode="json"),
        }  # fmt: skip
        save_checkpoint(
            self.root,
            CheckpointNote(**{**values, **changes}),
            actor=trainer.models["actor"],
            critic=trainer.models["critic"],
            tokenizer=Tokenizer(),
            state=tensors_of(trainer.learner, Progress(step, 7, 10 * step)),
        )
        return tensors


class Trainer:
    def __init__(self, config, models, learner, connection, resumption):
        self.config = config
        self.models = models
        self.learner = learner
        self.connection = connection
        self.resumption = resumption

    def tensors(self):
        states = {f"{model}.{name}": t for model in self.models for name, t in self.models[model].state_dict().items()}
        return {**states, **self.learner.tensors()}

    def disturbed(self, seed):
        """Fill all tensors with random numbers; return copies."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in self.tensors().values():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
        return self.copies()

    def copies(self):
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    def publish(self, version, progress, *, training=True, **options):
        return self.connection.publish(
            actor=self.models["actor"].state_dict(),
            critic=self.models["critic"].state_dict(),
            training=tensors_of(self.learner, progress) if training else None,
            version=version,
            **options,
        )

    def holds(self, tensors):
        mine = self.tensors()
        return mine.keys() == tensors.keys() and all(torch.equal(mine[name], tensors[name]) for name in mine)


@pytest.fixture
def site(tmp_path, request, monkeypatch):
    # Else the matrices of the tiny model are too small for moments of 8 bits.
    monkeypatch.setattr(update_rules, "_LEAST", 64)
    site = Site(tmp_path, getattr(request, "param", "adamw"))
    yield site
    site.house.close()


def test_without_a_checkpoint_a_run_starts_anew(site):
    trainer = site.trainer()
    before = trainer.copies()

    assert trainer.resumption.find() == Start(Progress(), 0)
    assert trainer.holds(before)


@pytest.mark.parametrize("site", OPTIMIZERS, indirect=True)
def test_a_start_goes_on_from_the_last_checkpoint_bit_for_bit(site, caplog):
    site.save(50)
    saved = site.save(73)
    trainer = site.trainer(learning_rate=1e-5)

    with caplog.at_level(logging.INFO, "pipeline"):
        start = trainer.resumption.find()

    assert start == Start(Progress(73, 7, 730), 73, False, read_latest(site.root), 73)
    assert trainer.holds(saved)
    assert trainer.learner.step == 73
    assert f"resuming: step=73 path={site.root / 'step-000073'}" in caplog.text
    assert "trainer.learning_rate=0.0004->1e-05" in caplog.text
    assert "--fresh" in caplog.text


def test_every_key_that_differs_from_the_checkpoints_is_named():
    before = Config().model_dump(mode="json")
    config = Config.model_validate(before)
    before["rollout"] |= {"temperature": 0.5}
    before["rewards"] = [{"name": "length", "weight": 2.0}]
    before["trainer"].pop("max_steps")

    named = told(before, config)

    rewards = config.model_dump(mode="json")["rewards"]
    assert named == (f" rollout.temperature=0.5->{config.rollout.temperature} rewards={before['rewards']}->{rewards}")


@pytest.mark.parametrize(
    ("checkpoint", "settings", "reason"),
    [
        ({"identity": "another"}, {}, "another run's"),
        ({}, {"resume": "never"}, "asked to"),
    ],
)
def test_what_is_not_gone_on_from_is_said_and_noted(site, caplog, checkpoint, settings, reason):
    site.save(73, **checkpoint)
    trainer = site.trainer(**settings)
    before = trainer.copies()

    with caplog.at_level(logging.INFO, "pipeline"):
        start = trainer.resumption.find()
    trainer.resumption.settle(start)

    assert start == Start()
    assert trainer.holds(before)
    assert reason in caplog.text
    assert read_latest(site.root) is None, "a rollback of this run must not take another's checkpoint"


def test_a_complete_run_goes_on_if_it_may_take_more_steps(site):
    site.save(73, complete=True)

    assert site.trainer(max_steps=80).resumption.find().progress.step == 73


def test_a_damaged_checkpoint_is_left_out_for_the_one_before_it_and_the_buffer_hears_so(site, caplog):
    saved = site.save(50)
    site.save(73)
    (site.root / "step-000073" / "trainer_state.safetensors").write_bytes(b"")
    trainer = site.trainer()

    start = trainer.resumption.find()
    trainer.resumption.settle(start)

    assert (start.progress.step, start.version, start.rollback) == (50, 50, True)
    assert trainer.holds(saved)
    assert "step-000073/trainer_state.safetensors has 0 B" in caplog.text
    assert read_latest(site.root).path == "step-000050"


@pytest.mark.parametrize("damaged_for", ["both", "the second rank alone"])
def test_ranks_verify_a_checkpoint_once_and_find_the_same_start(site, monkeypatch, damaged_for):
    """Two ranks in two threads, which agree as in a collective."""
    expected = site.save(4)
    site.save(5)
    broken = site.root / "step-000005" / "trainer_state.safetensors"
    if damaged_for == "both":
        broken.write_bytes(broken.read_bytes()[:-1] + b"x")
    met, loading, said, verified = threading.Barrier(2, timeout=60), threading.Lock(), {}, []
    first, second = site.trainer(), site.trainer(seed=1)
    second.resumption.connection = SimpleNamespace(rank=1, newest=first.connection.newest)

    def agree(rank):
        def agreed(ready):
            said[rank] = ready
            met.wait()
            both = all(said.values())
            met.wait()
            return both

        return agreed

    def verify_and_count(folder, note):
        verified.append(folder.name)
        checkpoint_note.verify(folder, note)

    def load(rank, folder):
        if (rank, folder.name, damaged_for) == (1, "step-000005", "the second rank alone"):
            raise CheckpointError("this rank cannot read it")
        # transformers replaces a method of its models while it loads one: two threads would leave it replaced.
        with loading:
            return Resumption._load(trainers[rank].resumption, folder)

    trainers = [first, second]
    monkeypatch.setattr(resume, "verify", verify_and_count)
    for rank, trainer in enumerate(trainers):
        trainer.resumption.agree = agree(rank)
        trainer.resumption._load = functools.partial(load, rank)

    with ThreadPoolExecutor(2) as threads:
        starts = list(threads.map(lambda trainer: trainer.resumption.find(), trainers))

    assert verified == ["step-000005", "step-000004"]
    assert starts[0] == starts[1]
    assert starts[0].progress.step == 4
    assert first.holds(expected) and second.holds(expected)


def test_when_no_checkpoint_can_be_used_the_start_is_refused(site):
    site.save(73)
    shutil.rmtree(site.root / "step-000073")

    with pytest.raises(ConfigError, match=r"step-000073: no checkpoint of this run can be used; `rlhfd start --fresh`"):
        site.trainer().resumption.find()


@pytest.mark.parametrize("site", OPTIMIZERS, indirect=True)
def test_a_dead_trainers_place_is_taken_exactly(site):
    dead = site.trainer()
    dead.publish(0, Progress())
    left = dead.disturbed(3)
    dead.publish(1, Progress(1, 11, 12))
    successor = site.trainer(seed=1)

    start = successor.resumption.find()

    assert start == Start(Progress(1, 11, 12), None)
    assert successor.holds(left)


def test_a_training_state_whose_weights_never_came_is_not_used_however_often(site, monkeypatch):
    trainer = site.trainer()
    left = trainer.disturbed(4)
    trainer.publish(4, Progress(4))

    def die_before_the_weights(versions, *_):
        raise KeyboardInterrupt

    monkeypatch.setattr(PolicyVersions, "_write_together", die_before_the_weights)
    for life in range(3):
        trainer.disturbed(5 + life)
        with pytest.raises(KeyboardInterrupt):
            trainer.publish(5, Progress(5))
        trainer = site.trainer(seed=1)

        assert trainer.resumption.find() == Start(Progress(4), None)
        assert trainer.holds(left)


def left_without_a_state(site):
    """A trainer that died at version 5, and kept the states of 0 and 3; return the tensors of version 3."""
    dead = site.trainer()
    for version in range(6):
        left = dead.disturbed(version)
        if version == 3:
            kept = left
        dead.publish(version, Progress(version, 11, 10 * version), training=version % 3 == 0)
    return kept


def test_a_version_without_a_state_goes_back_to_the_newest_that_has_one(site, caplog):
    site.save(2)
    kept = left_without_a_state(site)
    successor = site.trainer(seed=1)

    with caplog.at_level(logging.INFO, "pipeline"):
        start = successor.resumption.find()
    successor.resumption.settle(start)

    assert start == Start(Progress(3, 11, 30), 3, True, saved_step=2, in_memory=True)
    assert start.progress.position == 30, "the first prompt that is asked again"
    assert successor.holds(kept)
    assert read_latest(site.root).step == 2, "the latest checkpoint stays"
    assert "rolled back to the newest version with a training state: version=5 -> 3" in caplog.text


@pytest.mark.parametrize("damaged", [False, True])
def test_a_checkpoint_after_the_newest_state_is_gone_back_to_if_it_can_be_used(site, damaged):
    site.save(2)
    saved = site.save(4)
    if damaged:
        (site.root / "step-000004" / "model.safetensors").unlink()
    kept = left_without_a_state(site)
    successor = site.trainer(seed=1)

    start = successor.resumption.find()

    assert (start.version, start.rollback, start.in_memory) == (3 if damaged else 4, True, damaged)
    assert successor.holds(kept if damaged else saved)


def test_a_rollback_that_dies_at_its_publish_leaves_the_state_to_its_successor(site, monkeypatch):
    kept = left_without_a_state(site)

    def die_before_the_weights(versions, *_):
        raise KeyboardInterrupt

    for _ in range(3):
        with monkeypatch.context() as during:
            during.setattr(PolicyVersions, "_write_together", die_before_the_weights)
            trainer = site.trainer(seed=1)
            start = trainer.resumption.find()
            assert (start.version, start.progress.step) == (3, 3)
            with pytest.raises(KeyboardInterrupt):
                trainer.publish(3, start.progress, rollback=True)
    trainer = site.trainer(seed=1)
    start = trainer.resumption.find()
    trainer.publish(3, start.progress, rollback=True)
    successor = site.trainer(seed=2)

    assert successor.resumption.find() == Start(Progress(3, 11, 30), None)
    assert successor.holds(kept)


def test_weights_without_their_state_go_back_to_the_checkpoint(site):
    saved = site.save(2)
    dead = site.trainer()
    dead.publish(3, Progress(3), training=False)
    successor = site.trainer(seed=1)

    start = successor.resumption.find()

    assert start == Start(Progress(2, 7, 20), 2, True, read_latest(site.root), 2)
    assert successor.holds(saved)


def test_a_checkpoint_that_a_trainer_died_replacing_is_put_back_for_its_successor(site):
    saved = site.save(2)
    site.trainer().publish(3, Progress(3), training=False)
    model = site.root / "step-000002"
    model.rename(model.with_name(f".{model.name}{REPLACED}1"))
    successor = site.trainer(seed=1)

    start = successor.resumption.find()

    assert start == Start(Progress(2, 7, 20), 2, True, read_latest(site.root), 2)
    assert successor.holds(saved)
    assert sorted(path.name for path in site.root.iterdir()) == ["latest.json", "step-000002"]


def test_ranks_put_a_checkpoint_back_at_once(tmp_path, monkeypatch):
    moved = tmp_path / f".step-000002{REPLACED}1"
    moved.mkdir()
    rename = Path.rename

    def after_another_rank(path, target):
        rename(path, target)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", after_another_rank)

    put_back_replaced(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_one_that_was_replaced_stays_aside(tmp_path):
    moved, target = tmp_path / f".step-000002{REPLACED}1", tmp_path / "step-000002"
    for folder in (moved, target):
        folder.mkdir()
        (folder / "made").write_text(folder.name)

    put_back_replaced(tmp_path)

    assert [(folder / "made").read_text() for folder in (moved, target)] == [moved.name, target.name]


def test_a_checkpoint_that_cannot_be_put_back_is_refused_and_not_passed_over(site, monkeypatch):
    site.save(2)
    model = site.root / "step-000002"
    model.rename(model.with_name(f".{model.name}{REPLACED}1"))

    def refuse(path, target):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "rename", refuse)

    with pytest.raises(ConfigError, match=r"daemon\.state_dir: a checkpoint cannot be put back: .*Read-only"):
        site.trainer().resumption.find()


def test_a_checkpoint_of_the_very_version_that_is_published_is_no_rollback(site):
    dead = site.trainer()
    dead.disturbed(2)
    published = dead.publish(2, Progress(2), training=False)
    # The same random numbers.
    saved = site.save(2, fingerprint=f"{published.fingerprint:016x}")
    successor = site.trainer(seed=1)

    assert successor.resumption.find() == Start(Progress(2, 7, 20), None, saved_step=2)
    assert successor.holds(saved)


def test_with_neither_state_nor_checkpoint_the_run_is_rolled_back_to_its_start(site):
    site.trainer().publish(3, Progress(3), training=False)
    successor = site.trainer()
    before = successor.copies()

    assert successor.resumption.find() == Start(rollback=True)
    assert successor.holds(before)


@pytest.mark.parametrize("checkpoint", ["whole", "damaged", "none"])
def test_a_damaged_training_state_is_replaced_by_a_checkpoint_or_by_nothing(site, checkpoint):
    saved = None if checkpoint == "none" else site.save(2)
    if checkpoint == "damaged":
        (site.root / "step-000002" / "model.safetensors").unlink()
    dead = site.trainer()
    dead.publish(3, Progress(3))
    dead.connection.versions._training.slot(0).views["progress"][0] = 99
    successor = site.trainer(seed=1)

    if checkpoint == "whole":
        assert successor.resumption.find().version == 2
        assert successor.holds(saved)
    else:
        with pytest.raises(WeightsError, match="no whole copy"):
            successor.resumption.find()


def test_a_state_directory_that_takes_no_checkpoints_is_refused_at_the_start(site):
    site.root.parent.mkdir(parents=True)
    site.root.write_text("in the way")
    trainer = site.trainer()

    with pytest.raises(ConfigError, match=r"daemon.state_dir: no checkpoints can be written: .*runs/.*/checkpoints"):
        trainer.resumption.settle(trainer.resumption.find())
