"""Copies into and out of a slot: every byte, for any number of threads, and a fingerprint of exactly these bytes."""

import struct

import pytest
import torch
import xxhash

from pipeline.errors import WeightsError
from pipeline.models.weights import slot_copy
from pipeline.models.weights.slot_copy import Slot, combined
from tests.models.weights.lazy_gpu import LazyGpu

SHAPES = {"a": ((3, 50), torch.float32), "none": ((0, 4), torch.float32), "b": ((7,), torch.bfloat16),
          "one": ((), torch.int64), "c": ((11, 3, 5), torch.float16)}  # fmt: skip


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).mul(9).to(dtype) for name, (shape, dtype) in SHAPES.items()}


def slot(memory=None, driver=None):
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
    return Slot(memory, views, driver=driver)


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

    written = combined(its.write(tensors()))

    assert its.read(target) == written == slow_fingerprint(memory, 96)
    for name, expected in tensors().items():
        assert torch.equal(its.views[name], expected), name
        assert torch.equal(target[name], expected), name


def test_without_some_of_the_targets_the_fingerprint_is_of_all_tensors(small_blocks):
    its, target = slot(), tensors(seed=1)
    written = combined(its.write(tensors()))

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

    written = combined(its.write(given))
    found = its.read(target)

    assert found == written == combined(slot().write(expected))
    for name in SHAPES:
        assert torch.equal(target[name].to(expected[name].dtype), expected[name]), name


def test_one_bit_changes_the_fingerprint():
    memory = memoryview(bytearray(4096))
    its = slot(memory)
    written = combined(its.write(tensors()))
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
@pytest.mark.parametrize("refuses", [False, True], ids=["page-locked", "pageable"])
def test_a_gpus_tensors_are_copied_whole(small_blocks, on_gpu, refuses):
    given, target = tensors(), tensors(seed=1)
    gpu = LazyGpu(*(each[name] for each in (given, target) for name in on_gpu), refuses=refuses)
    memory = memoryview(bytearray(4096))
    its = slot(memory, gpu)

    written = combined(its.write(given))
    assert gpu.in_flight == 0
    found = its.read(target)

    assert gpu.in_flight == 0
    assert found == written == slow_fingerprint(memory, 96) == combined(slot().write(tensors()))
    for name, expected in tensors().items():
        assert torch.equal(target[name], expected), name


def test_a_gpus_tensors_of_other_dtype_or_layout_are_converted_on_the_gpu(small_blocks):
    given = tensors()
    given["a"], given["b"] = given["a"].t().contiguous().t(), given["b"].double()
    target = tensors(seed=1)
    target["c"] = torch.zeros(5, 3, 11, dtype=torch.float64).permute(2, 1, 0)
    its = slot(driver=LazyGpu(*given.values(), *target.values()))

    written = combined(its.write(given))

    assert its.read(target) == written == combined(slot().write(tensors()))
    for name, expected in tensors().items():
        assert torch.equal(target[name].to(expected.dtype), expected), name


def test_a_slot_is_page_locked_at_its_first_copy_of_a_gpu_until_it_is_closed():
    given, target = tensors(), tensors(seed=1)
    gpu = LazyGpu(*given.values(), *target.values())
    memory = memoryview(bytearray(4096))
    its = slot(memory, gpu)
    its.write(tensors(seed=2))
    assert not gpu.registered, "no tensor was the GPU's"

    for _ in range(3):
        its.write(given)
        its.read(target)
    assert gpu.registrations == 1
    assert gpu.registered == {torch.frombuffer(memory, dtype=torch.uint8).data_ptr(): 4096}
    its.close()
    its.close()

    assert not gpu.registered


def test_a_copy_that_comes_once_is_not_worth_a_page_lock():
    target = tensors(seed=1)
    gpu = LazyGpu(*target.values())
    its = slot()
    its.write(tensors())

    Slot(its.memory, its.views, driver=gpu, is_kept=False).read(target)

    assert gpu.registrations == 0
    assert torch.equal(target["a"], tensors()["a"])


def test_each_byte_is_copied_once_by_the_gpu_and_none_by_a_core(small_blocks):
    """A publish and a fetch through the ring of buffers that was here before copied each byte twice."""
    given, target = tensors(), tensors(seed=1)
    gpu = LazyGpu(*given.values(), *target.values())
    its, nbytes = slot(driver=gpu), sum(tensor.nbytes for tensor in given.values())
    its._bytes.flags.writeable = False

    its.write(given)
    assert gpu.copied_bytes == nbytes
    its.read(target)

    assert gpu.copied_bytes == 2 * nbytes
    assert all(torch.equal(target[name], given[name]) for name in given)


def test_a_block_is_hashed_once_its_own_tensors_have_arrived(monkeypatch):
    """The digest of the first tensor is taken while the second one is under way."""
    monkeypatch.setattr(slot_copy, "_BLOCK_BYTES", 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    given = {"first": torch.ones(16), "second": torch.ones(16)}
    memory, gpu, left = memoryview(bytearray(128)), LazyGpu(*given.values()), []
    views = {name: torch.frombuffer(memory, dtype=torch.float32, count=16, offset=64 * i)
             for i, name in enumerate(given)}  # fmt: skip
    its = Slot(memory, views, driver=gpu)
    digest = its._digest
    its._digest = lambda index: left.append(gpu.in_flight) or digest(index)

    its.write(given)

    assert left == [1, 0]


@pytest.mark.parametrize("count", [16, 64])
def test_marks_grow_linearly_with_the_tensors(count):
    given = {f"layer.{i}": torch.full((1 << 12,), float(i)) for i in range(count)}
    memory = memoryview(bytearray(count << 14))
    views = {name: torch.frombuffer(memory, dtype=torch.float32, count=1 << 12, offset=i << 14)
             for i, name in enumerate(given)}  # fmt: skip
    gpu = LazyGpu(*given.values())

    Slot(memory, views, driver=gpu).write(given)

    assert gpu.recorded == count + 1, "one a tensor, and one of the end"
    assert all(torch.equal(views[name], tensor) for name, tensor in given.items())


def test_a_tensor_that_is_converted_on_the_gpu_is_copied_in_parts_of_rows(small_blocks, monkeypatch):
    monkeypatch.setattr(slot_copy, "_CONVERTED_ELEMENTS", 60)
    # Every second element of "c", as lower halves are, and "a" in float64.
    given = tensors() | {"a": tensors()["a"].double(), "c": tensors()["c"].repeat_interleave(2, dim=2)[..., ::2]}
    gpu, sizes = LazyGpu(*given.values()), []
    copy = gpu.copy
    gpu.copy = lambda target, source: (sizes.append(source.numel()), copy(target, source))
    its = slot(driver=gpu)

    its.write(given)

    # Rows of 50 and of 15 elements; "b" and "one" are copied as they are.
    assert sizes == [50, 50, 50, 7, 1, 60, 60, 45]
    assert all(torch.equal(its.views[name], expected) for name, expected in tensors().items())
