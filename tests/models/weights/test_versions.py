"""Weights and training state: killed at any store, a trainer leaves both complete and of the same version.

A version without a state leaves both of the newest version that has one.
"""

import contextlib
import logging
import os
import tempfile
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pipeline.models.weights import store, versions
from pipeline.models.weights.shards import as_shards
from pipeline.models.weights.versions import PolicyVersions
from pipeline.storage import weights_header
from pipeline.storage.weights_header import WeightsVersion
from pipeline.trainer.saving.lower_halves import LowerHalves
from tests.storage.test_ledger import DyingMemory, Killed

ENDLESS = 1 << 30


def model(value):
    return {"actor.a": torch.full((3, 2), value), "actor.b": torch.full((5,), value, dtype=torch.bfloat16)}


def training(value):
    return {
        "progress": torch.tensor([value, value]),
        "actor.exp_avg.a": torch.full((3, 2), float(value)),
        "actor.float32.b": float32_of_b(value),
    }


def float32_of_b(value):
    """Return the float32 copies of `actor.b`, which they are rounded to: up, down, and for an even number a tie."""
    return value * (1 + torch.tensor([2**-10, -(2**-11), 0.0, 2**-8 if value == 1 else 0.0, 2**-12]))


class DyingSlot(store.Slot):
    """A slot whose writer dies when the budget of stores is spent, in the middle of a tensor."""

    def write(self, tensors):
        for name, shard in as_shards(tensors).items():
            view = self.views[name]
            if Dying.budget[0] == 0:
                half = view.numel() // 2
                view.flatten()[:half].copy_(shard.local.flatten()[:half])
                raise Killed
            Dying.budget[0] -= 1
            view.copy_(shard.local)
        return super().write(tensors)


class Dying:
    """A mapping whose writer dies when the budget of stores is spent."""

    budget: ClassVar = [ENDLESS]

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.real_marks = self.marks
        self.marks = DyingMemory(self.real_marks, self.budget)

    def close(self):
        self.marks = self.real_marks
        super().close()


class DyingMapping(Dying, store.WeightsMapping):
    pass


class DyingPublisher(Dying, store.WeightsPublisher):
    slot_type = DyingSlot

    def slot(self, slot):
        real = super().slot(slot)
        if type(real) is not self.slot_type:
            real = self._slots[slot] = self.slot_type(real.memory, real.views)
        return real


class VersionsMachine(RuleBasedStateMachine):
    """Publishes and rollbacks by trainers that die at any store, compared with the newest version before and after.

    Some versions have no training state. The weights and the state of the newest version that has one are then whole,
    and a successor goes back to it (`pipeline.trainer.resume`), however often it dies of that.
    """

    weight_slots = 3

    def __init__(self):
        super().__init__()
        self.original = versions.WeightsMapping, versions.WeightsPublisher
        versions.WeightsMapping, versions.WeightsPublisher = DyingMapping, DyingPublisher
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "weights"
        self.values = 0
        self.version, self.value, self.history = 0, 0, 0
        self.kept = (0, 0, 0)
        self.deaths = 0

    def new_trainer(self):
        return PolicyVersions(self.path, weight_slots=self.weight_slots)

    @initialize()
    def begin(self):
        self.trainer = self.new_trainer()
        self.publish(0, 0, rollback=False)
        self.reader = store.WeightsReader(self.path)

    def publish(self, version, value, *, rollback, keeps_state=True):
        weights = as_shards(model(float(value)))
        state = LowerHalves(weights, training(value)).stored() if keeps_state else None
        wanted = WeightsVersion(version, trained_through=value, rollback=rollback)
        return self.trainer.publish(wanted, weights, state)

    @rule(
        back=st.none() | st.integers(0, 3),
        stores=st.none() | st.integers(0, 45),
        keeps_state=st.integers(0, 2).map(bool),
    )
    def publish_or_die(self, back, stores, keeps_state):
        self.values = (self.values + 1) % 200
        rollback = back is not None
        version = max(0, self.version - back) if rollback else self.version + 1
        keeps_state = keeps_state or rollback or not self.trainer.may_lack_state()
        self.attempt(version, self.values, stores, rollback=rollback, keeps_state=keeps_state)

    @rule(stores=st.none() | st.integers(0, 45))
    def go_back_to_the_state(self, stores):
        """The start of a trainer whose predecessor left a version without a state."""
        if self.kept != (self.version, self.value, self.history):
            self.attempt(self.kept[0], self.kept[1], stores, rollback=True)

    def attempt(self, version, value, stores, *, rollback, keeps_state=True):
        before, after = (self.version, self.value, self.history), (version, value, self.history + rollback)
        Dying.budget[0] = ENDLESS if stores is None else stores
        try:
            self.publish(version, value, rollback=rollback, keeps_state=keeps_state)
        except Killed:
            self.deaths += 1
            self.trainer = self.new_trainer()
            found = self.newest()
            assert found in (after, before)
        else:
            found = after
        finally:
            Dying.budget[0] = ENDLESS
        self.version, self.value, self.history = found
        if found == after and keeps_state:
            self.kept = after

    @rule()
    def restart(self):
        self.trainer.close()
        self.trainer = self.new_trainer()

    def newest(self):
        newest = self.trainer.newest()
        return newest.version, newest.trained_through, newest.history

    @invariant()
    def what_is_newest_is_whole(self):
        if self.values == 0 and not self.path.exists():
            return
        into = model(-1.0)
        found = self.reader.fetch(into)
        assert (found.version, found.trained_through, found.history) == (self.version, self.value, self.history)
        assert all(tensor.eq(self.value).all() for tensor in into.values())

    @invariant()
    def the_newest_training_state_is_there_with_the_weights_that_it_belongs_to(self):
        if self.values == 0 and not self.path.exists():
            return
        version, value, history = self.kept
        found = self.trainer.kept()
        assert (found.age, found.trained_through) == ((version, history), value)
        state, weights = training(-1), as_shards(model(-1.0))
        halves = LowerHalves(weights, state)
        stored = halves.targets()
        assert halves and stored.keys() != state.keys()
        assert self.trainer.holds_training(self.trainer.newest(), stored) == (
            self.kept == (self.version, self.value, self.history)
        )
        assert self.trainer.restore_training(found, stored)
        assert self.trainer.restore(weights, version=found) == found
        assert all(shard.local.eq(value).all() for shard in weights.values())
        halves.join(stored, weights)
        assert all(torch.equal(tensor, training(value)[name]) for name, tensor in state.items())

    def teardown(self):
        versions.WeightsMapping, versions.WeightsPublisher = self.original
        self.folder.cleanup()


TestVersionsMachine = VersionsMachine.TestCase
TestVersionsMachine.settings = settings(stateful_step_count=25)


class TwoSlotsMachine(VersionsMachine):
    """The same with two slots of weights, where every version has a state."""

    weight_slots = 2


TestTwoSlotsMachine = TwoSlotsMachine.TestCase
TestTwoSlotsMachine.settings = settings(stateful_step_count=25)


def test_a_file_of_two_slots_stays_so_and_takes_versions_without_a_state_that_end_the_one_kept(tmp_path):
    path = tmp_path / "weights"
    first = PolicyVersions(path, weight_slots=2)
    first.publish(WeightsVersion(0), model(0.0), training(0))
    first.close()

    trainer = PolicyVersions(path, weight_slots=3)
    assert not trainer.may_lack_state()
    for version in (1, 2):
        trainer.publish(WeightsVersion(version), model(float(version)), None)
        # A version is not written over while it is the newest, so the one that was kept is.
        with contextlib.closing(store.WeightsReader(path)) as reader:
            assert reader.holds((version - 1, 0))
        assert (trainer.newest().version, trainer.kept() is None) == (version, version == 2)
        into = model(-1.0)
        trainer.restore(into)
        assert all(tensor.eq(version).all() for tensor in into.values())
    assert not trainer.may_lack_state()
    trainer.close()


def test_without_room_for_the_training_state_the_weights_are_published_alone(tmp_path, monkeypatch, caplog):
    free = store.refuse_larger_than_free
    asked = []

    def room_for_weights_alone(folder, nbytes, what):
        asked.append(nbytes)
        free(folder, nbytes if len(asked) == 1 else 1 << 62, what)

    monkeypatch.setattr(store, "refuse_larger_than_free", room_for_weights_alone)
    trainer = PolicyVersions(tmp_path / "weights")

    with caplog.at_level(logging.WARNING):
        for version in range(2):
            trainer.publish(WeightsVersion(version), model(1.0), training(1))

    assert trainer.newest().version == 1
    assert not trainer.restore_training(trainer.newest(), training(0))
    assert caplog.text.count("no training state in shared memory, a killed trainer resumes from a checkpoint") == 1
    trainer.close()


def test_a_training_state_of_another_model_is_not_used(tmp_path):
    trainer = PolicyVersions(tmp_path / "weights")
    trainer.publish(WeightsVersion(0), model(1.0), training(1))
    other = {**training(0), "actor.exp_avg.b": torch.zeros(1)}

    assert not trainer.restore_training(trainer.newest(), other)
    assert all(tensor.eq(0).all() for tensor in other.values())


def test_a_damaged_training_state_is_never_used_as_if_it_were_whole(tmp_path):
    trainer = PolicyVersions(tmp_path / "weights")
    damaged = trainer.publish(WeightsVersion(0), model(1.0), training(1))
    trainer._training.slot(0).views["progress"][0] = 99

    with pytest.raises(store.WeightsError, match="no whole copy"):
        trainer.restore_training(damaged, training(0))


def test_the_newest_version_is_read_from_the_header_without_a_mapping(tmp_path, monkeypatch):
    trainer = PolicyVersions(tmp_path / "weights")
    assert trainer.newest() is None
    published = [trainer.publish(WeightsVersion(version), model(1.0), None) for version in range(2)]
    mapped = []
    monkeypatch.setattr(store, "WeightsMapping", mapped.append)

    assert trainer.newest() == published[1]
    assert mapped == []
    trainer.close()


def test_the_newest_version_is_found_while_another_slot_is_written(tmp_path, monkeypatch):
    trainer = PolicyVersions(tmp_path / "weights")
    published = trainer.publish(WeightsVersion(0), model(1.0), None)
    words, other = trainer._weights.marks, weights_header.slot_mark(1)
    read, reads = os.pread, []

    def pread(*arguments):
        page = read(*arguments)
        reads.append(page)
        if len(reads) < 5:
            words[other + 1] += 1
        return page

    monkeypatch.setattr(os, "pread", pread)

    assert trainer.newest() == published
    assert len(reads) == 6, "until two reads in a row are equal"
    trainer.close()
