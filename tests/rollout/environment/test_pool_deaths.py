"""Processes of environments that end, hang or are killed: no other row pays for it, and no program stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.errors import ExitCode, RlhfdError
from pipeline.rollout.environment import pool
from tests.rollout.environment import test_pool

Rows, new_pool = test_pool.Rows, test_pool.new_pool


def test_a_stopped_process_is_killed_and_its_rows_are_repeated(new_pool) -> None:
    rows = Rows(new_pool(timeout_s=1.0), 2)
    rows.say("a", "b")
    os.kill(rows.pool._processes[0]._process.pid, signal.SIGSTOP)

    answers = rows.say("c", "d")

    assert [answer.observation for answer in answers] == ["['p', 0, {}] 2 c of 1", "['p', 1, {}] 2 d of 2"]


def test_a_process_killed_between_two_turns_costs_nothing(new_pool) -> None:
    rows = Rows(new_pool(), 2)
    rows.say("a", "b")
    killed = rows.pool._processes[0]._process
    killed.kill()
    killed.wait()

    assert [answer.reward for answer in rows.say("c", "d")] == [2.0, 2.0]


def test_a_process_killed_with_one_step_in_hand_costs_nothing(new_pool) -> None:
    rows = Rows(new_pool(), 1)
    rows.say("a")
    rows.submit("sleep 1")
    rows.pool.step(0.0)
    rows.pool._processes[0]._process.kill()
    while rows.pool.is_busy:
        rows.pool.step(1.0)

    assert [(answer.problem, answer.reward) for answer in rows.answers[0]] == [("", 1.0), ("", 2.0)]


def test_a_process_whose_child_holds_its_link_is_found_dead(new_pool) -> None:
    rows = Rows(new_pool(), 1)

    (answer,) = rows.say("fork", deadline_s=10.0)

    assert (answer.problem, answer.text) == ("exception", "the process of the row ended with exit code 3")


def test_no_child_of_an_environment_holds_its_link(new_pool) -> None:
    (answer,) = Rows(new_pool(), 1).say("link", deadline_s=10.0)

    assert answer.observation == "False False", "a program, and a fork"


def test_a_process_that_does_not_read_keeps_nobody_waiting_and_gets_its_messages_whole(new_pool) -> None:
    rows = Rows(new_pool(), 2)
    rows.say("a", "b")
    process = rows.pool._processes[0]._process
    os.kill(process.pid, signal.SIGSTOP)
    began_s = time.monotonic()
    rows.submit("x" * 3_000_000, "y")
    rows.pool.step(0.0)
    waited_s = time.monotonic() - began_s

    os.kill(process.pid, signal.SIGCONT)
    while rows.pool.is_busy:
        rows.pool.step(1.0)

    assert waited_s < 1.0
    assert [answers[-1].reward for answers in rows.answers] == [2.0, 2.0]
    assert rows.pool._processes[0]._process is process


def test_a_repetition_has_the_time_of_the_steps_that_it_repeats(new_pool, monkeypatch) -> None:
    """The worker would kill a process that takes longer than one step."""
    monkeypatch.setattr(pool, "_GRACE_S", 0.2)
    rows = Rows(new_pool(timeout_s=2.0), 2)
    for _ in range(3):
        rows.say("sleep 1.0", "block 0.2")
    rows.pool._processes[0]._process.kill()

    answers = rows.say("sleep 1.0", "block 0.2")

    assert [(answer.problem, answer.reward) for answer in answers] == [("", 4.0)] * 2


def test_a_step_after_a_repetition_has_the_time_of_one(new_pool) -> None:
    rows = Rows(new_pool(timeout_s=1.0), 1)
    rows.say("sleep 0.1")
    rows.pool._processes[0]._process.kill()
    rows.say("sleep 0.1")

    (answer,) = rows.say("sleep 5")

    assert (answer.problem, answer.text) == ("timeout", "no answer within 1 s")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def ends(pid: int, deadline_s: float = 10.0) -> bool:
    end_s = time.monotonic() + deadline_s
    while is_running(pid) and time.monotonic() < end_s:
        time.sleep(0.01)
    return not is_running(pid)


@pytest.mark.parametrize("end", ["close", "replaced", "killed"])
def test_a_program_that_an_environment_started_ends_with_its_process(new_pool, end: str) -> None:
    rows = Rows(new_pool(), 1)
    program = int(rows.say("program")[0].observation)
    assert is_running(program)

    if end == "close":
        rows.pool.close()
    elif end == "replaced":
        rows.say("die")
    else:
        # The pool is not called: the worker may be at work for long.
        rows.pool._processes[0]._process.kill()

    assert ends(program)


def test_no_program_of_an_environment_outlives_a_worker_that_is_killed(new_pool, tmp_path: Path) -> None:
    new_pool()
    worker = """
import time
from pipeline.rollout.environment.pool import EnvironmentPool, row_json
pool = EnvironmentPool("surroundings:Counting", timeout_s=20.0)
pool.wait_ready()
row = pool.new_row()
pool.submit(row, row_json("p", 1, {}), ["program"], lambda a: print(a.observation, flush=True), is_last=False)
while pool.is_busy:
    pool.step(1.0)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", worker], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        program = int(process.stdout.readline())
        process.kill()

    assert ends(program)


def test_a_successor_that_is_killed_before_it_is_ready_is_replaced_too(new_pool) -> None:
    rows = Rows(new_pool(), 2)
    rows.say("a", "b")
    for _ in range(2):
        killed = rows.pool._processes[0]._process
        killed.kill()
        killed.wait()
        rows.pool.step(1.0)

    assert [answer.reward for answer in rows.say("c", "d")] == [2.0, 2.0]


def test_successors_that_all_end_before_they_are_ready_are_no_bad_configuration(new_pool, tmp_path: Path) -> None:
    rows = Rows(new_pool(), 1)
    rows.say("a")
    (tmp_path / "surroundings.py").write_text("import os\nos._exit(7)\n")
    rows.pool._processes[0]._process.kill()

    with pytest.raises(RlhfdError, match=r"surroundings:Counting ended with exit code 7, 4 times in a row") as raised:
        rows.say("b")
    assert raised.value.exit_code is ExitCode.FAILED


def test_a_first_process_that_is_killed_while_it_imports_is_no_bad_configuration(new_pool, tmp_path: Path) -> None:
    (tmp_path / "surroundings.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")

    with pytest.raises(RlhfdError, match=r"imports surroundings:Counting was killed by SIGKILL") as raised:
        new_pool()
    assert raised.value.exit_code is ExitCode.FAILED


def test_rows_that_all_hang_are_given_up_after_the_third(new_pool) -> None:
    rows = Rows(new_pool(timeout_s=0.5), 8)
    began_s = time.monotonic()

    answers = rows.say(*["block 100"] * 8)

    assert {answer.problem for answer in answers} == {"timeout"}
    assert sum(answer.text.startswith("not tried") for answer in answers) == 5
    assert time.monotonic() - began_s < 40


def test_a_process_that_ends_with_nothing_in_hand_is_no_row_that_took_too_long(new_pool) -> None:
    rows = Rows(new_pool(timeout_s=1.0), 2)
    rows.say("a", "b")
    for _ in range(2):
        time.sleep(1.0)
        rows.pool._processes[0]._process.kill()
        rows.pool.step(1.0)
        rows.pool.wait_ready()

    answers = rows.say("block 100", "c")

    assert [answer.problem for answer in answers] == ["timeout", ""]


def test_a_dropped_row_is_not_run_again_after_the_end_of_its_process(new_pool) -> None:
    rows = Rows(new_pool(), 2)
    rows.submit("block 100", "sleep 0.1")
    rows.pool.step(0.2)
    rows.pool.forget(rows.numbers[:1])
    rows.pool._processes[0]._process.kill()
    while rows.pool.is_busy:
        rows.pool.step(1.0)

    assert [answer.observation for answer in rows.say("alive", first=1)] == ["1 of 1"]
    assert rows.answers[0] == [] and [answer.problem for answer in rows.answers[1]] == ["", ""]
