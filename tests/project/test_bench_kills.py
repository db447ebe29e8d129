"""`bin/bench kills`: what is counted as the cost of a kill."""

import pytest

from benches.card_run import dropped_rows
from benches.kills import Outcome, outcome_of, table
from benches.learning import ROWS

BEGAN = 100.0


def lines(*steps):
    return [
        {"step": step, "time_unix_s": BEGAN + 2.0 * at, "reward_mean": step / 10} for at, step in enumerate(steps, 1)
    ]


def test_steps_after_the_last_checkpoint_are_taken_again_and_their_rows_were_for_nothing():
    found = outcome_of(lines(1, 2, 3, 4, 3, 4, 5), BEGAN, 1, None)

    assert (found.seconds, found.repeated, found.lost_rows) == (14.0, 2, 2 * ROWS)
    assert found.last == pytest.approx(0.3), "each step once, as it was taken last"


def test_a_run_that_counts_its_rows_itself_is_believed():
    assert outcome_of(lines(1, 2, 3), BEGAN, 2, 48).lost_rows == 48


def test_a_kill_costs_the_difference_to_the_undisturbed_run_of_its_seed():
    plain = [Outcome(100.0, 0, 0, 64, 0.5), Outcome(110.0, 0, 0, 64, 0.5), Outcome(120.0, 0, 0, 96, 0.5)]
    killed = [Outcome(120.0, 4, 3, 64, 0.5), Outcome(150.0, 4, 4, 464, 0.4), Outcome(160.0, 4, 5, 496, 0.6)]

    (undisturbed, with_kills) = table({"x, undisturbed": plain, "x, killed": killed}).rows

    assert undisturbed[:2] == ("x, undisturbed", "0") and undisturbed[3:6] == ("-", "0", "-")
    assert with_kills[1] == "4" and with_kills[3].startswith("10.0") and with_kills[4:] == ("4", "100", "0.50")


def test_the_dropped_rows_are_those_of_the_last_books():
    told = "experiences: sealed 9 = trained 4 + dropped {} by name + ready 3 + leased 0"

    assert dropped_rows(f"{told.format(1)}\n{told.format(2)}\n") == 2
    assert dropped_rows("ended") is None
