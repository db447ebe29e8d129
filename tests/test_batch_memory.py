"""Memory of batches: used again, and never while anybody holds it."""

import gc
import threading

import numpy as np
import pytest
import torch

from pipeline.batch_memory import BatchMemory

LARGE = (16, 8192)


def test_the_memory_of_a_freed_tensor_is_the_next_ones():
    memory = BatchMemory()
    first = memory.empty(LARGE, "int64")
    place = first.data_ptr()

    del first
    again = memory.empty((16, 8100), "int64")

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
    tensor = memory.empty(LARGE, "int64")
    place, kept = tensor.data_ptr(), held(tensor)

    del tensor
    other = memory.empty(LARGE, "int64")

    assert other.data_ptr() != place
    del kept
    gc.collect()
    assert memory.empty(LARGE, "int64").data_ptr() == place


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "bfloat16", "float32", "float64"])
def test_a_tensor_has_the_dtype_that_is_asked_for(dtype):
    for shape in ((2, 3), (3, 100_001), (0, 5), (7,)):
        tensor = BatchMemory().empty(shape, dtype)
        assert (tensor.dtype, tuple(tensor.shape)) == (getattr(torch, dtype), shape)
        assert tensor.fill_(1).sum() == tensor.numel()


def test_no_more_is_kept_than_the_bound():
    memory = BatchMemory(most_free_bytes=4 << 20)
    for megabytes in range(1, 20):
        memory.empty((megabytes << 20,), "uint8")
        assert memory.free_bytes() <= (4 << 20) + (megabytes << 20), "what was freed last is looked at with the next"
    memory.empty((1 << 18,), "uint8")
    assert memory.free_bytes() <= (4 << 20) + (1 << 18)


def test_threads_never_share_memory():
    memory = BatchMemory()
    wrong: list[int] = []

    def work(number):
        nonlocal wrong
        for turn in range(300):
            tensors = [memory.empty((1 << 15,), "int64").fill_(number * 1000 + turn + place) for place in range(4)]
            wrong += [turn for place, tensor in enumerate(tensors) if (tensor != number * 1000 + turn + place).any()]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
