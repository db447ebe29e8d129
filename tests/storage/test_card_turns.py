"""Turns on a card: a rank steps or engines are awake, whoever dies and whoever inherits a descriptor."""

import os
import signal
import subprocess
import sys
import time

import pytest

from pipeline.storage.card_turns import CARD_VARIABLE, EngineTurn, RankTurn, inherited


@pytest.fixture
def turns(tmp_path):
    """Makes turns on one card, and closes them."""
    made = []

    def new(kind, *arguments):
        made.append(kind(tmp_path, *arguments))
        return made[-1]

    yield new
    for turn in made:
        if turn.descriptor >= 0:
            turn.close()


@pytest.fixture
def ended():
    """Processes that are killed at the end of the test."""
    pids = []
    yield pids
    for pid in pids:
        kill(pid)


def kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        return


def forked(act):
    """Return a fork that has acted and then waits for its end."""
    acted, told = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            act()
            os.write(told, b"x")
            while True:
                signal.pause()
        finally:
            os._exit(1)
    os.close(told)
    assert os.read(acted, 1) == b"x"
    os.close(acted)
    return pid


def test_a_rank_steps_once_every_engine_sleeps_and_an_engine_wakes_once_no_rank_steps(turns):
    rank, first, second = turns(RankTurn, 0), turns(EngineTurn), turns(EngineTurn)
    assert first.take() and second.take() and not first.is_wanted()

    assert not rank.take() and rank.is_asking and first.is_wanted()
    first.give_back()
    assert not rank.take(), "the second engine is awake"
    second.give_back()
    assert rank.take() and not rank.is_asking

    assert not first.take() and not first.is_awake
    rank.give_back()
    assert first.take() and second.take() and not first.is_wanted()


def test_an_engine_that_sleeps_yields_to_a_rank_that_asks(turns):
    rank, awake, asleep = turns(RankTurn, 0), turns(EngineTurn), turns(EngineTurn)
    awake.take()

    assert not rank.take()
    assert not asleep.take(), "else engines in turns could hold the rank up for ever"
    awake.give_back()
    assert rank.take()


def test_ranks_step_at_the_same_time_and_engines_wait_for_the_last_one(turns):
    ranks, engine = [turns(RankTurn, number) for number in range(3)], turns(EngineTurn)

    assert all(rank.take() for rank in ranks)
    for rank in ranks:
        assert not engine.take()
        rank.give_back()
    assert engine.take()


def test_the_memory_of_a_step_is_free_before_an_engine_wakes(turns):
    engine, seen = turns(EngineTurn), []
    rank = turns(RankTurn, 0, lambda: seen.append(engine.take()))
    rank.take()

    rank.give_back()

    assert seen == [False] and engine.take()


@pytest.mark.parametrize("kind", ["awake", "stepping", "asking"])
def test_a_process_that_is_killed_gives_its_turn_back(turns, tmp_path, ended, kind):
    def dies():
        assert (EngineTurn(tmp_path) if kind == "awake" else RankTurn(tmp_path, 0)).take() == (kind != "asking")

    other = turns(EngineTurn)
    if kind == "asking":
        other.take()
    ended.append(forked(dies))
    rank, engine = turns(RankTurn, 1), turns(EngineTurn)
    assert not (rank if kind == "awake" else engine).take()
    assert kind != "asking" or other.is_wanted()

    kill(ended[0])

    assert (rank if kind == "awake" else engine).take()
    assert not other.is_wanted() or kind == "awake"


@pytest.mark.parametrize("kind", ["engine", "rank"])
def test_a_fork_of_a_process_does_not_keep_its_turn(turns, tmp_path, ended, kind):
    turn = EngineTurn(tmp_path) if kind == "engine" else RankTurn(tmp_path, 0)
    other = turns(RankTurn, 1) if kind == "engine" else turns(EngineTurn)
    assert turn.take() and not other.take()
    ended.append(forked(lambda: None))

    turn.close()

    assert other.take()


def test_a_program_has_the_descriptor_only_if_it_is_passed(turns, ended):
    engine, rank = turns(EngineTurn), turns(RankTurn, 0)
    engine.take()
    waits = [sys.executable, "-c", "import signal; signal.pause()"]
    with subprocess.Popen(waits, close_fds=False) as other:
        ended.append(other.pid)
        with subprocess.Popen(waits, pass_fds=inherited()) as engines:
            ended.append(engines.pid)
            assert os.environ[CARD_VARIABLE] == str(engine.descriptor)

            engine.give_back()
            assert rank.take(), "an engine that sleeps has given the turn back for its process, too"
            rank.give_back()
            assert engine.take()
            engine.close()
            assert CARD_VARIABLE not in os.environ and inherited() == ()
            assert not rank.take(), "the process of the engine has memory of the card still"

            engines.kill()
        assert rank.take(), "another program had the descriptor"
        other.kill()


# An engine's process with children of its own, which outlive it.
PARENT = """
import os, signal, subprocess, sys
from pipeline.storage.card_turns import keep_inherited
keep_inherited()
if sys.argv[1] == "fork":
    if (pid := os.fork()) == 0:
        signal.pause()
else:
    pid = subprocess.Popen(["sleep", "1000"], close_fds=False).pid
print(pid, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("how", ["fork", "program"])
def test_a_child_of_an_engines_process_does_not_keep_the_turn(tmp_path, turns, ended, how):
    engine, rank = EngineTurn(tmp_path), turns(RankTurn, 0)
    engine.take()
    command = [sys.executable, "-c", PARENT, how]
    with subprocess.Popen(command, pass_fds=inherited(), stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        engine.close()
        assert not rank.take(), "the process of the engine is alive"

        process.kill()
        process.wait()
        try:
            # A fork may not have run yet, and closes the descriptor as the first thing.
            deadline_s = time.monotonic() + 60.0
            while not rank.take():
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
        finally:
            os.kill(child, signal.SIGKILL)
