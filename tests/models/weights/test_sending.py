"""Weights to other machines: the same bits whole or by differences, once to each machine, and never a wrong one."""

import contextlib
import dataclasses
import pickle

import numpy as np
import pytest
import torch

from pipeline.errors import WeightsError
from pipeline.models.weights import differences
from pipeline.models.weights.copies import WeightsCopy
from pipeline.models.weights.differences import Difference, applied, difference
from pipeline.models.weights.sending import Taken, WeightsHolder, WeightsRelay, offered
from pipeline.models.weights.store import WeightsPublisher, WeightsReader

BLOCK = 65_536
ELEMENTS = 3 * BLOCK + 5_000


class ObjectStore:
    """Values as bytes by number, whose arrays a reader gets read-only; `read` has the number of each value read."""

    def __init__(self):
        self.values, self.read = [], []

    def store(self, value):
        self.values.append(pickle.dumps(value))
        return len(self.values) - 1

    def load(self, reference):
        self.read.append(reference)
        value = pickle.loads(self.values[reference])
        for array in [value.data] if isinstance(value, WeightsCopy) else [one for part in value.parts for one in part]:
            array.flags.writeable = False
        return value


class Run:
    """A trainer that publishes, the holder beside it, and the relay of a machine."""

    def __init__(self, folder, dtype=torch.bfloat16):
        self.path = folder / "weights"
        generator = torch.Generator().manual_seed(1)
        self.weights = {"actor.w": torch.randn(ELEMENTS, generator=generator).to(dtype)}
        self.bits = self.weights["actor.w"].view(torch.int16 if dtype is torch.bfloat16 else torch.int32)
        self.rng = np.random.default_rng(1)
        self.publisher = WeightsPublisher(self.path, self.weights)
        self.published = self.publisher.publish(0, self.weights)
        self.store = ObjectStore()
        self.holder, self.relay = self.new_holder(), self.new_relay()

    def new_holder(self):
        return WeightsHolder(str(self.path), self.store.store, self.store.load)

    def new_relay(self):
        return WeightsRelay(self.store.store, self.store.load)

    def publish(self, share=0.01, *, version=None, **described):
        """Publish a version in which a share of the weights, or those at these places, have another last bit."""
        places = np.flatnonzero(self.rng.random(ELEMENTS) < share) if isinstance(share, float) else share
        self.bits[torch.from_numpy(places)] ^= 1
        version = self.published.version + 1 if version is None else version
        self.published = self.publisher.publish(version, self.weights, **described)

    def fetch(self, relay=None):
        """Do as a gateway does; return what the relay has taken, and whether an actor gets the newest version of it."""
        relay = self.relay if relay is None else relay
        taken = relay.take(self.holder.offer(relay.held()))
        return taken, bool(taken.references) and self.is_newest(taken)

    def is_newest(self, taken):
        target = {"actor.w": torch.zeros(ELEMENTS, dtype=self.weights["actor.w"].dtype)}
        fetched = pickle.loads(self.store.values[taken.references[0]]).fetch(target)
        return fetched == self.published and torch.equal(target["actor.w"].view(self.bits.dtype), self.bits)

    def copy(self):
        reader = WeightsReader(self.path)
        copied = reader.copy()
        reader.close()
        return copied

    def close(self):
        self.publisher.close()
        self.holder.close()


@pytest.fixture(params=[torch.bfloat16])
def run(tmp_path, request):
    with contextlib.closing(Run(tmp_path, request.param)) as run:
        yield run


@pytest.mark.parametrize("share", [0.0, 1e-4, 0.01, 0.2])
def test_the_bits_after_a_difference_are_those_of_the_whole_version(run, share):
    taken, is_newest = run.fetch()
    assert is_newest and (taken.whole_bytes, taken.difference_bytes) == (run.publisher.nbytes, 0)

    for _ in range(3):
        run.publish(share)

        taken, is_newest = run.fetch()

        assert is_newest and taken.whole_bytes == 0 < taken.difference_bytes <= run.publisher.nbytes // 2
        whole, is_newest = run.fetch(run.new_relay())
        assert is_newest and whole.difference_bytes == 0, "another machine has the same of the whole one"


def test_a_difference_has_four_bytes_a_changed_word_and_four_a_block(run, monkeypatch):
    monkeypatch.setattr(differences, "_PART_BLOCKS", 3)
    base = run.copy()
    # One word of the first block, none of the second, all of the third, and of the last, which is not full.
    run.publish(np.concatenate([[7], np.arange(2 * BLOCK, ELEMENTS)]))
    later = run.copy()

    made = difference(base, later, base.data.nbytes * 2)

    assert [part.counts.tolist() for part in made.parts] == [[1, 0, BLOCK], [5_000]]
    assert made.parts[0].places[:3].tolist() == [7, 0, 1]
    assert made.nbytes == 4 * 4 + 4 * (1 + BLOCK + 5_000)
    assert difference(base, later, made.nbytes) is not None
    assert difference(base, later, made.nbytes - 1) is None, "it is not worth it"
    assert np.array_equal(applied(base, [made]).data, later.data)


def test_a_version_goes_once_to_a_machine_whatever_the_number_of_its_workers(run):
    for is_first in (True, False):
        run.store.read.clear()
        # Four workers ask before one of them has the machine take the version, and four later.
        offers = [run.holder.offer(run.relay.held()) for _ in range(4)]
        all_taken = [run.relay.take(offer) for offer in offers] + [run.fetch()[0] for _ in range(4)]

        sent = [taken.whole_bytes + taken.difference_bytes for taken in all_taken]
        assert sent[0] > 0 == sum(sent[1:])
        assert [taken.references for taken in all_taken] == [all_taken[0].references] * 8
        assert run.is_newest(all_taken[-1])
        travelled = [number for number in run.store.read if number in offers[0].references]
        assert len(travelled) == (2 if is_first else 1), "the holder reads a whole one, too"
        run.publish()


@pytest.mark.parametrize("run", [torch.float32], indirect=True)
def test_without_another_machine_no_difference_is_made(run):
    for _ in range(3):
        run.publish()
        (whole,) = run.holder.whole()
        assert run.is_newest(Taken([whole]))
    assert len(run.store.values) == 3, "a whole version each"

    run.fetch()
    run.publish()
    (whole,) = run.holder.whole()
    taken, is_newest = run.fetch()

    assert is_newest and taken.whole_bytes == 0 < taken.difference_bytes
    assert run.is_newest(Taken([whole]))
    assert len(run.store.values) == 7, "and the relay's own two"


def test_a_difference_of_float32_weights_is_not_worth_it(run):
    run.fetch()
    run.publish(1.0)

    taken, is_newest = run.fetch()

    assert is_newest and taken.difference_bytes == 0 < taken.whole_bytes


def test_a_machine_that_has_missed_versions_gets_their_differences_and_one_that_has_missed_too_many_the_whole(run):
    late, later = run.new_relay(), run.new_relay()
    run.fetch(later)
    for version in range(8):
        if version == 5:
            run.fetch(late)
        run.publish(0.05)
        run.fetch()

    taken, is_newest = run.fetch(late)
    assert is_newest and taken.whole_bytes == 0
    # Three versions of 5 % each, with places of two bytes.
    assert taken.difference_bytes == pytest.approx(3 * 0.05 * 4 * ELEMENTS, rel=0.1)
    taken, is_newest = run.fetch(later)
    assert is_newest and taken.difference_bytes == 0, "eight are kept, if they have half of the bytes together"


def test_after_a_rollback_and_with_a_new_holder_the_newest_version_comes(run):
    run.fetch()
    run.publish()
    run.publish()
    run.fetch()
    run.publish(version=1, rollback=True)
    taken, is_newest = run.fetch()
    assert is_newest and run.relay.held() == (1, 1) and taken.whole_bytes == 0

    run.holder.close()
    run.holder = run.new_holder()
    run.publish()
    taken, is_newest = run.fetch()
    assert is_newest and taken.whole_bytes > 0, "it knows no earlier version"


def test_an_offer_that_another_worker_has_overtaken_is_refused_and_nothing_is_damaged(run):
    run.fetch()
    run.publish()
    overtaken = run.holder.offer(run.relay.held())
    run.publish()
    run.fetch()

    taken = run.relay.take(overtaken)

    assert not taken.references and not taken.is_damaged and taken.difference_bytes == 0
    assert "another worker of the machine" in taken.reason
    assert run.is_newest(run.fetch()[0])


def test_an_overtaken_worker_gets_the_next_offer_of_the_same_holder(run):
    run.fetch()
    run.publish()

    def take(offer):
        if not tried:
            run.publish()
            run.fetch()
        tried.append(offer)
        return run.relay.take(offer)

    tried = []
    overtaken, taken = offered(run.relay.held, run.holder.offer, take)

    assert not overtaken.references and overtaken.difference_bytes == 0
    assert run.is_newest(taken) and taken.difference_bytes == taken.whole_bytes == 0


@pytest.mark.parametrize("what", ["counts", "places", "values", "base", "lost"])
def test_a_damaged_difference_is_refused_and_the_whole_version_comes(run, what):
    run.fetch()
    run.publish()
    offer = run.holder.offer(run.relay.held())
    (number,) = offer.references
    right = pickle.loads(run.store.values[number])
    if what == "base":
        wrong = dataclasses.replace(right, base=(7, 0))
    elif what == "lost":
        wrong = dataclasses.replace(right, parts=[part._replace(values=part.values[:-1]) for part in right.parts])
    else:
        wrong = pickle.loads(run.store.values[number])
        getattr(wrong.parts[0], what).view(np.uint8)[100 if what != "counts" else 0] ^= 1
    run.store.values[number] = pickle.dumps(wrong)

    taken = run.relay.take(offer)

    assert taken.is_damaged and not taken.references and taken.reason
    assert taken.difference_bytes > 0, "its bytes were sent"
    assert run.relay.held() is None
    taken, is_newest = run.fetch()
    assert is_newest and taken.whole_bytes == run.publisher.nbytes


def test_a_wrong_base_of_the_right_name_is_found_by_the_fingerprint(run):
    base = run.copy()
    run.publish()
    made = difference(base, run.copy(), base.data.nbytes)
    assert isinstance(made, Difference)
    # A byte that the difference does not replace.
    unchanged = np.flatnonzero(base.data == run.copy().data)[1_000]
    base.data[unchanged] ^= 1

    with pytest.raises(WeightsError, match="of version 1 came damaged"):
        applied(base, [made])


def test_without_a_published_version_there_is_no_offer(tmp_path):
    weights = {"actor.w": torch.zeros(4)}
    WeightsPublisher(tmp_path / "weights", weights).close()
    store = ObjectStore()
    holder = WeightsHolder(str(tmp_path / "weights"), store.store, store.load)

    with contextlib.closing(holder), pytest.raises(WeightsError, match="no weights were published"):
        holder.offer(None)
