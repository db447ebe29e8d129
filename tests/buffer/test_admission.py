"""The rules that bound the buffer and the staleness of its rows."""

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.buffer import admission
from pipeline.buffer.admission import Limits
from pipeline.storage.layout import LedgerLayout
from pipeline.storage.ledger import Ledger
from pipeline.storage.tables import PromptRange
from tests.support.protocol import LIMITS


def ledger_at(version=0):
    layout = LedgerLayout(extents=64, rows_per_extent=8)
    ledger = Ledger(memoryview(bytearray(layout.nbytes)), layout)
    ledger.publish(version, 0, 0)
    return ledger


def issue(ledger, limits=LIMITS):
    prompts, _ = admission.prompts_to_issue(ledger, limits)
    new_round = admission.new_round(ledger, limits, admission.room_in_bound(ledger, limits))
    rows = prompts * limits.group_size
    record = ledger.reserve(rows=rows, prompts=prompts, offset=0, nbytes=64, new_round=new_round)
    ledger.assign(record, 0)
    return record


def seal(ledger, record, rows=None):
    ledger.seal(
        record,
        rows=rows or record.rows,
        nbytes=1,
        checksum=0,
        policy_version=record.policy_version,
        fingerprint=0,
        now_s=0.0,
    )


def test_no_ticket_before_the_first_weights():
    layout = LedgerLayout(extents=4, rows_per_extent=8)
    ledger = Ledger(memoryview(bytearray(layout.nbytes)), layout)

    assert admission.prompts_to_issue(ledger, LIMITS) == (0, "staleness")


def test_without_staleness_exactly_one_version_of_rows_is_issued():
    ledger = ledger_at()

    for _ in range(2):
        issue(ledger)

    assert ledger.reserved == 8
    assert admission.prompts_to_issue(ledger, LIMITS) == (0, "staleness")


def test_the_next_version_is_issued_only_once_the_last_is_published():
    ledger = ledger_at()
    for _ in range(2):
        seal(ledger, issue(ledger))
    lease = ledger.lease(admission.next_batch(ledger, LIMITS))
    ledger.acknowledge(lease)
    assert admission.prompts_to_issue(ledger, LIMITS) == (0, "staleness"), "trained, not yet published"

    ledger.publish(1, 0, 1)

    assert admission.prompts_to_issue(ledger, LIMITS) == (2, "")


def test_a_late_acknowledgement_of_another_rank_does_not_shrink_the_room():
    limits = dataclasses.replace(LIMITS, world_size=2, rows_per_version=16)
    ledger = ledger_at()
    for _ in range(4):
        seal(ledger, issue(ledger, limits))
    first = ledger.lease(admission.next_batch(ledger, limits))
    second = ledger.lease(admission.next_batch(ledger, limits))
    ledger.acknowledge(first)
    ledger.publish(1, 0, 2)
    room_before = admission.prompts_to_issue(ledger, limits)

    ledger.acknowledge(second)

    assert room_before == admission.prompts_to_issue(ledger, limits) == (2, "")


def test_a_short_ticket_is_followed_by_a_small_one_so_that_the_batch_fills():
    ledger = ledger_at()
    seal(ledger, issue(ledger), rows=2)
    seal(ledger, issue(ledger))
    assert admission.next_batch(ledger, LIMITS) is None

    prompts, _ = admission.prompts_to_issue(ledger, LIMITS)

    assert prompts == 1, "two rows are missing, which is one prompt of two responses"


def test_the_limit_counts_batches_reserved_or_ready():
    limits = dataclasses.replace(LIMITS, max_staleness=9, limit_batches=1)
    ledger = ledger_at()
    for _ in range(2):
        issue(ledger, limits)

    assert admission.prompts_to_issue(ledger, limits) == (0, "full")


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_limit_of_one_batch_that_lost_a_part_of_a_group_has_one_more_prompt(staleness):
    limits = dataclasses.replace(LIMITS, max_staleness=staleness, limit_batches=1)
    ledger = ledger_at()
    records = [issue(ledger, limits) for _ in range(2)]
    for record in records:
        seal(ledger, record)
    ledger.drop([(records[0], [0])], "quarantined")

    assert (ledger.ready, admission.prompts_to_issue(ledger, limits)) == (7, (1, ""))

    seal(ledger, issue(ledger, limits))

    assert sum(len(rows) for _, rows in admission.next_batch(ledger, limits)) == limits.sample_batch_size
    assert admission.prompts_to_issue(ledger, limits)[0] == 0, "a batch is ready"


def test_limit_zero_is_bounded_by_staleness_alone():
    limits = dataclasses.replace(LIMITS, max_staleness=3)
    ledger = ledger_at()
    for _ in range(8):
        issue(ledger, limits)

    assert admission.prompts_to_issue(ledger, limits) == (0, "staleness")


def test_a_batch_takes_the_oldest_tickets_first_whatever_the_order_of_arrival():
    ledger = ledger_at()
    records = [issue(ledger), issue(ledger)]
    seal(ledger, records[1])
    seal(ledger, records[0])

    batch = admission.next_batch(ledger, LIMITS)

    assert [(record.ticket, rows) for record, rows in batch] == [(0, [0, 1, 2, 3]), (1, [0, 1, 2, 3])]


def test_without_staleness_a_batch_waits_for_every_earlier_prompt_of_its_version():
    limits = dataclasses.replace(LIMITS, world_size=2, rows_per_version=16)
    ledger = ledger_at()
    records = [issue(ledger, limits) for _ in range(4)]
    for record in records[1:]:
        seal(ledger, record)
    assert ledger.ready == 12
    assert admission.next_batch(ledger, limits) is None, "rank 0 would train on prompts of rank 1"

    seal(ledger, records[0])

    batches = []
    for _ in range(2):
        batches.append([record.position for record, _ in admission.next_batch(ledger, limits)])
        ledger.lease(admission.next_batch(ledger, limits))
    assert batches == [[0, 2], [4, 6]]


def test_a_batch_does_not_wait_for_later_prompts():
    limits = dataclasses.replace(LIMITS, world_size=2, rows_per_version=16)
    ledger = ledger_at()
    records = [issue(ledger, limits) for _ in range(4)]
    for record in records[:2]:
        seal(ledger, record)

    assert [record.position for record, _ in admission.next_batch(ledger, limits)] == [0, 2]


def test_without_staleness_a_batch_waits_for_earlier_prompts_that_are_to_be_issued_again():
    limits = dataclasses.replace(LIMITS, world_size=2, rows_per_version=16)
    ledger = ledger_at()
    first, *later = [issue(ledger, limits) for _ in range(4)]
    for record in later:
        seal(ledger, record)
    ledger.abandon(first)
    ledger.resume(position=8, redo=[PromptRange(0, 2)], versions=[], spool=1)
    assert admission.next_batch(ledger, limits) is None

    seal(ledger, issue(ledger, limits))

    assert [record.position for record, _ in admission.next_batch(ledger, limits)] == [0, 2]


def test_without_staleness_a_batch_does_not_wait_for_prompts_that_its_version_has_no_room_for():
    """Rows that were set aside may leave a version full of later prompts."""
    ledger = ledger_at()
    for _ in range(2):
        seal(ledger, issue(ledger))
    ledger.resume(position=4, redo=[PromptRange(0, 1)], versions=[], spool=1)
    assert admission.prompts_to_issue(ledger, LIMITS)[0] == 0

    assert admission.next_batch(ledger, LIMITS) is not None


@given(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.integers(0, 2**32))
def test_without_staleness_each_batch_has_the_same_rows_in_any_order_of_arrival(world, batches, prompts, limit, seed):
    limits = dataclasses.replace(
        LIMITS,
        sample_batch_size=4,
        rows_per_version=4 * world * batches,
        prompts_per_ticket=prompts,
        limit_batches=limit,
        world_size=world,
    )
    rng, ledger, out = random.Random(seed), ledger_at(), []
    while ledger.totals.leases < 3 * limits.batches_per_version:
        actions = ["issue"] if admission.prompts_to_issue(ledger, limits)[0] else []
        actions += ["seal"] if ledger.reserved else []
        actions += ["lease"] if admission.next_batch(ledger, limits) else []
        if not actions:
            for lease in out:
                ledger.acknowledge(lease)
            out = []
            ledger.publish(ledger.totals.policy_version + 1, 0, ledger.totals.leases)
            continue
        action = rng.choice(actions)
        if action == "issue":
            issue(ledger, limits)
        elif action == "seal":
            seal(ledger, rng.choice(list(ledger.reserved_extents())))
        else:
            chosen = admission.next_batch(ledger, limits)
            found = [record.position + row // limits.group_size for record, rows in chosen for row in rows]
            first = 2 * ledger.next_lease()
            assert found == [first, first, first + 1, first + 1], "prompts in their order, two to a batch"
            out.append(ledger.lease(chosen))


def test_a_batch_waits_for_a_ticket_that_would_be_too_old_for_the_next():
    limits = dataclasses.replace(LIMITS, max_staleness=1)
    ledger = ledger_at()
    slow, *quick = [issue(ledger, limits) for _ in range(4)]
    for record in quick:
        seal(ledger, record)
    ledger.publish(1, 0, 0)

    assert ledger.ready == 12
    assert admission.next_batch(ledger, limits) is None

    seal(ledger, slow)
    assert admission.next_batch(ledger, limits)[0][0] is slow


def test_rows_beyond_the_bound_are_found_stale():
    ledger = ledger_at()
    record = issue(ledger)
    seal(ledger, record)

    ledger.publish(1, 0, 0)

    assert admission.stale_rows(ledger, LIMITS) == [(record, [0, 1, 2, 3])]


@given(
    st.integers(0, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 4), st.integers(0, 2**32), st.integers(0, 2)
)  # fmt: skip
def test_no_row_is_ever_trained_beyond_the_bound_and_nothing_stalls(staleness, batches, world, prompts, seed, limit):
    limits = Limits(
        sample_batch_size=4,
        rows_per_version=4 * world * batches,
        group_size=2,
        prompts_per_ticket=prompts,
        max_staleness=staleness,
        limit_batches=limit,
        world_size=world,
        row_bytes=1,
    )
    rng = random.Random(seed)
    ledger = ledger_at()
    trained_batches = 0
    open_leases: list[int] = []
    steps_without_progress = 0
    while trained_batches < 12 * limits.batches_per_version:
        actions = []
        if admission.prompts_to_issue(ledger, limits)[0]:
            actions.append("issue")
        if ledger.reserved:
            actions.append("seal")
        if len(open_leases) < 2 * world and admission.next_batch(ledger, limits):
            actions.append("lease")
        if open_leases:
            actions.append("train")
        assert actions, f"stalled: {ledger.totals} reserved={ledger.reserved} ready={ledger.ready}"
        action = rng.choice(actions)
        if action == "issue":
            issue(ledger, limits)
        elif action == "seal":
            record = rng.choice(list(ledger.reserved_extents()))
            # A ticket may come up short by a prompt.
            seal(ledger, record, rows=max(2, record.rows - 2 * rng.randrange(2)))
        elif action == "lease":
            lease = ledger.totals.leases
            trained_at = admission.version_of_lease(ledger, limits, lease)
            chosen = admission.next_batch(ledger, limits)
            assert sum(len(rows) for _, rows in chosen) == 4
            assert all(trained_at - record.policy_version <= staleness for record, _ in chosen)
            open_leases.append(ledger.lease(chosen))
        else:
            lease = open_leases.pop(0)
            assert admission.version_of_lease(ledger, limits, lease) == ledger.totals.policy_version
            ledger.acknowledge(lease)
            trained_batches += 1
            if trained_batches % limits.batches_per_version == 0:
                ledger.publish(ledger.totals.policy_version + 1, 0, trained_batches)
        steps_without_progress += 1
        assert steps_without_progress < 5000


@pytest.mark.parametrize("lease", [0, 1, 2, 3])
def test_a_leases_version_follows_from_what_the_newest_version_includes(lease):
    limits = dataclasses.replace(LIMITS, rows_per_version=16)
    ledger = ledger_at(version=5)

    ledger.publish(6, 0, 2)

    assert admission.version_of_lease(ledger, limits, lease) == [5, 5, 6, 6][lease]


def test_no_prompt_beyond_the_last_pass_is_issued_and_those_to_be_repeated_are():
    limits = dataclasses.replace(LIMITS, last_position=3, max_staleness=4)
    ledger = ledger_at()

    first, second = issue(ledger, limits), issue(ledger, limits)

    assert [(record.position, record.prompts) for record in (first, second)] == [(0, 2), (2, 1)]
    assert admission.prompts_to_issue(ledger, limits) == (0, "ended")
    assert not admission.is_exhausted(ledger, limits), "two tickets are rolled out"

    ledger.abandon(first, redo=PromptRange(0, 2))
    seal(ledger, second)
    assert admission.prompts_to_issue(ledger, limits) == (2, "")
    assert not admission.is_exhausted(ledger, limits)

    seal(ledger, issue(ledger, limits))
    assert (ledger.ready, admission.is_exhausted(ledger, limits)) == (6, True), "fewer rows than a batch"


def test_fewer_passes_at_a_resume_leave_prompts_that_would_be_repeated_unissued():
    ledger = ledger_at()
    limits = dataclasses.replace(LIMITS, max_staleness=4)
    for _ in range(3):
        record = issue(ledger, limits)
    ledger.abandon(record, redo=PromptRange(4, 2))

    assert admission.prompts_to_issue(ledger, dataclasses.replace(limits, last_position=5)) == (1, "")
    assert admission.prompts_to_issue(ledger, dataclasses.replace(limits, last_position=4)) == (0, "ended")
