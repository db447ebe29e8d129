"""Random transactions of the ledger against a model in plain Python, its writer killed at any store of any of them."""

import copy

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeline.storage.ledger import Ledger
from pipeline.storage.records import DROP_REASONS
from pipeline.storage.tables import PromptRange
from tests.storage.test_ledger import LAYOUT, DyingMemory, Killed, fresh, indexed, walked

WORLD_SIZE = 2


class Model:
    """A model of the ledger; every method is one transaction, on lists and dictionaries."""

    def __init__(self):
        self.tickets = {}  # number -> [owner, attempt, position, prompts, version, rows]
        self.rows = {}  # (ticket, row) -> [lease or None, deaths]
        self.counts = dict.fromkeys(["sealed", "trained", *DROP_REASONS], 0)
        self.issued = self.position = self.leases = self.through = 0
        self.version = -1
        self.vacant, self.redo, self.published, self.void = set(), set(), {}, set()

    def reserve(self, prompts):
        if self.redo:
            first = min(self.redo)
            self.redo -= set(range(first, first + prompts))
        else:
            first = self.position
            self.position += prompts
        self.tickets[self.issued] = [-1, 0, first, prompts, self.version, None]
        self.issued += 1

    def assign(self, ticket, owner):
        record = self.tickets[ticket]
        record[0] = owner
        if owner >= 0:
            record[1], record[4] = record[1] + 1, self.version

    def excuse(self, ticket):
        record = self.tickets[ticket]
        record[0], record[1] = -1, max(0, record[1] - 1)

    def seal(self, ticket, rows, version):
        self.tickets[ticket][4:] = [version, rows]
        self.rows |= {(ticket, row): [None, 0] for row in range(rows)}
        self.counts["sealed"] += rows

    def abandon(self, ticket):
        del self.tickets[ticket]

    def lease(self, rows):
        number = min(self.vacant, default=self.leases)
        self.leases += number not in self.vacant
        self.vacant.discard(number)
        for row in rows:
            self.rows[row][0] = number

    def _of(self, lease):
        return [row for row, (number, _) in self.rows.items() if number == lease]

    def _gone(self, rows):
        for row in rows:
            del self.rows[row]
            if not any(ticket == row[0] for ticket, _ in self.rows):
                del self.tickets[row[0]]

    def blame(self, lease):
        for row in self._of(lease):
            self.rows[row][1] += 1

    def acknowledge(self, lease):
        self.counts["trained"] += len(self._of(lease))
        self._gone(self._of(lease))

    def requeue(self, lease):
        for row in self._of(lease):
            self.rows[row][0] = None
        if lease >= self.through:
            self.vacant.add(lease)

    def drop(self, ticket, row, reason, redo):
        self.counts[reason] += 1
        if redo:
            self.redo.add(self.tickets[ticket][2] + row)
            self._join_redo()
        self._gone([(ticket, row)])

    def _join_redo(self):
        """The table holds a run an extent: beyond, prompts of the narrowest gap come once more."""
        ends = sorted(position for position in self.redo if position + 1 not in self.redo)
        if len(ends) > LAYOUT.extents:
            gaps = [range(end + 1, min(p for p in self.redo if p > end)) for end in ends[:-1]]
            self.redo |= set(min(gaps, key=len))

    def _renumber(self, through):
        self.through = through
        self.vacant = {lease for lease in self.vacant if lease >= through}

    def publish(self, fingerprint, through):
        self.version += 1
        self.published[self.version] = fingerprint
        self._renumber(through)

    def rebase(self, through):
        self._renumber(through)

    def roll_back(self, version, fingerprint):
        self.published = {v: f for v, f in self.published.items() if v < version} | {version: fingerprint}
        self.version = version
        self.leases = (self.leases + WORLD_SIZE - 1) // WORLD_SIZE * WORLD_SIZE
        self._renumber(self.leases)
        for record in self.tickets.values():
            if record[5] is None:
                record[4] = min(record[4], version)

    def view(self):
        leases = {lease for lease, _ in self.rows.values()} - {None}
        return {
            "tickets": {ticket: tuple(record) for ticket, record in self.tickets.items()},
            "rows": {row: tuple(state) for row, state in self.rows.items()},
            "leases": {lease: sorted(self._of(lease)) for lease in leases},
            "totals": (self.counts, self.issued, self.position, self.leases, self.version, self.through),
            "tables": (sorted(self.vacant), sorted(self.redo), sorted(self.published.items())),
        }


def view(ledger):
    """The same of a ledger."""
    totals = ledger.totals
    counts = {
        "sealed": totals.sealed,
        "trained": totals.trained,
        **dict(zip(DROP_REASONS, totals.dropped, strict=True)),
    }
    return {
        "tickets": {
            r.ticket: (r.owner, r.attempt, r.position, r.prompts, r.policy_version, r.rows if r.items else None)
            for r in ledger.extents.values()
        },
        "rows": {
            (record.ticket, row): (item.lease if item.state == 2 else None, item.deaths)
            for record in ledger.sealed_extents()
            for row, item in enumerate(record.items)
            if item.state
        },
        "leases": {
            lease: sorted((record.ticket, row) for record, rows in parts for row in rows)
            for lease, parts in ledger.leases.items()
        },
        "totals": (
            counts, totals.tickets, totals.position, totals.leases, totals.policy_version, totals.trained_through
        ),
        "tables": (
            ledger.vacant,
            [position for run in ledger.redo for position in range(run.position, run.position + run.prompts)],
            ledger.versions.entries(),
        ),
    }  # fmt: skip


class LedgerMachine(RuleBasedStateMachine):
    """Each transaction may be the writer's last: at the given store it is killed, and the next one opens the ledger."""

    def __init__(self):
        super().__init__()
        self.memory, self.model, self.fingerprint = fresh(), Model(), 0
        self.ledger = Ledger(self.memory, LAYOUT)

    def transact(self, stores, change, change_model):
        before, after = self.model.view(), copy.deepcopy(self.model)
        change_model(after)
        if stores is not None:
            journal, budget = self.ledger.memory.redo_log, [stores]
            journal.memory = DyingMemory(self.memory, budget)
            journal.marks = DyingMemory(self.memory[:32].cast("Q"), budget)
        try:
            change(self.ledger)
        except Killed:
            self.ledger = Ledger(self.memory, LAYOUT)
            assert view(self.ledger) in (before, after.view()), "before or after the transaction, never between"
            if view(self.ledger) == before:
                return
        else:
            if stores is not None:
                journal.memory, journal.marks = self.memory, self.memory[:32].cast("Q")
        self.model = after

    STORES = st.none() | st.integers(0, 9)
    PICK = st.integers(0, 999)

    def reserved(self):
        return [ticket for ticket, record in self.model.tickets.items() if record[5] is None]

    def ready(self):
        return sorted(row for row, (lease, _) in self.model.rows.items() if lease is None)

    def leased(self):
        return sorted({lease for lease, _ in self.model.rows.values()} - {None})

    @precondition(lambda self: self.ledger.has_free_slot())
    @rule(prompts=st.integers(1, 4), stores=STORES)
    def reserve(self, prompts, stores):
        if self.ledger.redo:
            prompts = min(prompts, self.ledger.redo[0].prompts)
        self.transact(
            stores,
            lambda ledger: ledger.reserve(rows=prompts, prompts=prompts, offset=0, nbytes=100),
            lambda model: model.reserve(prompts),
        )

    @precondition(lambda self: self.ledger.has_free_slot())
    @rule()
    def reserve_and_seal(self):
        self.reserve(prompts=4, stores=None)
        ticket, version = max(self.model.tickets), self.model.version
        rows = self.ledger.extents[ticket].rows
        self.transact(
            None,
            lambda ledger: ledger.seal(
                ledger.extents[ticket],
                rows=rows,
                nbytes=9,
                checksum=5,
                policy_version=version,
                fingerprint=9,
                now_s=1.0,
            ),
            lambda model: model.seal(ticket, rows, version),
        )

    @precondition(lambda self: self.reserved())
    @rule(pick=PICK, owner=st.integers(-1, 3), stores=STORES)
    def assign(self, pick, owner, stores):
        ticket = self.reserved()[pick % len(self.reserved())]
        self.transact(
            stores,
            lambda ledger: ledger.assign(ledger.extents[ticket], owner),
            lambda model: model.assign(ticket, owner),
        )

    @precondition(lambda self: self.reserved())
    @rule(pick=PICK, stores=STORES)
    def excuse(self, pick, stores):
        ticket = self.reserved()[pick % len(self.reserved())]
        self.transact(stores, lambda ledger: ledger.excuse(ledger.extents[ticket]), lambda model: model.excuse(ticket))

    @precondition(lambda self: self.reserved())
    @rule(pick=PICK, fewer=st.integers(0, 3), stores=STORES)
    def seal(self, pick, fewer, stores):
        ticket = self.reserved()[pick % len(self.reserved())]
        rows, version = max(1, self.ledger.extents[ticket].rows - fewer), self.ledger.totals.policy_version
        self.transact(
            stores,
            lambda ledger: ledger.seal(
                ledger.extents[ticket],
                rows=rows,
                nbytes=9,
                checksum=5,
                policy_version=version,
                fingerprint=9,
                now_s=1.0,
            ),
            lambda model: model.seal(ticket, rows, version),
        )

    @precondition(lambda self: self.reserved())
    @rule(pick=PICK, stores=STORES)
    def abandon(self, pick, stores):
        ticket = self.reserved()[pick % len(self.reserved())]
        self.transact(
            stores, lambda ledger: ledger.abandon(ledger.extents[ticket]), lambda model: model.abandon(ticket)
        )

    @precondition(lambda self: self.ready())
    @rule(pick=PICK, count=st.integers(1, 3), stores=STORES)
    def lease(self, pick, count, stores):
        start = pick % len(self.ready())
        rows = self.ready()[start : start + count]
        tickets = sorted({ticket for ticket, _ in rows})

        def change(ledger):
            ledger.lease([(ledger.extents[t], [row for ticket, row in rows if ticket == t]) for t in tickets])

        self.transact(stores, change, lambda model: model.lease(rows))

    @precondition(lambda self: self.leased())
    @rule(pick=PICK, how=st.sampled_from(["requeue", "requeue", "acknowledge", "blame"]), stores=STORES)
    def change_lease(self, pick, how, stores):
        lease = self.leased()[pick % len(self.leased())]
        self.transact(stores, lambda ledger: getattr(ledger, how)(lease), lambda model: getattr(model, how)(lease))

    @precondition(lambda self: self.ready())
    @rule(pick=PICK, reason=st.sampled_from(DROP_REASONS), redo=st.booleans(), stores=STORES)
    def drop(self, pick, reason, redo, stores):
        ticket, row = self.ready()[pick % len(self.ready())]
        run = PromptRange(self.model.tickets[ticket][2] + row, 1) if redo else None
        self.transact(
            stores,
            lambda ledger: ledger.drop([(ledger.extents[ticket], [row])], reason, redo=run),
            lambda model: model.drop(ticket, row, reason, redo),
        )

    @rule(more=st.integers(-5, 2), stores=STORES)
    def publish(self, more, stores):
        self.fingerprint += 1
        through = min(self.model.through + max(0, more), self.model.leases)
        version, fingerprint = self.model.version + 1, self.fingerprint
        self.transact(
            stores,
            lambda ledger: ledger.publish(version, fingerprint, through),
            lambda model: model.publish(fingerprint, through),
        )

    @rule(more=st.integers(-5, 2), stores=STORES)
    def rebase(self, more, stores):
        through = min(self.model.through + max(0, more), self.model.leases)
        self.transact(stores, lambda ledger: ledger.rebase(through), lambda model: model.rebase(through))

    @precondition(lambda self: self.model.version >= 0)
    @rule(back=st.integers(0, 3), stores=STORES)
    def roll_back(self, back, stores):
        self.fingerprint += 1
        version, fingerprint = max(0, self.model.version - back), self.fingerprint
        self.transact(
            stores,
            lambda ledger: ledger.roll_back(version, fingerprint, world_size=WORLD_SIZE, redo=[]),
            lambda model: model.roll_back(version, fingerprint),
        )

    @rule()
    def restart(self):
        self.ledger = Ledger(self.memory, LAYOUT)

    @invariant()
    def ledger_and_model_agree(self):
        assert view(self.ledger) == self.model.view()
        totals, ledger = self.ledger.totals, self.ledger
        assert totals.sealed == totals.trained + sum(totals.dropped) + ledger.ready + ledger.leased
        assert ledger.reserved == sum(record.rows for record in ledger.reserved_extents())
        assert indexed(ledger) == walked(ledger)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(stateful_step_count=50)
