"""Environments in processes: their answers, and what fails."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.user_modules import FOLDER_VARIABLE
from pipeline.errors import ConfigError
from pipeline.rollout.environment import pool as environment_pool
from pipeline.rollout.environment.pool import EnvironmentPool, row_json
from pipeline.rollout.environment.wire import Answer
from pipeline.runtime.pool import ProcessPool
from tests.support.daemon import descendants, is_alive, wait_until
from tests.support.told import Told

ENVIRONMENTS = """
import asyncio, os, signal, subprocess, sys, time
import numpy
from pipeline import Turn

at_import = asyncio.get_event_loop()

def link_of_this():
    loop = asyncio.get_running_loop()
    sockets = [int(n) for n in os.listdir("/proc/self/fd") if "socket:" in os.path.realpath(f"/proc/self/fd/{n}")]
    (link,) = set(sockets) - {loop._ssock.fileno(), loop._csock.fileno()}
    return link

class Session:
    def __init__(self): self.loop = asyncio.get_running_loop()
    async def reset(self, prompt, answer, columns): pass
    async def step(self, response): return Turn(str(self.loop is asyncio.get_running_loop() is at_import))

class Grave(BaseException): pass
class Mute(Exception):
    def __str__(self): raise OSError

class Counting:
    made = alive = 0
    def __del__(self): Counting.alive -= hasattr(self, "told")
    async def reset(self, prompt, answer, columns):
        Counting.made += 1
        Counting.alive += 1
        self.told, self.steps = [prompt, answer, columns], 0
    async def step(self, response):
        self.steps += 1
        name, _, seconds = response.partition(" ")
        if name == "raise": raise ValueError("secret")
        if name == "exit": os._exit(3)
        if name == "sleep": await asyncio.sleep(float(seconds))
        if name == "block": time.sleep(float(seconds))
        if name == "none": return None
        if name == "nan": return Turn(reward=float("nan"))
        if name == "number": return Turn(observation=5)
        if name == "large": return Turn(reward=10**400)
        if name == "beyond": return Turn(reward=1e39)
        if name == "array": return Turn(done=numpy.zeros(2))
        if name == "float32": return Turn(reward=numpy.float32(0.5))
        if name == "text": return Turn(reward="1")
        if name == "half": return Turn("\\ud800")
        if name == "half-error": raise ValueError("\\ud800")
        if name == "cancel": raise asyncio.CancelledError
        if name == "late": raise TimeoutError("of a socket")
        if name == "grave": raise Grave
        if name == "mute": raise Mute
        if name == "numpy": return Turn(numpy.str_("a"))
        if name == "long": return Turn("o" * int(seconds))
        if name == "alive": return Turn(f"{Counting.alive} of {Counting.made}")
        if name == "program":
            child = subprocess.Popen(["sleep", "1000"])
            own_session = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            read, write = os.pipe()
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.write(write, str(os.getpid()).encode())
                    os.execvp("sleep", ["sleep", "1000"])
                os._exit(0)
            os.wait()
            return Turn(f"{child.pid} {own_session.pid} {os.read(read, 100).decode()}")
        if name == "die": os.kill(os.getpid(), signal.SIGKILL)
        if name == "link":
            link = os.readlink(f"/proc/self/fd/{link_of_this()}")
            listed = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True)
            read, write = os.pipe()
            if (fork := os.fork()) == 0:
                links = "".join(os.popen(f"ls -l /proc/{os.getpid()}/fd"))
                os.write(write, str(link in links).encode())
                os._exit(0)
            os.waitpid(fork, 0)
            return Turn(f"{link in listed.stdout} {os.read(read, 100).decode()}")
        if name == "loop": return Turn(str(at_import is asyncio.get_running_loop()))
        if name == "leave": sys.exit(4)
        if name == "zero": os._exit(0)
        if name == "speak":
            os.write(link_of_this(), b"\\x01\\0\\0\\0\\xc1")
            await asyncio.sleep(100)
        if name == "fork":
            if os.fork() == 0:
                time.sleep(1000)
            os._exit(3)
        text = f"{self.told} {self.steps} {response} of {Counting.made}"
        return Turn(text, reward=self.steps, done=name == "done", tool_failed=name == "wrong")

class Plain:
    def reset(self, prompt, answer, columns): pass
    def step(self, response): return Turn(response.upper())

class Half:
    async def reset(self, prompt, answer, columns): pass

def broken(): raise OSError("no device")
def ending(): os._exit(9)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "surroundings.py").write_text(ENVIRONMENTS)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.fixture
def new_pool(folder: Path) -> Iterator[Callable[..., EnvironmentPool]]:
    pools: list[EnvironmentPool] = []

    def make(name: str = "Counting", *, timeout_s: float = 20.0, **options: Any) -> EnvironmentPool:
        pools.append(EnvironmentPool(f"surroundings:{name}", timeout_s=timeout_s, **options))
        pools[-1].wait_ready()
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


class Rows:
    """Rows of a pool, each with its responses so far and its answers."""

    def __init__(self, pool: EnvironmentPool, count: int) -> None:
        self.pool = pool
        self.numbers = [pool.new_row() for _ in range(count)]
        self.responses: list[list[str]] = [[] for _ in range(count)]
        self.answers: list[list[Answer]] = [[] for _ in range(count)]

    @property
    def pid(self) -> int:
        """The pool's first process, ready or not: forkserver, guard and process come before what it has started."""
        below = wait_until(lambda: descendants(self.pool._pool.forkserver.pid)[1:], 10.0, "it is forked")
        return below[0]

    def kill(self) -> None:
        """Kill the pool's first process, and wait for its end."""
        os.kill(pid := self.pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid), 10.0, "it is dead")

    def submit(self, *responses: str, first: int = 0, is_last: bool = False) -> None:
        for row, response in enumerate(responses, first):
            self.responses[row].append(response)
            self.pool.submit(
                self.numbers[row], row_json("p", row, {}), self.responses[row], self.answers[row].append,
                is_last=is_last,
            )  # fmt: skip

    def say(self, *responses: str, deadline_s: float = 60.0, **options: Any) -> list[Answer]:
        self.submit(*responses, **options)
        end_s = time.monotonic() + deadline_s
        while self.pool.is_busy and time.monotonic() < end_s:
            self.pool.step(1.0)
        assert not self.pool.is_busy
        first = options.get("first", 0)
        return [answers[-1] for answers in self.answers[first : first + len(responses)]]


def test_each_row_has_an_environment_of_its_own_that_keeps_its_state(new_pool) -> None:
    told = Told()
    rows = Rows(new_pool(processes=2, telemetry=told), 3)

    first, second = rows.say("a", "b", "done"), rows.say("c", "wrong")

    assert [answer.observation for answer in first] == [
        "['p', 0, {}] 1 a of 1", "['p', 1, {}] 1 b of 1", "['p', 2, {}] 1 done of 2",
    ]  # fmt: skip
    assert [answer.done for answer in first] == [False, False, True]
    assert [answer.observation for answer in second] == ["['p', 0, {}] 2 c of 2", "['p', 1, {}] 2 wrong of 1"]
    assert [answer.reward for answer in second] == [2.0, 2.0]
    assert [answer.tool_failed for answer in second] == [False, True]
    assert sorted(told.counted["environment_answered"]) == ["ok"] * 4 + ["tool_failed"]


def test_texts_and_numbers_of_numpy_will_do_and_no_child_holds_the_link(new_pool) -> None:
    answers = Rows(new_pool(), 4).say("float32", "numpy", "link", "loop")

    assert answers[0].reward == 0.5
    assert answers[1].observation == "a"
    assert answers[2].observation == "False False", "a program, and a fork"
    assert answers[3].observation == "True", "the loop of the import is that of all steps"


def test_rows_that_await_something_do_so_at_the_same_time(new_pool) -> None:
    rows = Rows(new_pool(), 20)
    began_s = time.monotonic()

    rows.say(*["sleep 0.5"] * 20)

    assert time.monotonic() - began_s < 5.0


FAILURES = {
    "raise": ("exception", "ValueError: secret"),
    "none": ("invalid", "step returned a NoneType, not a Turn"),
    "nan": ("invalid", "the reward is not a finite number"),
    "number": ("invalid", "the observation is a int, not a str"),
    "large": ("invalid", "the reward is not a finite number"),
    "beyond": ("invalid", "the reward 1e+39 is beyond float32, in which it is trained"),
    "text": ("invalid", "the reward is a str, not a number"),
    "half": ("invalid", "the observation holds half of a surrogate pair"),
    "half-error": ("exception", "ValueError: ?"),
    "cancel": ("exception", "CancelledError: "),
    "late": ("exception", "TimeoutError: of a socket"),
    "grave": ("exception", "Grave: "),
    "mute": ("exception", "Mute: without a message"),
    "exit": ("exception", "the process of the row ended with exit code 3"),
    "leave": ("exception", "the process of the row ended with exit code 4"),
    "zero": ("exception", "the process of the row ended with exit code 0"),
    "fork": ("exception", "the process of the row ended with exit code 3"),
    "speak": ("exception", "the process of the row was killed by SIGKILL"),
}


def test_a_step_that_fails_costs_its_own_row_alone(new_pool) -> None:
    """A fork that holds the link of a dead process, and bytes on the link that are no message, are among them."""
    told = Told()
    pool = new_pool(telemetry=told)
    for response, (problem, text) in FAILURES.items():
        rows = Rows(pool, 4)
        rows.say("a", "b", "c", "d")
        told.counted["environment_answered"].clear()

        answers = rows.say("e", response, "f", "g")

        assert [answer.problem for answer in answers] == ["", problem, "", ""], response
        said, _, place = answers[1].text.partition(" (")
        assert said == text and "secret" not in answers[1].bare
        assert place.partition(":")[0].endswith("surroundings.py") == (problem == "exception" and "process" not in text)
        assert [answer.reward for answer in (answers[0], *answers[2:])] == [2.0] * 3
        assert pool.problem is answers[1] and sorted(told.counted["environment_answered"]) == sorted(
            ["ok"] * 3 + [problem]
        )

    (answer,) = Rows(pool, 1).say("array")
    assert answer.problem == "exception" and answer.text.startswith("ValueError: The truth value of an array")


def test_a_process_whose_code_wrote_to_its_link_is_killed_and_does_not_end_by_itself_before(
    new_pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an exit code of 0 nobody would see what was wrong."""
    kill = ProcessPool._kill_if_overdue

    def kill_late(pool: Any, process: Any) -> None:
        if time.monotonic() >= process._deadline_s:
            time.sleep(0.5)
        kill(pool, process)

    monkeypatch.setattr(ProcessPool, "_kill_if_overdue", kill_late)

    (answer,) = Rows(new_pool(), 1).say("speak")

    assert answer.text == FAILURES["speak"][1]


def test_a_row_whose_step_takes_too_long_is_late_and_the_others_are_not(new_pool) -> None:
    rows = Rows(new_pool(timeout_s=1.0), 3)

    answers = rows.say("a", "sleep 100", "b")

    assert [answer.problem for answer in answers] == ["", "timeout", ""]
    assert [answer.observation for answer in rows.say("c")] == ["['p', 0, {}] 2 c of 3"], "the process lives"


def test_a_step_that_blocks_ends_its_process_and_the_other_rows_are_repeated_in_the_next(new_pool, capfd) -> None:
    rows = Rows(new_pool(timeout_s=1.0), 3)
    rows.say("a", "b", "c")

    answers = rows.say("d", "block 100", "e")

    assert [answer.problem for answer in answers] == ["", "timeout", ""]
    assert [answer.reward for answer in rows.say("f")] == [3.0], "the former responses were repeated"
    assert "surroundings.py" in capfd.readouterr().err, "the stack of the hang is logged"


def test_an_answer_that_waits_for_the_worker_does_not_end_its_process(new_pool, monkeypatch) -> None:
    monkeypatch.setattr(environment_pool, "_GRACE_S", 1.2)
    rows = Rows(new_pool(timeout_s=0.2), 1)
    rows.submit("long 3000000")
    rows.pool.step(0.0)
    pid = rows.pid
    time.sleep(1.6)  # the time of a step, and the grace of both sides

    while rows.pool.is_busy:
        rows.pool.step(1.0)

    assert rows.pid == pid
    assert len(rows.answers[0][0].observation) == 3_000_000


def test_a_look_that_finds_nothing_is_no_progress(new_pool) -> None:
    told = Told()
    rows = Rows(new_pool(telemetry=told), 1)
    rows.submit("sleep 100")
    seen = len(told.beats)

    rows.pool.step(0.0)
    assert len(told.beats) == seen
    rows.pool.step(0.1)
    assert len(told.beats) == seen + 1


def test_a_dropped_row_is_not_answered_and_its_environment_is_dropped_during_its_step_too(new_pool) -> None:
    rows = Rows(new_pool(), 2)
    rows.submit("sleep 100", "a")
    while not rows.answers[1]:
        rows.pool.step(1.0)
    rows.pool.forget(rows.numbers[:1])

    assert [answer.observation for answer in rows.say("alive", first=1)] == ["1 of 2"]
    rows.say("sleep 0.2", first=1)
    assert rows.answers[0] == [] and not any(answer.problem for answer in rows.answers[1])


REFUSED = {
    "surroundings:Nothing": "rollout.environment: surroundings has no function Nothing",
    "surroundings:Half": "rollout.environment: the Half of surroundings:Half has no method step",
    "surroundings:broken": r"rollout.environment: surroundings:broken\(\) raised OSError: no device",
    "surroundings:ending": "rollout.environment: the process that imports surroundings:ending ended with exit code 9",
    "nowhere:Any": "rollout.environment: cannot import nowhere",
}


def test_an_environment_that_cannot_be_used_is_refused(folder: Path) -> None:
    pools = [(EnvironmentPool(name, timeout_s=5.0), message) for name, message in REFUSED.items()]

    for pool, message in pools:
        with contextlib.closing(pool), pytest.raises(ConfigError, match=message):
            pool.wait_ready()


def test_an_environment_may_make_a_client_of_the_loop_as_it_is_made(new_pool) -> None:
    """As `aiohttp.ClientSession()`, which asks for the running loop."""
    assert [answer.observation for answer in Rows(new_pool("Session"), 1).say("a")] == ["True"]


def test_plain_functions_are_called_as_well_and_no_process_of_an_environment_loads_torch(new_pool) -> None:
    pool = new_pool("Plain")

    assert [answer.observation for answer in Rows(pool, 2).say("a", "b")] == ["A", "B"]
    assert "libtorch" not in Path(f"/proc/{Rows(pool, 0).pid}/maps").read_text()
