"""The ledger: transitions, the books, and what a buffer killed at any store leaves behind."""

import copy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeline.errors import LedgerError
from pipeline.ledger import Ledger
from pipeline.ledger_records import DROP_REASONS, ExtentState, LedgerLayout

LAYOUT = LedgerLayout(extents=6, rows_per_extent=4)


class Killed(BaseException):
    """The process is gone."""


class DyingMemory:
    """Shared memory whose writer dies when the budget of stores is spent; what was stored before stays."""

    def __init__(self, memory, budget):
        self.memory = memory
        self.budget = budget

    def __getitem__(self, key):
        return self.memory[key]

    def __setitem__(self, key, value):
        if self.budget[0] == 0:
            raise Killed
        self.budget[0] -= 1
        self.memory[key] = value


def open_ledger(memory):
    return Ledger(memory, LAYOUT)


def fresh():
    return memoryview(bytearray(LAYOUT.nbytes))


def reserve(ledger, rows=4):
    return ledger.reserve(rows=rows, prompts=rows, offset=0, nbytes=100)


def seal(ledger, record, rows=4):
    ledger.assign(record, 0)
    ledger.seal(record, rows=rows, nbytes=90, checksum=5, policy_version=0, fingerprint=9, now_s=1.0)


def books(ledger):
    totals = ledger.totals
    return totals.sealed, totals.trained, sum(totals.dropped), ledger.ready, ledger.leased


def balanced(ledger):
    sealed, trained, dropped, ready, leased = books(ledger)
    return sealed == trained + dropped + ready + leased


def test_an_item_goes_from_ticket_to_trained():
    ledger = open_ledger(fresh())
    record = reserve(ledger)
    seal(ledger, record)

    lease = ledger.lease([(record, [0, 1])])
    assert books(ledger) == (4, 0, 0, 2, 2)

    freed = ledger.acknowledge(lease)
    assert books(ledger) == (4, 2, 0, 2, 0)
    assert freed == [], "two rows still hold the extent"

    assert ledger.drop([(record, [2, 3])], "stale") == [record]
    assert books(ledger) == (4, 2, 2, 0, 0)
    assert record.state is ExtentState.FREE


def test_an_unsealed_extent_cannot_be_leased():
    ledger = open_ledger(fresh())
    record = reserve(ledger)

    with pytest.raises(IndexError):
        ledger.lease([(record, [0])])


def test_a_leased_row_cannot_be_leased_again():
    ledger = open_ledger(fresh())
    record = reserve(ledger)
    seal(ledger, record)
    ledger.lease([(record, [0])])

    with pytest.raises(LedgerError, match="row 0 is LEASED"):
        ledger.lease([(record, [0])])


def test_sealing_more_rows_than_reserved_is_refused():
    ledger = open_ledger(fresh())
    record = reserve(ledger, rows=2)

    with pytest.raises(LedgerError, match="sealed 4 rows in 90 B, reserved 2"):
        seal(ledger, record, rows=4)


def test_a_ticket_is_sealed_once():
    ledger = open_ledger(fresh())
    record = reserve(ledger)
    seal(ledger, record)

    with pytest.raises(LedgerError, match="is SEALED, expected RESERVED"):
        seal(ledger, record)


def test_a_full_table_refuses_reserve():
    ledger = open_ledger(fresh())
    for _ in range(LAYOUT.extents):
        reserve(ledger)

    assert not ledger.has_free_slot()
    with pytest.raises(LedgerError, match="all 6 extents are in use"):
        reserve(ledger)


def test_the_next_buffer_reads_what_the_last_one_wrote():
    memory = fresh()
    ledger = open_ledger(memory)
    first, second = reserve(ledger), reserve(ledger)
    seal(ledger, first)
    ledger.assign(second, 3)
    lease = ledger.lease([(first, [1, 2])])
    ledger.publish(7, 1)

    again = open_ledger(memory)

    assert again.extents == ledger.extents
    assert again.totals == ledger.totals
    assert again.leases() == ledger.leases() == {lease: [(first, [1, 2])]}
    assert (again.ready, again.leased, again.reserved) == (2, 2, 4)


def test_memory_too_small_for_the_layout_is_refused():
    with pytest.raises(LedgerError, match="does not fit into 100 B"):
        Ledger(memoryview(bytearray(100)), LAYOUT)


def test_a_torn_journal_is_refused_rather_than_replayed():
    memory = fresh()
    reserve(open_ledger(memory))
    memory[:32].cast("Q")[0] += 1
    memory[40] ^= 0xFF

    with pytest.raises(LedgerError, match="torn"):
        open_ledger(memory)


def every_operation(ledger):
    """One of each transaction, as (name, call) in an order that is legal."""
    record = reserve(ledger)
    yield "reserve"
    ledger.assign(record, 1)
    yield "assign"
    ledger.seal(record, rows=3, nbytes=50, checksum=1, policy_version=2, fingerprint=3, now_s=1.0)
    yield "seal"
    lease = ledger.lease([(record, [0, 1])])
    yield "lease"
    ledger.redeliver(lease)
    yield "redeliver"
    ledger.acknowledge(lease)
    yield "acknowledge"
    lease = ledger.lease([(record, [2])])
    yield "lease"
    ledger.requeue(lease)
    yield "requeue"
    ledger.drop([(record, [2])], "filtered")
    yield "drop"
    ledger.publish(3, 2)
    yield "publish"
    record = reserve(ledger)
    yield "reserve"
    ledger.abandon(record)
    yield "abandon"


def state_of(ledger):
    return ledger.extents, ledger.totals, ledger.leases(), ledger.ready, ledger.leased, ledger.reserved


def test_a_buffer_killed_at_any_store_leaves_the_state_before_or_after_its_transaction():
    reference = open_ledger(fresh())
    legal = [copy.deepcopy(state_of(reference))]
    legal += [copy.deepcopy(state_of(reference)) for _ in every_operation(reference)]
    stores, killed = 0, True
    while killed:
        memory = fresh()
        dying = open_ledger(memory)
        budget = [stores]
        journal = dying._journal
        journal.memory, journal.marks = DyingMemory(memory, budget), DyingMemory(memory[:32].cast("Q"), budget)
        try:
            for _ in every_operation(dying):
                pass
            killed = False
        except Killed:
            survivor = open_ledger(memory)
            assert balanced(survivor), f"killed at store {stores}: {books(survivor)}"
            assert state_of(survivor) in legal, f"killed at store {stores}"
            stores += 1
    assert stores > 60, "the sweep reached every store"


class LedgerMachine(RuleBasedStateMachine):
    """Random transactions with a restart of the buffer as one more step, against a model that only counts."""

    def __init__(self):
        super().__init__()
        self.memory = fresh()
        self.ledger = open_ledger(self.memory)
        self.trained = self.sealed = self.dropped = 0

    def reserved(self):
        return list(self.ledger.reserved_extents())

    def ready(self):
        return [
            (record, row)
            for record in self.ledger.sealed_extents()
            for row, item in enumerate(record.items)
            if item.state == 1
        ]

    @precondition(lambda self: self.ledger.has_free_slot())
    @rule(rows=st.integers(1, 4))
    def issue(self, rows):
        reserve(self.ledger, rows)

    @precondition(lambda self: self.reserved())
    @rule(pick=st.integers(0, 99), fewer=st.integers(0, 3))
    def seal(self, pick, fewer):
        record = self.reserved()[pick % len(self.reserved())]
        rows = max(1, record.rows - fewer)
        seal(self.ledger, record, rows)
        self.sealed += rows

    @precondition(lambda self: self.reserved())
    @rule(pick=st.integers(0, 99))
    def abandon(self, pick):
        self.ledger.abandon(self.reserved()[pick % len(self.reserved())])

    @precondition(lambda self: self.ready())
    @rule(pick=st.integers(0, 99))
    def lease(self, pick):
        record, row = self.ready()[pick % len(self.ready())]
        self.ledger.lease([(record, [row])])

    @precondition(lambda self: self.ledger.leases())
    @rule(pick=st.integers(0, 99), trained=st.booleans())
    def end_lease(self, pick, trained):
        leases = sorted(self.ledger.leases())
        lease = leases[pick % len(leases)]
        if trained:
            self.trained += sum(len(rows) for _, rows in self.ledger.leases()[lease])
            self.ledger.acknowledge(lease)
        else:
            self.ledger.requeue(lease)

    @precondition(lambda self: self.ready())
    @rule(pick=st.integers(0, 99), reason=st.sampled_from(DROP_REASONS))
    def drop(self, pick, reason):
        record, row = self.ready()[pick % len(self.ready())]
        self.ledger.drop([(record, [row])], reason)
        self.dropped += 1

    @rule()
    def restart(self):
        self.ledger = open_ledger(self.memory)

    @invariant()
    def books_balance(self):
        sealed, trained, dropped, _, _ = books(self.ledger)
        assert (sealed, trained, dropped) == (self.sealed, self.trained, self.dropped)
        assert balanced(self.ledger)
        assert self.ledger.reserved == sum(record.rows for record in self.reserved())


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
