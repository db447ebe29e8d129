"""The harness behind `bin/bench`: its arithmetic, and the file that it writes."""

import itertools
import os
import time

import pytest

from benches.__main__ import BENCHES, PAGES, main
from benches.measure import Sample, cpu_seconds, figure, interleaved, percentile, timed
from benches.report import RESULTS, ROOT, Section, Table, machine, merge, sections_of, table_rows, update_page


def test_a_ratio_is_the_median_of_the_rounds_own_ratios():
    # The second round was ten times slower for both: of medians the ratio would be 20 / 4 = 5.
    mine, its = Sample.of([20, 2, 40]), Sample.of([10, 1, 4])

    ratio = mine.over(its)

    assert ratio.values == (2, 2, 10)
    assert ratio.median == 2


def test_ratios_need_the_same_rounds():
    with pytest.raises(ValueError, match="argument 2"):
        Sample.of([1, 2]).over(Sample.of([1]))
    with pytest.raises(ValueError, match="no values"):
        Sample.of([])


def test_a_sample_shows_median_and_range():
    assert str(Sample.of([3, 1, 2])) == "2.00 (1.00 to 3.00)"
    assert str(Sample.of([3.14159])) == "3.14"
    assert str(Sample.of([0.5, 1.5]).scaled(2)) == "2.00 (1.00 to 3.00)"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0123456, "0.0123"), (1, "1.00"), (12.34, "12.3"), (123.4, "123"), (999.6, "1,000"),
     (1234.5, "1,230"), (51_234_567, "51,200,000"), (float("nan"), "nan")],
)  # fmt: skip
def test_figures_have_three_digits(value, text):
    assert figure(value) == text


def test_percentiles_are_those_of_the_nearest_rank():
    values = [*range(100, 0, -1)]

    assert percentile(values, 50) == 50
    assert percentile(values, 99) == 99
    assert percentile(values, 100) == 100
    assert percentile([7], 50) == 7
    assert percentile([1, 2, 3], 50) == 2


def test_ways_take_turns():
    calls, counter = [], itertools.count()

    def way(name):
        def measure():
            calls.append(name)
            return next(counter)

        return measure

    results = interleaved({name: way(name) for name in "abc"}, 4)

    rounds = ["".join(calls[start : start + 3]) for start in range(0, 12, 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len(set(rounds)) > 1
    assert all(results[name] == [i for i, call in enumerate(calls) if call == name] for name in "abc")


def test_the_first_call_is_not_timed():
    calls = []

    timed(lambda: calls.append(1), least_s=0.0, calls=3)

    assert len(calls) == 4


def test_cpu_time_of_a_process_is_counted():
    before_s, deadline_s = cpu_seconds(os.getpid()), time.monotonic() + 30
    while cpu_seconds(os.getpid()) < before_s + 0.05:
        assert time.monotonic() < deadline_s

    assert cpu_seconds(os.getpid()) >= before_s + 0.05


SECTION = Section("gather", "Rows into a batch", "How.", [Table(("what", "figure"), [("small", "1.00")], "Speed")])


def test_a_section_names_machine_versions_date_and_command():
    text = SECTION.markdown(took_s=12.3, command="bin/bench gather")

    assert text.startswith("## gather\n\nRows into a batch.\n")
    assert "`bin/bench gather`, 12 s, 20" in text
    assert machine() in text and "torch 2" in text and " cores, " in text
    assert text.endswith("**Speed**\n\n| what | figure |\n|---|---|\n| small | 1.00 |\n")


def test_a_row_of_another_width_than_its_header_is_refused():
    with pytest.raises(ValueError, match="1 cells under a header of 2"):
        list(Table(("a", "b"), [("only one",)]).lines())


def test_a_run_replaces_its_own_sections_only():
    first = merge("", [("## ledger", "## ledger\n\nold\n"), ("## gather on X", "## gather on X\n\ncard\n")], BENCHES)

    second = merge(first, [("## ledger", "## ledger\n\nnew\n"), ("## gather", "## gather\n\nhere\n")], BENCHES)

    assert [*sections_of(second)] == ["## gather", "## gather on X", "## ledger"]
    assert sections_of(second)["## gather on X"] == sections_of(first)["## gather on X"]
    assert "\n\nnew\n" in second and "\n\nold\n" not in second
    assert merge(second, [], BENCHES) == second


def test_rows_of_tables_are_found_without_headers():
    text = "a | b\n\n| what | figure |\n|---|---|\n| x | 1 |\n| y z | 2 |\n\ntext\n\n| other |\n|---|\n| w |\n"

    assert table_rows(text) == [("x", "1"), ("y z", "2"), ("w",)]


def test_a_page_takes_over_the_rows_that_it_repeats():
    results = "## a\n\n| what | figure |\n|---|---|\n| speed | 7 |\n| other | 9 |\n"
    readme = "# r\n\n| key | value |\n|---|---|\n| speed | 3 |\n| mine | 4 |\n\nspeed 3\n"

    assert update_page(readme, results) == readme.replace("| speed | 3 |", "| speed | 7 |")


def rows_from_bench(text):
    """Return the rows of a page's tables that say of themselves that they are `bin/bench`'s."""
    tables = [part for part in text.split("\n\n") if part.startswith("| `bin/bench")]
    return [row for table in tables for row in table_rows(table)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_says_of_speed_stands_in_the_results(page):
    claimed = rows_from_bench(page.read_text())

    assert claimed
    assert set(claimed) <= set(table_rows(RESULTS.read_text()))
    tables = [f"| {head} | x |\n|---|---|\n| {row} | 3 |\n" for head, row in
              (("`bin/bench`", "speed"), ("`bin/bench transport`", "way"), ("what", "a"))]  # fmt: skip
    assert rows_from_bench("\n".join(tables)) == [("speed", "3"), ("way", "3")]


def test_an_unknown_name_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["transprot"])

    assert "no benchmark 'transprot', only " in capsys.readouterr().err


def test_every_module_that_is_a_benchmark_has_a_name():
    modules = {
        path.stem.replace("_", "-") for path in (ROOT / "benches").glob("*.py") if "def run(" in path.read_text()
    }

    assert modules <= set(BENCHES)


def test_a_quick_run_prints_and_writes_nothing(capsys):
    before = RESULTS.read_bytes() if RESULTS.exists() else b""

    code = main(["--quick", "ledger"])

    assert code == 0
    assert [*sections_of(capsys.readouterr().out)] == ["## ledger"]
    assert (RESULTS.read_bytes() if RESULTS.exists() else b"") == before
