"""Memory of batches: used again, and never while anybody holds it."""

import gc
import threading

import numpy as np
import pytest
import torch

from pipeline.experience.tensor_pool import BatchMemory

LARGE = (16, 8192)


def empty(memory, shape, dtype):
    """The tensor alone: its array would hold the memory too."""
    (tensor,), _ = memory.empty(1, shape, dtype)
    return tensor


def test_tensors_of_one_call_lie_in_one_array_and_each_has_a_storage_of_its_own():
    for shape in ((2, 3), (16, 8192)):
        tensors, array = BatchMemory().empty(3, shape, "bfloat16")
        array[...] = np.arange(3)[:, None, None]

        assert array.shape == (3, *shape)
        assert [tensor.view(torch.int16).unique().tolist() for tensor in tensors] == [[0], [1], [2]]
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)


def test_memory_that_one_of_several_tensors_holds_is_nobody_elses():
    memory = BatchMemory()
    (_, second), _ = memory.empty(2, LARGE, "int64")
    second.fill_(7)

    (first, *_), _ = memory.empty(2, LARGE, "int64")
    first.fill_(8)

    assert (second == 7).all()


def test_the_memory_of_a_freed_tensor_is_the_next_ones():
    memory = BatchMemory()
    first = empty(memory, LARGE, "int64")
    place = first.data_ptr()

    del first
    again = empty(memory, (16, 8100), "int64")

    assert again.data_ptr() == place
    assert (again.shape, again.dtype, again.is_contiguous()) == ((16, 8100), torch.int64, True)


@pytest.mark.parametrize(
    "held",
    [
        lambda tensor: tensor,
        lambda tensor: tensor[3:5, ::7],
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.view(torch.int32).untyped_storage(),
        lambda tensor: np.from_dlpack(tensor),
        lambda tensor: memoryview(tensor.numpy()),
    ],
    ids=["tensor", "view", "array", "storage", "dlpack", "memoryview"],
)
def test_memory_that_somebody_holds_is_nobody_elses(held):
    memory = BatchMemory()
    tensor = empty(memory, LARGE, "int64")
    place, kept = tensor.data_ptr(), held(tensor)

    del tensor
    other = empty(memory, LARGE, "int64")

    assert other.data_ptr() != place
    del kept
    gc.collect()
    assert empty(memory, LARGE, "int64").data_ptr() == place


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "bfloat16", "float32", "float64"])
def test_a_tensor_has_the_dtype_that_is_asked_for(dtype):
    for shape in ((2, 3), (3, 100_001), (0, 5), (7,)):
        tensor = empty(BatchMemory(), shape, dtype)
        assert (tensor.dtype, tuple(tensor.shape)) == (getattr(torch, dtype), shape)
        assert tensor.fill_(1).sum() == tensor.numel()


def test_no_more_is_kept_than_the_bound():
    memory = BatchMemory(most_free_bytes=4 << 20)
    for megabytes in range(1, 20):
        empty(memory, (megabytes << 20,), "uint8")
        assert memory.free_bytes() <= (4 << 20) + (megabytes << 20), "what was freed last is looked at with the next"
    empty(memory, (1 << 18,), "uint8")
    assert memory.free_bytes() <= (4 << 20) + (1 << 18)


def test_threads_never_share_memory():
    memory = BatchMemory()
    wrong: list[int] = []

    def work(number):
        nonlocal wrong
        for turn in range(300):
            tensors = [empty(memory, (1 << 15,), "int64").fill_(number * 1000 + turn + place) for place in range(4)]
            wrong += [turn for place, tensor in enumerate(tensors) if (tensor != number * 1000 + turn + place).any()]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
