"""Copies into and out of a slot: every byte, for any number of threads, and a fingerprint of exactly these bytes."""

import struct

import pytest
import torch
import xxhash

from pipeline.errors import WeightsError
from pipeline.models.weights import slot_copy
from pipeline.models.weights.slot_copy import Slot

SHAPES = {"a": ((3, 50), torch.float32), "none": ((0, 4), torch.float32), "b": ((7,), torch.bfloat16),
          "one": ((), torch.int64), "c": ((11, 3, 5), torch.float16)}  # fmt: skip


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).mul(9).to(dtype) for name, (shape, dtype) in SHAPES.items()}


def slot(memory=None):
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
    return Slot(memory, views)


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


def test_a_block_waits_for_the_copies_that_reach_into_it_and_no_others():
    waited = []

    class Event:
        def __init__(self, name):
            self.name = name

        def synchronize(self):
            waited.append(self.name)

    copied = [(100, Event("first")), (250, Event("second")), (400, Event("third"))]

    Slot._wait_for(copied, 96)
    assert waited == ["first"]
    Slot._wait_for(copied, 192)
    assert waited == ["first", "first", "second"]
    Slot._wait_for([], 192)
