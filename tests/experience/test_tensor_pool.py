"""Memory of batches: reused, and never while a reference to it exists."""

import collections
import gc
import itertools
import os
import pickle
import random
import signal
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.experience import tensor_pool
from pipeline.experience.tensor_pool import BatchMemory

LARGE = (16, 8192)
# Values of int64; two tensors of each fill a chunk of one of three sizes.
LENGTHS = (4 << 12, 5 << 12, 8 << 12)


def empty(memory, shape, dtype):
    """Return the tensor without its array, which would hold the memory too."""
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
        lambda tensor: tensor.detach(),
        lambda tensor: tensor.reshape(-1)[-1:],
        lambda tensor: tensor.unbind()[-1],
        lambda tensor: tensor.numpy()[5:].view("int32").T[3:, 1:],
        lambda tensor: tensor.data,
        lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
        lambda tensor: [tensor],
    ],
    ids=[
        "tensor", "view", "array", "storage", "dlpack", "memoryview", "detached", "one value", "row",
        "view of an array", "data", "parameter", "list",
    ],
)  # fmt: skip
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
        assert memory.free_bytes() <= (4 << 20) + (megabytes << 20), (
            "the last freed chunk counts at the next allocation"
        )
    empty(memory, (1 << 18,), "uint8")
    assert memory.free_bytes() <= (4 << 20) + (1 << 18)


# Objects that a trainer may keep of a tensor; each holds the tensor's memory.
KEPT = [
    lambda tensor: tensor,
    lambda tensor: tensor.view(2, -1),
    lambda tensor: tensor[::2],
    lambda tensor: tensor.detach()[-1:],
    lambda tensor: tensor.numpy(),
    lambda tensor: memoryview(tensor.numpy()),
    lambda tensor: tensor.split(1000),
]


def values_of(kept):
    """Return every value that can be read through a kept object."""
    parts = kept if isinstance(kept, tuple) else (kept,)
    return np.unique(np.concatenate([np.asarray(part).reshape(-1) for part in parts]))


class Holder:
    """Allocates memory, keeps some and releases some; each tensor is filled with a number of its own."""

    def __init__(self, memory, numbers):
        self.memory, self.numbers, self.held, self.places = memory, numbers, {}, {}

    def take(self, length, keep):
        tensors, array = self.memory.empty(2, (length,), "int64")
        self.places[array.ctypes.data] = array.nbytes
        for tensor in tensors:
            number = next(self.numbers)
            # Not by torch, which starts a thread pool for each calling thread.
            tensor.numpy()[...] = number
            self.held[number] = keep(tensor)
        del array

    def let_go(self, place):
        number = list(self.held)[place % len(self.held)]
        kept = self.held.pop(number)
        return number, kept

    def overwritten(self):
        return [number for number, kept in self.held.items() if values_of(kept).tolist() != [number]]


steps = st.lists(
    st.tuples(st.just("take"), st.sampled_from(LENGTHS), st.sampled_from(KEPT))
    | st.tuples(st.just("let go"), st.integers(0, 99), st.none()),
    max_size=40,
)


@settings(deadline=None, max_examples=60)
@given(steps=steps, bound=st.sampled_from([0, 1 << 19, 1 << 30]))
def test_what_is_held_is_never_overwritten(steps, bound):
    holder = Holder(BatchMemory(most_free_bytes=bound), itertools.count())

    for step, number, keep in steps:
        if step == "take":
            holder.take(number, keep)
        elif holder.held:
            holder.let_go(number)
        assert holder.overwritten() == []


def test_what_threads_hold_is_never_overwritten_whichever_thread_lets_it_go():
    memory = BatchMemory()
    passed_on: collections.deque = collections.deque()
    numbers, wrong = itertools.count(), []
    holders = [Holder(memory, numbers) for _ in range(4)]
    interval = sys.getswitchinterval()

    def work(holder, rng):
        for _ in range(400):
            if len(holder.held) < 12 and rng.random() < 0.6:
                holder.take(rng.choice(LENGTHS), rng.choice(KEPT))
            elif holder.held:
                passed_on.append(holder.let_go(rng.randrange(12)))
            if len(passed_on) > 20:
                # At most four threads are here at once: the queue is never empty.
                number, kept = passed_on.popleft()
                wrong.extend([number] if values_of(kept).tolist() != [number] else [])
        wrong.extend(holder.overwritten())
        holder.held.clear()

    sys.setswitchinterval(1e-5)
    try:
        threads = [
            threading.Thread(target=work, args=(holder, random.Random(seed))) for seed, holder in enumerate(holders)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)

    assert next(numbers) > 1000
    assert wrong == []
    passed_on.clear()
    places = dict(itertools.chain.from_iterable(holder.places.items() for holder in holders))
    assert memory.free_bytes() == sum(places.values()), "each chunk came back once"


def test_memory_may_be_let_go_and_taken_at_any_step_of_the_module_itself():
    """A finalizer does so: it runs at any allocation, in the thread that executes the module."""
    memory = BatchMemory(most_free_bytes=1 << 20)
    holder = Holder(memory, itertools.count())
    again = Holder(memory, holder.numbers)
    events = collections.Counter()

    def trace(frame, event, argument):
        if frame.f_code.co_filename != tensor_pool.__file__:
            return None
        frame.f_trace_opcodes = True
        events[frame.f_code.co_name] += 1
        if holder.held:
            holder.let_go(0)
        if sum(events.values()) % 7 == 0:
            again.take(LENGTHS[0], KEPT[2])
        if len(again.held) > 8:
            again.let_go(3)
        return trace

    before = sys.gettrace()
    for turn in range(12):
        for length in LENGTHS:
            holder.take(length, KEPT[turn % len(KEPT)])
        sys.settrace(trace)
        try:
            (tensor,), _ = memory.empty(1, (LENGTHS[turn % 3],), "int64")
            memory.free_bytes()
        finally:
            sys.settrace(before)
        holder.held[-1 - turn] = tensor.fill_(-1 - turn)

        assert holder.overwritten() == again.overwritten() == []
    assert events.keys() >= {"empty", "_lease", "_trim", "free_bytes", "__del__"}


def test_what_autograd_saved_is_not_overwritten_before_the_backward_pass():
    memory = BatchMemory()
    weights = torch.ones(LARGE, requires_grad=True)
    (values,), _ = memory.empty(1, LARGE, "float32")
    values.fill_(3.0)

    loss = (weights * values).sum()
    del values
    other = empty(memory, LARGE, "float32").fill_(5.0)
    loss.backward()

    assert (weights.grad == 3.0).all()
    del loss
    gc.collect()
    assert empty(memory, LARGE, "float32").data_ptr() != other.data_ptr()


def test_a_pickled_tensor_has_memory_of_its_own():
    memory = BatchMemory()
    tensors, _ = memory.empty(2, LARGE, "int64")
    data = pickle.dumps(tensors[0].fill_(7))
    place = tensors[0].data_ptr()

    copied = pickle.loads(data)
    del tensors, _
    again = empty(memory, (2 * LARGE[0], LARGE[1]), "int64").fill_(8)

    assert again.data_ptr() == place
    assert len(data) < 2 * copied.nbytes
    assert (copied == 7).all()


def in_a_child(work):
    """Return the exit code of a child that runs `work`; a signal kills it after 10 s."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 10)
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# CPython 3.12 and later warn of every fork beside threads.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_forked_at_any_step_of_a_thread_within_the_module_can_use_its_memory():
    memory = BatchMemory(most_free_bytes=0)
    (held,), _ = memory.empty(1, LARGE, "int64")
    held.fill_(7)
    # Free, and above the bound: the first allocation releases it.
    empty(memory, (1 << 20,), "uint8")
    stops, going_on, ended = threading.Semaphore(0), threading.Semaphore(0), threading.Event()
    steps = set()

    def trace(frame, event, argument):
        if frame.f_code.co_filename != tensor_pool.__file__:
            return None
        step = frame.f_code.co_name, frame.f_lineno
        if step not in steps:
            steps.add(step)
            stops.release()
            going_on.acquire()
        return trace

    def take_and_let_go():
        for _ in range(2):
            holder = Holder(memory, itertools.count())
            sys.settrace(trace)
            holder.take(LENGTHS[0], KEPT[0])
            holder.held.clear()
            sys.settrace(None)
        ended.set()
        stops.release()

    def work():
        holder = Holder(memory, itertools.count())
        for turn in range(4):
            holder.take(LENGTHS[turn % 2], KEPT[turn % 2])
        holder.let_go(0)
        return holder.overwritten() == [] and (held.numpy() == 7).all()

    thread = threading.Thread(target=take_and_let_go)
    thread.start()
    codes = []
    while stops.acquire(timeout=60) and not ended.is_set():
        codes.append(in_a_child(work))
        going_on.release()
    thread.join()

    assert set(codes) == {0}
    assert {name for name, _ in steps} >= {"empty", "_lease", "_trim", "free_bytes", "__del__"}
    assert (held == 7).all()
