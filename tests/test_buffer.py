"""The buffer against peers that only know the protocol, with deaths of all of them."""

import random

import pytest

from pipeline.admission import Limits
from pipeline.arena import ExtentAllocator
from pipeline.buffer import Buffer
from pipeline.errors import GaveUpError
from pipeline.ledger import Ledger
from pipeline.ledger_records import LedgerLayout
from pipeline.messages import (
    Ack,
    Credit,
    Drain,
    Failed,
    Hello,
    Lease,
    PeerDied,
    Published,
    Release,
    Sealed,
    Settled,
    Ticket,
    Wait,
    WantTickets,
    Welcome,
)

LIMITS = Limits(
    sample_batch_size=8,
    rows_per_version=8,
    group_size=2,
    prompts_per_ticket=2,
    max_staleness=0,
    limit_batches=0,
    world_size=1,
    row_bytes=100,
)
LAYOUT = LedgerLayout(extents=32, rows_per_extent=8)


class Counts:
    """An observer that counts."""

    def __init__(self):
        self.ended = {}
        self.duplicates = 0

    def sealed(self, rows, staleness_versions):
        pass

    def ticket_ended(self, result):
        self.ended[result] = self.ended.get(result, 0) + 1

    def leased(self, rows, age_s):
        pass

    def lease_ended(self, result, rows, duration_s):
        self.ended[result] = self.ended.get(result, 0) + 1

    def duplicate(self):
        self.duplicates += 1


class Bench:
    """A buffer, the memory that outlives it, and what it has said to whom."""

    def __init__(self, limits=LIMITS, *, capacity_bytes=1 << 20, **options):
        self.memory = memoryview(bytearray(LAYOUT.nbytes))
        self.limits = limits
        self.capacity_bytes = capacity_bytes
        self.options = {"workers": 2, **options}
        self.sent = []
        self.counts = Counts()
        self.now_s = 0.0
        self.restart()

    def restart(self):
        self.ledger = Ledger(self.memory, LAYOUT)
        self.buffer = Buffer(
            self.ledger,
            ExtentAllocator(self.capacity_bytes),
            self.limits,
            lambda peer, message: self.sent.append((peer, message)),
            self.counts,
            **self.options,
        )

    def say(self, *messages):
        for message in messages:
            self.buffer.handle(message, self.now_s)
        self.buffer.step(self.now_s)

    def heard(self, peer, kind):
        found = [message for name, message in self.sent if name == peer and isinstance(message, kind)]
        self.sent = [(n, m) for n, m in self.sent if not (n == peer and isinstance(m, kind))]
        return found

    @property
    def balanced(self):
        totals = self.ledger.totals
        return totals.sealed == totals.trained + sum(totals.dropped) + self.ledger.ready + self.ledger.leased


def worker(index=0, incarnation=1, tickets=2):
    name = f"worker-{index}"
    return Hello(name, incarnation), WantTickets(name, incarnation, tickets)


def trainer(incarnation=1, batches=2, rank=0):
    return Hello(f"trainer-{rank}", incarnation), Credit(f"trainer-{rank}", incarnation, batches)


def sealed(ticket, worker="worker-0", rows=4, version=None):
    return Sealed(worker, ticket.ticket, rows, 200, 1, ticket.policy_version if version is None else version, 9)


def one_step(bench):
    """Everything up to a lease: two tickets sealed, one batch out."""
    bench.say(Published(0, 9, 0), *worker(), *trainer())
    for ticket in bench.heard("worker-0", Ticket):
        bench.say(sealed(ticket))
    (lease,) = bench.heard("trainer-0", Lease)
    return lease


def test_no_ticket_before_weights_and_the_worker_is_told_why():
    bench = Bench()

    bench.say(*worker())

    assert bench.heard("worker-0", Ticket) == []
    assert [wait.reason for wait in bench.heard("worker-0", Wait)] == ["staleness"]


def test_rows_go_from_ticket_to_lease_to_trained():
    bench = Bench()

    lease = one_step(bench)
    assert [(part.ticket, part.rows) for part in lease.parts] == [(0, [0, 1, 2, 3]), (1, [0, 1, 2, 3])]
    bench.say(Ack("trainer-0", lease.lease))

    assert bench.ledger.totals.trained == bench.ledger.totals.sealed == 8
    assert bench.buffer.used_bytes == 0, "extents are free again"


def test_two_workers_share_the_tickets():
    bench = Bench()

    bench.say(*worker(0), *worker(1), Published(0, 9, 0))

    assert len(bench.heard("worker-0", Ticket)) == len(bench.heard("worker-1", Ticket)) == 1


def test_a_dead_workers_ticket_goes_to_another_with_the_same_prompts():
    bench = Bench()
    bench.say(Published(0, 9, 0), *worker(0, tickets=1))
    (ticket,) = bench.heard("worker-0", Ticket)

    bench.say(PeerDied("worker-0"), *worker(1))

    again = bench.heard("worker-1", Ticket)[0]
    assert (again.ticket, again.position, again.prompts, again.attempt) == (ticket.ticket, ticket.position, 2, 2)
    assert bench.counts.ended == {"reissued": 1}


def test_a_restarted_worker_does_not_keep_its_predecessors_ticket():
    bench = Bench()
    bench.say(Published(0, 9, 0), *worker(0, incarnation=1, tickets=1))

    bench.say(*worker(0, incarnation=2, tickets=1))

    first, second = bench.heard("worker-0", Ticket)
    assert (first.to, second.to) == (1, 2)
    assert first.ticket == second.ticket


def test_a_seal_from_a_worker_that_lost_its_ticket_changes_nothing():
    bench = Bench()
    bench.say(Published(0, 9, 0), *worker(0, tickets=1))
    (ticket,) = bench.heard("worker-0", Ticket)
    bench.say(PeerDied("worker-0"), *worker(1))

    bench.say(sealed(ticket, "worker-0"))

    assert bench.ledger.totals.sealed == 0
    assert bench.counts.duplicates == 1


def test_a_repeated_seal_is_settled_again_and_counted_once():
    bench = Bench()
    bench.say(Published(0, 9, 0), *worker())
    ticket, _ = bench.heard("worker-0", Ticket)

    bench.say(sealed(ticket), sealed(ticket))

    assert bench.ledger.totals.sealed == 4
    assert len(bench.heard("worker-0", Settled)) == 2
    assert bench.counts.duplicates == 1


def test_prompts_that_fail_every_time_are_set_aside():
    bench = Bench(max_attempts=2)
    bench.say(Published(0, 9, 0), *worker(0, tickets=1))
    positions = []
    for _ in range(3):
        (ticket,) = bench.heard("worker-0", Ticket)
        positions.append(ticket.position)
        bench.say(Failed("worker-0", ticket.ticket, "boom", retry=True))

    assert positions == [0, 0, 2]
    assert bench.counts.ended["failed"] == 1


def test_an_epoch_without_any_experience_ends_the_run_and_says_so():
    bench = Bench(prompts_in_source=4)
    bench.say(Published(0, 9, 0), *worker(0, tickets=1))
    (ticket,) = bench.heard("worker-0", Ticket)
    bench.say(Failed("worker-0", ticket.ticket, "too long", retry=False))
    (ticket,) = bench.heard("worker-0", Ticket)

    with pytest.raises(GaveUpError, match="4 prompts in a row, a whole epoch"):
        bench.say(Failed("worker-0", ticket.ticket, "too long", retry=False))


def test_an_arena_that_can_never_hold_the_next_ticket_ends_the_run():
    bench = Bench(capacity_bytes=5000)

    with pytest.raises(GaveUpError, match="arena_bytes is too small"):
        bench.say(Published(0, 9, 0), *worker())


def test_a_restarted_trainer_gets_its_leases_again():
    bench = Bench()
    lease = one_step(bench)

    bench.say(*trainer(incarnation=2))

    (again,) = bench.heard("trainer-0", Lease)
    assert (again.lease, again.parts, again.to, again.deliveries) == (lease.lease, lease.parts, 2, 2)
    assert bench.counts.ended["holder_died"] == 1


def test_a_trainer_that_died_between_step_and_publish_does_not_stall_the_tickets():
    bench = Bench()
    lease = one_step(bench)
    bench.say(Ack("trainer-0", lease.lease))
    assert bench.heard("worker-0", Ticket) == []

    bench.say(*trainer(incarnation=2))

    assert len(bench.heard("worker-0", Ticket)) == 2


def test_a_lease_handed_back_is_ready_again():
    bench = Bench()
    lease = one_step(bench)

    bench.buffer.handle(Release("trainer-0", lease.lease), 0.0)

    assert (bench.ledger.ready, bench.ledger.leased) == (8, 0)
    assert bench.balanced


def test_an_acknowledgement_is_counted_once():
    bench = Bench()
    lease = one_step(bench)

    bench.say(Ack("trainer-0", lease.lease), Ack("trainer-0", lease.lease))

    assert bench.ledger.totals.trained == 8
    assert bench.counts.duplicates == 1


def test_ranks_take_turns():
    bench = Bench(Limits(**{**LIMITS.__dict__, "world_size": 2, "rows_per_version": 16, "max_staleness": 1}))
    bench.say(Published(0, 9, 0), *worker(tickets=8), *trainer(rank=0), *trainer(rank=1))
    for ticket in bench.heard("worker-0", Ticket):
        bench.say(sealed(ticket))

    assert [lease.lease for lease in bench.heard("trainer-0", Lease)] == [0, 2]
    assert [lease.lease for lease in bench.heard("trainer-1", Lease)] == [1, 3]


def test_draining_stops_tickets_and_leases_and_tells_everyone():
    bench = Bench()
    bench.say(Published(0, 9, 0), *worker(), *trainer())
    tickets = bench.heard("worker-0", Ticket)

    bench.say(Drain(), *[sealed(ticket) for ticket in tickets])

    assert bench.heard("trainer-0", Lease) == []
    assert len(bench.heard("worker-0", Drain)) == len(bench.heard("trainer-0", Drain)) == 1
    assert bench.ledger.ready == 8


def test_finish_closes_the_books():
    bench = Bench()
    one_step(bench)

    bench.buffer.finish()

    assert bench.balanced
    assert bench.ledger.ready == bench.ledger.leased == bench.ledger.reserved == 0
    assert bench.buffer.used_bytes == 0


def test_a_restarted_buffer_greets_everyone_and_forgets_nothing():
    bench = Bench()
    lease = one_step(bench)
    before = bench.ledger.totals, bench.buffer.used_bytes
    bench.sent.clear()

    bench.restart()

    assert [peer for peer, message in bench.sent if isinstance(message, Welcome)] == [
        "worker-0",
        "worker-1",
        "trainer-0",
    ]
    assert (bench.ledger.totals, bench.buffer.used_bytes) == before
    bench.say(Hello("trainer-0", 1, held=[lease.lease]), Ack("trainer-0", lease.lease))
    assert bench.heard("trainer-0", Lease) == [], "the trainer still holds its batch"
    assert bench.ledger.totals.trained == 8


class Town:
    """Workers and a trainer with memories of their own, any of which may die at any message; so may the buffer."""

    def __init__(self, seed, staleness):
        self.rng = random.Random(seed)
        self.bench = Bench(Limits(**{**LIMITS.__dict__, "max_staleness": staleness}), max_attempts=1000)
        self.incarnation = 10
        self.tickets = {0: {}, 1: {}}
        self.unsettled = {0: {}, 1: {}}
        self.leases = []
        self.acked = []
        self.version = 0
        self.trained = []
        self.names = {}
        for index in (0, 1):
            self.born(f"worker-{index}")
        self.born("trainer-0")
        self.bench.say(Published(0, 9, 0))

    def born(self, name):
        self.incarnation += 1
        self.names[name] = self.incarnation
        index = int(name[-1])
        if name.startswith("worker"):
            self.tickets[index], self.unsettled[index] = {}, {}
            self.bench.say(Hello(name, self.incarnation), WantTickets(name, self.incarnation, 2))
        else:
            self.leases, self.acked = [], []
            self.bench.say(Hello(name, self.incarnation), Credit(name, self.incarnation, 2))

    def deliver(self):
        sent, self.bench.sent = self.bench.sent, []
        for peer, message in sent:
            index = int(peer[-1])
            if isinstance(message, Ticket) and message.to == self.names[peer]:
                self.tickets[index][message.ticket] = message
            elif isinstance(message, Settled) and message.to == self.names[peer]:
                self.unsettled[index].pop(message.ticket, None)
            elif isinstance(message, Lease) and message.to == self.names[peer]:
                self.leases.append(message)

    def roll(self, index, lost):
        if not self.tickets[index]:
            return
        ticket = self.tickets[index].pop(min(self.tickets[index]))
        message = sealed(ticket, f"worker-{index}", rows=2 * ticket.prompts)
        self.unsettled[index][ticket.ticket] = message
        if not lost:
            self.bench.say(message)

    def train(self, lost):
        if not self.leases:
            return
        lease = self.leases.pop(0)
        self.version += 1
        self.trained.append(lease)
        self.acked.append(lease.lease)
        if lost:
            return
        self.bench.say(Ack("trainer-0", lease.lease), Published(self.version, 9, lease.lease + 1))

    def restart_buffer(self):
        """The mail that lay in the old one's socket is gone; its peers tell the new one what it may have missed."""
        self.bench.sent.clear()
        self.bench.restart()
        self.bench.sent.clear()
        for index in (0, 1):
            name = f"worker-{index}"
            held = [*self.tickets[index], *self.unsettled[index]]
            self.bench.say(Hello(name, self.names[name], held), WantTickets(name, self.names[name], 2))
            for message in list(self.unsettled[index].values()):
                self.bench.say(message)
        for lease in self.acked:
            self.bench.say(Ack("trainer-0", lease))
        through = self.acked[-1] + 1 if self.acked else 0
        self.bench.say(
            Published(self.version, 9, through),
            Hello("trainer-0", self.names["trainer-0"], [lease.lease for lease in self.leases]),
            Credit("trainer-0", self.names["trainer-0"], 2),
        )

    def step(self):
        self.deliver()
        chance = self.rng.random()
        if chance < 0.45:
            self.roll(self.rng.randrange(2), lost=False)
        elif chance < 0.8:
            self.train(lost=False)
        elif chance < 0.86:
            index = self.rng.randrange(2)
            self.bench.say(PeerDied(f"worker-{index}"))
            self.born(f"worker-{index}")
        elif chance < 0.9:
            self.born("trainer-0")
        else:
            # Something was under way when the buffer died.
            lost = self.rng.choice([lambda: self.roll(0, lost=True), lambda: self.train(lost=True), lambda: None])
            lost()
            self.restart_buffer()
        assert self.bench.balanced
        self.deliver()


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_lost_and_the_run_goes_on_whoever_dies(seed, staleness):
    town = Town(seed, staleness)

    for _ in range(1500):
        town.step()

    totals = town.bench.ledger.totals
    assert totals.trained > 500, "the town went on"
    assert sum(totals.dropped) == 0 or staleness == 0
    held = town.bench.ledger.ready + town.bench.ledger.leased
    assert totals.sealed == totals.trained + sum(totals.dropped) + held
    rows = [(part.ticket, row) for lease in town.trained for part in lease.parts for row in part.rows]
    twice = len(rows) - len(set(rows))
    assert twice <= 8 * sum(lease.deliveries > 1 for lease in town.trained), "only a redelivered batch is trained again"
