"""Backoff and the limit of starts, with a clock that is passed in."""

import random

import pytest

from pipeline.config.schema import DaemonConfig
from pipeline.supervisor.restarts import RestartLimits, RestartPolicy

LIMITS = RestartLimits(first_delay_s=1.0, longest_delay_s=4.0, healthy_s=100.0, starts=5, window_s=600.0)


@pytest.fixture
def policy():
    return RestartPolicy(LIMITS, random.Random(0))


def crash(policy, at_s, *, lived_s=0.0, start_s=1.0):
    policy.started(at_s)
    return policy.died(at_s + start_s + lived_s, lived_s)


def test_the_wait_doubles_up_to_its_cap(policy):
    waits = [crash(policy, at_s) for at_s in (0, 10, 20, 30)]

    for wait_s, expected_s in zip(waits, (1, 2, 4, 4), strict=True):
        assert 0.8 * expected_s <= wait_s <= 1.2 * expected_s


def test_the_fifth_start_within_the_window_is_the_last(policy):
    waits = [crash(policy, at_s) for at_s in range(0, 50, 10)]

    assert None not in waits[:4]
    assert waits[4] is None


def test_old_starts_are_forgiven(policy):
    waits = [crash(policy, at_s, lived_s=LIMITS.healthy_s) for at_s in range(0, 2000, 200)]

    assert None not in waits


@pytest.mark.parametrize("start_s", [60.0, 150.0, 290.0, 3600.0])
def test_deaths_soon_after_ready_are_counted_however_long_the_starts_take(policy, start_s):
    now_s, waits = 0.0, []
    while None not in waits and len(waits) < 100:
        waits.append(crash(policy, now_s, start_s=start_s, lived_s=5.0))
        now_s += start_s + 5.0 + (waits[-1] or 0.0)

    assert len(waits) == LIMITS.starts


def test_one_healthy_life_begins_the_count_anew(policy):
    waits = [crash(policy, 1000.0 * turn, lived_s=LIMITS.healthy_s if turn == 3 else 5.0) for turn in range(9)]

    assert None not in waits[:8]
    assert waits[8] is None, "the fifth in a row"


def test_a_healthy_life_resets_the_wait(policy):
    for at_s in (0, 10, 20):
        crash(policy, at_s)

    wait_s = crash(policy, 30, lived_s=LIMITS.healthy_s)

    assert wait_s <= 1.2


def test_a_long_start_is_no_healthy_life(policy):
    for at_s in (0, 10):
        crash(policy, at_s)

    assert crash(policy, 20, start_s=2 * LIMITS.healthy_s) > 3.0


def test_the_bounds_are_those_of_the_configuration():
    limits = RestartLimits.of(DaemonConfig(restart_delay_s=3, restart_limit=7))

    assert (limits.first_delay_s, limits.longest_delay_s, limits.starts, limits.window_s) == (3, 360, 7, 600)


def test_other_bounds_hold_from_then_on(policy):
    policy.limit(RestartLimits(first_delay_s=10.0, longest_delay_s=15.0, starts=3, window_s=600.0))

    waits = [crash(policy, at_s) for at_s in (0, 10, 20)]

    assert 8 <= waits[0] <= 12 and 12 <= waits[1] <= 18
    assert waits[2] is None


def test_a_wait_that_has_grown_is_cut_to_the_new_cap(policy):
    for at_s in (0, 10):
        crash(policy, at_s)

    policy.limit(RestartLimits(first_delay_s=0.5, longest_delay_s=2.0, starts=5, window_s=600.0))

    assert 1.6 <= crash(policy, 20) <= 2.4


def test_a_wait_that_has_grown_is_raised_to_the_new_first_one(policy):
    for at_s in (0, 10):
        crash(policy, at_s)

    policy.limit(RestartLimits(first_delay_s=30.0, longest_delay_s=3600.0, starts=5, window_s=600.0))

    assert 24 <= crash(policy, 20) <= 36
