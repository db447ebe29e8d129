"""Dynamic sampling with refill: dropped groups, the prompts in their place, and the bits of the run under deaths."""

import dataclasses

import msgspec
import pytest

from pipeline.buffer.spool import SpoolTotals, metadata_of
from pipeline.runtime.messages import Failed, Lease, Published, Sealed, Ticket
from pipeline.storage.extent_file import SavedExtent
from pipeline.storage.records import DROP_REASONS, ready_rows
from pipeline.storage.tables import PromptRange
from tests.support.protocol import LIMITS, Bench, trainer, worker
from tests.support.town import WORKERS, Town

FILTERED = DROP_REASONS.index("filtered")


def limits(**changes):
    return dataclasses.replace(LIMITS, **{"max_refill": 2, **changes})


def seal(ticket, *flat, rows=4):
    return Sealed(
        "worker-0", ticket.ticket, rows, 200, 1, ticket.policy_version, 9, attempt=ticket.attempt, flat=list(flat)
    )


def begun(**changes):
    """Return a bench with a worker and a trainer, and its first tickets; a version has 4 prompts."""
    bench = Bench(limits(**changes))
    bench.say(Published(0, 9, 0), *worker(tickets=4), *trainer())
    return bench, bench.heard("worker-0", Ticket)


def places(tickets):
    return [(ticket.position, ticket.prompts) for ticket in tickets]


def test_a_group_without_signal_is_dropped_as_it_is_sealed_and_a_prompt_is_issued_in_its_place():
    bench, (first, second) = begun()

    bench.say(seal(first, 1), seal(second))

    assert bench.ledger.totals.sealed == 8
    assert bench.ledger.totals.dropped[FILTERED] == 2
    assert bench.ledger.ready == 6 and bench.balanced
    (third,) = bench.heard("worker-0", Ticket)
    assert places([third]) == [(4, 1)]
    bench.say(seal(third, rows=2))
    (lease,) = bench.heard("trainer-0", Lease)
    assert [(part.ticket, part.rows) for part in lease.parts] == [(0, [0, 1]), (1, [0, 1, 2, 3]), (2, [0, 1])]


def test_a_ticket_without_any_signal_gives_its_room_back():
    bench, (first, _) = begun()
    used = bench.buffer.used_bytes

    bench.say(seal(first, 0, 1))

    assert bench.ledger.totals.dropped[FILTERED] == bench.ledger.totals.sealed == 4
    assert bench.buffer.used_bytes == used // 2 and first.ticket not in bench.ledger.extents
    bench.say(seal(first, 0, 1))
    assert bench.ledger.totals.sealed == 4 and bench.counts.duplicates == 1, "the repeated message changes nothing"
    bench.restart()
    assert bench.balanced and bench.ledger.totals.refilled == 4
    assert bench.buffer.used_bytes == used // 2


def test_without_max_refill_groups_without_signal_stay_in_the_batch():
    bench, (first, second) = begun(max_refill=0)

    bench.say(seal(first, 0, 1), seal(second))

    assert bench.ledger.totals.dropped[FILTERED] == 0
    assert len(bench.heard("trainer-0", Lease)) == 1


def test_at_max_refill_groups_without_signal_are_kept_until_the_next_version(caplog):
    bench, tickets = begun(max_refill=1)
    issued = places(tickets)
    while tickets:
        bench.say(*(seal(ticket, *range(ticket.prompts), rows=2 * ticket.prompts) for ticket in tickets))
        tickets = bench.heard("worker-0", Ticket)
        issued += places(tickets)

    # The prompts of the version and as many in their place; the second time all are kept.
    assert issued == [(0, 2), (2, 2), (4, 2), (6, 2)]
    assert bench.ledger.totals.dropped[FILTERED] == 8
    (lease,) = bench.heard("trainer-0", Lease)
    assert [part.ticket for part in lease.parts] == [2, 3]
    assert [record.message for record in caplog.records if "max_refill" in record.message] == [
        "groups without signal are trained, rollout.max_refill is reached: version=0 refilled=8"
    ]
    bench.say(Published(1, 9, 1))
    first, _ = bench.heard("worker-0", Ticket)
    bench.say(seal(first, 0, 1))
    assert bench.ledger.totals.dropped[FILTERED] == 12


def test_with_staleness_a_prompt_is_issued_at_once_and_the_bound_holds_too():
    bench, tickets = begun(max_staleness=1, max_refill=1, prompts_per_ticket=1)
    assert places(tickets) == [(position, 1) for position in range(4)]

    bench.say(seal(tickets[0], 0, rows=2))
    assert places(bench.heard("worker-0", Ticket)) == [(4, 1)]
    dropped = 1
    for _ in range(20):
        for record in list(bench.ledger.reserved_extents())[:1]:
            bench.say(Sealed("worker-0", record.ticket, 2, 100, 1, 0, 9, flat=[0]))
            dropped += 1

    assert bench.ledger.totals.dropped[FILTERED] == 2 * 4, "as many prompts as a version has"
    assert dropped > 8 and bench.balanced


@pytest.mark.parametrize("flat", [[-1], [2], [1, 0], [0, 0]])
def test_numbers_of_groups_that_a_ticket_cannot_have_are_refused(flat):
    bench, (first, _) = begun()

    bench.say(seal(first, *flat))

    assert bench.ledger.totals.sealed == 0
    assert bench.counts.aside == {"invalid": 4}


@pytest.mark.parametrize("max_refill", [0, 2])
def test_in_step_a_round_waits_for_all_of_its_tickets_so_that_each_has_the_same_prompts_in_any_order(max_refill):
    """In place of groups without signal, or without refill of prompts that gave no rows."""
    orders = []
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        shape = {"prompts_per_ticket": 3, "sample_batch_size": 16, "rows_per_version": 16}
        bench, tickets = begun(**shape, max_refill=max_refill)
        assert places(tickets) == [(0, 3), (3, 3), (6, 2)]
        for place in order:
            assert bench.heard("worker-0", Ticket) == []
            ticket = tickets[place]
            if max_refill:
                bench.say(seal(ticket, 0, 1, rows=2 * ticket.prompts))
            elif ticket.prompts > 2:
                bench.say(seal(ticket, 0, rows=2))
            else:
                bench.say(Failed("worker-0", ticket.ticket, "no", False, ticket.attempt))
        orders.append(places(bench.heard("worker-0", Ticket)))

    assert orders == [[(8, 3), (11, 3)]] * 3


def rows_of(town):
    return [town.trained[lease] for lease in sorted(town.trained)]


def flat(share):
    """Return a function that calls a share of the prompts without signal."""
    return lambda position: (position * 2654435761 % (1 << 32)) / (1 << 32) < share


def undisturbed(versions, **options):
    town = Town(staleness=0, **options)
    town.goes_on(versions)
    return town


def death(town):
    """Let a process die, or a message be lost; none of these is the fault of any rows."""
    chance, index = town.rng.random(), town.rng.randrange(WORKERS)
    if chance < 0.25:
        town.worker_dies(index)
    elif chance < 0.5:
        town.buffer_dies()
    elif chance < 0.6:
        town.roll(index, lost=True)
        town.buffer_dies()
    elif chance < 0.7:
        town.train(lost=True)
        town.buffer_dies()
    elif chance < 0.8:
        town.trainer_comes_again(overtaken=chance < 0.75)
    else:
        town.trainer_starts()


@pytest.mark.parametrize(("world_size", "accumulation", "batch"), [(1, 1, 8), (2, 1, 8), (1, 2, 8), (2, 2, 6)])
@pytest.mark.parametrize(
    ("share", "failing", "max_refill", "limit"),
    [(0.4, 0.0, 5, 0), (0.9, 0.0, 1, 0), (0.4, 0.3, 0, 0), (0.4, 0.3, 2, 0), (0.4, 0.3, 2, 2), (0.4, 0.3, 0, 1)],
)
@pytest.mark.parametrize("seed", range(3))
def test_in_step_the_same_rows_are_trained_in_the_same_batches_whoever_dies(
    seed, share, failing, max_refill, limit, world_size, accumulation, batch
):
    options = {"world_size": world_size, "accumulation": accumulation, "batch": batch, "max_refill": max_refill}
    options["limit"] = limit
    options |= {"is_flat": flat(share), "fails": lambda position: flat(failing)(position + 7)}
    town = Town(staleness=0, seed=seed, **options)

    for _ in range(400):
        if town.rng.random() < 0.2:
            death(town)
        else:
            town.roll(town.rng.randrange(WORKERS))
            town.train()
        if town.rng.random() < 0.9:
            town.deliver()
        town.check_books()
    town.goes_on()

    expected = undisturbed(town.weights[0], **options)
    assert town.weights[0] > 10
    assert rows_of(town) == rows_of(expected)[: len(town.trained)]


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_no_prompt_is_lost_each_is_trained_once_or_dropped_for_its_rewards(seed, staleness):
    town = Town(staleness=staleness, seed=seed, max_refill=50, is_flat=flat(0.4))

    for _ in range(400):
        if town.rng.random() < 0.15:
            death(town)
        else:
            town.roll(town.rng.randrange(WORKERS))
            town.train()
        town.deliver()
        town.check_books()
    town.goes_on()

    stale = town.ledger.totals.dropped[DROP_REASONS.index("stale")]
    trained = [(first + row // 2, row % 2) for batch in rows_of(town) for first, _, row in batch]
    low = town.ledger.index.lowest_position()
    unfinished = town.ledger.totals.position if low is None else low
    unfinished = min([unfinished, *(record.position for record in town.ledger.extents.values())])
    assert stale == 0 and sum(town.ledger.totals.dropped) == town.ledger.totals.dropped[FILTERED]
    assert len(set(trained)) == len(trained) > 100, "none is trained twice"
    assert unfinished > 50
    assert {position for position, _ in trained if position < unfinished} == {
        position for position in range(unfinished) if not flat(0.4)(position)
    }


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_the_run_goes_on_whatever_happens_with_refill_too(seed, staleness):
    town = Town(staleness=staleness, seed=seed, world_size=2, max_refill=2, is_flat=flat(0.5))

    for _ in range(500):
        town.random_event()
    town.goes_on()

    assert town.ledger.totals.dropped[FILTERED] > 0


def test_a_stop_in_the_midst_of_a_round_changes_no_ticket_of_the_run():
    shape = {"prompts_per_ticket": 3, "sample_batch_size": 16, "rows_per_version": 16}
    bench = Bench(limits(**shape))
    bench.say(Published(0, 9, 0), *worker(tickets=1), *trainer())
    (first,) = bench.heard("worker-0", Ticket)
    bench.say(seal(first, 0, 1, rows=6))
    assert places(bench.heard("worker-0", Ticket)) == [(3, 3)]

    cut = [PromptRange(record.position, record.prompts) for record in bench.ledger.reserved_extents()]
    spooled = msgspec.json.decode(metadata_of(bench.ledger, cut)["totals"], type=SpoolTotals)
    (record,) = bench.ledger.sealed_extents()
    again = Bench(limits(**shape))
    again.ledger.restore(SavedExtent(0, 0, 3, 6, ready_rows(record), 0, 9, checksum=1, nbytes=200), 0, 0.0)
    again.ledger.resume(
        position=spooled.position, redo=spooled.redo, versions=spooled.versions, spool=1, refilled=spooled.refilled,
        round_left=spooled.round_left,
    )  # fmt: skip
    again.restart()
    again.say(Published(0, 9, 0), *worker(tickets=2), *trainer())
    tickets = again.heard("worker-0", Ticket)
    again.say(*(seal(ticket, rows=2 * ticket.prompts) for ticket in tickets))

    assert places(tickets) == [(3, 3), (6, 2)]
    assert places(again.heard("worker-0", Ticket)) == [(8, 2)]
