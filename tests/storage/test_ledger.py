"""The ledger: transitions, totals, and the state after a buffer is killed at any store."""

import collections
import copy

import pytest

from pipeline.errors import LedgerError
from pipeline.storage.layout import LedgerLayout
from pipeline.storage.ledger import Ledger
from pipeline.storage.records import ExtentState
from pipeline.storage.tables import PromptRange, add_prompts, between

LAYOUT = LedgerLayout(extents=6, rows_per_extent=4)


class Killed(BaseException):
    """The process is gone."""


class DyingMemory:
    """Shared memory whose writer dies after a number of stores; the earlier stores stay."""

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

    with pytest.raises(LedgerError, match="lease 1: a row is LEASED"):
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


def test_a_ticket_reserved_for_a_worker_is_what_a_reserved_and_assigned_one_is():
    at_once, in_two_steps = fresh(), fresh()
    open_ledger(at_once).reserve(rows=4, prompts=4, offset=64, nbytes=100, owner=3)
    ledger = open_ledger(in_two_steps)
    ledger.assign(ledger.reserve(rows=4, prompts=4, offset=64, nbytes=100), 3)

    (one,), (other,) = (open_ledger(memory).extents.values() for memory in (at_once, in_two_steps))

    assert one == other
    assert (one.owner, one.attempt, one.state) == (3, 1, ExtentState.RESERVED)


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
    ledger.publish(7, 9, 1)

    again = open_ledger(memory)

    assert again.extents == ledger.extents
    assert again.totals == ledger.totals
    assert again.leases == ledger.leases == {lease: [(first, [1, 2])]}
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


def test_a_batch_takes_the_lowest_vacant_number_before_a_new_one():
    ledger = open_ledger(fresh())
    record = reserve(ledger)
    seal(ledger, record)
    numbers = [ledger.lease([(record, [row])]) for row in range(3)]

    ledger.requeue(1)
    ledger.requeue(0)

    assert numbers == [0, 1, 2]
    assert [ledger.lease([(record, [row])]) for row in (0, 1, 3)] == [0, 1, 3]


def test_a_published_version_ends_the_vacancy_of_numbers_that_it_is_past():
    ledger = open_ledger(fresh())
    record = reserve(ledger)
    seal(ledger, record)
    ledger.lease([(record, [0])])
    ledger.requeue(0)

    ledger.publish(1, 9, 1)

    assert ledger.vacant == []
    assert ledger.lease([(record, [0])]) == 1


def test_prompts_that_come_again_are_leased_before_later_ones_and_the_next_buffer_keeps_the_order():
    memory = fresh()
    ledger = open_ledger(memory)
    first, second = reserve(ledger), reserve(ledger)
    seal(ledger, second)
    seal(ledger, first)
    ledger.drop([(first, [0, 1, 2, 3])], "spooled", redo=PromptRange(0, 4))
    seal(ledger, late := reserve(ledger))
    assert late.ticket > second.ticket
    lease = ledger.lease(ledger.index.oldest_rows(8))

    again = open_ledger(memory)

    places = [(record.position, rows) for record, rows in ledger.leases[lease]]
    assert [(record.position, rows) for record, rows in again.leases[lease]] == places
    assert [position for position, _ in places] == [0, 4]


def test_prompts_that_come_again_are_issued_before_new_ones():
    ledger = open_ledger(fresh())
    record = reserve(ledger)
    seal(ledger, record)

    ledger.drop([(record, [1, 2])], "rolled_back", redo=PromptRange(1, 2))

    tickets = [ledger.reserve(rows=2, prompts=2, offset=0, nbytes=1) for _ in range(2)]
    assert [ticket.position for ticket in tickets] == [1, 4]


def test_after_a_rollback_numbers_go_on_at_rank_0_and_old_leases_are_void():
    ledger = open_ledger(fresh())
    record, pending = reserve(ledger), None
    seal(ledger, record)
    for version in range(4):
        ledger.publish(version, 10 + version, 0)
    ledger.lease([(record, [0])])
    pending = reserve(ledger)
    ledger.assign(pending, 0)

    ledger.roll_back(1, 21, world_size=2, redo=[])

    assert (ledger.totals.policy_version, ledger.totals.leases, ledger.totals.trained_through) == (1, 2, 2)
    assert ledger.versions.entries() == [(0, 10), (1, 21)]
    assert [ledger.versions.rolled_back(*pair) for pair in ((0, 10), (1, 11), (1, 21), (3, 13))] == [
        False,
        True,
        False,
        True,
    ]
    assert pending.policy_version == 1
    ledger.requeue(0)
    assert ledger.vacant == [], "a void number is not filled"


@pytest.mark.parametrize(
    ("runs", "more", "joined"),
    [
        ([], PromptRange(3, 2), [PromptRange(3, 2)]),
        ([PromptRange(3, 2)], PromptRange(5, 1), [PromptRange(3, 3)]),
        ([PromptRange(3, 2)], PromptRange(1, 1), [PromptRange(1, 1), PromptRange(3, 2)]),
        ([PromptRange(3, 2)], PromptRange(2, 5), [PromptRange(2, 5)]),
        ([PromptRange(0, 1), PromptRange(10, 1)], PromptRange(13, 1), [PromptRange(0, 1), PromptRange(10, 4)]),
    ],
)
def test_runs_of_prompts_are_joined_and_none_is_lost(runs, more, joined):
    assert add_prompts(runs, more, most=2) == joined


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
    ledger.acknowledge(lease)
    yield "acknowledge"
    lease = ledger.lease([(record, [2])])
    yield "lease"
    ledger.blame(lease)
    yield "blame"
    ledger.requeue(lease)
    yield "requeue"
    ledger.lease([(record, [2])])
    yield "lease, its number vacant"
    ledger.requeue(lease)
    yield "requeue"
    ledger.drop([(record, [2])], "filtered", redo=PromptRange(2, 4))
    yield "drop, its prompts to come again"
    ledger.publish(3, 9, 2)
    yield "publish"
    record = reserve(ledger)
    yield "reserve, of prompts that come again"
    ledger.assign(record, 1)
    yield "assign"
    ledger.roll_back(1, 8, world_size=2, redo=[])
    yield "roll_back"
    ledger.excuse(record)
    yield "excuse"
    ledger.rebase(2)
    yield "rebase"
    ledger.abandon(record)
    yield "abandon"
    record = reserve(ledger)
    yield "reserve"
    empty = ledger.reserve(rows=4, prompts=4, offset=100, nbytes=100, new_round=8)
    yield "reserve, a round begins"
    ledger.seal(record, rows=4, nbytes=50, checksum=1, policy_version=1, fingerprint=8, now_s=2.0, filtered=[1, 2])
    yield "seal, two rows filtered"
    ledger.seal(
        empty, rows=4, nbytes=50, checksum=1, policy_version=1, fingerprint=8, now_s=3.0, filtered=range(4), refilled=2
    )
    yield "seal, all rows filtered"


def walked(ledger):
    """Return the content of the index, computed by a walk over all records."""
    sealed = [record for record in ledger.extents.values() if record.state is ExtentState.SEALED]
    reserved = [record for record in ledger.extents.values() if record.state is ExtentState.RESERVED]
    ready = [(record, [item for item in record.items if item.state.name == "READY"]) for record in sealed]
    held = [(record, rows) for record, rows in ready if rows]
    rows_by_version = {}
    for record, rows in held:
        rows_by_version[record.policy_version] = rows_by_version.get(record.policy_version, 0) + len(rows)
    return {
        "reserved": {record.ticket: record for record in reserved},
        "owned": dict(collections.Counter(record.owner for record in reserved)),
        "reserved_rows": {
            version: sum(record.rows for record in reserved if record.policy_version == version)
            for version in {record.policy_version for record in reserved}
        },
        "order": sorted((record.policy_version, record.position, record.ticket) for record, _ in held),
        "ready_rows": rows_by_version,
        "ready": {record.ticket: len(rows) for record, rows in ready},
        "held": {record.ticket: sum(item.state.name != "GONE" for item in record.items) for record in sealed},
        "ready_bytes": sum(record.nbytes for record, _ in held),
        "sealed_bytes": sum(record.nbytes for record in sealed),
        "position": min((record.position for record in [*reserved, *(record for record, _ in held)]), default=None),
        "seal": min((record.sealed_s for record, _ in held), default=None),
    }


def indexed(ledger):
    index = ledger.index
    return {
        "reserved": index.reserved,
        "owned": index.owned,
        "reserved_rows": index.reserved_rows,
        "order": [(record.policy_version, record.position, record.ticket) for record in index.ready()],
        "ready_rows": index.ready_rows,
        "ready": {record.ticket: record.ready for record in ledger.sealed_extents()},
        "held": {record.ticket: record.held for record in ledger.sealed_extents()},
        "ready_bytes": index.ready_bytes,
        "sealed_bytes": index.sealed_bytes,
        "position": index.lowest_position(),
        "seal": index.oldest_seal_s(),
    }


def state_of(ledger):
    # A look at the rows decodes those that the open left as bytes.
    assert indexed(ledger) == walked(ledger)
    tables = ledger.vacant, ledger.redo, ledger.versions
    return ledger.extents, ledger.totals, tables, ledger.leases, ledger.ready, ledger.leased, ledger.reserved


def test_a_buffer_killed_at_any_store_leaves_the_state_before_or_after_its_transaction():
    reference = open_ledger(fresh())
    legal = [copy.deepcopy(state_of(reference))]
    legal += [copy.deepcopy(state_of(reference)) for _ in every_operation(reference)]
    stores, killed = 0, True
    while killed:
        memory = fresh()
        dying = open_ledger(memory)
        budget = [stores]
        journal = dying.memory.redo_log
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


def test_a_state_that_is_none_is_damage():
    # Hand-placed: the first byte of a record and of an item is its state.
    for offset in ("extents_offset", "items_offset"):
        memory = fresh()
        ledger = open_ledger(memory)
        record = ledger.reserve(rows=2, prompts=1, offset=0, nbytes=64)
        ledger.seal(record, rows=2, nbytes=64, checksum=1, policy_version=0, fingerprint=0, now_s=0.0)
        memory[getattr(ledger.layout, offset) + record.slot * (128 if offset == "extents_offset" else 32)] = 7

        with pytest.raises(LedgerError, match="is in state 7, which is none"):
            open_ledger(memory)


def test_what_lies_between_runs_of_prompts_is_what_none_of_them_holds():
    runs = [PromptRange(4, 2), PromptRange(8, 4), PromptRange(9, 1), PromptRange(20, 5)]
    held = {4, 5, 8, 9, 10, 11, 20, 21, 22, 23, 24}
    for position in range(30):
        for stop in range(position, 30):
            left = [place for run in between(runs, position, stop) for place in range(run.position, sum(run))]
            assert left == sorted(set(range(position, stop)) - held), (position, stop)
