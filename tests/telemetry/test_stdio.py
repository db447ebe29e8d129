"""Output that never waits for its reader: omitted lines are counted, read lines are in order, and it ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.telemetry import log_file
from pipeline.telemetry.stdio import NonBlockingStream, never_blocking
from tests.support.daemon import SMALL, START_TIMEOUT_S, Daemon, status_of, wait_until

ROOT = Path(__file__).parents[2]
LONG = "x" * 1000
DEADLINE_S = 30.0


class Place:
    """A pipe or a terminal: the writer's end, and the text that was read at the other end so far."""

    def __init__(self, kind: str) -> None:
        self._reader, self.writer = os.pipe() if kind == "pipe" else os.openpty()
        os.set_blocking(self._reader, False)
        self._read = b""

    def read(self) -> str:
        """Return all that has come up to now, or more than a place holds: a writer may be as fast as its reader."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(1000):
                if not (data := os.read(self._reader, 1 << 16)):
                    break
                self._read += data
        return self._read.decode()

    def close(self) -> None:
        """Close the reader's end, so that a writer gets an error; then close the writer's end."""
        os.close(self._reader)
        wait_until(lambda: all(thread.name != "stdio" for thread in threading.enumerate()), DEADLINE_S, "all end")
        os.close(self.writer)


@pytest.fixture(params=["pipe", "terminal"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    place = Place(request.param)
    yield place
    place.close()


def run(code: str, **streams: int) -> subprocess.Popen[bytes]:
    """Start a program that has `never_blocking`, `os` and `sys`."""
    head = "import os, sys\nfrom pipeline.telemetry.stdio import never_blocking\n"
    return subprocess.Popen([sys.executable, "-c", head + code], cwd=ROOT, **streams)


def fill(writer: int) -> None:
    """Leave no room in a pipe."""
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)


@pytest.mark.timeout(90)
def test_who_writes_goes_on_while_nobody_reads_and_what_is_left_out_is_counted(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    stream = NonBlockingStream(place.writer)

    for number in range(5000):
        stream.write(f"{number} {LONG}\n")
    wait_until(lambda: place.read() and "left out" in caplog.text, DEADLINE_S, "the omitted lines are reported")
    stream.write("after\n")
    wait_until(lambda: place.read().endswith("after\r\n" if stream.isatty() else "after\n"), DEADLINE_S, "it goes on")
    stream.finish(DEADLINE_S)

    *kept, last = place.read().splitlines()
    (left_out,) = re.findall(r"left out: lines=(\d+)", caplog.text)
    numbers = [int(line.partition(" ")[0]) for line in kept]
    assert kept == [f"{number} {LONG}" for number in sorted({*numbers})] and last == "after"
    assert len(kept) > 1000 and len(kept) + int(left_out) == 5000


@pytest.mark.timeout(90)
def test_the_end_waits_for_who_reads_and_a_moment_for_who_does_not(place: Place) -> None:
    stream = NonBlockingStream(place.writer)
    for _ in range(500):
        stream.write(LONG)
    started_s = time.monotonic()

    stream.finish(0.2)

    assert 0.2 <= time.monotonic() - started_s < DEADLINE_S
    # Accepted text is written all the same, as long as the process lives.
    wait_until(lambda: len(place.read()) == 500 * len(LONG), DEADLINE_S, "all is read")


def test_a_reader_that_is_gone_is_an_error_to_who_writes() -> None:
    gone, writer = os.pipe()
    os.close(gone)
    stream = NonBlockingStream(writer)

    def fails() -> bool:
        try:
            stream.write("x\n")
        except BrokenPipeError:
            return True
        return False

    wait_until(fails, DEADLINE_S, "a write fails")
    stream.finish(DEADLINE_S)
    os.close(writer)


def test_no_signal_is_taken_from_the_thread_that_holds_it_back(place: Place) -> None:
    stream = NonBlockingStream(place.writer)

    (thread,) = (thread for thread in threading.enumerate() if thread.name == "stdio")
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    stream.finish(DEADLINE_S)

    (blocked,) = re.findall(r"^SigBlk:\s*(\w+)$", status, re.MULTILINE)
    assert all(int(blocked, 16) >> (number - 1) & 1 for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_regular_file_is_written_as_ever(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file, contextlib.redirect_stderr(file), never_blocking():
        assert sys.stderr is file


@pytest.mark.timeout(90)
def test_output_and_errors_in_one_pipe_keep_their_order_to_the_last_line() -> None:
    code = """
with never_blocking():
    for number in range(2000):
        print(number, file=(sys.stdout, sys.stderr)[number % 2])
"""
    with run(code, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        read = process.stdout.read().split()

    assert process.returncode == 0 and read == [b"%d" % number for number in range(2000)]


@pytest.mark.timeout(90)
def test_a_program_ends_though_nobody_reads() -> None:
    reader, writer = os.pipe()
    fill(writer)

    with run("with never_blocking():\n    print('hello', file=sys.stderr)\nsys.exit(7)", stderr=writer) as process:
        code = process.wait(DEADLINE_S)

    os.close(reader)
    os.close(writer)
    assert code == 7


# A whole daemon.

TALKATIVE = f"""
import sys

def score(ids, mask, **_):
    # More than a pipe and all queues behind it hold, within some steps.
    print("x" * {1 << 14}, file=sys.stderr)
    return 1.0
"""


@pytest.mark.parametrize("place", ["pipe", "terminal"], indirect=True)
@pytest.mark.variant
@pytest.mark.integration
@pytest.mark.timeout(300)
def test_a_daemon_whose_output_nobody_reads_trains_answers_and_ends_in_order(
    place: Place, tmp_path: Path, task: Path
) -> None:
    (tmp_path / "talkative.py").write_text(TALKATIVE)
    own = ('rewards=["talkative:score"]', "rollout.reward_timeout_s=0")

    with Daemon(tmp_path, *SMALL, *own, task=task, printed_to=place.writer, environment={"TERM": "xterm"}) as daemon:
        daemon.wait_step(6)
        assert status_of(daemon.ask("status", "--json"))["state"] == "ready"
        wait_until(lambda: "left out" in place.read(), START_TIMEOUT_S, "the omitted lines are reported")
        step = daemon.status()["step"]
        daemon.wait_step(step + 6)
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0

    kept = "".join(file.read_text() for file in log_file.path_in(daemon.state_dir).parent.iterdir())
    assert "draining: SIGTERM received" in kept and "left out: lines=" in kept
