"""Captures on a GPU, with a fake driver that logs calls: a stream and a pool an engine, whole after a failure."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

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
        self.current, self.fails, self.mode = "main", fails, "warn"
        calls, driver = self.calls, self

        class CUDAGraph:
            def capture_begin(self, pool: object, capture_error_mode: str) -> None:
                calls.append(f"begin in {pool} on {driver.current}, errors {capture_error_mode}")

            def capture_end(self) -> None:
                calls.append("end")
                if driver.fails:
                    raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

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
            ("set_sync_debug_mode", lambda mode: setattr(driver, "mode", mode)),
        ):
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end_allocation, raising=False)


def reads_back() -> None:
    raise RuntimeError("reads back")


def test_a_failed_capture_leaves_stream_and_pool_and_names_the_error_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(monkeypatch)

    with pytest.raises(RuntimeError, match="previous error during capture") as raised:
        CudaDevice().capture(reads_back)

    assert "reads back" in str(raised.value.__context__)
    assert driver.current == "main"
    assert driver.calls == [
        "synchronize", "begin in pool 1 on side 1, errors thread_local", "end", "leave pool 1", "draw from clone",
    ]  # fmt: skip


def test_the_graphs_of_an_engine_share_a_stream_and_a_pool_until_a_capture_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without `empty_cache`, which would take the blocks of all others at each capture."""
    driver, device = Driver(monkeypatch, fails=False), CudaDevice()
    device.capture(lambda: None)
    device.capture(lambda: None)
    driver.fails = True
    with pytest.raises(RuntimeError):
        device.capture(lambda: None)
    driver.fails = False

    device.capture(lambda: None)

    begun = [call.partition(",")[0] for call in driver.calls if call.startswith("begin")]
    assert begun == ["begin in pool 1 on side 1"] * 3 + ["begin in pool 2 on side 2"]
    assert "empty_cache" not in driver.calls


def test_a_generator_that_refuses_does_not_hide_the_failed_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch, refuses=True)

    with pytest.raises(RuntimeError, match="previous error during capture"):
        CudaDevice().capture(reads_back)


def test_the_trial_refuses_to_wait_for_the_gpu_and_leaves_the_mode_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    modes: list[str] = []

    def step() -> None:
        modes.append(driver.mode)
        raise RuntimeError("called a synchronizing CUDA operation")

    capture = GraphCapture(CudaDevice())
    with pytest.raises(RuntimeError, match="synchronizing"):
        # The step that is run again after the trial raises too.
        capture.run_or_capture(step)

    assert modes == ["error", "warn"] and driver.mode == "warn"
    assert not capture.is_possible
