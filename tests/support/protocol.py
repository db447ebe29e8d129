"""The crew of the buffer's protocol: a buffer, and peers that know its messages alone.

    Bench              a buffer in memory of its own, and the messages that it has sent; peers are functions
    House              a buffer on a real arena, a worker that seals made-up rows, and connections of trainers
    tests.support.town workers and trainer ranks with memories of their own, each of which may fail at any message

The replay buffer has a protocol of its own, and so a crew of its own (`tests.support.replay_crew`).
"""

import collections
import dataclasses

from pipeline.buffer.admission import Limits
from pipeline.buffer.buffer import Buffer
from pipeline.experience import codec
from pipeline.experience.ragged import RaggedRows
from pipeline.runtime.messages import Credit, Hello, Lease, Published, Sealed, Ticket, WantTickets
from pipeline.serial import Queue
from pipeline.storage.allocator import ExtentAllocator
from pipeline.storage.arena import Arena
from pipeline.storage.layout import LedgerLayout
from pipeline.storage.ledger import Ledger
from pipeline.trainer.connection import Connection
from pipeline.trainer.prefetch import Gathering
from tests.support.experiences import made_up

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
HOUSE_LAYOUT = LedgerLayout(extents=16, rows_per_extent=4)
HOUSE_LIMITS = dataclasses.replace(LIMITS, group_size=1, prompts_per_ticket=4, max_staleness=4, row_bytes=4096)


class Counts:
    """An observer that counts."""

    def __init__(self):
        self.ended = {}
        self.lease_s = []
        self.aside = {}
        self.files = []
        self.duplicates = 0

    def sealed(self, rows, staleness_versions):
        pass

    def ticket_ended(self, result):
        self.ended[result] = self.ended.get(result, 0) + 1

    def leased(self, rows, age_s):
        pass

    def lease_ended(self, result, rows, duration_s):
        self.lease_s.append(duration_s)
        self.ended[result] = self.ended.get(result, 0) + 1

    def set_aside(self, reason, rows):
        self.aside[reason] = self.aside.get(reason, 0) + rows

    def quarantine_file(self, result):
        self.files.append(result)

    def duplicate(self):
        self.duplicates += 1


class Bench:
    """A buffer, the memory that outlives it, and the messages it has sent."""

    def __init__(self, limits=LIMITS, *, capacity_bytes=1 << 20, layout=LAYOUT, **options):
        self.layout = layout
        self.memory = memoryview(bytearray(layout.nbytes))
        self.limits = limits
        self.capacity_bytes = capacity_bytes
        self.options = {"workers": 2, **options}
        self.sent = []
        self.counts = Counts()
        self.now_s = 0.0
        self.restart()

    def restart(self):
        self.ledger = Ledger(self.memory, self.layout)
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


def seal_of(ticket, worker="worker-0"):
    """Return a worker's `Sealed` with the ticket's attempt."""
    return Sealed(worker, ticket.ticket, 4, 200, 1, ticket.policy_version, 9, attempt=ticket.attempt)


def one_step(bench):
    """Everything up to a lease: two tickets sealed, one batch out."""
    bench.say(Published(0, 9, 0), *worker(), *trainer())
    for ticket in bench.heard("worker-0", Ticket):
        bench.say(sealed(ticket))
    (lease,) = bench.heard("trainer-0", Lease)
    return lease


class House:
    """A buffer, its arena, and a worker that seals made-up experience for every ticket."""

    def __init__(self, folder, *, copy_ahead=False, ragged=False, prompts=0):
        self.copy_ahead = copy_ahead
        self.ragged = ragged
        self.prompts = prompts
        self.connections = []
        Arena.create(
            folder / "arena", payload_bytes=1 << 20, ledger_bytes=HOUSE_LAYOUT.nbytes, layout=HOUSE_LAYOUT.identity
        )
        self.arena = Arena(folder / "arena")
        self.weights_path = folder / "weights"
        self.post = collections.defaultdict(Queue)
        self.counts = Counts()
        self.rolled = {}
        self.start_buffer()
        self.post["buffer"].send(Hello("worker-0", 1))
        self.post["buffer"].send(WantTickets("worker-0", 1, 2))
        self.post["buffer"].send(Published(0, 5, 0))

    def close(self):
        for connection in self.connections:
            connection.close()
        self.ledger.close()
        self.arena.close()

    def start_buffer(self):
        """Start a new buffer, as after a kill of the last."""
        self.ledger = Ledger(self.arena.ledger[:], HOUSE_LAYOUT)
        allocator = ExtentAllocator(self.arena.payload_bytes)
        self.buffer = Buffer(
            self.ledger,
            allocator,
            HOUSE_LIMITS,
            lambda peer, message: self.post[peer].send(message),
            self.counts,
            workers=1,
            last_position=lambda: self.prompts,
        )

    def turn(self, *, work=True):
        for message in self.post["buffer"].receive():
            self.buffer.handle(message, 0.0)
        self.buffer.step(0.0)
        for message in self.post["worker-0"].receive():
            if isinstance(message, Ticket) and work:
                self.seal(message)
        for message in self.post["buffer"].receive():
            self.buffer.handle(message, 0.0)
        self.buffer.step(0.0)

    def seal(self, ticket):
        experience = made_up(rows=ticket.prompts, seed=ticket.ticket)
        self.rolled[ticket.ticket] = experience
        encoded = codec.encode(experience, self.arena.extent(ticket.offset, ticket.nbytes))
        self.post["buffer"].send(
            Sealed(
                "worker-0",
                ticket.ticket,
                ticket.prompts,
                encoded.nbytes,
                encoded.checksum,
                *self.ledger.versions.entries()[-1],
            ),
        )

    def connect(self, **options):
        connection = Connection(
            self.arena,
            self.weights_path,
            self.post["trainer-0"],
            self.post["buffer"],
            rank=0,
            world_size=1,
            **({"gathering": Gathering(ahead=self.copy_ahead)} | options),
        )
        self.connections.append(connection)
        return connection

    def batch(self, connection):
        for _ in range(4):
            self.turn()
            connection.receive(0.0)
            if (batch := connection.poll(ragged=self.ragged)) is not None:
                assert isinstance(batch.content, RaggedRows) is self.ragged
                return batch
        raise AssertionError("no batch came")
