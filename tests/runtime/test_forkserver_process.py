"""Conditions under which a process must not be forked into roles, asked in a fresh process: pytest has threads."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys, warnings
warnings.simplefilter("error")
import torch
from pipeline.runtime.forkserver_process import _forks_badly

parent, says_so = os.getpid(), sys.argv[1] == "True"
if says_so:
    # PyTorch's own answer: False in the process that asked CUDA for its devices, True in its forks.
    torch.cuda._is_in_bad_fork = lambda: os.getpid() != parent
print(_forks_badly(), len(os.listdir("/proc/self/task")))
"""


@pytest.mark.parametrize("has_asked_cuda", [True, False])
def test_a_process_whose_forks_cannot_use_cuda_is_found_by_a_fork(has_asked_cuda):
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(has_asked_cuda)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip

    assert found.stdout.split() == [str(has_asked_cuda), "1"], found.stderr


LEAVES = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from pipeline.runtime.child_entry import leave

class Late:
    def __del__(self):
        print("unloaded", flush=True)

late = Late()
atexit.register(print, "atexit")
pool = ThreadPoolExecutor(1)
pool.submit(lambda: (time.sleep(0.2), print("thread", flush=True)))
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
sys.stdout.write("unflushed ")
leave(3)
"""


def test_a_role_ends_after_its_threads_and_exit_functions_without_unloading_its_modules():
    ended = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=60)

    assert (ended.returncode, ended.stdout.split()) == (3, ["unflushed", "thread", "atexit"]), ended.stderr
