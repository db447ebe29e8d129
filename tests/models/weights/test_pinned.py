"""The ring of page-locked buffers: allocated when used, each mark waited for once, pageable memory if CUDA refuses."""

import logging

import pytest
import torch

from pipeline.models.weights.pinned import CudaDriver, PinnedRing, process_ring
from tests.models.weights.lazy_gpu import LazyGpu


def test_buffers_are_allocated_at_the_first_use_and_reused_in_turn():
    gpu = LazyGpu()
    ring = PinnedRing(gpu, buffers=3, buffer_bytes=64)
    assert gpu.allocated == []

    with ring.held():
        found = [ring.buffer(number) for number in range(7)]

    assert gpu.allocated == [64, 64, 64]
    assert [found.index(buffer) for buffer in found] == [0, 1, 2, 0, 1, 2, 0]


def test_a_mark_is_waited_for_once():
    gpu = LazyGpu()
    ring = PinnedRing(gpu, buffers=2, buffer_bytes=64)
    source = torch.arange(9, dtype=torch.uint8)

    with ring.held():
        buffer = ring.buffer(0)
        buffer.copy_in(5, source)
        buffer.record()
        buffer.wait()
        buffer.wait()
        assert torch.equal(buffer.tensor[5:14], source)

    assert gpu.synchronized == 1


def test_a_copy_that_fails_half_way_leaves_no_copy_in_flight():
    gpu = LazyGpu()
    ring = PinnedRing(gpu, buffers=2, buffer_bytes=64)

    def fail():
        with ring.held():
            ring.buffer(0).copy_in(0, torch.ones(4, dtype=torch.uint8))
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail()

    assert gpu.in_flight == 0
    assert gpu.synchronized == 1


def test_a_refusal_of_page_locked_memory_is_a_warning_and_a_pageable_buffer(caplog, monkeypatch):
    real = torch.empty

    def refuse(*size, pin_memory=False, **options):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")
        return real(*size, **options)

    monkeypatch.setattr("torch.empty", refuse)

    with caplog.at_level(logging.WARNING):
        buffer = CudaDriver().allocate(1 << 16)

    assert (buffer.dtype, len(buffer)) == (torch.uint8, 1 << 16)
    (record,) = caplog.records
    assert record.message == (
        "no page-locked memory, copies to and from the card are slower: bytes=65536 error=CUDA error: out of memory"
    )


def test_a_process_has_one_ring_for_all_its_slots():
    assert process_ring() is process_ring()
    assert 2 <= process_ring().buffers <= 4
    assert process_ring().buffer_bytes == 64 << 20
