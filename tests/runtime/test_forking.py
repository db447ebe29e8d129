"""Forks of a process that run one function; pytest has threads and must not be forked, so a program of its own is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from pipeline.runtime import forking
from pipeline.runtime.forkserver import forkserver_environment
from tests.support.daemon import END_TIMEOUT_S, is_alive, wait_until

PROGRAM = """
import faulthandler, json, logging, os, signal, sys, threading
from pipeline.runtime.forking import ForkedChild, unfit_to_fork
from pipeline.telemetry import log

kept, other = os.pipe(), open(os.devnull)
counted = []
log.configure("parent")
log.count_warnings(counted.append)
signal.signal(signal.SIGTERM, lambda *_: None)
faulthandler.register(signal.SIGUSR1, chain=False)

def look():
    logging.getLogger().warning("a warning of the child")
    state = {
        "descriptors": sorted(
            int(name) for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")
        ),
        "input": os.readlink("/proc/self/fd/0"),
        "parent": [os.getppid(), int(os.environ["RLHFD_PARENT"])],
        "variable": os.environ["ONE"],
        "sigterm": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "handlers": len(logging.getLogger().handlers),
    }
    os.write(kept[1], json.dumps(state).encode())

def fail():
    raise ZeroDivisionError("of the child")

def stay():
    signal.pause()

assert unfit_to_fork() == ""
child = ForkedChild(look, [kept[1]], {"ONE": "1"})
seen = json.loads(os.read(kept[0], 1 << 16))
seen |= {"pid": os.getpid(), "kept": kept[1], "code": child.wait(), "counted": counted}
seen["failed"] = ForkedChild(fail, [], {}).wait()
killed = ForkedChild(stay, [], {})
killed.kill()
seen["killed"] = killed.wait()
waiting = threading.Event()
thread = threading.Thread(target=waiting.wait, name="watcher")
thread.start()
seen["with a thread"] = unfit_to_fork()
waiting.set()
thread.join()
seen["stays"] = ForkedChild(stay, [], {}).pid
print(json.dumps(seen), flush=True)
signal.pause()
"""


def test_a_fork_has_nothing_of_its_parent_but_what_it_is_given_and_dies_with_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None and program.stderr is not None
        seen: dict[str, Any] = json.loads(program.stdout.readline() or program.stderr.read())
        assert is_alive(seen["stays"])
        program.kill()
        errors = program.stderr.read()

    assert seen["descriptors"] == [0, 1, 2, seen["kept"]]
    assert seen["input"] == os.devnull
    assert seen["parent"] == [seen["pid"]] * 2
    assert seen["variable"] == "1"
    assert seen["sigterm"]
    assert seen["handlers"] == 0
    assert seen["counted"] == [], "the parent counts its own warnings alone"
    assert (seen["code"], seen["failed"], seen["killed"]) == (0, 1, -signal.SIGKILL)
    assert "ZeroDivisionError: of the child" in errors
    assert seen["with a thread"] == "has started what a fork would lose: thread watcher"
    wait_until(lambda: not is_alive(seen["stays"]), END_TIMEOUT_S, "the fork dies with its parent")


@pytest.mark.parametrize(
    ("opened", "by_any", "by_cuda"),
    [
        # As NVML does, which names the cards.
        ("/dev/nvidiactl", True, False),
        ("/dev/nvidia0", True, False),
        # As CUDA does.
        ("/dev/nvidia-uvm", True, True),
        ("/dev/null", False, False),
    ],
)
def test_a_gpu_that_is_open_forbids_a_fork(
    opened: str, by_any: bool, by_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forking, "threads_lost", dict)
    monkeypatch.setattr(forking.os.path, "realpath", lambda path: opened)

    found = [forking.unfit_to_fork(), forking.unfit_to_fork(forking.CUDA)]

    assert found == ["has opened a GPU, which a forked process cannot use" * refused for refused in (by_any, by_cuda)]


JEMALLOC = """
import os, sys
import pyarrow
from pipeline.runtime.forking import ForkedChild, unfit_to_fork

names = {open(f"/proc/self/task/{tid}/comm").read().strip() for tid in os.listdir("/proc/self/task")}
held = [pyarrow.array(range(1000)) for _ in range(10)]

def work():
    pool = pyarrow.jemalloc_memory_pool()
    for _ in range(20):
        taken = [pyarrow.array(range(1000), memory_pool=pool) for _ in range(10)]
        assert taken[-1][999].as_py() == 999
        pool.release_unused()

print("jemalloc_bg_thd" in names, repr(unfit_to_fork()), [ForkedChild(work, [], {}).wait() for _ in range(5)])
"""


def test_the_thread_of_pyarrows_allocator_is_no_reason_not_to_fork() -> None:
    environment = {**os.environ, "JE_ARROW_MALLOC_CONF": "background_thread:true", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", JEMALLOC], env=environment, capture_output=True, text=True, timeout=120
    )

    assert done.stdout == "True '' [0, 0, 0, 0, 0]\n", done.stderr


def test_the_forkserver_has_that_thread_switched_off_unless_the_user_wants_it() -> None:
    code = "import os, pyarrow; print(len(os.listdir('/proc/self/task')))"
    base = {name: value for name, value in os.environ.items() if name != "JE_ARROW_MALLOC_CONF"}
    threads = [
        subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True).stdout
        for variables in (
            forkserver_environment(base),
            forkserver_environment({**base, "JE_ARROW_MALLOC_CONF": "background_thread:true"}),
        )
    ]

    assert threads == ["1\n", "2\n"]
