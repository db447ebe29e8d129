"""The newest weights are read from shared memory where the trainer's message was lost with a buffer."""

import dataclasses
import os

import msgspec
import pytest
import torch

from pipeline.buffer.process import NewestWeights
from pipeline.models.weights.store import WeightsPublisher, WeightsReader
from pipeline.runtime.messages import Ack, Lease, Published, Ticket
from pipeline.storage.weights_header import NEWEST, PAGE_BYTES, newest_version, slot_mark
from tests.support.protocol import LIMITS, Bench, sealed, trainer, worker


@pytest.fixture
def publisher(tmp_path):
    publisher = WeightsPublisher(tmp_path / "weights", {"actor.w": torch.zeros(3)})
    yield publisher
    publisher.close()


def publish(publisher, version, **options):
    return publisher.publish(version, {"actor.w": torch.full((3,), float(version))}, **options)


def word(published):
    return Published(
        published.version, published.fingerprint, published.trained_through, published.rollback, published.position
    )


class TestHeader:
    def test_it_is_what_a_worker_would_fetch(self, publisher, tmp_path):
        reader = WeightsReader(tmp_path / "weights")
        assert newest_version(tmp_path / "weights") is None
        for version, rollback in ((0, False), (1, False), (2, False), (9, False), (4, True), (5, False)):
            published = publish(publisher, version, trained_through=version, rollback=rollback, position=7)
            assert newest_version(tmp_path / "weights") == reader.newest() == published
        reader.close()

    def test_without_a_whole_head_there_is_none(self, publisher, tmp_path):
        path = tmp_path / "weights"
        publish(publisher, 3)
        whole = path.read_bytes()
        odd = bytearray(whole)
        odd[slot_mark(0) * 8] |= 1
        beyond = bytearray(whole)
        beyond[NEWEST * 8] = 200

        assert newest_version(tmp_path / "no such file") is None
        for data in (whole[: PAGE_BYTES - 1], b"x" + whole[1:], odd, beyond, b""):
            path.with_name("other").write_bytes(data)
            assert newest_version(path.with_name("other")) is None

    def test_a_page_that_changes_while_it_is_read_is_left_for_the_next_look(self, publisher, tmp_path, monkeypatch):
        publish(publisher, 3)
        read = os.pread
        monkeypatch.setattr(os, "pread", lambda *args: (read(*args), publish(publisher, 4 + next(turns)))[0])
        turns = iter(range(9))

        assert newest_version(tmp_path / "weights") is None


class TestWord:
    def test_a_version_that_nobody_speaks_of_is_told_after_a_second(self, publisher, tmp_path):
        bench, weights = Bench(), NewestWeights(tmp_path / "weights")
        bench.say(word(publish(publisher, 0)))
        publish(publisher, 1)

        for now_s in (5.0, 5.9):
            weights.look(bench.buffer, now_s)
            assert bench.ledger.totals.policy_version == 0, "its trainer's own word may be under way"
        weights.look(bench.buffer, 6.0)

        assert bench.ledger.totals.policy_version == 1

    def test_one_whose_trainer_speaks_is_not(self, publisher, tmp_path):
        bench, weights = Bench(), NewestWeights(tmp_path / "weights")
        for version in range(4):
            published = publish(publisher, version)
            weights.look(bench.buffer, float(version))
            bench.say(word(published))
            weights.look(bench.buffer, version + 0.5)

        assert bench.counts.duplicates == 0

    def test_a_rollback_is_told_as_one(self, publisher, tmp_path):
        bench, weights = Bench(), NewestWeights(tmp_path / "weights")
        for version in range(4):
            bench.say(word(publish(publisher, version)))
        publish(publisher, 1, rollback=True, position=0)

        weights.look(bench.buffer, 0.0, patience_s=0.0)

        assert bench.ledger.totals.policy_version == 1
        assert bench.ledger.versions.is_marked(3)

    def test_what_the_buffer_refuses_is_told_once(self, publisher, tmp_path):
        bench, weights = Bench(), NewestWeights(tmp_path / "weights")
        bench.say(word(publish(publisher, 0)))
        publish(publisher, 1, trained_through=999)

        for now_s in range(100):
            weights.look(bench.buffer, float(now_s))

        assert (bench.buffer.refused, bench.ledger.totals.policy_version) == (1, 0)

    def test_a_rank_gets_its_batch_though_the_other_waits_for_it_and_does_not_listen(self, publisher, tmp_path):
        """Rank 0 has published and is in the next step; its word lay with the buffer that was killed."""
        limits = dataclasses.replace(LIMITS, rows_per_version=16, max_staleness=1, world_size=2)
        bench, weights = Bench(limits, workers=1), NewestWeights(tmp_path / "weights")
        first = publish(publisher, 0)
        bench.say(word(first), *worker(0, tickets=8), *trainer(rank=0, batches=2), *trainer(rank=1, batches=1))
        for ticket in bench.heard("worker-0", Ticket)[:6]:
            bench.say(msgspec.structs.replace(sealed(ticket), fingerprint=first.fingerprint))
        assert [lease.lease for lease in bench.heard("trainer-0", Lease)] == [0, 2]
        bench.say(Ack("trainer-0", 0), Ack("trainer-1", 1))
        lost = publish(publisher, 1, trained_through=2)

        bench.restart()
        bench.say(*worker(0, incarnation=2, tickets=8), *trainer(rank=1, incarnation=2))
        for ticket in bench.heard("worker-0", Ticket):
            bench.say(msgspec.structs.replace(sealed(ticket, version=1), fingerprint=lost.fingerprint))
        assert bench.ledger.ready == 0, "their weights are unknown"
        weights.look(bench.buffer, 0.0)
        weights.look(bench.buffer, 1.0)
        bench.say()

        assert [lease.lease for lease in bench.heard("trainer-1", Lease) if lease.to == 2] == [3]
