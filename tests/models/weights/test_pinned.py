"""Page-locked memory: registered once, unregistered once, and one warning if CUDA refuses."""

import logging
import subprocess
import sys

from pipeline.models.weights.pinned import PinnedMemory


class Runtime:
    """A fake of CUDA's two calls; tests/daemon/test_gpu.py uses the real runtime."""

    def __init__(self, code=0):
        self.code = code
        self.calls = []

    def cudaHostRegister(self, address, nbytes, flags):
        self.calls.append(("register", address, nbytes, flags))
        return self.code

    def cudaHostUnregister(self, address):
        self.calls.append(("unregister", address))
        return 0


def test_memory_is_registered_once_and_unregistered_once(caplog):
    runtime = Runtime()

    memory = PinnedMemory(4096, 1 << 20, "the arena", runtime=runtime)
    assert memory.nbytes == 1 << 20
    memory.close()
    memory.close()

    assert runtime.calls == [("register", 4096, 1 << 20, 1), ("unregister", 4096)]
    assert memory.nbytes == 0
    assert not caplog.records


def test_a_refusal_is_one_warning_with_the_limit_and_nothing_to_give_back(caplog, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda which: (8 << 20, 8 << 20))
    runtime = Runtime(code=2)

    with caplog.at_level(logging.WARNING):
        memory = PinnedMemory(4096, 1 << 30, "the arena", runtime=runtime)
    memory.close()

    assert memory.nbytes == 0
    assert [call[0] for call in runtime.calls] == ["register"]
    (record,) = caplog.records
    assert "the arena could not be page-locked" in record.message
    assert "bytes=1073741824 cuda_error=2 limit_on_locked_memory=8,388,608 B" in record.message


def test_a_process_that_ends_without_closing_gives_it_back():
    """In a child process, because its exit is under test."""
    program = (
        "from tests.models.weights.test_pinned import Runtime\n"
        "from pipeline.models.weights.pinned import PinnedMemory\n"
        "class Telling(Runtime):\n"
        "    def cudaHostUnregister(self, address): print('given back', address)\n"
        "memory = PinnedMemory(4096, 1, 'the arena', runtime=Telling())\n"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert shown.stdout == "given back 4096\n"
