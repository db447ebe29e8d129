"""The replay buffer's decisions against clients that only know the protocol, with deaths on both sides."""

import math
import random

import pytest

from pipeline.replay.queue import ReplayQueue
from pipeline.runtime.messages import (
    Ack,
    Ask,
    Books,
    Damaged,
    Delivered,
    Failed,
    Join,
    Lease,
    PeerDied,
    Refused,
    Sealed,
    Settled,
    Ticket,
    WantBatch,
    WantRoom,
    Welcome,
)
from pipeline.storage.allocator import ExtentAllocator
from pipeline.storage.layout import LedgerLayout
from pipeline.storage.ledger import Ledger
from pipeline.storage.tables import MOST_LEASES
from tests.support import protocol

LAYOUT = LedgerLayout(extents=64, rows_per_extent=8)


class Bench(protocol.Bench):
    """A queue, the memory that outlives it, and the messages that it sent."""

    def __init__(self, *, sample_batch_size=4, limit=0, capacity_bytes=1 << 16, layout=LAYOUT):
        self.remembered = {}
        self.servers = 0
        super().__init__(limits=(sample_batch_size, limit), capacity_bytes=capacity_bytes, layout=layout)

    def restart(self):
        self.servers += 1
        self.ledger = Ledger(self.memory, self.layout)
        sample_batch_size, limit = self.limits
        self.buffer = ReplayQueue(
            self.ledger,
            ExtentAllocator(self.capacity_bytes),
            lambda peer, message: self.sent.append((peer, message)),
            holders={lease: client for client, lease in self.remembered.items()},
            remember=self.remembered.__setitem__,
            owner="the test",
            incarnation=self.servers,
            sample_batch_size=sample_batch_size,
            limit=limit,
        )


class Client:
    """One client of the bench."""

    def __init__(self, bench, index=0, incarnation=100):
        self.bench = bench
        self.name = f"client-{index}"
        self.incarnation = incarnation
        self.request = 0
        self.join()

    def join(self, **held):
        self.incarnation += 1
        self.bench.say(Join(self.name, self.incarnation, "socket", self.bench.servers, **held))

    def want_room(self, rows=1, nbytes=256, deadline_s=math.inf):
        self.request += 1
        self.bench.say(WantRoom(self.name, self.incarnation, self.request, rows, nbytes, deadline_s))
        return self.one(Ticket)

    def seal(self, ticket, rows=1, nbytes=100):
        self.bench.say(Sealed(self.name, ticket.ticket, rows, nbytes, 1, 0, 0))
        assert self.one(Settled) == Settled(self.incarnation, ticket.ticket)

    def append(self, rows=1):
        self.seal(ticket := self.want_room(rows), rows)
        return [(ticket.ticket, row) for row in range(rows)]

    def want_batch(self, deadline_s=math.inf):
        self.request += 1
        self.bench.say(WantBatch(self.name, self.incarnation, self.request, deadline_s))
        return self.one(Lease)

    def ack(self, lease):
        self.bench.say(Ack(self.name, lease.lease))
        assert self.one(Delivered) == Delivered(self.incarnation, lease.lease)

    def ask(self, what):
        self.request += 1
        self.bench.say(Ask(self.name, self.incarnation, self.request, what, math.inf))
        return self.one(Books)

    def refused(self):
        return self.one(Refused)

    def one(self, kind):
        found = self.bench.heard(self.name, kind)
        assert len(found) <= 1
        return found[0] if found else None


def rows_of(lease):
    return [(part.ticket, row) for part in lease.parts for row in part.rows]


def test_a_batch_is_the_oldest_rows_and_each_row_is_delivered_once():
    bench = Bench()
    producer, consumer = Client(bench, 0), Client(bench, 1)
    rows = producer.append(3) + producer.append(3) + producer.append(2)

    first = consumer.want_batch()
    consumer.ack(first)
    second = consumer.want_batch()
    consumer.ack(second)

    assert rows_of(first) + rows_of(second) == rows
    assert consumer.want_batch() is None
    assert (bench.ledger.totals.trained, bench.ledger.ready, bench.buffer._allocator.free_bytes) == (8, 0, 1 << 16)


def test_who_waits_longest_is_served_first():
    bench = Bench(sample_batch_size=1)
    consumers = [Client(bench, index) for index in (2, 0, 1)]
    for consumer in consumers:
        assert consumer.want_batch() is None

    producer = Client(bench, 9)
    rows = [producer.append()[0] for _ in range(2)]

    assert rows_of(consumers[0].one(Lease)) == rows[:1]
    assert rows_of(consumers[1].one(Lease)) == rows[1:]
    assert consumers[2].one(Lease) is None


def test_a_batch_of_a_dead_consumer_goes_whole_to_the_next_before_younger_rows():
    bench = Bench(sample_batch_size=2)
    producer, dying, next_one = Client(bench, 0), Client(bench, 1), Client(bench, 2)
    rows = producer.append(2) + producer.append(2)
    assert rows_of(dying.want_batch()) == rows[:2]

    bench.say(PeerDied("client-1"))

    assert rows_of(next_one.want_batch()) == rows[:2]
    assert bench.balanced


def test_batches_of_dead_consumers_keep_their_order_whoever_died_first():
    bench = Bench(sample_batch_size=1)
    producer, first, second, next_one = (Client(bench, index) for index in range(4))
    rows = producer.append() + producer.append()
    first.want_batch(), second.want_batch()

    bench.say(PeerDied("client-2"))
    bench.say(PeerDied("client-1"))

    assert rows_of(next_one.want_batch()) == rows[:1]


def test_room_of_a_dead_producer_is_free_again_and_its_rows_never_appear():
    bench = Bench(sample_batch_size=1)
    dying, consumer = Client(bench, 0), Client(bench, 1)
    ticket = dying.want_room(1)

    bench.say(PeerDied("client-0"))
    bench.say(Sealed("client-0", ticket.ticket, 1, 200, 1, 0, 0))

    assert consumer.want_batch() is None
    assert bench.ledger.totals.sealed == 0 and bench.buffer._allocator.free_bytes == 1 << 16


def test_a_successor_of_the_same_name_ends_what_its_predecessor_held():
    bench = Bench(sample_batch_size=1)
    predecessor = Client(bench, 0)
    predecessor.append()
    predecessor.want_batch()
    predecessor.want_room()

    successor = Client(bench, 0, incarnation=500)

    assert bench.ledger.reserved == 0
    assert rows_of(successor.want_batch()) == [(0, 0)]


def test_producers_wait_while_the_limit_of_batches_is_queued():
    bench = Bench(sample_batch_size=2, limit=2)
    producer, other, consumer = (Client(bench, index) for index in range(3))
    producer.append(2)
    producer.append(2)

    assert producer.want_room(2) is None
    assert other.want_room(1) is None
    consumer.ack(consumer.want_batch())

    assert producer.one(Ticket) is not None
    assert other.one(Ticket) is None


def test_an_append_under_way_counts_against_the_limit():
    bench = Bench(sample_batch_size=2, limit=1)

    assert Client(bench, 0).want_room(2) is not None
    assert Client(bench, 1).want_room(2) is None


def test_a_full_arena_makes_producers_wait_until_a_batch_is_taken():
    bench = Bench(sample_batch_size=2, capacity_bytes=512)
    producer, consumer = Client(bench, 0), Client(bench, 1)
    # 256 B are reserved for each and 128 B are kept.
    producer.append(), producer.append(), producer.append()

    assert producer.want_room() is None and producer.refused() is None
    consumer.ack(consumer.want_batch())

    assert producer.one(Ticket) is not None


def test_an_append_larger_than_the_arena_is_refused_with_both_sizes():
    producer = Client(Bench(capacity_bytes=512))

    producer.want_room(nbytes=1024)

    assert producer.refused().reason == "1,024 B do not fit into an arena of 512 B"


def test_rows_that_fill_the_arena_and_no_batch_are_an_error_and_no_hang():
    bench = Bench(sample_batch_size=4, capacity_bytes=512)
    producer = Client(bench)
    producer.append(), producer.append(), producer.append()

    producer.want_room()

    refused = producer.refused()
    assert refused.kind == "arena"
    assert "3 rows are there, a batch takes 4, 128 B free of 512 B" in refused.reason


def test_records_of_the_ledger_run_out_like_bytes():
    bench = Bench(sample_batch_size=1)
    producer, consumer = Client(bench, 0), Client(bench, 1)
    for _ in range(LAYOUT.extents):
        producer.append()

    assert producer.want_room() is None
    consumer.ack(consumer.want_batch())

    assert producer.one(Ticket) is not None


def test_a_wait_ends_at_its_deadline_and_takes_nothing():
    bench = Bench(sample_batch_size=2, limit=1)
    producer, other, consumer = (Client(bench, index) for index in range(3))
    producer.append(1)
    assert consumer.want_batch(deadline_s=5.0) is None
    assert bench.buffer.next_deadline_s() == 5.0

    bench.now_s = 5.0
    bench.say()
    producer.append(1)
    producer.want_room(1, deadline_s=6.0)
    bench.now_s = 6.0
    bench.say()

    assert consumer.refused().reason == "1 row waits, a batch takes 2"
    assert producer.refused().reason == "no room for 1 row: 1 batch is queued, the limit is 1"
    assert consumer.one(Lease) is None and bench.ledger.leased == 0
    assert other.want_batch() is not None


def test_flush_makes_a_last_smaller_batch_behind_the_full_ones():
    bench = Bench(sample_batch_size=2)
    producer, consumer = Client(bench, 0), Client(bench, 1)
    rows = producer.append(3)

    assert producer.ask("flush").rows == 3
    rows += producer.append(2)

    batches = [rows_of(consumer.want_batch()) for _ in range(3)]
    assert batches == [rows[:2], rows[2:3], rows[3:]]
    assert bench.balanced


def test_a_flush_with_nothing_there_makes_no_batch():
    bench = Bench()
    client = Client(bench)

    assert client.ask("flush").rows == 0
    assert client.want_batch() is None


def test_clear_drops_all_that_waits_and_nothing_else():
    bench = Bench(sample_batch_size=2)
    producer, consumer, other = (Client(bench, index) for index in range(3))
    producer.append(2)
    lease = consumer.want_batch()
    producer.append(3), producer.ask("flush"), producer.append(1)
    ticket = producer.want_room(2)

    books = other.ask("clear")
    consumer.ack(lease)
    producer.seal(ticket, 2)

    assert (books.rows, books.dropped, books.ready, books.leased, books.batches) == (4, 4, 0, 2, 0)
    assert rows_of(other.want_batch()) == [(ticket.ticket, 0), (ticket.ticket, 1)]
    assert bench.balanced


def test_clear_drops_more_flushed_batches_than_the_ledger_has_vacant_leases():
    bench = Bench(sample_batch_size=1, layout=LedgerLayout(extents=64, rows_per_extent=128))
    producer = Client(bench)
    for _ in range(-(-MOST_LEASES // 128) + 1):
        producer.append(128)
    rows = producer.ask("flush").rows

    books = producer.ask("clear")

    assert rows > MOST_LEASES and (books.rows, books.dropped, books.ready) == (rows, rows, 0)
    assert bench.balanced


def test_the_end_wakes_all_who_wait_and_refuses_whoever_comes():
    bench = Bench(sample_batch_size=2, limit=1)
    writing, producer, consumer, late = (Client(bench, index) for index in range(4))
    writing.want_room(2)
    assert producer.want_room() is None and consumer.want_batch() is None

    bench.say(PeerDied("owner"))
    late.want_batch()

    for client in (producer, consumer, late):
        assert client.refused() == Refused(client.incarnation, client.request, "closed", "closed by the test")


def test_drain_takes_no_more_rows_and_ends_when_the_last_was_taken():
    bench = Bench(sample_batch_size=2)
    owner, producer, consumer, late = (Client(bench, index) for index in range(4))
    producer.append(2)
    under_way = producer.want_room(1)

    assert owner.ask("drain") is None
    assert late.want_room() is None and late.refused().kind == "closed"
    first = consumer.want_batch()
    consumer.ack(first)
    producer.seal(under_way)
    last = consumer.want_batch()
    assert not bench.buffer.closed
    consumer.ack(last)

    assert [len(rows_of(first)), len(rows_of(last))] == [2, 1]
    assert bench.buffer.closed == "drained and closed by the test"
    assert owner.one(Books).trained == 3


def test_a_failed_append_gives_its_room_back():
    bench = Bench()
    producer = Client(bench)
    ticket = producer.want_room(4, nbytes=4096)

    bench.say(Failed(producer.name, ticket.ticket, "no such field", retry=False))

    assert producer.one(Settled) is not None
    assert bench.buffer._allocator.free_bytes == 1 << 16


def test_damaged_rows_are_dropped_and_counted_and_the_others_come_again():
    bench = Bench(sample_batch_size=3)
    producer, consumer = Client(bench, 0), Client(bench, 1)
    rows = producer.append(2) + producer.append(2) + producer.append(1)
    lease = consumer.want_batch()

    bench.say(Damaged(consumer.name, lease.lease, [rows[0][0]], "checksum"))

    assert consumer.one(Delivered) is not None
    assert rows_of(consumer.want_batch()) == rows[2:]
    assert bench.ledger.totals.dropped[3] == 2 and bench.balanced


def test_requests_are_answered_once_however_often_they_are_repeated():
    bench = Bench(sample_batch_size=1)
    producer, consumer = Client(bench, 0), Client(bench, 1)
    want = WantRoom(producer.name, producer.incarnation, 7, 1, 256, math.inf)
    bench.say(want, want)
    bench.say(want)
    (ticket,) = bench.heard(producer.name, Ticket)
    sealed = Sealed(producer.name, ticket.ticket, 1, 200, 1, 0, 0)
    bench.say(sealed, sealed)
    lease = consumer.want_batch()
    consumer.ack(lease)
    consumer.ack(lease)

    assert (bench.ledger.totals.tickets, bench.ledger.totals.sealed, bench.ledger.totals.trained) == (1, 1, 1)


def test_who_has_not_joined_this_server_is_asked_to():
    bench = Bench()

    bench.say(WantBatch("client-0", 5, 1, math.inf))
    bench.say(Join("client-0", 5, "socket", server=0))
    bench.say(WantBatch("client-0", 5, 2, math.inf))

    assert bench.heard("client-0", Welcome) == [Welcome(1)] * 3


def test_the_next_server_knows_who_holds_what():
    bench = Bench(sample_batch_size=1)
    writer, holder, gone, lost = (Client(bench, index) for index in range(4))
    rows = [writer.append()[0] for _ in range(3)]
    held, _, _ = holder.want_batch(), gone.want_batch(), lost.want_batch()
    ticket = writer.want_room()

    bench.restart()
    assert bench.buffer.clients == {"client-0", "client-1", "client-2", "client-3"}
    writer.join(ticket=ticket.ticket)
    holder.join(lease=held.lease)
    bench.say(PeerDied("client-2"))
    # The lease was in flight when the server died: the client joins without it.
    lost.join()

    writer.seal(ticket)
    holder.ack(held)
    assert rows_of(lost.want_batch()) == rows[1:2]
    assert bench.ledger.totals.trained == 1 and bench.balanced


@pytest.mark.parametrize("before", ["cleared", "damaged"])
def test_the_next_server_knows_the_holder_of_a_batch_after_rows_were_dropped(before):
    bench = Bench(sample_batch_size=1)
    writer, holder, other = (Client(bench, index) for index in range(3))
    writer.append()
    if before == "cleared":
        writer.ask("flush"), writer.ask("clear")
    else:
        damaged = holder.want_batch()
        bench.say(Damaged(holder.name, damaged.lease, [damaged.parts[0].ticket], "checksum"))
        assert holder.one(Delivered) is not None
    rows = writer.append()
    held = holder.want_batch()

    bench.restart()
    other.join()

    assert other.want_batch() is None
    holder.join(lease=held.lease)
    holder.ack(held)
    assert rows_of(held) == rows and bench.ledger.totals.trained == 1 and bench.balanced


def test_a_dead_consumers_batch_comes_before_rows_that_were_appended_after_a_clear():
    bench = Bench(sample_batch_size=1)
    writer, first, second, next_one = (Client(bench, index) for index in range(4))
    rows = writer.append() + writer.append()
    first.want_batch(), second.want_batch()
    bench.say(PeerDied(first.name))
    writer.ask("clear")
    writer.append(), writer.ask("flush")

    bench.say(PeerDied(second.name))

    assert rows_of(next_one.want_batch()) == rows[1:]


def test_the_books_of_a_server_do_not_grow_with_the_rows_that_have_gone():
    bench = Bench(sample_batch_size=1)
    producer, waiting, consumer = (Client(bench, index) for index in range(3))
    # An append that takes long is the oldest record all the time.
    assert waiting.want_room() is not None

    for _ in range(2000):
        producer.append()
        consumer.ack(consumer.want_batch())

    index = bench.ledger.index
    assert len(index._positions) < 200 and len(index._seals) < 200
    assert index.lowest_position() == 0 and index.oldest_seal_s() is None


def test_flushed_batches_survive_the_server():
    bench = Bench(sample_batch_size=4)
    client = Client(bench)
    rows = client.append(2)
    client.ask("flush")

    bench.restart()
    client.join()

    assert rows_of(client.want_batch()) == rows


@pytest.mark.parametrize("seed", range(40))
def test_each_row_is_delivered_once_whoever_dies(seed):
    rng = random.Random(seed)
    bench = Bench(sample_batch_size=rng.choice([1, 3, 8]), limit=rng.choice([0, 1, 3]), capacity_bytes=4096)
    clients = {index: Client(bench, index) for index in range(6)}
    tickets, leases, waiting = {}, {}, set()
    sealed, delivered = [], []
    for incarnation in range(10_000, 11_000):
        index = rng.randrange(6)
        client = clients[index]
        match rng.choice(["room", "batch", "finish", "finish", "finish", "die", "restart", "flush"]):
            case "die" if rng.random() < 0.2:
                bench.say(PeerDied(client.name))
                bench.sent = [(name, message) for name, message in bench.sent if name != client.name]
                clients[index] = Client(bench, index, incarnation * 1000)
                tickets.pop(index, None), leases.pop(index, None), waiting.discard(index)
            case "restart" if rng.random() < 0.2:
                bench.restart()
                bench.sent.clear()
                for number, other in clients.items():
                    held = {"ticket": tickets[number].ticket} if number in tickets else {}
                    held |= {"lease": leases[number].lease} if number in leases else {}
                    other.join(**held)
                waiting.clear()
            case "flush" if rng.random() < 0.2 and index not in waiting | tickets.keys() | leases.keys():
                assert client.ask("flush") is not None
            case "room" | "batch" as request if index not in waiting | tickets.keys() | leases.keys():
                waiting.add(index)
                answer = client.want_room(rng.randint(1, 8), 256) if request == "room" else client.want_batch()
                if answer is not None:
                    bench.sent.append((client.name, answer))
            case "finish" if index in tickets:
                ticket = tickets.pop(index)
                rows = rng.randint(1, bench.ledger.extents[ticket.ticket].rows)
                client.seal(ticket, rows)
                sealed += [(ticket.ticket, row) for row in range(rows)]
            case "finish" if index in leases:
                lease = leases.pop(index)
                client.ack(lease)
                delivered += rows_of(lease)
        for number, other in clients.items():
            if number in waiting and (ticket := other.one(Ticket)):
                tickets[number] = ticket
                waiting.discard(number)
            elif number in waiting and (lease := other.one(Lease)):
                leases[number] = lease
                waiting.discard(number)
            elif number in waiting and other.refused():
                waiting.discard(number)
        assert bench.balanced

    assert len(delivered) == len(set(delivered)) == bench.ledger.totals.trained
    assert set(delivered) <= set(sealed) and len(sealed) == bench.ledger.totals.sealed > 20
    left = {(record.ticket, row) for record in bench.ledger.sealed_extents()
            for row, item in enumerate(record.items) if item.state}  # fmt: skip
    assert left == set(sealed) - set(delivered)
