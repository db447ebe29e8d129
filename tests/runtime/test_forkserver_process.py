"""The forkserver: its requests, and conditions under which it must not be forked, asked in a fresh process."""

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeline.runtime.forking import next_request
from pipeline.runtime.forkserver import Forkserver

PROGRAM = """
import os, sys, warnings
warnings.simplefilter("error")
import torch
from pipeline.runtime.forkserver_process import forks_badly

parent, says_so = os.getpid(), sys.argv[1] == "True"
if says_so:
    # PyTorch's own answer: False in the process that asked CUDA for its devices, True in its forks.
    torch.cuda._is_in_bad_fork = lambda: os.getpid() != parent
print(forks_badly(), len(os.listdir("/proc/self/task")))
"""


@pytest.mark.parametrize("has_asked_cuda", [True, False])
def test_a_process_whose_forks_cannot_use_cuda_is_found_by_a_fork(has_asked_cuda):
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(has_asked_cuda)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip

    assert found.stdout.split() == [str(has_asked_cuda), "1"], found.stderr


@pytest.mark.parametrize(
    "variables", [{"LATIN_1": os.fsdecode(b"caf\xe9")}, {f"SERVICE_{number}": "x" * 1000 for number in range(1500)}],
    ids=["no_text", "many"],
)  # fmt: skip
def test_a_fork_gets_every_variable_whatever_its_bytes_and_their_number(variables):
    forkserver, spec = Forkserver(), '{"role": "trainer"}'
    forkserver._link, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.settimeout(10.0)

    def serve():
        request, (*pipes, descriptor) = next_request(server, 3)
        with socket.socket(fileno=descriptor) as handshake:
            handshake.send(b"4711")
            handshake.recv(8)
        for pipe in pipes:
            os.close(pipe)
        return request

    with open(os.devnull) as pipe, server, ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve)
        child = forkserver.forked(spec, variables)(pipe.fileno(), pipe.fileno())
        request = served.result(30)
    forkserver.close()

    assert (child.pid, request.work) == (4711, spec)
    assert request.environment == {os.fsencode(name): os.fsencode(value) for name, value in variables.items()}


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
