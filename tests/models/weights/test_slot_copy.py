"""Copies into and out of a slot: every byte, for any number of threads, and a fingerprint of exactly these bytes."""

import struct

import pytest
import torch
import xxhash

from pipeline.errors import WeightsError
from pipeline.models.weights import slot_copy
from pipeline.models.weights.pinned import PinnedRing
from pipeline.models.weights.slot_copy import Slot
from tests.models.weights.lazy_gpu import LazyGpu

SHAPES = {"a": ((3, 50), torch.float32), "none": ((0, 4), torch.float32), "b": ((7,), torch.bfloat16),
          "one": ((), torch.int64), "c": ((11, 3, 5), torch.float16)}  # fmt: skip


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).mul(9).to(dtype) for name, (shape, dtype) in SHAPES.items()}


def slot(memory=None, ring=None):
    memory, views, place = memory or memoryview(bytearray(4096)), {}, 0
    for name, (shape, dtype) in SHAPES.items():
        numbers = torch.Size(shape).numel()
        # Not a multiple of a block: tensors begin and end in the middle of one.
        views[name] = (
            torch.frombuffer(memory, dtype=dtype, count=numbers, offset=place).reshape(shape)
            if numbers
            else torch.empty(shape, dtype=dtype)
        )
        place += (numbers * dtype.itemsize + 63) // 64 * 64
    return Slot(memory, views, ring=ring)


@pytest.fixture(params=["one thread", "four threads"])
def small_blocks(request, monkeypatch):
    monkeypatch.setattr(slot_copy, "_BLOCK_BYTES", 96)
    if request.param == "four threads":
        monkeypatch.setattr(slot_copy, "_THREADS_FROM_BYTES", 0)
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})


def slow_fingerprint(memory, block):
    digests = [xxhash.xxh3_64_intdigest(bytes(memory[start : start + block])) for start in range(0, len(memory), block)]
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(digests)}Q", *digests)) >> 1


def test_what_is_written_is_read_with_the_fingerprint_of_a_slow_reference(small_blocks):
    memory = memoryview(bytearray(4096))
    its, target = slot(memory), tensors(seed=1)

    written = its.write(tensors())

    assert its.read(target) == written == slow_fingerprint(memory, 96)
    for name, expected in tensors().items():
        assert torch.equal(its.views[name], expected), name
        assert torch.equal(target[name], expected), name


def test_without_some_of_the_targets_the_fingerprint_is_of_all_tensors(small_blocks):
    its, target = slot(), tensors(seed=1)
    written = its.write(tensors())

    del target["b"]
    with pytest.raises(WeightsError, match="b: missing"):
        its.read(target)

    assert its.read(target, partial=True) == written
    for name, found in target.items():
        assert torch.equal(found, tensors()[name]), name


def test_tensors_that_are_no_plain_copy_of_bytes_are_copied_by_value(small_blocks):
    given = tensors()
    expected = {name: tensor.clone() for name, tensor in given.items()}
    given["a"] = given["a"].t().contiguous().t()
    given["b"] = given["b"].double()
    target = tensors(seed=1)
    target["c"] = torch.zeros(5, 3, 11, dtype=torch.float64).permute(2, 1, 0)
    its = slot()

    written = its.write(given)
    found = its.read(target)

    assert found == written == slot().write(expected)
    for name in SHAPES:
        assert torch.equal(target[name].to(expected[name].dtype), expected[name]), name


def test_one_bit_changes_the_fingerprint():
    memory = memoryview(bytearray(4096))
    its = slot(memory)
    written = its.write(tensors())
    memory[700] ^= 1

    assert its.read(tensors()) != written


@pytest.mark.parametrize("wrong", [{"a": torch.zeros(3, 51)}, {"c": None}])
def test_tensors_that_do_not_fit_leave_the_slot_as_it_was(wrong):
    memory = memoryview(bytearray(4096))
    its = slot(memory)
    its.write(tensors())
    before = bytes(memory)

    with pytest.raises(WeightsError, match=r"a: \(3, 51\), expected \(3, 50\)|c: missing, expected \(11, 3, 5\)"):
        its.write(tensors(seed=1) | wrong)

    assert bytes(memory) == before


@pytest.mark.parametrize("on_gpu", [["a", "b", "c", "one", "none"], ["b", "c"]], ids=["all", "some"])
@pytest.mark.parametrize("buffers", [2, 3])
def test_a_gpus_tensors_pass_through_the_ring_whole(small_blocks, on_gpu, buffers):
    given, target = tensors(), tensors(seed=1)
    gpu = LazyGpu(*(each[name] for each in (given, target) for name in on_gpu))
    memory = memoryview(bytearray(4096))
    its = slot(memory, PinnedRing(gpu, buffers=buffers, buffer_bytes=200))

    written = its.write(given)
    assert gpu.in_flight == 0
    found = its.read(target)

    assert gpu.in_flight == 0
    assert found == written == slow_fingerprint(memory, 96) == slot().write(tensors())
    for name, expected in tensors().items():
        assert torch.equal(target[name], expected), name


def test_a_gpus_tensors_of_other_dtype_or_layout_are_converted_on_the_gpu(small_blocks):
    given = tensors()
    given["a"], given["b"] = given["a"].t().contiguous().t(), given["b"].double()
    target = tensors(seed=1)
    target["c"] = torch.zeros(5, 3, 11, dtype=torch.float64).permute(2, 1, 0)
    its = slot(ring=PinnedRing(LazyGpu(*given.values(), *target.values()), buffer_bytes=96))

    written = its.write(given)

    assert its.read(target) == written == slot().write(tensors())
    for name, expected in tensors().items():
        assert torch.equal(target[name].to(expected.dtype), expected), name


def test_the_bytes_that_a_gpu_gets_are_those_of_the_fingerprint(small_blocks):
    """A publisher that overwrites the slot after the copy into a buffer changes neither."""
    memory = memoryview(bytearray(4096))
    its = slot(memory)
    expected = its.write(tensors())
    target = tensors(seed=1)

    class Overwriting(LazyGpu):
        def copy(self, into, source):
            memory[:] = bytes(4096)
            super().copy(into, source)

    read = slot(memory, PinnedRing(Overwriting(*target.values()), buffer_bytes=4096 // 96 * 96 + 96)).read(target)

    assert read == expected
    for name, value in tensors().items():
        assert torch.equal(target[name], value), name


@pytest.mark.parametrize("mib", [16, 32, 64])
def test_synchronizations_grow_linearly_with_the_slot(mib, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    given = {f"layer.{i}": torch.full((mib << 14,), float(i)) for i in range(16)}
    memory, views, place = memoryview(bytearray(mib << 20)), {}, 0
    for name, tensor in given.items():
        views[name] = torch.frombuffer(memory, dtype=torch.float32, count=tensor.numel(), offset=place)
        place += tensor.nbytes
    gpu = LazyGpu(*given.values())
    its = Slot(memory, views, ring=PinnedRing(gpu, buffer_bytes=4 << 20))

    its.write(given)

    assert (gpu.recorded, gpu.synchronized) == (mib // 4, mib // 4), "one a buffer of 4 MiB"
    assert gpu.allocated == [4 << 20] * 3, "page-locked memory does not grow with the slot"
    assert all(torch.equal(views[name], tensor) for name, tensor in given.items())
