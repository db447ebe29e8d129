"""The buffer against peers that only know the protocol, with deaths of all of them."""

import dataclasses
import typing

import pytest

from pipeline.errors import GaveUpError
from pipeline.runtime.messages import (
    Ack,
    Damaged,
    Drain,
    Exhausted,
    Failed,
    FaultReason,
    Faulty,
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
from pipeline.storage.records import DROP_REASONS, Item
from pipeline.storage.tables import PromptRange
from tests.support.protocol import LIMITS, Bench, one_step, seal_of, sealed, trainer, worker


def issued(bench, **worker_options):
    """The first weights are published, and a worker gets its tickets."""
    bench.say(Published(0, 9, 0), *worker(**worker_options))
    return bench.heard("worker-0", Ticket)


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


def test_rows_that_leave_together_are_never_decoded_one_by_one(monkeypatch):
    """The buffer's cost of an append does not grow with its rows: one item stands for all of them."""
    decoded, unpack_all = [], Item.unpack_all
    monkeypatch.setattr(Item, "unpack_all", lambda data: decoded.append(unpack_all(data)) or decoded[-1])
    bench = Bench()

    lease = one_step(bench)
    bench.say(Ack("trainer-0", lease.lease))

    assert bench.ledger.totals.trained == 8
    assert decoded
    assert {len(items) for items in decoded} == {1}


def test_two_workers_share_the_tickets():
    bench = Bench()

    bench.say(*worker(0), *worker(1), Published(0, 9, 0))

    assert len(bench.heard("worker-0", Ticket)) == len(bench.heard("worker-1", Ticket)) == 1


def test_a_dead_workers_tickets_go_to_another_and_only_the_one_that_it_died_of_has_had_its_attempt():
    bench = Bench()
    first, second = issued(bench, tickets=2)

    bench.say(PeerDied("worker-0", working_on=first.ticket), *worker(1, tickets=2))

    found = {(again.ticket, again.position, again.prompts, again.attempt) for again in bench.heard("worker-1", Ticket)}
    assert found == {(first.ticket, first.position, 2, 2), (second.ticket, second.position, 2, 1)}
    assert bench.counts.ended == {"reissued": 2}


def test_deaths_of_another_cause_use_up_no_attempt():
    bench = Bench(limits(max_attempts=2))
    first, second = issued(bench, incarnation=1, tickets=2)

    for incarnation in range(2, 9):
        # Killed from outside, then as a worker whose supervisor was killed: no death is reported.
        bench.say(PeerDied("worker-0"), *worker(0, incarnation=incarnation, tickets=2))
        bench.say(*worker(0, incarnation=100 + incarnation, tickets=2))

    again = bench.heard("worker-0", Ticket)[-2:]
    assert [(ticket.ticket, ticket.attempt) for ticket in again] == [(first.ticket, 1), (second.ticket, 1)]
    assert bench.counts.ended.keys() == {"reissued"}


def test_a_restarted_worker_has_its_predecessors_ticket_and_a_late_report_of_that_ones_death_takes_it_not():
    bench = Bench()
    bench.say(Published(0, 9, 0), Hello("worker-0", 1, pid=100), WantTickets("worker-0", 1, 1))
    bench.say(Hello("worker-0", 2, pid=200), WantTickets("worker-0", 2, 1))

    bench.say(PeerDied("worker-0", pid=100), *worker(1))

    first, second = bench.heard("worker-0", Ticket)
    assert (first.to, second.to) == (1, 2)
    assert first.ticket == second.ticket
    assert second.ticket not in [ticket.ticket for ticket in bench.heard("worker-1", Ticket)]


def test_a_seal_from_a_worker_that_lost_its_ticket_changes_nothing():
    bench = Bench()
    (ticket,) = issued(bench, tickets=1)
    bench.say(PeerDied("worker-0"), *worker(1))

    bench.say(sealed(ticket, "worker-0"))

    assert bench.ledger.totals.sealed == 0
    assert bench.counts.duplicates == 1


def test_a_repeated_seal_is_settled_again_and_counted_once():
    bench = Bench()
    ticket, _ = issued(bench)

    bench.say(sealed(ticket), sealed(ticket))

    assert bench.ledger.totals.sealed == 4
    assert len(bench.heard("worker-0", Settled)) == 2
    assert bench.counts.duplicates == 1


def test_prompts_that_fail_every_time_are_set_aside():
    bench = Bench(limits(max_attempts=2))
    bench.say(Published(0, 9, 0), *worker(0, tickets=1))
    positions = []
    for _ in range(3):
        (ticket,) = bench.heard("worker-0", Ticket)
        positions.append(ticket.position)
        bench.say(Failed("worker-0", ticket.ticket, "boom", retry=True))

    assert positions == [0, 0, 2]
    assert bench.counts.ended["failed"] == 1


def test_an_epoch_without_any_experience_ends_the_run_and_says_so():
    bench = Bench(limits(prompts_in_source=4))
    (ticket,) = issued(bench, tickets=1)
    bench.say(Failed("worker-0", ticket.ticket, "too long", retry=False))
    (ticket,) = bench.heard("worker-0", Ticket)
    # Experience between them: two failures in a row from here on.
    bench.say(sealed(ticket))
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
    assert (again.lease, again.parts, again.to) == (lease.lease, lease.parts, 2)
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

    bench.buffer.handle(Release("trainer-0", lease.lease, 1), 0.0)

    assert (bench.ledger.ready, bench.ledger.leased) == (8, 0)
    assert bench.balanced


def test_a_lease_that_is_handed_back_by_one_whose_successor_has_it_stays_with_that():
    bench = Bench()
    lease = one_step(bench)

    bench.say(*trainer(incarnation=2), Release("trainer-0", lease.lease, 1))

    (again,) = bench.heard("trainer-0", Lease)
    assert (again.lease, again.parts) == (lease.lease, lease.parts)
    assert (bench.ledger.ready, bench.ledger.leased) == (0, 8)


def test_tickets_of_a_worker_that_this_run_does_not_have_go_to_others():
    bench = Bench()
    bench.say(Published(0, 9, 0), *worker(1), *trainer())
    tickets = bench.heard("worker-1", Ticket)
    assert tickets

    bench.options["workers"] = 1
    bench.restart()
    bench.say(*worker(0))

    assert [ticket.ticket for ticket in bench.heard("worker-0", Ticket)] == [ticket.ticket for ticket in tickets]
    assert {record.attempt for record in bench.ledger.reserved_extents()} == {1}, "no attempt of theirs counts"


def test_an_acknowledgement_is_counted_once():
    bench = Bench()
    lease = one_step(bench)
    bench.now_s += 3.0

    bench.say(Ack("trainer-0", lease.lease), Ack("trainer-0", lease.lease))

    assert bench.ledger.totals.trained == 8
    assert bench.counts.lease_s == [3.0]
    assert bench.counts.duplicates == 1


def test_ranks_take_turns():
    bench = Bench(limits(world_size=2, rows_per_version=16, max_staleness=1))
    bench.say(Published(0, 9, 0), *worker(tickets=8), *trainer(rank=0), *trainer(rank=1))
    for ticket in bench.heard("worker-0", Ticket):
        bench.say(sealed(ticket))

    assert [lease.lease for lease in bench.heard("trainer-0", Lease)] == [0, 2]
    assert [lease.lease for lease in bench.heard("trainer-1", Lease)] == [1, 3]


def two_steps_of_two_ranks():
    """Return a bench whose two ranks have their leases of two steps: 0 and 2, 1 and 3."""
    bench = Bench(limits(world_size=2, rows_per_version=16, max_staleness=1))
    bench.say(Published(0, 9, 0), *worker(tickets=8), *trainer(rank=0), *trainer(rank=1))
    for ticket in bench.heard("worker-0", Ticket):
        bench.say(sealed(ticket))
    assert [lease.lease for rank in (0, 1) for lease in bench.heard(f"trainer-{rank}", Lease)] == [0, 2, 1, 3]
    return bench


def test_ranks_that_die_before_each_has_acknowledged_its_batch_of_a_step_take_it_again_together():
    bench = two_steps_of_two_ranks()

    bench.say(Ack("trainer-1", 1), *trainer(rank=0, incarnation=2), *trainer(rank=1, incarnation=2))

    assert [lease.lease for lease in bench.heard("trainer-0", Lease) if lease.to == 2] == [0, 2]
    assert [lease.lease for lease in bench.heard("trainer-1", Lease) if lease.to == 2] == [1, 3]
    assert bench.ledger.totals.trained == 0
    bench.say(Ack("trainer-0", 0))
    assert bench.ledger.totals.trained == 0, "the word of the dead rank does not count"
    bench.say(Ack("trainer-1", 1))
    assert bench.ledger.totals.trained == 16


def test_a_rank_that_has_acknowledged_its_batch_gets_the_next_one_and_not_the_same_again():
    bench = two_steps_of_two_ranks()

    bench.say(Ack("trainer-1", 1), Ack("trainer-1", 1))
    bench.buffer.handle(Hello("trainer-1", 2, held=[3], fresh=False), 0.0)

    assert not [lease for lease in bench.heard("trainer-1", Lease) if lease.to == 2]
    assert bench.counts.duplicates == 1
    bench.say(Published(1, 8, 2))
    assert (bench.ledger.totals.trained, bench.ledger.leased) == (16, 16), "a version includes the batches of all ranks"


def test_a_buffer_killed_as_it_counts_the_batches_of_a_step_leaves_none_to_its_successor():
    bench = two_steps_of_two_ranks()
    bench.ledger.acknowledge(0)

    bench.restart()
    bench.say(Ack("trainer-0", 0), Ack("trainer-1", 1))

    assert bench.ledger.totals.trained == 16


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
    assert bench.counts.lease_s == [None], "no time from lease to ack is known"


def leased(bench):
    """Everything up to the first leases, with one worker and one rank."""
    bench.say(Published(0, 9, 0), *worker(tickets=8), *trainer())
    for ticket in bench.heard("worker-0", Ticket):
        bench.say(sealed(ticket))
    return bench.heard("trainer-0", Lease)


def limits(**changes):
    return dataclasses.replace(LIMITS, **changes)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": 5},
        {"rows": 0},
        {"nbytes": 1 << 40},
        {"nbytes": -1},
        {"checksum": 1 << 64},
        {"policy_version": -3},
        {"policy_version": 1 << 63},
    ],
)
def test_a_seal_of_impossible_size_is_refused_and_its_prompts_are_rolled_again(wrong):
    bench = Bench()
    (ticket,) = issued(bench, tickets=1)
    fields = {"rows": 4, "nbytes": 200, "checksum": 1, "policy_version": 0, "fingerprint": 9, **wrong}

    bench.say(Sealed("worker-0", ticket.ticket, **fields))

    (again,) = bench.heard("worker-0", Ticket)
    assert (again.ticket, again.position, again.attempt) == (ticket.ticket, ticket.position, 2)
    assert [settled.ticket for settled in bench.heard("worker-0", Settled)] == [ticket.ticket]
    assert bench.counts.aside == {"invalid": 4}
    assert bench.ledger.totals.sealed == 0


def test_experience_of_weights_that_nobody_published_is_refused():
    kept = []
    bench = Bench(quarantine=lambda chosen, reason, detail: kept.append((*chosen[0], reason, detail)))
    (ticket,) = issued(bench, tickets=1)

    bench.say(Sealed("worker-0", ticket.ticket, 4, 200, 1, 0, 8))

    assert bench.counts.aside == {"fingerprint": 4}
    assert bench.ledger.totals.sealed == 0
    ((record, rows, reason, detail),) = kept
    assert (record.offset, record.nbytes, record.checksum, record.fingerprint) == (ticket.offset, 200, 1, 8)
    assert (rows, reason, detail) == ([0, 1, 2, 3], "fingerprint", "sealed by worker-0")


@pytest.mark.parametrize("reason", typing.get_args(FaultReason))
def test_what_did_not_pass_the_gate_is_kept_and_counted_by_reason_and_its_prompts_are_rolled_again(reason):
    kept = []
    bench = Bench(quarantine=lambda chosen, reason, detail: kept.append((*chosen[0], reason, detail)))
    (ticket,) = issued(bench, tickets=1)
    faulty = Faulty("worker-0", ticket.ticket, reason, "row 1: nan", 4, 200, 1, 0, 9)

    bench.say(faulty)

    (again,) = bench.heard("worker-0", Ticket)
    assert (again.ticket, again.position, again.attempt) == (ticket.ticket, ticket.position, 2)
    assert [settled.ticket for settled in bench.heard("worker-0", Settled)] == [ticket.ticket]
    ((record, rows, why, detail),) = kept
    assert (record.offset, record.nbytes, record.checksum, rows) == (ticket.offset, 200, 1, [0, 1, 2, 3])
    assert (why, detail) == (reason, "made by worker-0: row 1: nan")
    assert (bench.counts.aside, bench.counts.ended) == ({reason: 4}, {"reissued": 1})
    assert bench.ledger.totals.sealed == 0


def test_what_did_not_pass_the_gate_is_given_up_after_its_attempts_and_said_again_changes_nothing():
    bench = Bench(limits(max_attempts=2))
    bench.say(Published(0, 9, 0), *worker(0, tickets=1))
    for _ in range(2):
        (ticket,) = bench.heard("worker-0", Ticket)
        faulty = Faulty("worker-0", ticket.ticket, "not_finite", "", 4, 200, 1, 0, 9)
        bench.say(faulty)
    bench.heard("worker-0", Settled)

    bench.restart()
    bench.say(faulty)

    assert bench.counts.ended == {"reissued": 1, "failed": 1}
    assert bench.counts.aside == {"not_finite": 8}
    assert bench.counts.duplicates == 1
    (next_ticket,) = bench.heard("worker-0", Ticket)
    assert next_ticket.position == 2, "the prompts behind it"


@pytest.mark.parametrize("kind", ["faulty", "failed", "sealed"])
def test_what_came_of_an_earlier_attempt_is_counted_once_though_its_worker_has_the_ticket_again(kind):
    """The buffer dies after it has handed the ticket out again and before anybody heard of it."""
    bench = Bench(limits(max_attempts=9))
    (ticket,) = issued(bench, tickets=1)
    word = {
        "faulty": Faulty("worker-0", ticket.ticket, "not_finite", "", 4, 200, 1, 0, 9, attempt=1),
        "failed": Failed("worker-0", ticket.ticket, "deadline passed", retry=True, attempt=1),
        "sealed": Sealed("worker-0", ticket.ticket, 4, 200, 1, 0, 8, attempt=1),
    }[kind]
    bench.say(word)
    counted = dict(bench.counts.aside)
    bench.sent.clear()

    bench.restart()
    hello = Hello("worker-0", 2, held=[ticket.ticket], attempts=[1])
    bench.say(hello, word, WantTickets("worker-0", 2, 1))

    assert bench.counts.aside == counted
    assert bench.counts.duplicates == 1
    assert [settled.ticket for settled in bench.heard("worker-0", Settled)] == [ticket.ticket]
    (again,) = bench.heard("worker-0", Ticket)
    assert (again.ticket, again.attempt, again.to) == (ticket.ticket, 2, 2), (
        "it comes again, as the attempt that it was"
    )
    bench.say(word, seal_of(again))
    assert bench.ledger.totals.sealed == 4


@pytest.mark.parametrize("wrong", [{"rows": 0, "nbytes": 0}, {"rows": 5}, {"nbytes": 1 << 40}, {"checksum": -1}])
def test_what_could_not_be_written_or_is_of_impossible_size_is_counted_without_a_copy(wrong):
    kept = []
    bench = Bench(quarantine=lambda *case: kept.append(case))
    (ticket,) = issued(bench, tickets=1)
    fields = {"rows": 4, "nbytes": 200, "checksum": 1, "policy_version": 0, "fingerprint": 9, **wrong}

    bench.say(Faulty("worker-0", ticket.ticket, "lengths", "row 1", **fields))

    assert bench.counts.aside == {"lengths": 4}
    assert kept == []
    assert len(bench.heard("worker-0", Ticket)) == 1


def test_a_seal_that_is_here_before_word_of_its_weights_waits_for_it():
    bench = Bench()
    (ticket,) = issued(bench, tickets=1)
    early = Sealed("worker-0", ticket.ticket, 4, 200, 1, 1, 10)
    bench.say(early)
    assert bench.ledger.totals.sealed == 0
    assert bench.heard("worker-0", Settled) == []

    bench.say(Published(1, 10, 0))

    assert bench.ledger.totals.sealed == 4
    assert len(bench.heard("worker-0", Settled)) == 1


def test_word_of_the_weights_that_never_comes_is_not_waited_for_beyond_a_minute():
    bench = Bench()
    (ticket,) = issued(bench, tickets=1)
    bench.say(Sealed("worker-0", ticket.ticket, 4, 200, 1, 1, 10))

    bench.now_s = 61.0
    bench.say()

    assert bench.counts.aside == {"fingerprint": 4}
    assert len(bench.heard("worker-0", Ticket)) == 1


def test_damage_costs_its_extent_once_and_nothing_else():
    bench = Bench()
    (lease,) = leased(bench)

    bench.say(*[Damaged("trainer-0", lease.lease, [1], "torn", incarnation=2)] * 2)

    assert bench.ledger.totals.dropped[DROP_REASONS.index("quarantined")] == 4
    assert (bench.counts.aside, bench.counts.duplicates) == ({"checksum": 4}, 1)
    (ticket,) = bench.heard("worker-0", Ticket)
    bench.say(sealed(ticket))
    (again,) = bench.heard("trainer-0", Lease)
    assert (again.lease, again.to, again.for_version) == (lease.lease, 2, 0)
    assert [part.ticket for part in again.parts] == [0, 2]


def test_a_batch_at_which_its_trainer_died_twice_is_quarantined_with_its_reason():
    kept = []
    bench = Bench(quarantine=lambda chosen, reason, detail: kept.append((chosen[0][0].ticket, reason, detail)))
    (lease,) = leased(bench)

    for incarnation in (2, 3):
        assert kept == []
        bench.say(PeerDied("trainer-0", working_on=lease.lease), *trainer(incarnation))

    assert kept == [(0, "killed_trainer", "trainer-0 died 2 times at lease 0")]
    assert bench.counts.aside == {"killed_trainer": 8}
    bench.heard("trainer-0", Lease)
    for ticket in bench.heard("worker-0", Ticket):
        bench.say(sealed(ticket))
    assert [again.lease for again in bench.heard("trainer-0", Lease)] == [lease.lease], "the run goes on"


def test_deaths_are_remembered_through_a_restart_of_the_buffer():
    bench = Bench()
    (lease,) = leased(bench)
    bench.say(PeerDied("trainer-0", working_on=lease.lease))

    bench.restart()
    bench.say(PeerDied("trainer-0", working_on=lease.lease))

    assert bench.counts.aside == {"killed_trainer": 8}


def test_a_batch_that_the_successor_holds_when_word_of_the_second_death_comes_is_not_taken_from_it():
    """Its number would go to other rows, and the successor's word for the batch in its hands would count for those."""
    bench = Bench()
    (lease,) = leased(bench)
    bench.say(PeerDied("trainer-0", working_on=lease.lease))

    bench.say(*trainer(2))
    bench.say(PeerDied("trainer-0", working_on=lease.lease, pid=77))

    (again,) = bench.heard("trainer-0", Lease)
    assert (again.lease, again.parts) == (lease.lease, lease.parts)
    assert (lease.deaths, again.deaths) == (0, 1)
    assert bench.ledger.leases.keys() == {lease.lease} and bench.counts.aside == {}
    bench.say(PeerDied("trainer-0", working_on=lease.lease))
    assert bench.counts.aside == {"killed_trainer": 8}, "the next death sets it aside"


def test_a_batch_that_a_dead_trainer_only_held_is_not_blamed():
    bench = Bench(limits(max_staleness=1))
    first, second = leased(bench)

    for incarnation in (2, 3):
        bench.say(PeerDied("trainer-0", working_on=first.lease), *trainer(incarnation))

    dropped = bench.ledger.totals.dropped[DROP_REASONS.index("quarantined")]
    assert dropped == 8
    assert {part.ticket for part in second.parts} <= bench.ledger.extents.keys()


def test_a_rollback_drops_what_newer_weights_wrote_and_issues_its_prompts_again():
    bench = Bench(limits(max_staleness=1))
    _first, _ = leased(bench)
    bench.say(Published(1, 10, 1))
    for ticket in bench.heard("worker-0", Ticket):
        bench.say(Sealed("worker-0", ticket.ticket, 4, 200, 1, 1, 10))
    assert bench.ledger.totals.position == 12

    bench.say(PeerDied("trainer-0"), Published(0, 11, 0, rollback=True), *trainer(2))

    # Both versions' rows are gone: version 0 was published anew, with other weights.
    assert bench.ledger.totals.dropped[DROP_REASONS.index("rolled_back")] == 16
    positions = [ticket.position for ticket in bench.heard("worker-0", Ticket)]
    assert positions == [4, 6, 8, 10], "the prompts of lease 1 and of the tickets after it"
    assert bench.ledger.totals.position == 12


def test_after_a_rollback_a_trainer_gets_batches_under_numbers_that_start_anew():
    bench = Bench()
    bench.say(Published(5, 9, 0), *worker(tickets=8), *trainer())
    for ticket in bench.heard("worker-0", Ticket):
        bench.say(sealed(ticket, version=5))
    bench.heard("trainer-0", Lease)

    bench.say(PeerDied("trainer-0"), Published(3, 10, 0, rollback=True), *trainer(2))
    for ticket in bench.heard("worker-0", Ticket):
        assert ticket.policy_version == 3
        bench.say(Sealed("worker-0", ticket.ticket, 4, 200, 1, 3, 10))

    (lease,) = bench.heard("trainer-0", Lease)
    assert (lease.for_version, [part.policy_version for part in lease.parts]) == (3, [3, 3])


@pytest.mark.parametrize("version", [1, 0], ids=["made before the rollback", "made after it"])
def test_prompts_that_were_out_at_a_rollback_come_after_those_whose_training_is_undone(version):
    bench = Bench(limits(max_staleness=0))
    bench.say(Published(0, 9, 0), *worker(tickets=8), *trainer())
    first = bench.heard("worker-0", Ticket)
    bench.say(*(sealed(ticket) for ticket in first))
    bench.say(Published(1, 10, 1))
    later = bench.heard("worker-0", Ticket)
    fingerprint = {0: 11, 1: 10}[version]

    bench.say(PeerDied("trainer-0"), Published(0, 11, 0, rollback=True, position=0), *trainer(2))
    assert bench.heard("worker-0", Ticket) == [], "there is room for no more rows of a version"
    bench.say(*(Sealed("worker-0", ticket.ticket, 4, 200, 1, version, fingerprint) for ticket in later))

    again = bench.heard("worker-0", Ticket)
    assert [ticket.position for ticket in again] == [ticket.position for ticket in first]
    bench.say(*(Sealed("worker-0", ticket.ticket, 4, 200, 1, 0, 11) for ticket in again))
    (*_, lease) = bench.heard("trainer-0", Lease)
    assert [part.ticket for part in lease.parts] == [ticket.ticket for ticket in again]
    bench.say(Published(1, 12, lease.lease + 1))
    assert [ticket.position for ticket in bench.heard("worker-0", Ticket)] == [ticket.position for ticket in later]


def test_a_rollback_that_is_told_again_ends_no_lease():
    bench = Bench()
    bench.say(Published(5, 9, 0), *worker(tickets=8), Published(3, 10, 0, rollback=True), *trainer())
    for ticket in bench.heard("worker-0", Ticket):
        bench.say(Sealed("worker-0", ticket.ticket, 4, 200, 1, 3, 10))
    (lease,) = bench.heard("trainer-0", Lease)

    bench.say(Published(3, 10, 0, rollback=True))

    assert list(bench.ledger.leases) == [lease.lease]


def test_other_weights_under_the_newest_number_are_no_repeat():
    bench = Bench()
    one_step(bench)

    bench.say(PeerDied("trainer-0"), Published(0, 10, 0, rollback=True))

    assert not bench.ledger.leases
    assert bench.ledger.totals.dropped[DROP_REASONS.index("rolled_back")] == 8


def test_a_rollout_with_weights_that_were_rolled_back_is_refused_without_blame():
    bench = Bench()
    bench.say(Published(5, 9, 0), *worker(tickets=1))
    (ticket,) = bench.heard("worker-0", Ticket)

    bench.say(Published(3, 10, 0, rollback=True), sealed(ticket, version=5))

    (again,) = bench.heard("worker-0", Ticket)
    assert (again.ticket, again.attempt, again.policy_version) == (ticket.ticket, 1, 3)
    assert bench.counts.aside == {"rolled_back": 4}


def test_a_lease_names_the_position_that_a_run_without_its_memory_goes_on_from():
    bench = Bench(limits(max_staleness=1))

    first, second = leased(bench)

    # Four tickets of two prompts, four rows each; a batch of eight rows takes two of them.
    assert (first.position, second.position) == (4, 8)


def test_a_ticket_under_way_holds_the_position_back():
    bench = Bench(limits(max_staleness=2))
    bench.say(Published(0, 9, 0), *worker(tickets=3), *trainer())
    slow, *quick = bench.heard("worker-0", Ticket)
    for ticket in quick:
        bench.say(sealed(ticket))

    (lease,) = bench.heard("trainer-0", Lease)

    assert lease.position == slow.position == 0


def test_a_restarted_buffer_does_not_take_a_living_trainer_for_a_new_one():
    bench = Bench(limits(max_staleness=1))
    first, second = leased(bench)
    bench.say(Ack("trainer-0", first.lease))
    through = bench.ledger.totals.trained_through

    bench.restart()
    bench.say(Hello("trainer-0", 1, held=[second.lease], fresh=False))

    assert bench.ledger.totals.trained_through == through, "its next version includes the first batch"


def test_paused_hands_out_no_ticket_and_leases_what_is_there():
    bench = Bench(limits(max_staleness=4))
    first, second, third = issued(bench, tickets=3)
    bench.buffer.paused = True

    # One that comes to nothing is not handed out again, and no new one is for the worker that has none.
    bench.say(Failed("worker-0", third.ticket, "boom", retry=True), *worker(1), *trainer())
    bench.say(sealed(first), sealed(second))

    assert bench.heard("worker-0", Ticket) == bench.heard("worker-1", Ticket) == []
    assert [wait.reason for wait in bench.heard("worker-1", Wait)] == ["paused"]
    assert len(bench.heard("trainer-0", Lease)) == 1, "the ready rows are trained"

    bench.buffer.paused = False
    bench.say()

    handed_out = bench.heard("worker-0", Ticket) + bench.heard("worker-1", Ticket)
    assert third.ticket in [ticket.ticket for ticket in handed_out] and len(handed_out) > 1
    assert bench.balanced


def test_other_limits_hold_for_tickets_from_then_on():
    bench = Bench(limits(max_attempts=1, ticket_timeout_s=10.0))
    (before,) = issued(bench, tickets=1)

    bench.buffer.limit(max_attempts=2, ticket_timeout_s=20.0)
    bench.say(Failed("worker-0", before.ticket, "boom", retry=True))

    (after,) = bench.heard("worker-0", Ticket)
    assert (before.ticket, before.deadline_s) == (after.ticket, 10.0)
    assert (after.attempt, after.deadline_s) == (2, 20.0)


def test_a_trainer_that_wants_tickets_is_refused():
    bench = Bench()
    bench.say(Published(0, 9, 0), *trainer(), WantTickets("trainer-0", 1, 2))

    assert bench.buffer.refused == 1
    assert bench.heard("trainer-0", Ticket) == [] and bench.ledger.reserved == 0


def test_each_trainer_is_told_once_that_the_passes_are_over_and_so_is_its_successor():
    bench = Bench(last_position=lambda: 7)
    lease = one_step(bench)
    assert not bench.heard("trainer-0", Exhausted), "three prompts are left"
    bench.say(Published(1, 9, lease.lease + 1))
    tickets = bench.heard("worker-0", Ticket)
    assert [(ticket.position, ticket.prompts) for ticket in tickets] == [(4, 2), (6, 1)]

    bench.say(sealed(tickets[0]), sealed(tickets[1], rows=2))
    bench.say()

    assert [message.through for message in bench.heard("trainer-0", Exhausted)] == [1]
    assert not bench.heard("trainer-0", Lease) and not bench.heard("worker-0", Ticket)
    bench.restart()
    bench.say(*trainer(2), *worker())
    assert [message.to for message in bench.heard("trainer-0", Exhausted)] == [2]
    bench.say(Drain(complete=True))
    assert bench.buffer.finish()
    assert (bench.ledger.totals.trained, bench.ledger.totals.dropped[DROP_REASONS.index("cleared")]) == (8, 6)
    assert bench.balanced


def test_prompts_that_come_again_beyond_the_last_pass_keep_no_batch_waiting():
    """A run that was stopped in its third pass is gone on with under `trainer.max_epochs` = 2, with K = 0."""
    bench = Bench(limits(rows_per_version=16))
    bench.ledger.resume(position=10, redo=[], versions=[], spool=0)
    cut, *tickets = issued(bench, tickets=4)
    bench.say(*map(sealed, tickets[:2]))
    bench.ledger.abandon(bench.ledger.extents[cut.ticket], redo=PromptRange(cut.position, cut.prompts))
    bench.ledger.abandon(bench.ledger.extents[tickets[2].ticket])

    bench.options["last_position"] = lambda: 5
    bench.restart()
    bench.say(*worker(2), *trainer(2))

    assert not bench.heard("worker-0", Ticket)
    (lease,) = bench.heard("trainer-0", Lease)
    assert [part.position for part in lease.parts] == [12, 14]
    assert bench.heard("trainer-0", Exhausted)
