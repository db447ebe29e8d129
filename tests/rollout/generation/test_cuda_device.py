"""Captures on a GPU, with a fake driver that logs calls: a stream and a pool an engine, whole after a failure."""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pipeline.rollout.generation.graph_capture import CudaDevice, GraphCapture


class Generator:
    """A generator whose state a capture has marked; a clone of the state is not marked."""

    def __init__(self, calls: list[str], *, refuses: bool = False) -> None:
        self._calls, self._refuses = calls, refuses

    def clone_state(self) -> str:
        if self._refuses:
            raise RuntimeError("a capture is under way")
        return "clone"

    def graphsafe_set_state(self, state: str) -> None:
        self._calls.append(f"draw from {state}")


class Driver:
    """The calls of torch.cuda that a capture makes, logged; the end of a capture fails while `fails` holds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails: bool = True, refuses: bool = False) -> None:
        self.calls: list[str] = []
        self.current, self.fails = "main", fails
        self.error = "operation failed due to a previous error during capture"
        self.mode: int | str = "warn"
        calls, driver = self.calls, self
        graphs_of: dict[str, weakref.WeakSet[Any]] = {}

        class CUDAGraph:
            def capture_begin(self, pool: str, capture_error_mode: str) -> None:
                if pool in graphs_of and not graphs_of[pool]:
                    raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
                graphs_of.setdefault(pool, weakref.WeakSet()).add(self)
                calls.append(f"begin in {pool} on {driver.current}, errors {capture_error_mode}")

            def capture_end(self) -> None:
                calls.append("end")
                if driver.fails:
                    raise RuntimeError(f"CUDA error: {driver.error}")

            def replay(self) -> None:
                calls.append("replay")

        @contextlib.contextmanager
        def stream(side: str) -> Iterator[None]:
            before, driver.current = driver.current, side
            try:
                yield
            finally:
                driver.current = before

        def end_allocation(device: int, pool: str) -> None:
            calls.append(f"leave {pool}")
            raise RuntimeError("the pool is not in use")

        def set_mode(mode: int | str) -> None:
            # As torch does, on its first call in a process.
            warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect all", stacklevel=2)
            driver.mode = mode

        sides, pools = (map(f"{kind} {{}}".format, itertools.count(1)) for kind in ("side", "pool"))
        for name, value in (
            ("CUDAGraph", CUDAGraph),
            ("Stream", lambda: next(sides)),
            ("stream", stream),
            ("graph_pool_handle", lambda: next(pools)),
            ("synchronize", lambda: calls.append("synchronize")),
            ("current_device", lambda: 0),
            ("default_generators", (Generator(calls, refuses=refuses),)),
            ("empty_cache", lambda: calls.append("empty_cache")),
            ("get_sync_debug_mode", lambda: driver.mode),
            ("set_sync_debug_mode", set_mode),
        ):
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end_allocation, raising=False)


def reads_back() -> None:
    raise RuntimeError("reads back")


def has_no_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_failed_capture_leaves_stream_and_pool_and_names_the_error_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(monkeypatch)

    with pytest.raises(RuntimeError, match="previous error during capture") as raised:
        CudaDevice().capture(reads_back, "pool 1")

    assert "reads back" in str(raised.value.__context__)
    assert driver.current == "main"
    assert driver.calls == [
        "synchronize", "begin in pool 1 on side 1, errors thread_local", "end", "leave pool 1", "draw from clone",
    ]  # fmt: skip


def test_graphs_that_were_all_released_are_followed_by_others_in_the_same_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without `empty_cache`, which would take the blocks of all others at each capture."""
    driver = Driver(monkeypatch, fails=False)
    capture = GraphCapture(CudaDevice())
    monkeypatch.setattr(CudaDevice, "name", "cpu")
    capture.run_or_capture(lambda: None)

    for _ in range(3):
        graph = capture.run_or_capture(lambda: None)
        assert graph is not None
        del graph

    begun = [call.partition(",")[0] for call in driver.calls if call.startswith("begin")]
    assert begun == ["begin in pool 1 on side 1"] * 4, "one of them is the graph that keeps the pool"
    assert driver.calls.count("replay") == 3 and "empty_cache" not in driver.calls


def test_a_pool_that_was_given_back_or_had_no_memory_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, fails=False)
    capture = GraphCapture(CudaDevice())
    monkeypatch.setattr(CudaDevice, "name", "cpu")
    capture.run_or_capture(lambda: None)
    capture.run_or_capture(lambda: None)

    capture.release()
    capture.run_or_capture(lambda: None)
    with pytest.raises(torch.OutOfMemoryError):
        capture.run_or_capture(has_no_memory)
    capture.run_or_capture(lambda: None)

    begun = [call.split()[3] for call in driver.calls if call.startswith("begin")]
    assert begun == ["1", "1", "2", "2", "2", "3", "3"]
    assert capture.is_possible


def test_a_card_without_memory_for_a_graph_itself_is_full_and_later_steps_are_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA allocates a graph at its end, beside torch's allocator."""
    driver = Driver(monkeypatch, fails=False)
    capture = GraphCapture(CudaDevice())
    monkeypatch.setattr(CudaDevice, "name", "cpu")
    capture.run_or_capture(lambda: None)
    driver.fails, driver.error = True, "out of memory\nCompile with `TORCH_USE_CUDA_DSA`"

    with pytest.raises(torch.OutOfMemoryError):
        capture.run_or_capture(lambda: None)
    driver.fails = False

    assert capture.run_or_capture(lambda: None) is not None


def test_a_failed_capture_leaves_the_graphs_of_another_engine_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, fails=False)
    monkeypatch.setattr(CudaDevice, "name", "cpu")
    first, second = GraphCapture(CudaDevice()), GraphCapture(CudaDevice())
    for capture in (first, second):
        capture.run_or_capture(lambda: None)
        assert capture.run_or_capture(lambda: None) is not None
    driver.fails = True
    assert first.run_or_capture(lambda: None) is None
    driver.fails = False

    assert not first.is_possible
    assert second.run_or_capture(lambda: None) is not None


def test_a_generator_that_refuses_does_not_hide_the_failed_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch, refuses=True)

    with pytest.raises(RuntimeError, match="previous error during capture"):
        CudaDevice().capture(reads_back, "pool 1")


@pytest.mark.filterwarnings("error")
def test_the_trial_refuses_to_wait_for_the_gpu_and_leaves_the_mode_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word: torch's warning that the mode is a prototype is of no use in a log."""
    driver = Driver(monkeypatch)
    modes: list[str] = []

    def step() -> None:
        modes.append(str(driver.mode))
        raise RuntimeError("called a synchronizing CUDA operation")

    capture = GraphCapture(CudaDevice())
    with pytest.raises(RuntimeError, match="synchronizing"):
        # The step that is run again after the trial raises too.
        capture.run_or_capture(step)

    assert modes == ["error", "warn"] and driver.mode == "warn"
    assert not capture.is_possible
