"""Capture of decoding steps, with a fake device: tried once an engine, refused for good, and never a lost token."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.rollout.generation import cuda_graphs
from pipeline.rollout.generation.graph_capture import CudaDevice, GraphCapture
from pipeline.rollout.generation.interface import Sampling
from pipeline.rollout.generation.kv_cache import PreallocatedLayer
from pipeline.rollout.generation.transformers import TransformersGenerator
from tests.support import tiny

PROMPTS = torch.tensor([[0, 0, 5, 9], [7, 3, 11, 2], [0, 6, 6, 4]])
MASK = (PROMPTS != 0).long()
SAMPLING = Sampling(max_length=94, pad_token_id=tiny.PAD, seed=3)


class FakeGraph:
    """Runs its step at each replay, into the tensor of its result."""

    def __init__(self, step: Callable[[], Tensor], result: Tensor) -> None:
        self._step, self._result = step, result
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self._result.copy_(self._step())


class FakeDevice:
    """A device with graphs; each capture raises `fails`, if given."""

    def __init__(self, *, fails: Exception | None = None) -> None:
        self.graphs: list[FakeGraph] = []
        self.trials = self.captures = 0
        self.is_refusing = False
        self._fails = fails

    @contextlib.contextmanager
    def refuse_synchronization(self) -> Iterator[None]:
        self.trials += 1
        self.is_refusing = True
        try:
            yield
        finally:
            self.is_refusing = False

    def capture(self, step: Callable[[], Tensor]) -> tuple[FakeGraph, Tensor]:
        self.captures += 1
        if self._fails is not None:
            raise self._fails
        rows = len(step.__self__._tokens)  # type: ignore[attr-defined]
        result = torch.full((rows, tiny.VOCABULARY_SIZE), torch.nan)
        self.graphs.append(FakeGraph(step, result))
        return self.graphs[-1], result


def engine_on(device: FakeDevice, model: Any) -> TransformersGenerator:
    engine = TransformersGenerator(model, fixed_shapes=True)
    engine._capture = GraphCapture(device)
    return engine


def assert_tokens_of_the_plain_loop(engine: TransformersGenerator) -> None:
    expected = TransformersGenerator(tiny.llama()).generate(PROMPTS, MASK, SAMPLING, group_size=4)
    made = engine.generate(PROMPTS, MASK, SAMPLING, group_size=4)
    assert torch.equal(made.sequences, expected.sequences)
    assert made.log_probs is not None and expected.log_probs is not None
    torch.testing.assert_close(made.log_probs, expected.log_probs, atol=1e-5, rtol=0)


def reads_back_in_layer_1(model: Any, device: FakeDevice) -> Any:
    """Let the second layer read a value back: by then the first layer has written its part of the cache."""

    def look(*_: object) -> None:
        if device.is_refusing:
            raise RuntimeError("called a synchronizing CUDA operation\n(traceback)")

    model.model.layers[1].register_forward_pre_hook(look)
    return model


def test_steps_are_replayed_after_one_trial_an_engine() -> None:
    device = FakeDevice()
    engine = engine_on(device, tiny.llama())

    assert_tokens_of_the_plain_loop(engine)
    assert_tokens_of_the_plain_loop(engine)

    assert device.trials == 1
    assert device.captures == len(device.graphs) >= 4
    assert sum(graph.replays for graph in device.graphs) > 100


def test_a_model_that_reads_a_value_back_is_found_before_a_capture_and_only_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = FakeDevice()
    engine = engine_on(device, reads_back_in_layer_1(tiny.llama(), device))

    with caplog.at_level(logging.WARNING):
        assert_tokens_of_the_plain_loop(engine)
        assert_tokens_of_the_plain_loop(engine)

    assert (device.trials, device.captures) == (1, 0)
    assert [line for line in caplog.messages if "no CUDA graph" in line] == [
        "no CUDA graph of this model, its tokens take longer: called a synchronizing CUDA operation"
    ]


def test_a_capture_that_fails_costs_no_token_and_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    device = FakeDevice(fails=RuntimeError("operation not permitted when stream is capturing"))
    engine = engine_on(device, tiny.llama())

    assert_tokens_of_the_plain_loop(engine)
    assert_tokens_of_the_plain_loop(engine)

    assert (device.trials, device.captures) == (1, 1)
    assert caplog.text.count("no CUDA graph of this model") == 1


def test_a_device_that_is_full_is_no_answer_about_the_model() -> None:
    device = FakeDevice(fails=torch.OutOfMemoryError("CUDA out of memory"))
    engine = engine_on(device, tiny.llama())

    with pytest.raises(torch.OutOfMemoryError):
        engine.generate(PROMPTS, MASK, SAMPLING, group_size=4)

    assert engine._capture is not None and engine._capture.is_possible


def test_old_and_new_cache_are_never_held_at_once_by_more_than_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = 5
    old: list[weakref.ref[PreallocatedLayer]] = []
    held: list[int] = []

    class Watched(cuda_graphs.FixedShapeLayer):
        def __init__(self, layer: PreallocatedLayer, *others: Any) -> None:
            held.append(sum(one() is not None for one in old))
            old.append(weakref.ref(layer))
            super().__init__(layer, *others)

    monkeypatch.setattr(cuda_graphs, "FixedShapeLayer", Watched)
    model = tiny.llama(num_hidden_layers=layers)
    TransformersGenerator(model, fixed_shapes=True).generate(
        PROMPTS, MASK, Sampling(max_length=100, pad_token_id=tiny.PAD, seed=3)
    )

    assert len(held) == 2 * layers, "the prompt's cache is moved once, and once for more room"
    assert max(held) <= 1


class Driver:
    """The calls of torch.cuda that a capture makes, logged; the end of a capture fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.current = "main"
        calls, driver = self.calls, self

        class CUDAGraph:
            def capture_begin(self, pool: object, capture_error_mode: str) -> None:
                calls.append(f"begin in {pool} on {driver.current}")

            def capture_end(self) -> None:
                calls.append("end")
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

        pools = iter(["pool 1", "pool 2"])
        for name, value in (
            ("CUDAGraph", CUDAGraph),
            ("Stream", lambda: "side"),
            ("stream", stream),
            ("graph_pool_handle", lambda: next(pools)),
            ("synchronize", lambda: calls.append("synchronize")),
            ("current_device", lambda: 0),
            ("empty_cache", lambda: calls.append("empty_cache")),
        ):
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end_allocation, raising=False)


def test_a_failed_capture_leaves_stream_and_pool_and_names_the_error_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(monkeypatch)

    def step() -> Tensor:
        raise RuntimeError("reads back")

    with pytest.raises(RuntimeError, match="previous error during capture") as raised:
        CudaDevice().capture(step)

    assert "reads back" in str(raised.value.__context__)
    assert driver.current == "main"
    assert driver.calls == ["synchronize", "begin in pool 1 on side", "end", "leave pool 1"]
