"""A stopped process is found, with the signal that stopped it; commands to a stopped daemon say so.

Each process has a group of its own: the kernel ignores SIGTSTP in a group without a parent of another group in its
session, such as that of a program started by setsid.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli.main import main
from pipeline.errors import ExitCode, StoppedError, UnreachableError
from pipeline.runtime import control
from pipeline.runtime.lock import InstanceRecord
from pipeline.runtime.signals import stat_of, stop_signal
from pipeline.supervisor.status import cpu_seconds

DEADLINE_S = 60.0
HOLDER = """
import sys, time
from pathlib import Path
from pipeline.runtime.lock import InstanceLock
with InstanceLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"], process_group=0)
    yield process
    process.kill()
    process.wait()


def stop(pid: int, number: signal.Signals) -> None:
    os.kill(pid, number)
    deadline_s = time.monotonic() + DEADLINE_S
    while stop_signal(pid) is None and time.monotonic() < deadline_s:
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGTSTP])
def test_the_signal_that_stopped_a_process_is_named(sleeper: subprocess.Popen[bytes], number: signal.Signals) -> None:
    assert stop_signal(sleeper.pid) is None

    stop(sleeper.pid, number)

    assert stop_signal(sleeper.pid) == number.name
    os.kill(sleeper.pid, signal.SIGCONT)
    deadline_s = time.monotonic() + DEADLINE_S
    while stop_signal(sleeper.pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert stop_signal(sleeper.pid) is None


NAMED = """
import sys, threading, time
from pathlib import Path

# Several ticks of the kernel's count of CPU time.
while time.process_time() < 0.05:
    pass

def cut(text):
    return text.encode()[:14]

def name_itself():
    Path("/proc/thread-self/comm").write_bytes(cut("奖励函数线程"))
    named.set()
    sys.stdin.read()

Path("/proc/self/comm").write_bytes(cut("训练策略模型"))
named = threading.Event()
thread = threading.Thread(target=name_itself, name="rewards", daemon=True)
thread.start()
named.wait()
if len(sys.argv) > 1:
    from pipeline.runtime.forking import threads_lost
    print(*threads_lost().values(), flush=True)
print("named", flush=True)
thread.join()
"""
"""A process whose name, and that of a thread, ends within a character, as where the kernel cuts one after 15 bytes."""


def test_a_process_whose_name_is_no_text_is_read_like_any_other() -> None:
    with subprocess.Popen([sys.executable, "-c", NAMED], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as named:
        assert named.stdout is not None and named.stdout.readline() == b"named\n"

        assert stop_signal(named.pid) is None
        assert cpu_seconds(named.pid) > 0


def test_a_thread_whose_name_is_no_text_is_one_that_a_fork_would_lose() -> None:
    program = [sys.executable, "-c", NAMED, "threads"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as named:
        assert named.stdout is not None
        found = named.stdout.readline()
        named.communicate(timeout=DEADLINE_S)

    assert found == b"rewards\n"


def test_a_request_to_a_stopped_instance_is_refused_at_once(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    stop(sleeper.pid, signal.SIGTSTP)
    record = InstanceRecord(sleeper.pid, str(tmp_path))

    with pytest.raises(StoppedError, match=rf"^pid {sleeper.pid} is stopped \(SIGTSTP\), kill -CONT {sleeper.pid}$"):
        control.request(record, "status", timeout_s=DEADLINE_S)


WAITING = """
import ctypes, signal
print("waits", flush=True)
ctypes.CDLL(None).vfork() or signal.pause()
"""
"""A process in the kernel's state D, as before a disk: the parent of a vfork, whose child executes nothing."""


def test_a_request_without_an_answer_names_the_disk_that_the_instance_waits_for(tmp_path: Path) -> None:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent,
        subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE, process_group=0) as instance,
        contextlib.ExitStack() as ended,
    ):
        ended.callback(os.killpg, instance.pid, signal.SIGKILL)
        silent.bind(str(tmp_path / "control.sock"))
        silent.listen()
        record, deadline_s = InstanceRecord(instance.pid, str(tmp_path)), time.monotonic() + DEADLINE_S
        assert instance.stdout is not None and instance.stdout.readline() == b"waits\n"
        while stat_of(instance.pid)[0] != b"D" and time.monotonic() < deadline_s:
            time.sleep(0.01)

        with pytest.raises(UnreachableError, match=r"0.1 s: it waits in the kernel \(state D\), as for a disk"):
            control.request(record, "status", timeout_s=0.1)


@pytest.mark.parametrize("has_record", [True, False], ids=["running", "starting"])
def test_commands_say_that_the_daemon_is_stopped(tmp_path: Path, has_record: bool) -> None:
    with (
        subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, process_group=0
        ) as instance,
        contextlib.ExitStack() as ended,
    ):
        ended.callback(instance.kill)
        assert instance.stdout is not None
        assert instance.stdout.readline() == b"held\n"
        if has_record:
            InstanceRecord(instance.pid, str(tmp_path)).write(tmp_path)
        stop(instance.pid, signal.SIGTSTP)

        for command in ("status", "why", "stop"):
            result = CliRunner().invoke(main, [command, "--runtime-dir", str(tmp_path)])

            assert result.exit_code == ExitCode.UNREACHABLE
            assert result.output == f"pid {instance.pid} is stopped (SIGTSTP), kill -CONT {instance.pid}\n"
