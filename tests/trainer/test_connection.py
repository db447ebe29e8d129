"""The trainer's connection against a real buffer on a real arena, all in this process."""

import contextlib
from unittest import mock

import pytest
import torch

from pipeline.errors import DeadlineError, WeightsError
from pipeline.experience.ragged import RaggedRows
from pipeline.experience.types import Experience
from pipeline.runtime.messages import Exhausted, Lease, Published, Welcome
from pipeline.serial import Queue
from pipeline.storage.records import DROP_REASONS
from pipeline.storage.weights_header import WeightsVersion
from pipeline.trainer.session import BufferSession
from tests.support.protocol import House
from tests.support.recording import equal


@pytest.fixture(params=[False, True], ids=["copied when asked for", "copied ahead"])
def copy_ahead(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["padded", "ragged"])
def house(tmp_path, copy_ahead, request):
    house = House(tmp_path, copy_ahead=copy_ahead, ragged=request.param)
    yield house
    house.close()


class Deaf:
    """A receiver that loses the messages of its first turn, as the socket of a closing connection does."""

    def __init__(self, house):
        self.house = house
        self.lost = []

    def receive(self, timeout_s):
        self.house.turn()
        messages = self.house.post["trainer-0"].receive()
        if not self.lost:
            self.lost = messages
            return []
        return messages


def test_a_welcome_that_is_lost_is_asked_for_again_and_costs_no_batch(house):
    connection = house.connect()
    connection.session._receiver = deaf = Deaf(house)

    assert connection.session.await_buffer(10.0)

    assert any(isinstance(message, Welcome) for message in deaf.lost)
    assert house.batch(connection).lease == 0


def test_without_a_buffer_there_is_no_welcome(house):
    connection = house.connect()
    house.post["trainer-0"].receive()

    assert not connection.session.await_buffer(0.01)


def test_a_batch_holds_the_rows_that_were_sealed_in_ticket_order(house):
    connection = house.connect()

    batch = house.batch(connection)

    expected = torch.cat([house.rolled[0].reward, house.rolled[1].reward])
    assert torch.equal(batch.experience.reward, expected)
    assert batch.experience.info["policy_version"].tolist() == [0] * 8


def test_the_iterator_acknowledges_a_batch_when_the_next_is_asked_for(house):
    connection = house.connect()
    house.batch(connection)
    connection.acknowledge()
    for _ in range(3):
        house.turn()
    batches = connection.experiences(device="meta", timeout_s=1.0, ragged=house.ragged)

    first = next(batches)
    assert isinstance(first, RaggedRows if house.ragged else Experience)
    assert (first.tensors["reward"] if house.ragged else first.reward).device.type == "meta"
    house.turn()
    assert house.ledger.totals.trained == 8
    next(batches)
    house.turn()

    assert house.ledger.totals.trained == 16


def test_rows_without_padding_are_those_of_the_padded_batch_of_the_same_lease(house):
    first = house.batch(house.connect())
    house.ragged = not house.ragged

    # A trainer that takes the other form after the death of the first one.
    second = house.batch(house.connect())

    assert second.lease == first.lease
    rows, experience = (first.rows, second.experience) if not house.ragged else (second.rows, first.experience)
    equal(rows.padded(), experience)


def test_the_form_of_a_batch_may_change_with_each_one(house):
    connection = house.connect(prefetch=4)
    forms = [house.ragged, not house.ragged, not house.ragged, house.ragged]
    taken = []
    for house.ragged in forms:
        taken.append(house.batch(connection))

    assert [batch.lease for batch in taken] == [0, 1, 2, 3]
    for batch, sealed in zip(taken, ((0, 1), (2, 3), (4, 5), (6, 7)), strict=True):
        rewards = torch.cat([house.rolled[ticket].reward for ticket in sealed])
        assert torch.equal(batch.experience.reward, rewards)
        assert torch.equal(batch.rows.tensors["reward"], rewards)


@pytest.mark.parametrize("ragged", [False, True])
def test_a_batch_that_is_handed_back_comes_again_before_later_ones_and_is_not_counted_as_trained(
    tmp_path, copy_ahead, ragged
):
    with contextlib.closing(House(tmp_path, copy_ahead=copy_ahead, ragged=ragged)) as house:
        connection = house.connect(prefetch=5)
        first, second, third = (house.batch(connection) for _ in range(3))
        house.turn()
        connection.receive(0.0)

        connection.hand_back(2)
        again = [house.batch(connection) for _ in range(3)]
        connection.publish(actor={"weight": torch.zeros(2)})
        house.turn()

        assert [batch.lease for batch in again] == [1, 2, 3]
        handed_back = torch.cat([second.experience.reward, third.experience.reward])
        assert torch.equal(torch.cat([batch.experience.reward for batch in again[:2]]), handed_back)
        assert house.ledger.totals.trained == sum(len(b.experience.sequences) for b in (first, *again))


def test_more_batches_than_are_in_hand_are_not_handed_back(house):
    connection = house.connect()
    house.batch(connection)
    house.batch(connection)

    with pytest.raises(ValueError, match="3 batches cannot be handed back, 2 in hand"):
        connection.hand_back(3)

    connection.publish(actor={"weight": torch.zeros(2)})
    house.turn()
    assert house.ledger.totals.trained == 16, "both are in hand as before"


def test_publishing_acknowledges_and_makes_the_next_version_once_also_for_a_new_buffer(house):
    connection = house.connect()
    house.batch(connection)

    published = connection.publish(actor={"w": torch.ones(3)})
    house.turn()

    assert published.version == 1
    for _ in range(2):
        totals = house.ledger.totals
        assert (totals.trained, totals.policy_version, totals.trained_through) == (8, 1, 1)
        house.start_buffer()
        connection.receive(0.0)
        house.turn()


def test_a_wait_that_comes_to_nothing_ends_at_its_deadline(house):
    connection = house.connect()

    with pytest.raises(DeadlineError, match=r"no batch for trainer rank 0 within 0\.01 s"):
        connection.take(timeout_s=0.01)


def test_a_batch_that_is_there_is_taken_within_no_time(house):
    connection = house.connect()
    for _ in range(4):
        house.turn()
        with contextlib.suppress(DeadlineError):
            assert connection.take(timeout_s=0, ragged=house.ragged) is not None
            return
    pytest.fail("no batch came")


def test_adapters_are_restored_by_the_names_of_peft_by_which_they_are_published(house):
    connection, name = house.connect(), "base_model.model.model.layers.0.q_proj.lora_A.weight"
    connection.publish(actor={name: torch.ones(3)})

    found = {name: torch.zeros(3)}
    connection.restore(actor=found)

    assert found[name].tolist() == [1.0] * 3


def test_a_training_state_of_other_names_is_refused_and_an_empty_one_is_none(house):
    connection = house.connect()
    weights, moment = {"w": torch.ones(3)}, {"m": torch.full((3,), 2.0)}
    connection.publish(actor=weights, training={})

    published = connection.publish(actor=weights, training=moment)

    found = {"m": torch.zeros(3)}
    assert connection.restore_training(published, found) and found["m"].tolist() == [2.0] * 3
    with pytest.raises(WeightsError, match="the training state has other names than the one published first: v"):
        connection.publish(actor=weights, training={**moment, "v": torch.ones(3)})


@pytest.mark.parametrize("training", [{"state": {0: {}}}, {0: torch.ones(3)}, {"step": 3}, [torch.ones(3)]])
def test_a_training_state_that_is_no_tensors_by_name_is_refused_and_costs_no_version(house, training):
    """As an optimizer's state dict: its numbers were written for names, and no later trainer could read any version."""
    connection = house.connect()
    connection.publish(actor={"weight": torch.ones(2)})

    with pytest.raises(WeightsError, match="nothing is published: training has tensors by name"):
        connection.publish(actor={"weight": torch.zeros(2)}, training=training)

    assert connection.newest().version == 1
    successor = house.connect()
    assert successor.publish(actor={"weight": torch.zeros(2)}, training={"moment": torch.ones(3)}).version == 2
    assert successor.restore_training(successor.newest(), {"moment": torch.zeros(3)})


@pytest.mark.parametrize(
    ("moment", "fault"),
    [
        (torch.empty(3, device="meta"), "m has no values of its own: it is torch.strided on the device meta"),
        (torch.ones(3).to_sparse(), "m has no values of its own: it is torch.sparse_coo on the device cpu"),
        (torch.Tensor._make_subclass(type("DTensor", (torch.Tensor,), {}), torch.ones(3)), "m is a DTensor, not a wh"),
    ],
    ids=["meta", "sparse", "DTensor"],
)
def test_a_training_state_without_its_values_is_refused_before_a_slot_is_begun(house, moment, fault):
    connection = house.connect()

    with pytest.raises(WeightsError, match=f"nothing is published: training: {fault}"):
        connection.publish(actor={"weight": torch.ones(2)}, training={"m": moment})

    assert connection.newest() is None
    assert connection.publish(actor={"weight": torch.ones(2)}, training={"m": torch.ones(3)}).version == 1


def test_a_batch_that_a_device_has_no_room_for_is_the_next_one_again(house, monkeypatch):
    """Its lease was given up: the version after the next batch would have counted its rows as trained."""
    connection = house.connect()
    connection.session.await_buffer(10.0)
    for _ in range(3):
        house.turn()
        connection.receive(0.0)
    gathering = connection._prefetcher.take
    monkeypatch.setattr(connection._prefetcher, "take", mock.Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError):
        connection.poll()
    monkeypatch.setattr(connection._prefetcher, "take", gathering)

    assert connection.poll().lease == 0


def test_closing_hands_back_what_was_not_trained(house):
    connection = house.connect()
    house.batch(connection)

    connection.close()
    house.turn(work=False)

    assert house.ledger.totals.trained == 0
    assert house.counts.ended["nacked"] == 2


def test_a_successor_gets_the_dead_trainers_batch_with_the_same_rows(house):
    first = house.batch(house.connect())

    successor = house.connect()
    second = house.batch(successor)

    assert second.lease == first.lease
    assert torch.equal(second.experience.sequences, first.experience.sequences)


def test_a_batch_whose_weights_were_published_is_never_delivered_again_even_if_no_message_left(house):
    connection = house.connect()
    batch = house.batch(connection)
    connection.publish(actor={"w": torch.ones(3)})
    # Killed here: the weights are in shared memory, no message was sent.
    house.post["buffer"].receive()

    successor = house.connect()
    again = house.batch(successor)

    assert again.lease > batch.lease
    assert house.ledger.totals.trained == 8
    assert house.ledger.totals.policy_version == 1


def test_a_version_without_a_batch_includes_all_batches_of_the_versions_before_it(house):
    """The first batch counts as trained by itself, the second one by the version before, whose message is lost."""
    connection = house.connect()
    house.batch(connection)
    connection.acknowledge()
    second = house.batch(connection)
    assert connection.publish(actor={"weight": torch.zeros(2)}).trained_through == second.lease + 1

    published = connection.publish(actor={"weight": torch.ones(2)})

    assert published.trained_through == second.lease + 1
    house.post["buffer"].receive()
    house.start_buffer()
    connection.receive(0.0)
    house.turn()
    assert house.ledger.totals.trained == 16
    assert house.batch(connection).lease == second.lease + 1


def test_a_batch_is_trained_once_however_often_it_is_delivered(house):
    house.batch(house.connect())
    successor = house.connect()
    leases = []
    for _ in range(8):
        house.turn()
        successor.receive(0.0)
        while (batch := successor.poll(ragged=house.ragged)) is not None:
            leases.append(batch.lease)
            successor.publish(actor={"w": torch.full((3,), float(len(leases)))})

    house.turn(work=False)

    assert leases == sorted(set(leases))
    assert house.ledger.totals.policy_version == len(leases)


def test_a_restarted_buffer_learns_of_an_acknowledgement_it_missed(house):
    connection = house.connect()
    house.batch(connection)
    connection.acknowledge()
    house.post["buffer"].receive()

    house.start_buffer()
    connection.receive(0.0)
    house.turn()

    assert house.ledger.totals.trained == 8
    assert house.ledger.leases.get(0) is None


def test_a_dead_buffers_lease_that_was_not_read_yet_comes_again_from_the_next(house):
    connection = house.connect()
    house.turn()
    connection.receive(0.0)
    house.turn()
    unread = [message for message in house.post["trainer-0"].receive() if isinstance(message, Lease)]
    assert unread
    house.start_buffer()
    connection.receive(0.0)

    for message in unread:
        house.post["trainer-0"].send(message)
    connection.receive(0.0)
    assert connection.poll() is None, "it goes by another name now"

    batch = house.batch(connection)
    assert batch.lease == unread[0].lease
    connection.acknowledge()
    house.turn()
    assert house.ledger.totals.trained == 8


def test_damage_in_the_arena_is_found_before_a_row_is_used(house):
    connection = house.connect()
    for _ in range(3):
        house.turn()
        connection.receive(0.0)
    record = house.ledger.extents[0]
    house.arena.payload[record.offset + record.nbytes - 1] ^= 1

    batch = house.batch(connection)

    assert batch.lease == 0, "the number is filled again"
    expected = torch.cat([house.rolled[1].reward, house.rolled[2].reward])
    assert torch.equal(batch.experience.reward, expected), "the sound rows of the damaged batch come first"
    assert house.ledger.totals.dropped[DROP_REASONS.index("quarantined")] == 4
    assert house.counts.aside == {"checksum": 4}
    assert house.batch(connection).lease == 1


def test_damage_is_told_to_a_buffer_that_was_started_anew(house):
    connection = house.connect()
    for _ in range(3):
        house.turn()
        connection.receive(0.0)
    record = house.ledger.extents[0]
    house.arena.payload[record.offset + record.nbytes - 1] ^= 1
    assert connection.poll() is None
    house.post["buffer"].receive()

    house.start_buffer()
    connection.receive(0.0)

    assert house.batch(connection).lease == 0
    assert house.counts.aside == {"checksum": 4}


def published_by_the_first_rank(house, version, fingerprint, trained_through):
    house.post["buffer"].send(Published(version, fingerprint, trained_through))
    house.turn()


def test_a_rank_that_does_not_report_later_versions_does_not_repeat_an_old_rollback_to_a_new_buffer(house):
    connection = house.connect()
    published_by_the_first_rank(house, 1, 6, 0)
    connection.start_over(WeightsVersion(0, 5, 0, rollback=True, history=1))
    batch = house.batch(connection)
    assert house.ledger.totals.policy_version == 0
    connection.session.settle()
    published_by_the_first_rank(house, 1, 7, batch.lease + 1)

    house.start_buffer()
    connection.receive(0.0)
    house.turn()

    assert house.ledger.totals.policy_version == 1, "the weights are those of version 1"


def test_a_rollback_that_a_buffer_did_not_live_to_handle_is_repeated_to_the_next(house):
    connection = house.connect()
    published_by_the_first_rank(house, 1, 6, 0)
    connection.start_over(WeightsVersion(0, 5, 0, rollback=True, history=1))
    house.post["buffer"].receive()

    house.start_buffer()
    connection.receive(0.0)
    house.turn()

    assert house.ledger.totals.policy_version == 0
    assert house.ledger.versions.knows(0, 5)


def test_a_batch_in_hand_before_a_rollback_is_neither_handed_back_nor_acknowledged_after_it(house):
    connection = house.connect()
    house.batch(connection)
    published_by_the_first_rank(house, 1, 6, 0)
    connection.start_over(WeightsVersion(0, 5, 0, rollback=True, history=1))

    with pytest.raises(ValueError, match="1 batch cannot be handed back, 0 in hand"):
        connection.hand_back(1)
    connection.acknowledge()
    house.turn()

    assert (house.ledger.totals.trained, house.counts.duplicates) == (0, 0)


def test_a_rank_knows_whether_its_last_batch_makes_a_whole_round():
    of_rank = {"rank": 1, "world_size": 2, "prefetch": 2, "newest": None}
    session = BufferSession(Queue(), Queue(), **of_rank)
    session._peer.meets(Welcome(7))
    assert not session.is_exhausted(None)

    session._handle(Exhausted(session._peer.incarnation, 3))

    assert session.is_exhausted(None) and session.is_exhausted(3) and not session.is_exhausted(1)
    session._handle(Lease(session._peer.incarnation, 3, 1, []))
    assert not session.is_exhausted(None), "rows came back: the buffer tells anew"
