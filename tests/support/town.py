"""A buffer among workers and trainer ranks with memories of their own, any of which may fail at any message.

The ranks behave like the built-in trainer: in lock-step, a version each `accumulation` rounds, published by rank 0,
which acknowledges. Each rank checks the buffer's guarantees on a batch before it trains on it.
"""

import dataclasses
import random

import msgspec

from pipeline.buffer.admission import Limits
from pipeline.runtime.evaluation_plan import EvaluationPlan
from pipeline.runtime.messages import (
    Credit,
    Damaged,
    Evaluated,
    Failed,
    Faulty,
    Hello,
    Lease,
    PeerDied,
    Published,
    Release,
    Sealed,
    Settled,
    Ticket,
    WantTickets,
    is_evaluation,
)
from pipeline.storage.card_turns import EngineTurn, RankTurn
from pipeline.storage.records import ExtentState
from pipeline.telemetry.evaluations import PromptResult, find, newest
from tests.support.protocol import Bench

WORKERS = 2


@dataclasses.dataclass
class Worker:
    """A rollout worker: the weights it holds, its tickets, and its messages that the buffer has not settled."""

    incarnation: int
    weights: tuple[int, int]
    tickets: dict[int, Ticket] = dataclasses.field(default_factory=dict)
    unsettled: dict[int, Sealed | Failed | Faulty | Evaluated] = dataclasses.field(default_factory=dict)
    turn: EngineTurn | None = None
    is_loaded: bool = True


@dataclasses.dataclass
class Rank:
    """A trainer rank, with the rules of `pipeline.trainer.connection.Connection`."""

    incarnation: int
    queue: list[Lease] = dataclasses.field(default_factory=list)
    newest: int = -1
    damaged: Damaged | None = None
    turn: RankTurn | None = None
    is_stepping: bool = False


class Book:
    """The complete evaluations; it outlives the buffer."""

    def __init__(self):
        self.found = []

    def newest(self, version, fingerprint_of):
        return newest(self.found, version, fingerprint_of)

    def find(self, version, fingerprint, plan):
        return find(self.found, version, f"{fingerprint:016x}", plan)

    def add(self, evaluation):
        self.found.append(evaluation)


def plan(every, prompts=(5, 2), num_generations=2):
    names = tuple(f"file-{number}" for number in range(len(prompts)))
    return EvaluationPlan(every, num_generations, num_generations, names, prompts, 2, "plan")


def results_of(ticket, responses=2):
    """Return the results of a worker for an evaluation ticket: prompt p has p mod 3 right responses of 2."""
    positions = range(ticket.position, ticket.position + ticket.prompts)
    return [PromptResult(p, responses, min(p % 3, responses), p / 10, p + 1.0, p % 2) for p in positions]


class Town:
    """The simulation; each method is one event."""

    def __init__(
        self,
        *,
        staleness=0,
        world_size=1,
        accumulation=1,
        batch=8,
        seed=0,
        evaluate_every=0,
        max_refill=0,
        limit=0,
        is_flat=lambda position: False,
        fails=lambda position: False,
        card=None,
    ):
        # The folder of the turns on a card that all ranks and engines share; None: each has memory of its own.
        self.card = card
        self.slept = 0
        # Whether the group of a prompt has no signal, by its position.
        self.is_flat = is_flat or (lambda position: False)
        # Whether a prompt gives no rows, by its position.
        self.fails = fails
        # Position and prompts of the ticket, and the row, of each trained row, by lease.
        self.trained = {}
        self.rng = random.Random(seed)
        self.world_size, self.accumulation = world_size, accumulation
        self.limits = Limits(
            sample_batch_size=batch,
            rows_per_version=batch * world_size * accumulation,
            group_size=2,
            prompts_per_ticket=2,
            max_staleness=staleness,
            limit_batches=limit,
            world_size=world_size,
            row_bytes=100,
            max_attempts=100_000,
            max_refill=max_refill,
        )
        self.every, self.book = evaluate_every, Book()
        evaluation = {"plan": plan(evaluate_every), "book": self.book} if evaluate_every else {}
        self.bench = Bench(self.limits, workers=WORKERS, **evaluation)
        self.incarnations = 10
        self.fingerprints = 100
        self.batches = 0
        self.rolled_back = 0
        # The content of shared memory: the newest weights, and the leases that they include.
        self.weights, self.through = (0, 100), 0
        self.valid = {self.weights}
        self.said = Published(0, 100, 0)
        self.workers = [Worker(0, self.weights) for _ in range(WORKERS)]
        self.ranks = [Rank(0) for _ in range(world_size)]
        self.bench.say(self.said)
        for index in range(WORKERS):
            self.worker_starts(index)
        self.trainer_starts()

    @property
    def ledger(self):
        return self.bench.ledger

    def incarnation(self):
        self.incarnations += 1
        return self.incarnations

    # Messages.

    def deliver(self):
        """Deliver all messages."""
        sent, self.bench.sent = self.bench.sent, []
        self._read(sent)

    def _read(self, mail):
        for peer, message in mail:
            role, _, index = peer.partition("-")
            if role == "worker":
                self._worker_reads(self.workers[int(index)], message)
            else:
                self._rank_reads(self.ranks[int(index)], message)

    def _worker_reads(self, worker, message):
        if getattr(message, "to", worker.incarnation) != worker.incarnation:
            return
        if isinstance(message, Ticket):
            if message.ticket not in worker.unsettled:
                worker.tickets[message.ticket] = message
        elif isinstance(message, Settled):
            worker.unsettled.pop(message.ticket, None)

    def _rank_reads(self, rank, message):
        if isinstance(message, Lease) and message.to == rank.incarnation and message.lease > rank.newest:
            rank.newest = message.lease
            rank.damaged = None
            rank.queue.append(message)

    # Workers.

    def worker_starts(self, index):
        if (turn := self.workers[index].turn) is not None:
            turn.close()
        self.workers[index] = Worker(self.incarnation(), (-1, 0))
        if self.card is not None:
            self.workers[index].turn, self.workers[index].is_loaded = EngineTurn(self.card), False
        self.worker_connects(index)

    def worker_connects(self, index):
        """Load the engine awake, in its turn, then connect."""
        worker, name = self.workers[index], f"worker-{index}"
        if worker.turn is not None and (worker.is_loaded or not worker.turn.take()):
            return
        worker.is_loaded = True
        self.bench.say(Hello(name, worker.incarnation), WantTickets(name, worker.incarnation, 2))

    def rest(self, index):
        """Have the engine of a worker without tickets sleep, if a rank asks for the card."""
        worker = self.workers[index]
        if worker.turn is not None and worker.turn.is_awake and not worker.tickets and worker.turn.is_wanted():
            worker.turn.give_back()
            self.slept += 1

    def worker_dies(self, index):
        self.bench.say(PeerDied(f"worker-{index}"))
        self.worker_starts(index)

    def roll(self, index, *, lost=False, shorter=False, fault=""):
        """Work on the oldest ticket; the worker's message about it may be lost, or wrong."""
        worker = self.workers[index]
        self.worker_connects(index) if not worker.is_loaded else self.rest(index)
        if not worker.tickets or not (worker.turn is None or worker.turn.take()):
            return
        ticket = worker.tickets.pop(min(worker.tickets))
        if ticket.evaluation >= 0:
            self._evaluate(index, ticket, lost=lost, fault=fault)
            return
        record = self.ledger.extents[ticket.ticket]
        room = (record.state, record.owner, record.offset)
        assert room == (ExtentState.RESERVED, index, ticket.offset), "a worker writes into its own room only"
        if ticket.policy_version != worker.weights[0] or self.weights[0] <= worker.weights[0]:
            worker.weights = self.weights
        positions = range(ticket.position, ticket.position + ticket.prompts - (shorter and ticket.prompts > 1))
        whole = [position for position in positions if not self.fails(position)]
        rows = 2 * len(whole)
        version, fingerprint = worker.weights
        flat = [group for group, position in enumerate(whole) if self.is_flat(position)]
        sealed = Sealed(f"worker-{index}", ticket.ticket, rows, 50 * rows, 1, version, fingerprint, flat=flat)
        if fault == "rows":
            sealed = Sealed(sealed.worker, sealed.ticket, rows + 99, 50, 1, version, fingerprint)
        elif fault == "fingerprint":
            sealed = Sealed(sealed.worker, sealed.ticket, rows, 50, 1, version, 7)
        elif fault == "not finite":
            sealed = Faulty(sealed.worker, sealed.ticket, "not_finite", "", rows, 50, 1, version, fingerprint)
        if not rows:
            sealed = Failed(f"worker-{index}", ticket.ticket, "no", False, ticket.attempt)
        worker.unsettled[ticket.ticket] = sealed
        if not lost:
            self.bench.say(sealed)

    def _evaluate(self, index, ticket, *, lost, fault):
        worker = self.workers[index]
        if ticket.policy_version != worker.weights[0] or self.weights[0] <= worker.weights[0]:
            worker.weights = self.weights
        version, fingerprint = worker.weights
        results = results_of(ticket, responses=9 if fault == "rows" else 2)
        if fault == "fingerprint":
            fingerprint = 7
        evaluated = Evaluated(f"worker-{index}", ticket.ticket, version, fingerprint, results, ticket.attempt)
        if fault == "not finite":
            evaluated = Failed(f"worker-{index}", ticket.ticket, "no", True, ticket.attempt)
        worker.unsettled[ticket.ticket] = evaluated
        if not lost:
            self.bench.say(evaluated)

    # Trainer ranks.

    def trainer_starts(self):
        """All ranks start, from the newest weights."""
        self._new_ranks()
        self.said = Published(*self.weights, self.through)
        self.bench.say(self.said)
        for index in range(self.world_size):
            self._introduce(index)

    def _new_ranks(self):
        for rank in self.ranks:
            if rank.turn is not None:
                rank.turn.close()
        self.ranks = [Rank(self.incarnation()) for _ in range(self.world_size)]
        if self.card is not None:
            for index, rank in enumerate(self.ranks):
                rank.turn = RankTurn(self.card, index)

    def may_step(self):
        """Return whether all ranks have their batches, and then their turns."""
        if any(len(rank.queue) < self.accumulation for rank in self.ranks):
            return False
        for rank in self.ranks:
            rank.is_stepping = rank.is_stepping or rank.turn is None or rank.turn.take()
        return all(rank.is_stepping for rank in self.ranks)

    def _introduce(self, index):
        rank, name = self.ranks[index], f"trainer-{index}"
        held = [lease.lease for lease in rank.queue]
        self.bench.say(
            Hello(name, rank.incarnation, held, rank.newest < 0),
            Credit(name, rank.incarnation, self.accumulation + 1),
        )

    def train(self, *, lost=False):
        """Train one version, if every rank has its batches."""
        if not self.may_step():
            return
        if self.every and self.weights[0] % self.every == 0:
            assert self.book.find(*self.weights, "plan"), "a version that is due has no successor before"
        for rank in self.ranks:
            for lease in rank.queue[: self.accumulation]:
                self._check(lease)
        self.through = (self.ranks[0].queue[self.accumulation - 1].lease // self.world_size + 1) * self.world_size
        for rank in self.ranks:
            del rank.queue[: self.accumulation]
            rank.is_stepping = False
            if rank.turn is not None:
                rank.turn.give_back()
        self.batches += self.accumulation * self.world_size
        self._publish(self.weights[0] + 1, lost=lost)

    def _check(self, lease):
        assert lease.for_version == self.weights[0], "the number tells the version"
        assert sum(len(part.rows) for part in lease.parts) == self.limits.sample_batch_size
        for part in lease.parts:
            record = self.ledger.extents[part.ticket]
            leased = [(row, record.items[row].lease) for row in part.rows]
            assert all(number == lease.lease for _, number in leased), "a rank acknowledges the rows that it trains on"
            assert (record.policy_version, record.fingerprint) in self.valid, "of weights that exist"
            assert lease.for_version - part.policy_version <= self.limits.max_staleness, "within the bound"
            rows = [(record.position, record.prompts, row) for row in part.rows]
            self.trained.setdefault(lease.lease, []).extend(rows)

    def _publish(self, version, *, lost=False, rollback=False):
        self.fingerprints += 1
        self.weights = (version, self.fingerprints)
        self.valid = {weights for weights in self.valid if weights[0] < version} | {self.weights}
        self.said = Published(*self.weights, self.through, rollback)
        if not lost:
            self.bench.say(self.said)

    def trainer_dies(self, *, at=0):
        """All ranks die with rank `at`; only its batch counts as the cause."""
        for index, rank in enumerate(self.ranks):
            working_on = rank.queue[0].lease if rank.queue and index == at else -1
            self.bench.say(PeerDied(f"trainer-{index}", working_on))
        self.trainer_starts()

    def trainer_comes_again(self, *, overtaken):
        """All ranks close and connect anew; the buffer may read their returned leases after their new hello."""
        handed_back = [
            Release(f"trainer-{index}", lease.lease, rank.incarnation)
            for index, rank in enumerate(self.ranks)
            for lease in rank.queue
        ]
        self.bench.say(*(Credit(f"trainer-{index}", rank.incarnation, 0) for index, rank in enumerate(self.ranks)))
        if not overtaken:
            self.bench.say(*handed_back)
        self.trainer_starts()
        if overtaken:
            self.bench.say(*handed_back)

    def trainer_rolls_back(self, versions):
        """The trainer dies and goes on from an older checkpoint."""
        for index in range(self.world_size):
            self.bench.say(PeerDied(f"trainer-{index}"))
        self._new_ranks()
        back_to = max(0, self.weights[0] - versions)
        if back_to < self.weights[0]:
            self.rolled_back += 1
            self._publish(back_to, rollback=True)
        for index in range(self.world_size):
            self._introduce(index)

    def damage(self, index, *, lost=False):
        """A rank finds an extent of its next batch damaged."""
        rank = self.ranks[index]
        if not rank.queue or rank.is_stepping or (rank.turn is not None and rank.turn.is_asking):
            # A batch is read before its step is due.
            return
        lease = rank.queue[0]
        rank.queue.clear()
        rank.newest, rank.incarnation = lease.lease - 1, self.incarnation()
        rank.damaged = Damaged(f"trainer-{index}", lease.lease, [lease.parts[0].ticket], "torn", rank.incarnation)
        if not lost:
            self.bench.say(rank.damaged)

    # The buffer.

    def buffer_dies(self):
        """The buffer dies; its peers repeat to the new one the messages that it may have missed.

        Its last message to each peer is lost with it, or was read before, or is read only after the repeats.
        """
        mail, self.bench.sent = self.bench.sent, []
        fate = {peer: self.rng.choice(("lost", "read", "unread")) for peer, _ in mail}
        self._read([(peer, message) for peer, message in mail if fate[peer] == "read"])
        self.bench.restart()
        self.bench.sent.clear()
        for index, worker in enumerate(self.workers):
            worker.incarnation = self.incarnation()
            if not worker.is_loaded:
                continue
            for tickets in (worker.tickets, worker.unsettled):
                for number in [number for number in tickets if is_evaluation(number)]:
                    del tickets[number]
            name, held = f"worker-{index}", [*worker.tickets, *worker.unsettled]
            self.bench.say(Hello(name, worker.incarnation, held, fresh=False))
            self.bench.say(*worker.unsettled.values())
            self.bench.say(WantTickets(name, worker.incarnation, 2))
        for index, rank in enumerate(self.ranks):
            rank.incarnation = self.incarnation()
            if index == 0:
                self.bench.say(self.said)
            if rank.damaged is not None:
                rank.damaged = msgspec.structs.replace(rank.damaged, incarnation=rank.incarnation)
                self.bench.say(rank.damaged)
            self._introduce(index)
        self._read([(peer, message) for peer, message in mail if fate[peer] == "unread"])

    # All of it.

    def close(self):
        """Close the turns."""
        for peer in (*self.workers, *self.ranks):
            if peer.turn is not None:
                peer.turn.close()
                peer.turn = None

    def check_books(self):
        if self.card is not None:
            awake = [worker for worker in self.workers if worker.turn is not None and worker.turn.is_awake]
            assert not (awake and any(rank.is_stepping for rank in self.ranks)), "an engine is awake during a step"
        ledger, totals = self.ledger, self.ledger.totals
        assert self.bench.balanced
        out = set(ledger.leases)
        assert out.isdisjoint(ledger.vacant)
        assert all(totals.trained_through <= lease < totals.leases for lease in ledger.vacant)
        used = sum(-(-max(record.nbytes, 1) // 64) * 64 for record in ledger.extents.values())
        assert used == self.bench.buffer.used_bytes, "room of the arena is neither lost nor given twice"

    def random_event(self):
        """Run a random event; most of them are work."""
        chance, rng = self.rng.random(), self.rng
        index, rank = rng.randrange(WORKERS), rng.randrange(self.world_size)
        if self.card is not None and rng.random() < 0.1:
            self.may_step()
        elif chance < 0.45:
            self.roll(index, shorter=chance < 0.03)
        elif chance < 0.78:
            self.train()
        elif chance < 0.82:
            self.worker_dies(index)
        elif chance < 0.85:
            self.trainer_dies(at=rank)
        elif chance < 0.86:
            self.trainer_comes_again(overtaken=rng.random() < 0.5)
        elif chance < 0.87:
            self.damage(rank)
        elif chance < 0.88:
            self.trainer_rolls_back(rng.randrange(1, 4))
        elif chance < 0.90:
            self.roll(index, fault=rng.choice(["rows", "fingerprint", "not finite"]))
        elif chance < 0.94:
            self.deliver()
        else:
            # A message was in flight when the buffer died.
            rng.choice(
                [
                    lambda: self.roll(index, lost=True),
                    lambda: self.train(lost=True),
                    lambda: self.damage(rank, lost=True),
                    lambda: None,
                ]
            )()
            self.buffer_dies()
        if rng.random() < 0.9:
            self.deliver()
        self.check_books()

    def goes_on(self, versions=3, events=400):
        """Check that, without further failures, `versions` versions are trained within `events` events."""
        start, left = self.weights[0], events
        while self.weights[0] < start + versions:
            assert left, f"stalled: {self.ledger.totals} {self.ledger.vacant} {self.ledger.redo}"
            left -= 1
            self.bench.say()
            self.deliver()
            for index in range(WORKERS):
                self.roll(index)
            self.deliver()
            self.train()
            self.check_books()
