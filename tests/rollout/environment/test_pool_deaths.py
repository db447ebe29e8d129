"""Processes of environments that end, hang or are killed: no other row pays for it, and no program stays."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.errors import DeadlineError, ExitCode, RlhfdError
from pipeline.rollout.environment import pool
from tests.rollout.environment import test_pool
from tests.support.daemon import is_alive, parent, wait_until

Rows, folder, new_pool = test_pool.Rows, test_pool.folder, test_pool.new_pool


def test_a_stopped_process_is_killed_and_its_rows_are_repeated(new_pool) -> None:
    rows = Rows(new_pool(timeout_s=1.0), 2)
    rows.say("a", "b")
    os.kill(rows.pid, signal.SIGSTOP)

    answers = rows.say("c", "d")

    assert [answer.observation for answer in answers] == ["['p', 0, {}] 2 c of 1", "['p', 1, {}] 2 d of 2"]


def test_a_process_that_is_killed_costs_nothing(new_pool) -> None:
    rows = Rows(new_pool(), 1)
    rows.say("a")
    rows.kill()
    rows.say("b")
    rows.submit("sleep 1")
    rows.pool.step(0.0)
    rows.kill()
    while rows.pool.is_busy:
        rows.pool.step(1.0)
    for _ in range(2):
        # The second one before it is ready.
        rows.kill()
        rows.pool.step(1.0)
    rows.say("c")

    assert [(answer.problem, answer.reward) for answer in rows.answers[0]] == [("", 1.0 + step) for step in range(4)]


def test_the_last_answers_of_a_process_count_and_its_successor_has_the_time_of_a_start(new_pool) -> None:
    rows = Rows(new_pool(timeout_s=1.0), 2)
    rows.say("a", "b")
    pool_ = rows.pool._pool
    rows.submit("c", "die")
    wait_until(lambda: select.select([pool_._control], [], [], 0.0)[0], 20.0, "its end is told")

    rows.pool.step(0.0)

    assert [answers[-1].reward for answers in rows.answers] == [2.0, 1.0]
    assert not pool_.processes[0].is_ready
    assert pool_.processes[0]._deadline_s - time.monotonic() > pool.STARTUP_TIMEOUT_S / 2


def test_a_process_that_does_not_read_keeps_nobody_waiting_and_gets_its_messages_whole(new_pool) -> None:
    rows = Rows(new_pool(), 2)
    rows.say("a", "b")
    os.kill(pid := rows.pid, signal.SIGSTOP)
    began_s = time.monotonic()
    rows.submit("x" * 3_000_000, "y")
    rows.pool.step(0.0)
    waited_s = time.monotonic() - began_s

    os.kill(pid, signal.SIGCONT)
    while rows.pool.is_busy:
        rows.pool.step(1.0)

    assert waited_s < 1.0
    assert [answers[-1].reward for answers in rows.answers] == [2.0, 2.0]
    assert rows.pid == pid


def test_a_repetition_has_the_time_of_the_steps_that_it_repeats(new_pool, monkeypatch) -> None:
    """The worker would kill a process that takes longer than one step."""
    monkeypatch.setattr(pool, "_GRACE_S", 0.2)
    rows = Rows(new_pool(timeout_s=2.0), 2)
    for _ in range(3):
        rows.say("sleep 1.0", "block 0.2")
    rows.kill()

    answers = rows.say("sleep 1.0", "block 0.2")

    assert [(answer.problem, answer.reward) for answer in answers] == [("", 4.0)] * 2


def test_a_step_after_a_repetition_has_the_time_of_one(new_pool) -> None:
    rows = Rows(new_pool(timeout_s=1.0), 1)
    rows.say("sleep 0.1")
    rows.kill()
    rows.say("sleep 0.1")

    (answer,) = rows.say("sleep 5")

    assert answer.problem == "timeout"
    assert answer.text.startswith("no answer within 1 s (rollout.environment_timeout_s) (")
    assert re.search(r"surroundings\.py:\d+\)$", answer.text), "the line that awaits"


def programs_of(rows: Rows) -> list[int]:
    """Have an environment start a program, one with a session of its own and a daemon; return their pids."""
    programs = list(map(int, rows.say("program")[0].observation.split()))
    assert list(map(is_alive, programs)) == [True] * 3
    return programs


def test_programs_that_an_environment_started_end_with_its_process(new_pool) -> None:
    rows = Rows(new_pool(), 1)

    programs = programs_of(rows)
    rows.say("die")
    assert not any(map(is_alive, programs)), "replaced"

    rows = Rows(rows.pool, 1)
    programs = programs_of(rows)
    rows.kill()
    # The pool is not called: the worker may be at work for long.
    wait_until(lambda: not any(map(is_alive, programs)), 10.0, "their end")

    rows = Rows(rows.pool, 1)
    programs = programs_of(rows)
    rows.pool.close()
    assert not any(map(is_alive, programs))


def test_programs_of_an_environment_end_also_after_a_kill_of_its_guard(new_pool) -> None:
    rows = Rows(new_pool(processes=2), 2)
    programs = [list(map(int, answer.observation.split())) for answer in rows.say("program", "program")]
    (guard,) = {parent(process.pid) for process in rows.pool._pool.processes if process.pid == parent(programs[0][0])}

    os.kill(guard, signal.SIGKILL)

    wait_until(lambda: not any(map(is_alive, programs[0])), 10.0, "their end")
    assert all(map(is_alive, programs[1])), "those of the other process live on"
    assert [answer.reward for answer in rows.say("c", "d")] == [2.0, 2.0]
    rows.pool.close()
    assert not any(map(is_alive, programs[1]))


def test_no_program_of_an_environment_outlives_a_worker_that_is_killed(folder: Path) -> None:
    worker = """
import sys
from pipeline.rollout.environment.pool import EnvironmentPool, row_json
pool = EnvironmentPool("surroundings:Counting", timeout_s=20.0)
pool.wait_ready()
row = pool.new_row()
pool.submit(row, row_json("p", 1, {}), ["program"], lambda a: print(a.observation, flush=True), is_last=False)
while pool.is_busy:
    pool.step(1.0)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", worker], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        programs = list(map(int, process.stdout.readline().split()))
        process.kill()

    assert len(programs) == 3
    wait_until(lambda: not any(map(is_alive, programs)), 10.0, "their end")


def test_a_process_that_dies_while_nobody_tells_of_it_ends_the_pool(new_pool) -> None:
    rows = Rows(new_pool(timeout_s=0.2), 1)
    os.kill(rows.pool._pool.forkserver.pid, signal.SIGSTOP)
    os.kill(rows.pid, signal.SIGKILL)

    with pytest.raises(DeadlineError, match="the process that starts environment processes has not answered for 4 s"):
        rows.say("a")


def test_successors_that_all_end_before_they_are_ready_are_no_bad_configuration(new_pool, tmp_path: Path) -> None:
    rows = Rows(new_pool(), 1)
    rows.say("a")
    (tmp_path / "surroundings.py").write_text("import os\nos._exit(7)\n")
    rows.kill()

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
        rows.kill()
        rows.pool.step(1.0)
        rows.pool.wait_ready()

    answers = rows.say("block 100", "c")

    assert [answer.problem for answer in answers] == ["timeout", ""]


def test_a_dropped_row_is_not_run_again_after_the_end_of_its_process(new_pool) -> None:
    rows = Rows(new_pool(), 2)
    rows.submit("block 100", "sleep 0.1")
    rows.pool.step(0.2)
    rows.pool.forget(rows.numbers[:1])
    rows.kill()
    while rows.pool.is_busy:
        rows.pool.step(1.0)

    assert [answer.observation for answer in rows.say("alive", first=1)] == ["1 of 1"]
    assert rows.answers[0] == [] and [answer.problem for answer in rows.answers[1]] == ["", ""]
