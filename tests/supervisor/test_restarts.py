"""Backoff and the limit of starts, with a clock that is passed in."""

import random

import pytest

from pipeline.config.schema import DaemonConfig
from pipeline.supervisor.restarts import HEALTHY_S, RestartPolicy


@pytest.fixture
def policy():
    return RestartPolicy(DaemonConfig(restart_delay_s=1), random.Random(0))


def crash(policy, at_s, *, lived_s=0.0, start_s=1.0):
    policy.started(at_s)
    return policy.died(at_s + start_s + lived_s, lived_s)


def test_the_wait_doubles_up_to_120_times_the_first():
    policy = RestartPolicy(DaemonConfig(restart_delay_s=3, restart_limit=100), random.Random(0))

    waits = [crash(policy, at_s) for at_s in range(0, 90, 10)]

    for wait_s, expected_s in zip(waits, (3, 6, 12, 24, 48, 96, 192, 360, 360), strict=True):
        assert 0.8 * expected_s <= wait_s <= 1.2 * expected_s


def test_the_fifth_start_within_the_window_is_the_last(policy):
    waits = [crash(policy, at_s) for at_s in range(0, 50, 10)]

    assert None not in waits[:4]
    assert waits[4] is None


def test_old_starts_are_forgiven(policy):
    waits = [crash(policy, at_s, lived_s=HEALTHY_S) for at_s in range(0, 2000, 200)]

    assert None not in waits


@pytest.mark.parametrize("start_s", [60.0, 150.0, 290.0, 3600.0])
def test_deaths_soon_after_ready_are_counted_however_long_the_starts_take(policy, start_s):
    now_s, waits = 0.0, []
    while None not in waits and len(waits) < 100:
        waits.append(crash(policy, now_s, start_s=start_s, lived_s=5.0))
        now_s += start_s + 5.0 + (waits[-1] or 0.0)

    assert len(waits) == 5


def test_one_healthy_life_begins_the_count_anew(policy):
    waits = [crash(policy, 1000.0 * turn, lived_s=HEALTHY_S if turn == 3 else 5.0) for turn in range(9)]

    assert None not in waits[:8]
    assert waits[8] is None, "the fifth in a row"


def test_a_healthy_life_resets_the_wait(policy):
    for at_s in (0, 10, 20):
        crash(policy, at_s)

    wait_s = crash(policy, 30, lived_s=HEALTHY_S)

    assert wait_s <= 1.2


def test_a_long_start_is_no_healthy_life(policy):
    for at_s in (0, 10):
        crash(policy, at_s)

    assert crash(policy, 20, start_s=2 * HEALTHY_S) > 3.0


def test_other_bounds_hold_from_then_on(policy):
    policy.limit(DaemonConfig(restart_delay_s=10, restart_limit=3))

    waits = [crash(policy, at_s) for at_s in (0, 10, 20)]

    assert 8 <= waits[0] <= 12 and 16 <= waits[1] <= 24
    assert waits[2] is None


@pytest.mark.parametrize(("first_s", "wait_s"), [(0.025, 3.0), (30, 30.0)])
def test_a_wait_that_has_grown_is_cut_to_the_new_cap_or_raised_to_the_new_first_one(policy, first_s, wait_s):
    for at_s in (0, 10):
        crash(policy, at_s)

    policy.limit(DaemonConfig(restart_delay_s=first_s))

    assert 0.8 * wait_s <= crash(policy, 20) <= 1.2 * wait_s
