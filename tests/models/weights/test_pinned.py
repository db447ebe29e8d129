"""Page-locked memory: locked, given back, pageable if CUDA refuses; copies are complete when they are waited for."""

import logging

import pytest
import torch

from pipeline.models.weights.pinned import CardCopies, CudaDriver, page_locked, process_driver
from tests.models.weights.lazy_gpu import LazyGpu


class Runtime:
    """The calls of the CUDA runtime that page-lock memory; as the real one it refuses memory that is locked already."""

    def __init__(self, *, room):
        self.room = room
        self.locked = {}
        self.asked = 0

    def cudaHostRegister(self, address, nbytes, flags):
        self.asked += 1
        assert flags == 1, "portable"
        if address in self.locked:
            return 712
        if sum(self.locked.values()) + nbytes > self.room:
            return 2
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address):
        return 0 if self.locked.pop(address, None) else 713

    def cudaGetErrorString(self, error):
        return {2: "out of memory", 712: "part or all of the requested memory range is already mapped"}[error]


@pytest.fixture
def runtime(monkeypatch):
    runtime = Runtime(room=1000)
    monkeypatch.setattr("torch.cuda.cudart", lambda: runtime)
    return runtime


def test_memory_is_locked_until_it_is_given_back(runtime):
    driver = CudaDriver()

    assert driver.register(4096, 600) and driver.register(8192, 400)
    assert runtime.locked == {4096: 600, 8192: 400}
    driver.unregister(4096)

    assert runtime.locked == {8192: 400}


def test_the_first_refusal_is_one_warning_and_cuda_is_not_asked_again(runtime, caplog, monkeypatch):
    monkeypatch.setattr("torch.zeros", lambda *_, **__: None)
    driver = CudaDriver()

    with caplog.at_level(logging.WARNING):
        assert driver.register(4096, 600)
        found = [driver.register(8192, 401), driver.register(12288, 10)]

    assert found == [False, False] and runtime.asked == 2
    (record,) = caplog.records
    assert record.message == (
        "no page-locked memory, copies to and from the card are slower: bytes=401 error=out of memory"
    )
    assert runtime.locked == {4096: 600}, "the memory locked before stays so"


def test_the_error_that_the_runtime_keeps_is_taken_by_a_launch_of_no_use(runtime, monkeypatch):
    launched = []

    def launch(*_, **options):
        launched.append(options)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr("torch.zeros", launch)

    assert not CudaDriver().register(4096, 2000)
    assert launched == [{"device": "cuda"}]


def test_a_copy_is_complete_when_its_name_is_waited_for_and_all_are_at_the_end():
    sources = [torch.arange(9, dtype=torch.uint8), torch.arange(9, 18, dtype=torch.uint8)]
    gpu, targets = LazyGpu(*sources), [torch.zeros(9, dtype=torch.uint8) for _ in sources]

    with CardCopies(gpu) as copies:
        for name, target, source in zip("ab", targets, sources, strict=True):
            copies.begin(name, target, source)
        copies.wait("a")
        assert torch.equal(targets[0], sources[0]) and not targets[1].any()
        copies.wait("of the host")

    assert torch.equal(targets[1], sources[1])


def test_a_copy_that_fails_half_way_leaves_no_copy_in_flight():
    source = torch.ones(4, dtype=torch.uint8)
    gpu = LazyGpu(source)

    def fail():
        with CardCopies(gpu) as copies:
            copies.begin("a", torch.zeros(4, dtype=torch.uint8), source)
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail()

    assert gpu.in_flight == 0


def test_a_refusal_of_a_page_locked_buffer_is_a_warning_and_a_pageable_one(caplog, monkeypatch):
    real = torch.empty

    def refuse(*size, pin_memory=False, **options):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")
        return real(*size, **options)

    monkeypatch.setattr("torch.empty", refuse)

    with caplog.at_level(logging.WARNING):
        buffer = page_locked(1 << 16)

    assert (buffer.dtype, len(buffer)) == (torch.uint8, 1 << 16)
    (record,) = caplog.records
    assert record.message == (
        "no page-locked memory, copies to and from the card are slower: bytes=65536 error=CUDA error: out of memory"
    )


def test_a_process_warns_once_for_all_its_slots():
    assert process_driver() is process_driver()
