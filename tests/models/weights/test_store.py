"""Weights in shared memory: versions, fingerprints, and that no reader loads part of a version."""

import pytest
import torch

from pipeline.errors import ConfigError, WeightsError
from pipeline.models.weights import store as module
from pipeline.models.weights.store import WeightsPublisher, WeightsReader, flatten


def tensors(value=0.0):
    return {
        "actor.a": torch.full((3, 5), value),
        "actor.b": torch.full((7,), value, dtype=torch.bfloat16),
        "critic.c": torch.full((2,), int(value)),
    }


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights"


def test_what_is_published_is_fetched_with_its_version_and_fingerprint(path):
    publisher = WeightsPublisher(path, tensors())
    published = publisher.publish(3, tensors(1.5))
    reader = WeightsReader(path)
    target = tensors()

    fetched = reader.fetch(target)

    assert fetched == published
    assert fetched.version == 3
    for name, expected in tensors(1.5).items():
        assert torch.equal(target[name], expected)


def test_file_is_private(path):
    WeightsPublisher(path, tensors())

    assert path.stat().st_mode & 0o777 == 0o600


def test_fingerprint_tells_weights_apart(path):
    publisher = WeightsPublisher(path, tensors())

    first, second, third = (publisher.publish(v, tensors(x)) for v, x in ((1, 1.0), (2, 2.0), (3, 1.0)))

    assert first.fingerprint == third.fingerprint != second.fingerprint


def test_nothing_published_is_nothing_to_fetch(path):
    WeightsPublisher(path, tensors())
    reader = WeightsReader(path)

    assert reader.newest() is None
    with pytest.raises(WeightsError, match="no weights were published"):
        reader.fetch(tensors())


def test_a_version_that_is_not_new_is_refused(path):
    publisher = WeightsPublisher(path, tensors())
    publisher.publish(4, tensors())

    with pytest.raises(WeightsError, match="version 4 is not above 4"):
        publisher.publish(4, tensors())


def test_a_publisher_that_takes_over_goes_on_with_the_versions(path):
    WeightsPublisher(path, tensors()).publish(7, tensors(7.0))
    reader = WeightsReader(path)

    WeightsPublisher(path, tensors()).publish(8, tensors(8.0))

    assert reader.newest().version == 8


def test_another_model_gets_a_file_of_its_own(path):
    WeightsPublisher(path, tensors()).publish(7, tensors(7.0))

    WeightsPublisher(path, {"actor.a": torch.zeros(1)})

    assert WeightsReader(path).newest() is None


def test_a_reader_follows_to_the_file_of_a_successor_that_has_the_tensors_in_another_order(path):
    """As a trainer of one's own that was changed and started again: a state dict gathered from shards is not tied."""
    first = WeightsPublisher(path, tensors())
    first.publish(7, tensors(7.0))
    first.publish(6, tensors(6.0), rollback=True)
    first.close()
    reader, target = WeightsReader(path), tensors()
    assert reader.fetch(target).age == (6, 1)
    reversed_order = dict(reversed(tensors(8.0).items()))

    successor = WeightsPublisher(path, reversed_order)
    assert reader.newest() is None, "the file is there, and no version yet"
    successor.publish(7, reversed_order)

    assert reader.newest().age == (7, 1), "the count of rollbacks goes on"
    assert reader.fetch(target).version == 7 and target["actor.a"].eq(8.0).all()
    copied = reader.copy()
    assert copied.tensors()["actor.b"].eq(8.0).all() and len(copied.data) == reader.nbytes
    path.unlink()
    assert reader.newest().version == 7, "of a daemon that has ended"


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"actor.a": torch.zeros(3, 4)}, r"actor.a: \(3, 4\)"), ({"actor.a": None}, "actor.a: missing")],
)
def test_a_target_that_does_not_fit_is_refused_by_name(path, changed, message):
    WeightsPublisher(path, tensors()).publish(1, tensors())
    target = {name: tensor for name, tensor in {**tensors(), **changed}.items() if tensor is not None}

    with pytest.raises(WeightsError, match=message):
        WeightsReader(path).fetch(target)


def test_a_publisher_killed_half_way_leaves_the_version_before(path, monkeypatch):
    publisher = WeightsPublisher(path, tensors())
    publisher.publish(1, tensors(1.0))
    publisher.publish(2, tensors(2.0))

    class Killed(BaseException):
        pass

    def die(digests):
        raise Killed

    monkeypatch.setattr("pipeline.models.weights.store.combined", die)
    with pytest.raises(Killed):
        publisher.publish(3, tensors(3.0))
    monkeypatch.undo()
    target = tensors()

    assert WeightsReader(path).fetch(target).version == 2
    assert target["actor.a"][0, 0] == 2.0
    successor = WeightsPublisher(path, tensors())
    assert successor.publish(3, tensors(3.5)).version == 3
    assert WeightsReader(path).fetch(target).version == 3
    assert target["actor.a"][0, 0] == 3.5


def test_a_reader_that_is_overtaken_copies_again(path):
    publisher = WeightsPublisher(path, tensors(), slots=2)
    publisher.publish(1, tensors(1.0))
    reader = WeightsReader(path)
    overtaken = []

    class Target(dict):
        """When its tensors are first asked for, the publisher overtakes the reader by all slots."""

        def items(self):
            if not overtaken:
                overtaken.append(True)
                for version in (2, 3):
                    publisher.publish(version, tensors(float(version)))
            return super().items()

    target = Target(tensors())

    assert reader.fetch(target).version == 3
    assert all((target[name] == 3).all() for name in target)


def test_a_reader_that_is_overtaken_reads_the_header_again(path, monkeypatch):
    publisher = WeightsPublisher(path, tensors(), slots=2)
    publisher.publish(1, tensors(1.0), trained_through=10)
    reader = WeightsReader(path)
    unpack = module.unpack_version

    def overtaken(marks, slot):
        """Return a version whose number was read before the publisher overtook the reader by all slots."""
        monkeypatch.setattr(module, "unpack_version", unpack)
        before = unpack(marks, slot)
        for version in (2, 3):
            published = publisher.publish(version, tensors(float(version)), trained_through=10 * version)
        return published._replace(version=before.version)

    monkeypatch.setattr(module, "unpack_version", overtaken)

    newest = reader.newest()

    assert (newest.version, newest.trained_through) == (3, 30)


def test_damaged_weights_are_never_reported_as_loaded(path):
    publisher = WeightsPublisher(path, tensors())
    publisher.publish(1, tensors(1.0))
    reader = WeightsReader(path)
    publisher.slot(0).views["actor.a"][0, 0] = 99.0

    with pytest.raises(WeightsError, match="no whole copy"):
        reader.fetch(tensors())


def test_tied_weights_travel_once():
    shared = torch.ones(4, 4)

    flat = flatten(actor={"embed.weight": shared, "lm_head.weight": shared}, critic=None)

    assert list(flat) == ["actor.embed.weight"]


def test_weights_larger_than_shared_memory_are_refused(tmp_path):
    huge = {"actor.a": torch.empty(1, dtype=torch.float32).expand(1 << 42)}

    with pytest.raises(ConfigError, match=r"weights in 3 slots of .* does not fit"):
        WeightsPublisher(tmp_path / "weights", huge)
