"""`bin/bench kills` and `bin/card --kills`: what is counted as the cost of a kill."""

import pytest

from benches.card_row import Row
from benches.card_run import Books, read_books
from benches.kills import Outcome, Steps, Watch, card_rows, difference, outcome_of, tables
from benches.learning import ROWS, Kill

BEGAN = 100.0


def lines(*steps):
    return [
        {"step": step, "time_unix_s": BEGAN + 2.0 * at, "reward_mean": step / 10} for at, step in enumerate(steps, 1)
    ]


def test_steps_after_the_last_checkpoint_are_computed_again_and_their_rows_were_for_nothing():
    found = outcome_of(lines(1, 2, 3, 4, 3, 4, 5), BEGAN, [Kill("process", 4, BEGAN + 8.5)])

    assert (found.seconds, found.kills, found.repeated, found.lost_rows) == (14.0, 1, 2, 2 * ROWS)
    assert found.last == pytest.approx(0.3), "each step once, as it was taken last"
    assert found.spent_s == {"process": (5.5, 1, 1)}, "from the kill to the end of the fifth step"


def test_a_run_that_counts_its_rows_and_steps_itself_is_believed():
    found = outcome_of(lines(1, 2, 3), BEGAN, dropped=48, repeated=1, twice=5)

    assert (found.lost_rows, found.repeated, found.twice) == (48, 1, 5)


def test_the_time_of_a_kill_ends_with_the_next_one():
    kills = [Kill("worker", 4, BEGAN + 8.25), Kill("trainer", 6, BEGAN + 12.5)]

    found = outcome_of(lines(*range(1, 10)), BEGAN, kills)

    assert found.spent_s == {"worker": (4.25, 2, 1), "trainer": (5.5, 3, 1)}
    twice = outcome_of(lines(*range(1, 10)), BEGAN, [kill._replace(name="process") for kill in kills])
    assert twice.spent_s == {"process": (9.75, 5, 2)}, "of all its kills"
    assert found.step_s == 2.0


def runs():
    """Three seeds, undisturbed and with four kills."""
    plain = [Outcome(100.0, 0, 0, 64, 0.5, 2.0), Outcome(110.0, 0, 0, 64, 0.5, 2.0), Outcome(120.0, 0, 0, 96, 0.5, 1.0)]
    spent = {"worker": (46.0, 20, 2), "trainer": (29.0, 10, 1)}
    killed = [
        Outcome(120.0, 4, 3, 64, 0.5, 2.0, 0, spent),
        Outcome(150.0, 4, 4, 464, 0.4, 2.0, 0, spent),
        Outcome(160.0, 4, 5, 496, 0.6, 2.0, 0, spent),
    ]
    return {"x, undisturbed": plain, "x, killed": killed}


def test_a_kill_costs_the_difference_to_the_undisturbed_run_of_its_seed():
    table, by_process = tables(runs())
    undisturbed, with_kills = table.rows

    assert undisturbed[:2] == ("x, undisturbed", "0") and undisturbed[3:7] == ("-", "0", "-", "-")
    assert with_kills[1] == "4" and with_kills[3].startswith("10.0") and with_kills[4:] == ("4", "100", "0", "0.50")
    # 10 steps of the undisturbed run of the seed: 20, 20 and 10 s.
    assert by_process.rows == [
        ("x, SIGKILL of its worker", "3.00 (3.00 to 13.0)"), ("x, SIGKILL of its trainer", "9.00 (9.00 to 19.0)"),
    ]  # fmt: skip


def test_on_a_card_a_row_that_counts_twice_is_a_failure():
    found = runs()
    rows = {row.figure: row for row in card_rows(found)}

    assert rows["x: SIGKILL"] == Row("x: SIGKILL", "4 of worker, trainer")
    assert rows["x: to the last step"] == Row("x: to the last step", "150.0 s", "undisturbed 110.0 s")
    assert rows["x: steps computed again"] == Row("x: steps computed again", "4", "100 rows lost a kill")
    assert rows["x: reward of the last 10 steps"].against == "undisturbed 0.500"
    assert not any(row.failed for row in rows.values())

    found["x, killed"][1] = Outcome(150.0, 4, 4, 464, 0.4, twice=ROWS)
    assert difference(found["x, killed"], found["x, undisturbed"]).twice == ROWS
    assert [row.measured for row in card_rows(found) if row.failed] == [str(ROWS)]


def test_the_books_are_those_that_were_told_last():
    told = "experiences: sealed 9 = trained 4 + dropped {} by name + ready 3 + leased 0"

    books = read_books(f"{told.format(1)}\n{told.format(2)}\n")

    assert books == Books(9, 4, 2, 3, 0) and books.unaccounted == 0
    assert read_books("ended") is None


def test_a_step_whose_line_is_removed_is_computed_again(tmp_path):
    watch = Watch(tmp_path)

    for steps in (3, 4, 4, 3, 4, 5, 3):
        watch.at_step(steps)
    watch.look("rlhfd_items_unaccounted -3\n")
    watch.look("rlhfd_items_unaccounted 0\n")

    assert (watch.repeated, watch.unaccounted) == (3, 3)


def test_each_kill_has_as_many_steps_behind_it_as_before_it():
    plan = Steps.for_kills(4, 12)

    assert plan.steps == 60 and [*plan.kills] == [12, 24, 36, 48]
