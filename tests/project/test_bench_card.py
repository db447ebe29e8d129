"""`bin/card`: its parts end at their deadlines and leave nothing, and its rows are those of what was measured."""

import contextlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from benches import card
from benches.card import _end_orphans, main, run_part, write
from benches.card_parts import KILLS, PARTS, SLEEP, of_report, of_tests
from benches.card_row import Place, Row
from benches.card_run import books_of, speeds_of
from benches.card_sleep import ASLEEP, PhaseMemory, phase_of, rows_of
from benches.measure import descendants
from benches.report import Section, Table, sections_of
from pipeline.runtime.lock import shm_directory
from pipeline.supervisor.capacity.budgets import AWAKE_PHASE, STEP_PHASE
from pipeline.telemetry.activity import ActivityClock
from pipeline.telemetry.metrics import SlotName
from pipeline.telemetry.slab import MetricsSlab
from tests.support.daemon import is_alive, wait_until
from tests.support.slabs import begun

GB = 10**9
ROW = '{"figure": "speed", "measured": "3", "against": "", "failed": ""}'


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path / "part", tmp_path / "model", "", small=True)
    place.folder.mkdir()
    return place


def program(text):
    return [sys.executable, "-c", textwrap.dedent(text)]


def test_a_part_that_is_late_is_ended_with_all_that_it_has_started_and_is_a_failed_row(place):
    """It ignores SIGTERM, has a child in another session, and the shared memory of a daemon of its folder."""
    shared = shm_directory(place.folder / "run")
    own = f"""
        import os, pathlib, signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path({str(place.folder / "run")!r}).mkdir()
        pathlib.Path({str(shared)!r}).mkdir()
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        pathlib.Path({str(place.folder / "pid")!r}).write_text(str(child.pid))
        print('{ROW}', flush=True)
        print("waits for ever", file=sys.stderr, flush=True)
        time.sleep(600)
    """

    found = run_part(program(own), place, 3.0, grace_s=0.1)

    assert found[0] == Row("speed", "3"), "what it had measured stays"
    assert [row.failed for row in found[1:]] == ["not done within 3 s; waits for ever"]
    assert not shared.exists()
    pid = int((place.folder / "pid").read_text())
    wait_until(lambda: not is_alive(pid), 30.0, "its child ends")


def test_a_row_is_told_as_soon_as_it_is_known(place):
    """A run that is killed midway has told what it had measured: the part waits until its first row is told."""
    told = place.folder / "told"
    own = f"""
        import pathlib, time
        print('{ROW}', flush=True)
        while not pathlib.Path({str(told)!r}).exists():
            time.sleep(0.01)
    """

    found = run_part(program(own), place, 30.0, tell=lambda row: told.write_text(row.figure))

    assert found == [Row("speed", "3")]


def test_a_part_that_ends_with_an_error_is_a_failed_row(place):
    found = run_part(program("import sys; sys.exit('no such card')"), place, 30.0)

    assert [row.failed for row in found] == ["exit code 1; no such card"]


def test_an_orphan_of_a_part_is_named_and_killed():
    own = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with subprocess.Popen([sys.executable, "-c", own]) as parent:
        # Before its exec a child has the command of its parent.
        sleeps = "\0import time; time.sleep(600)\0"
        wait_until(lambda: any(sleeps in command_of(pid) for pid in descendants(parent.pid)), 30.0, "a child")

        left = _end_orphans(parent.pid, within_s=0.0)

        assert parent.wait(30) == 0, "its child has ended"
    assert len(left) == 1 and left[0].endswith("-c import time; time.sleep(600)")


def command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


REPORT = """<testsuites><testsuite tests="6" failures="1" errors="2" skipped="1">
<testcase name="test_a"/><testcase name="test_b"/><testcase name="test_c"><skipped message="no"/></testcase>
<testcase name="test_d"><failure message="AssertionError: 3 is not 4&#10;more">text</failure></testcase>
<testcase name="test_d"><error message="left behind">text</error></testcase>
<testcase name="test_e"><error message="no fixture">text</error></testcase></testsuite></testsuites>"""


def test_tests_are_counted_and_those_that_failed_are_named(tmp_path):
    path = tmp_path / "report.xml"
    path.write_text(REPORT)

    rows = [*of_report(path, 1)]

    assert rows == [
        Row("tests that need a GPU", "2 passed, 2 failed, 1 skipped", failed="pytest ended with 1"),
        Row("`test_d`", failed="AssertionError: 3 is not 4"),
        Row("`test_d`", failed="left behind"),
        Row("`test_e`", failed="no fixture"),
    ]
    skipped = "".join(f'<testcase name="{name}"><skipped/></testcase>' for name in "ab")
    path.write_text(f"<testsuites><testsuite>{skipped}</testsuite></testsuites>")
    assert [*of_report(path, 0)] == [Row("tests that need a GPU", "0 passed, 0 failed, 2 skipped")]
    path.write_text('<testsuites><testsuite tests="0" failures="0" errors="0" skipped="0"/></testsuites>')
    assert [row.failed for row in of_report(path, 5)] == ["pytest ended with 5"], "none was found"
    assert [row.failed for row in of_report(tmp_path / "none.xml", 3)] == ["pytest ended with 3 before its report"]


def test_tests_that_are_late_are_counted_as_far_as_they_were_done(tmp_path):
    """With a program in pytest's place that writes its report when it is interrupted, as pytest does."""
    report, begun = tmp_path / "report.xml", tmp_path / "begun"
    own = program(f"""
        import pathlib, signal, time
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            pathlib.Path({str(begun)!r}).touch()
            time.sleep(600)
        except KeyboardInterrupt:
            pathlib.Path({str(report)!r}).write_text({REPORT!r})
            raise SystemExit(2)
    """)

    rows = of_tests(own, report, 3.0)

    late, counted, *_ = rows
    assert begun.exists() and late.failed == "not done within 3 s"
    assert counted.measured == "2 passed, 2 failed, 1 skipped"


def test_books_that_do_not_add_up_are_a_failure():
    line = "experiences: sealed {} = trained 60 + dropped 30 (cleared 30) + ready 8 + leased 2\n"

    good, bad = books_of(line.format(100)), books_of(line.format(1) + line.format(101))

    assert good == Row("rows", "100 sealed", "60 trained + 30 dropped + 8 ready + 2 leased")
    assert (bad.measured, bad.failed) == ("101 sealed", "they do not add up")
    assert books_of("").failed


def test_speeds_leave_out_the_first_steps_and_count_the_rest():
    def line(end_s, length, own_s):
        phases = {"forward_s": own_s, "backward_s": own_s, "reduce_s": 0.0, "optimizer_s": 0.5}
        return {"time_unix_s": end_s, "rows": 10, "response_length_mean_tokens": length, "tokens_trained": 30, **phases}

    # From the end of the second step on: 4 s, 2 steps, 20 rows, 10 * 5 + 10 * 7 tokens; passes of 1.5 and 2.5 s.
    rows = [*speeds_of([line(0.0, 99, 9), line(10.0, 99, 9), line(11.0, 5, 0.5), line(14.0, 7, 1.0)])]

    assert rows[0] == Row("response tokens/s", "30.0", "5.0 rows/s")
    assert rows[1] == Row("seconds a step", "2.000", "2.000 in the trainer's passes, 15.0 tokens/s")
    assert [row.failed for row in speeds_of([line(0.0, 9, 9)])] == ["too few for a speed"]


def test_the_next_run_on_the_same_card_replaces_its_section_alone(tmp_path):
    path = tmp_path / "RESULTS.md"
    path.write_text("# Results\n\n## ledger\n\nours\n\n## card on X\n\nof another card\n")

    def section(value):
        return Section("card", "rlhfd on a card", "How.", [Table(("part", "figure"), [("train", value)])], "NVIDIA Y")

    for value in ("1", "2"):
        write(path, section(value), took_s=3.0)

    found = sections_of(path.read_text())
    assert [*found] == ["## ledger", "## card on NVIDIA Y", "## card on X"]
    assert "| train | 2 |" in found["## card on NVIDIA Y"] and "| train | 1 |" not in path.read_text()
    assert found["## ledger"] == "## ledger\n\nours\n"


def test_all_parts_together_end_within_ten_minutes():
    untimed = max(part.deadline_s for part in PARTS.values() if not part.is_timed)

    assert untimed + sum(part.deadline_s for part in PARTS.values() if part.is_timed) <= 600


@pytest.mark.parametrize(("device", "most_s"), [("NVIDIA Y", 130.0), ("", 1300.0)])
def test_a_deadline_is_for_a_card_that_is_lent_and_ten_times_that_on_a_busy_cpu(tmp_path, monkeypatch, device, most_s):
    given = []
    monkeypatch.setattr(card, "run_part", lambda command, place, deadline_s, tell: given.append(deadline_s) or [])

    card._all(["train"], tmp_path, device, small=not device)

    assert given == [10 * card._MODEL_S if not device else card._MODEL_S, most_s]


def test_without_a_card_it_says_how_to_run_on_a_cpu_and_with_an_unknown_part_which_there_are(monkeypatch, capsys):
    monkeypatch.delenv("SMALL", raising=False)
    monkeypatch.setattr(card, "_card", lambda: "")

    assert main([]) == 1
    assert "SMALL=1 bin/card" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["trian"])
    assert "no part 'trian', only tests, embedded, train" in capsys.readouterr().err


def test_parts_with_a_section_of_their_own_are_none_of_the_default_ones(monkeypatch, capsys):
    monkeypatch.delenv("SMALL", raising=False)
    monkeypatch.setattr(card, "_card", lambda: "")

    assert not {*KILLS, *SLEEP} & {*PARTS}
    for group in (KILLS, SLEEP):
        assert max(part.deadline_s for part in group.values()) <= 600, "each part fits into ten minutes"
    assert main(["--kills", "--sleep"]) == 1, "there is no card"
    assert "SMALL=1 bin/card" in capsys.readouterr().err


def test_a_phase_is_that_of_both_processes():
    assert phase_of("asleep", "train") == STEP_PHASE
    assert phase_of("asleep", "wait_card") == phase_of("asleep", "publish") == ASLEEP
    assert phase_of("generate", "wait_data") == AWAKE_PHASE
    assert phase_of("fetch_weights", "train") is None


def test_a_reading_counts_where_the_phase_is_the_same_at_its_end(tmp_path):
    slab = MetricsSlab.create(tmp_path / "metrics", [SlotName("rollout"), SlotName("trainer")])
    worker, trainer = (ActivityClock(begun(slab, role), [*of]) for role, of in
                       (("rollout", ["asleep", "generate"]), ("trainer", ["train"])))  # fmt: skip
    with contextlib.ExitStack() as asleep:
        asleep.enter_context(worker.during("asleep"))
        changes = [False, True]

        def read(pid):
            assert pid == os.getpid()
            if changes.pop():
                asleep.close()
            return 7

        memory = PhaseMemory(tmp_path, read)
        with trainer.during("train"):
            memory.look(slab)
            assert memory.readings == {}, "the engine woke meanwhile"
    with worker.during("asleep"), trainer.during("train"):
        memory.look(slab)
    slab.close()

    assert memory.readings == {STEP_PHASE: [7]}


def test_memory_beyond_the_plan_and_an_engine_that_keeps_its_memory_are_failures():
    planned = {
        STEP_PHASE: {"trainer 0: weights": 3 * GB, "trainer 0: gradients": 2 * GB},
        AWAKE_PHASE: {"trainer 0: weights": 3 * GB, "rollout 0: KV cache": 8 * GB},
    }
    readings = {ASLEEP: [5 * GB, 4 * GB], STEP_PHASE: [5 * GB, 6 * GB], AWAKE_PHASE: [10 * GB, 11 * GB]}

    rows = [*rows_of(readings, planned, before_bytes=GB, freed=8 * GB)]

    assert [row.measured for row in rows] == ["1.00 GB", "3.00 GB", "5.00 GB", "10.00 GB"]
    assert rows[2].against == "planned 5.00 GB, of it trainer 0: weights 3.00 GB, trainer 0: gradients 2.00 GB"
    assert not any(row.failed for row in rows)
    over = {**readings, STEP_PHASE: [7 * GB], ASLEEP: [8 * GB]}
    found = [*rows_of(over, planned, before_bytes=GB, freed=8 * GB)]
    assert [row.failed for row in found] == ["", "the engine kept its memory: 3.00 GB less than awake",
                                             "120% of the plan", ""]  # fmt: skip
    (none,) = (row for row in rows_of({}, {}, before_bytes=0, freed=1) if row.failed)
    assert none.failed.startswith("no reading of: asleep")
