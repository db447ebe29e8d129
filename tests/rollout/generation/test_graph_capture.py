"""Capture of decoding steps, with a fake device: tried once an engine, refused for good, and never a lost token."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from transformers import FalconConfig, FalconForCausalLM, Llama4ForCausalLM, Llama4TextConfig
from transformers.cache_utils import DynamicSlidingWindowLayer

from pipeline.config.plan import row_bucket
from pipeline.experience.vision_rows import VisionRows
from pipeline.models.inputs import cache_keyword
from pipeline.models.pass_size import release_memory
from pipeline.rollout.generation import cuda_graphs
from pipeline.rollout.generation.graph_capture import GraphCapture
from pipeline.rollout.generation.interface import Sampling
from pipeline.rollout.generation.kv_cache import preallocated_cache
from pipeline.rollout.generation.transformers import TransformersGenerator
from tests.support import tiny, tiny_vision
from tests.support.launches import Launches

PROMPTS = torch.tensor([[0, 0, 5, 9], [7, 3, 11, 2], [0, 6, 6, 4]])
MASK = (PROMPTS != 0).long()
SAMPLING = Sampling(max_length=94, pad_token_id=tiny.PAD, seed=3)
ROUNDING = 4e-5
"""Most that two log-probs differ by: either is up to 1.6e-5 from its value in double precision, more or less by CPU."""


@dataclasses.dataclass
class Captured:
    """The remains of a graph after its release."""

    size: tuple[int, int]
    replays: int = 0


class FakeGraph:
    """Runs its step at each replay; it would compute with other tensors than at its capture, a card does not.

    Its operations are no launches (`Launches`). It keeps nothing of its engine alive, as a graph of a card does not.
    """

    def __init__(self, step: functools.partial[None]) -> None:
        how, bucket = step.args
        # The model's forward is a method of the engine; a sampler is kept by its bucket.
        self._run, self._how = (
            weakref.WeakMethod(step.func),
            weakref.WeakMethod(how) if callable(how) else weakref.ref(how),
        )
        self._bucket = weakref.ref(bucket)
        self._addresses = addresses_of(bucket)
        self.record = Captured((len(bucket.tokens), bucket.room))

    def replay(self) -> None:
        self.record.replays += 1
        run, how, bucket = self._run(), self._how(), self._bucket()
        assert run is not None and how is not None and addresses_of(bucket) == self._addresses
        with _disable_current_modes():
            run(how, bucket)


def addresses_of(bucket: Any) -> list[int]:
    tensors = [bucket.column, bucket.tokens, bucket.positions, bucket.logits]
    tensors += [tensor for ring in bucket.rings.values() for tensor in (ring.column, ring.mask)]
    tensors += [bucket.noise, bucket.sampled, bucket.log_probs, bucket.alive]
    for layer in bucket.layers:
        tensors += [layer.keys, layer.values, layer._column]
    return [tensor.data_ptr() for tensor in tensors]


class Keeper:
    """The graph of a step that belongs to no bucket."""

    def replay(self) -> None:
        raise AssertionError("a trivial graph is replayed")


class FakeDevice:
    """A device with graphs; each capture from the `good`-th on raises `fails`, if given.

    As torch's allocator does, it refuses a capture into a pool whose graphs were all released.
    """

    name = "cpu"

    def __init__(self, *, fails: Exception | None = None, good: int = 0) -> None:
        self.graphs: list[Captured] = []
        self.pools: list[weakref.WeakSet[Any]] = []
        self.trials = self.captures = 0
        self.is_refusing = False
        self._fails, self._good = fails, good
        self._used: set[int] = set()

    @contextlib.contextmanager
    def refuse_synchronization(self) -> Iterator[None]:
        self.trials += 1
        self.is_refusing = True
        try:
            yield
        finally:
            self.is_refusing = False

    def new_pool(self) -> int:
        self.pools.append(weakref.WeakSet())
        return len(self.pools) - 1

    def capture(self, step: Callable[[], object], pool: Any) -> FakeGraph | Keeper:
        if pool in self._used and not self.pools[pool]:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        graph: FakeGraph | Keeper = Keeper()
        if isinstance(step, functools.partial):
            self.captures += 1
            if self._fails is not None and self.captures > self._good:
                raise self._fails
            graph = FakeGraph(step)
            self.graphs.append(graph.record)
        self._used.add(pool)
        self.pools[pool].add(graph)
        return graph

    @property
    def live(self) -> list[int]:
        """Graphs of each pool."""
        return [len(pool) for pool in self.pools]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Rows and columns of each graph."""
        return [graph.size for graph in self.graphs]


def engine_on(device: FakeDevice, model: Any, sampling: FakeDevice | None = None) -> TransformersGenerator:
    engine = TransformersGenerator(model, fixed_shapes=True)
    engine._capture = GraphCapture(device)
    engine._sampling_capture = GraphCapture(sampling, "sampling")
    return engine


@functools.cache
def of_the_plain_loop(prompts: tuple[tuple[int, ...], ...], sampling: Sampling, group_size: int) -> Any:
    """Return what the plain loop samples of `tiny.llama()`: most batches here are sampled several times."""
    rows = torch.tensor(prompts)
    return TransformersGenerator(tiny.llama()).generate(rows, (rows != 0).long(), sampling, group_size=group_size)


def assert_tokens_of_the_plain_loop(
    engine: TransformersGenerator,
    *,
    prompts: Tensor = PROMPTS,
    sampling: Sampling = SAMPLING,
    group_size: int = 4,
    model: Any = None,
) -> None:
    mask = (prompts != 0).long()
    if model is None:
        expected = of_the_plain_loop(tuple(map(tuple, prompts.tolist())), sampling, group_size)
    else:
        expected = TransformersGenerator(model).generate(prompts, mask, sampling, group_size=group_size)
    made = engine.generate(prompts, mask, sampling, group_size=group_size)
    assert torch.equal(made.sequences, expected.sequences)
    assert made.log_probs is not None and expected.log_probs is not None
    torch.testing.assert_close(made.log_probs, expected.log_probs, atol=ROUNDING, rtol=0)


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
    # The room of the first batch needs more memory, for which its first graph is dropped.
    assert device.sizes == [(16, 64), (16, 94), (16, 64)]
    assert sum(graph.replays for graph in device.graphs) > 100


def test_batches_of_other_rows_and_widths_replay_the_graphs_of_their_buckets() -> None:
    """14, 12 and 16 rows are 16 rows of a graph; prompts of 2, 4 and 7 tokens have rooms of 64 and of 94 columns."""
    device = FakeDevice()
    engine = engine_on(device, tiny.llama())
    never = dataclasses.replace(SAMPLING, eos_token_ids=())
    # The memory is as large as it becomes, and the trial is over.
    assert_tokens_of_the_plain_loop(engine, sampling=never)
    assert_tokens_of_the_plain_loop(engine, sampling=never)
    assert set(device.sizes) == {(16, 64), (16, 94)}
    captures = device.captures

    for group_size in (4, 2):
        rows = 16 // group_size
        for width in (2, 4, 7):
            prompts = torch.randint(
                2, 20, (rows - (group_size == 2), width), generator=torch.Generator().manual_seed(7)
            )
            assert_tokens_of_the_plain_loop(engine, prompts=prompts, sampling=never, group_size=group_size)

    assert device.captures == captures


def test_rows_that_leave_go_on_in_a_graph_of_fewer_rows_that_is_kept() -> None:
    device = FakeDevice()
    engine = engine_on(device, tiny.llama())
    # Few of them end in the eight steps between two looks.
    most_end = dataclasses.replace(SAMPLING, max_length=60, eos_token_ids=(1, 2))
    batches = [dataclasses.replace(most_end, seed=seed) for seed in range(6)]
    for sampling in batches:
        assert_tokens_of_the_plain_loop(engine, sampling=sampling, group_size=16)
    captures = device.captures
    assert {rows for rows, _ in device.sizes} >= {2, 4, 8, 16}

    for sampling in batches:
        assert_tokens_of_the_plain_loop(engine, sampling=sampling, group_size=16)

    assert device.captures == captures


def test_a_batch_that_needs_more_memory_than_there_is_captures_anew() -> None:
    """A graph reads addresses: none may be replayed once its memory was given back (`FakeGraph` checks them)."""
    device = FakeDevice()
    engine = engine_on(device, tiny.llama())
    for group_size in (1, 4, 1, 4):
        assert_tokens_of_the_plain_loop(engine, group_size=group_size)
    captures = device.captures

    assert_tokens_of_the_plain_loop(engine, group_size=16)

    assert device.captures > captures
    assert_tokens_of_the_plain_loop(engine, group_size=4)
    decoder = engine._decoder
    assert decoder is not None
    places = {bucket.layers[1].values.data_ptr() for bucket in decoder._buckets.values()}
    assert places == {decoder._memory["values 1"].data_ptr()}, "no bucket holds memory of its own"


@pytest.mark.parametrize(("build", "window"), [(tiny.mistral, 80), (tiny.gemma3, 3)])
def test_layers_that_slide_a_window_replay_graphs_over_no_more_columns_than_it_has(build: Any, window: int) -> None:
    """Rows leave, rooms double, graphs are captured anew in larger memory."""
    device, model = FakeDevice(), build(window=window)
    engine = engine_on(device, model, FakeDevice())
    wide = torch.randint(2, 20, (3, 7), generator=torch.Generator().manual_seed(7))
    wide[0, :3] = tiny.PAD
    for prompts, group_size, ends in ((wide, 1, (1, 2)), (PROMPTS, 4, ())):
        sampling = dataclasses.replace(SAMPLING, eos_token_ids=ends)
        assert_tokens_of_the_plain_loop(engine, prompts=prompts, sampling=sampling, group_size=group_size, model=model)
    assert_tokens_of_the_plain_loop(engine, model=model)
    captures = device.captures

    assert_tokens_of_the_plain_loop(engine, model=model)

    assert device.captures == captures > 2 and sum(graph.replays for graph in device.graphs) > 200
    decoder = engine._decoder
    assert decoder is not None
    assert {room for _, room in decoder._buckets} == {64, 94}
    for (rows, room), bucket in decoder._buckets.items():
        windows = [window, *([None, window] if build is tiny.gemma3 else [window])]
        assert [layer.keys.shape[2] for layer in bucket.layers] == [min(room, each or room) for each in windows]
        assert [len(layer.keys) for layer in bucket.layers] == [rows] * len(windows)
    # 16 rows of 94 columns are the largest area.
    held = decoder._memory["keys 0"].numel() // math.prod(model.base_model.layers[0].self_attn.k_proj.weight.shape[:1])
    assert held == 16 * min(window, 94)


def test_memory_is_for_the_most_rows_and_the_largest_area_of_any_batch() -> None:
    device, model = FakeDevice(), tiny.llama()
    engine = engine_on(device, model)
    few = dataclasses.replace(SAMPLING, eos_token_ids=())
    many = dataclasses.replace(few, max_length=20)
    assert_tokens_of_the_plain_loop(engine, sampling=few, group_size=1)

    # More rows than before, of fewer columns in all: 8 x 20 in place of 4 x 94.
    assert_tokens_of_the_plain_loop(engine, sampling=many, group_size=2)

    decoder = engine._decoder
    assert decoder is not None
    assert len(decoder._memory["tokens"]) == 8 and len(decoder._memory["mask"]) == 4 * 94
    captures = device.captures
    assert_tokens_of_the_plain_loop(engine, sampling=few, group_size=1)
    assert_tokens_of_the_plain_loop(engine, sampling=many, group_size=2)
    assert device.captures > captures and len(decoder._memory["tokens"]) == 8


def test_buffers_that_find_no_memory_leave_the_engine_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on(FakeDevice(), tiny.llama())
    assert_tokens_of_the_plain_loop(engine)
    made = cuda_graphs.CudaGraphDecoder._new_layer

    def full(self: Any, number: int, size: tuple[int, int], *others: Any) -> Any:
        if number == 1 and size == (64, 94):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made(self, number, size, *others)

    monkeypatch.setattr(cuda_graphs.CudaGraphDecoder, "_new_layer", full)
    with pytest.raises(torch.OutOfMemoryError):
        engine.generate(PROMPTS, MASK, dataclasses.replace(SAMPLING, eos_token_ids=()), group_size=16)

    assert_tokens_of_the_plain_loop(engine)


def test_a_vision_model_has_three_positions_a_token() -> None:
    """A batch of 3 rows, where 4 are the least memory: each of the three axes needs 4 columns."""
    model = tiny_vision.model()
    prompts = torch.tensor([[4, 5, 6], [5, 6, 7], [4, 6, 8]])
    sampling = Sampling(max_length=20, pad_token_id=0, eos_token_ids=(), seed=3)
    vision = VisionRows.none(3)

    made = [
        engine.generate(prompts, torch.ones_like(prompts), sampling, group_size=1, vision=vision)
        for engine in (TransformersGenerator(model), engine_on(FakeDevice(), model))
    ]

    assert torch.equal(made[0].sequences, made[1].sequences)


def test_a_model_whose_weights_have_moved_is_captured_anew() -> None:
    """A graph would read the weights of before; weights that are replaced in place are those of the next step."""
    device, model, other = FakeDevice(), tiny.llama(), tiny.llama(seed=9)
    engine = engine_on(device, model)
    assert_tokens_of_the_plain_loop(engine)
    assert_tokens_of_the_plain_loop(engine)
    captures = device.captures
    model.load_state_dict(other.state_dict())
    assert_tokens_of_the_plain_loop(engine, model=other)
    assert device.captures == captures

    model.load_state_dict({name: tensor.clone() for name, tensor in other.state_dict().items()}, assign=True)

    assert_tokens_of_the_plain_loop(engine, model=other)
    assert device.captures > captures


def test_a_pass_without_memory_gets_that_of_the_graphs() -> None:
    device = FakeDevice()
    engine = engine_on(device, tiny.llama())
    assert_tokens_of_the_plain_loop(engine)
    assert engine._decoder is not None
    buckets = [weakref.ref(bucket) for bucket in engine._decoder._buckets.values()]
    captures = device.captures

    release_memory()

    assert buckets and all(bucket() is None for bucket in buckets)
    assert not engine._decoder._memory
    assert device.live == [0], "the pool has memory as long as a graph of it exists"
    assert_tokens_of_the_plain_loop(engine)
    assert device.captures > captures and device.live[0] == 0 and device.live[1] > 1


def test_growth_and_moved_weights_capture_again_into_the_memory_of_the_graphs_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All graphs go at once then, and torch refuses a capture into a pool that has none."""
    device, model = FakeDevice(), tiny.llama()
    engine = engine_on(device, model)
    for group_size in (1, 1, 4):
        assert_tokens_of_the_plain_loop(engine, group_size=group_size)
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    captures = device.captures

    assert_tokens_of_the_plain_loop(engine)

    assert device.captures > captures
    assert len(device.pools) == 1 and "no CUDA graph" not in caplog.text


def test_graphs_and_pool_end_with_their_engine_and_leave_those_of_another_alone() -> None:
    device = FakeDevice()
    first, second = engine_on(device, tiny.llama()), engine_on(device, tiny.llama())
    for engine in (first, second):
        for _ in range(2):
            engine.generate(PROMPTS, MASK, SAMPLING, group_size=4)
    held = device.live
    assert len(held) == 2 and min(held) > 1
    captures = device.captures

    del first, engine

    assert device.live == [0, held[1]]
    assert_tokens_of_the_plain_loop(second)
    assert device.captures == captures


@pytest.mark.parametrize("build", [tiny.gpt2, tiny.gemma3])
def test_uninitialized_memory_reaches_no_row(monkeypatch: pytest.MonkeyPatch, build: Any) -> None:
    """Memory for a batch holds NaN and the largest numbers first, then what the batch before it left there."""
    engine = engine_on(FakeDevice(), build(), FakeDevice())
    to_the_end = Sampling(max_length=128, pad_token_id=tiny.PAD, eos_token_ids=(), seed=3)
    made = torch.empty

    def filled(*size: Any, **settings: Any) -> Tensor:
        tensor = made(*size, **settings)
        if tensor.dtype == torch.bool:
            return tensor.fill_(True)
        return tensor.fill_(math.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)

    monkeypatch.setattr(cuda_graphs.torch, "empty", filled)
    for rows in (3, 4, 3):
        prompts = PROMPTS.repeat(2, 1)[:rows]
        # 12 and 16 rows have 16 rows of memory; a position beyond the last one is an error.
        assert_tokens_of_the_plain_loop(engine, prompts=prompts, sampling=to_the_end, model=build())


def test_memory_after_a_release_is_for_the_batches_that_follow() -> None:
    engine = engine_on(FakeDevice(), tiny.llama())
    assert_tokens_of_the_plain_loop(engine, group_size=16)
    assert engine._decoder is not None

    release_memory()

    assert_tokens_of_the_plain_loop(engine, group_size=1)
    assert len(engine._decoder._memory["tokens"]) == 4, "three rows, not the 48 of before"


def test_a_step_that_fails_leaves_the_engine_whole() -> None:
    device, model = FakeDevice(), tiny.llama()
    engine = engine_on(device, model)
    assert_tokens_of_the_plain_loop(engine)
    calls = itertools.count()

    def fail(*_: object) -> None:
        if next(calls) == 5:
            raise RuntimeError("the card fell off the bus")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="fell off"):
        engine.generate(PROMPTS, MASK, SAMPLING, group_size=2)
    hook.remove()

    assert_tokens_of_the_plain_loop(engine)


@torch.no_grad()
def test_only_whole_rows_and_windows_by_sdpa_have_fixed_shapes() -> None:
    model = tiny.llama()
    cache = preallocated_cache(model.config)
    assert not cuda_graphs.can_run_fixed_shapes(model, cache), "a cache without a prompt has no tensors yet"
    model(input_ids=PROMPTS, use_cache=True, **{cache_keyword(model): cache})
    assert cuda_graphs.can_run_fixed_shapes(model, cache)

    model.config._attn_implementation = "eager"
    assert not cuda_graphs.can_run_fixed_shapes(model, cache), "eager attention has no test of it"

    for windows in (tiny.mistral(), tiny.gemma3()):
        cache = preallocated_cache(windows.config)
        assert not cuda_graphs.can_run_fixed_shapes(windows, cache), "a cache without a prompt has no tensors yet"
        windows(input_ids=PROMPTS, use_cache=True, **{cache_keyword(windows): cache})
        assert cuda_graphs.can_run_fixed_shapes(windows, cache)
        cache.layers[0].sliding_window = 3
        assert not cuda_graphs.can_run_fixed_shapes(windows, cache), "a mask is of all layers that slide"

    windows = tiny.gemma3()
    cache = preallocated_cache(windows.config)
    windows(input_ids=PROMPTS, use_cache=True, **{cache_keyword(windows): cache})
    windows._can_compile_fullgraph = False
    assert not cuda_graphs.can_run_fixed_shapes(windows, cache), "it may take no masks by kinds of layers"

    torch.manual_seed(0)
    chunks = Llama4ForCausalLM(
        Llama4TextConfig(vocab_size=tiny.VOCABULARY_SIZE, hidden_size=16, intermediate_size=24, num_hidden_layers=4,
                         num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_local_experts=2,
                         attention_chunk_size=3, pad_token_id=tiny.PAD)
    ).eval()  # fmt: skip
    cache = preallocated_cache(chunks.config)
    chunks(input_ids=PROMPTS, use_cache=True, **{cache_keyword(chunks): cache})
    assert any(isinstance(layer, DynamicSlidingWindowLayer) for layer in cache.layers)
    assert not cuda_graphs.can_run_fixed_shapes(chunks, cache), "a chunk does not slide"

    biased = FalconForCausalLM(
        FalconConfig(vocab_size=tiny.VOCABULARY_SIZE, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                     alibi=True)
    ).eval()  # fmt: skip
    cache = preallocated_cache(biased.config)
    biased(input_ids=PROMPTS, use_cache=True, **{cache_keyword(biased): cache})
    assert not cuda_graphs.can_run_fixed_shapes(biased, cache), "biases are made from a mask of two dimensions"


@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (2, 2), (3, 4), (17, 32), (32, 32), (33, 64), (97, 128)])
def test_rows_are_rounded_up_to_powers_of_two_then_to_multiples_of_32(rows: int, bucket: int) -> None:
    assert row_bucket(rows) == bucket


@pytest.mark.parametrize(
    ("filled", "most", "multiple", "room"),
    [(4, 2000, 1, 64), (33, 2000, 1, 128), (64, 2000, 1, 128), (1000, 2000, 1, 2000), (1000, 2000, 64, 2048),
     (4, 2000, 48, 96), (4, 50, 1, 50), (4, 50, 64, 64)],
)  # fmt: skip
def test_room_doubles_up_to_the_most_and_is_a_multiple(filled: int, most: int, multiple: int, room: int) -> None:
    assert cuda_graphs.room_bucket(filled, most, multiple) == room


def test_the_graph_that_was_not_used_for_longest_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "_MOST_BUCKETS", 1)
    device = FakeDevice()
    engine = engine_on(device, tiny.llama())

    for _ in range(3):
        assert_tokens_of_the_plain_loop(engine)
        assert engine._decoder is not None and len(engine._decoder._buckets) == 1

    # Each batch has two rooms or more, and only one graph is kept.
    assert device.captures >= 5


def test_a_graph_that_was_used_again_is_kept_before_one_that_was_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "_MOST_BUCKETS", 2)
    engine = engine_on(FakeDevice(), tiny.llama())
    short = Sampling(max_length=12, pad_token_id=tiny.PAD, eos_token_ids=(), seed=3)

    for group_size in (16, 4, 16, 1):
        engine.generate(PROMPTS, MASK, short, group_size=group_size)

    assert engine._decoder is not None
    assert [rows for rows, _ in engine._decoder._buckets] == [64, 4]


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


@pytest.mark.parametrize("good", [0, 1])
def test_a_capture_that_fails_costs_no_token_and_is_not_tried_again_and_the_graphs_from_before_stay(
    caplog: pytest.LogCaptureFixture, good: int
) -> None:
    device = FakeDevice(fails=RuntimeError("operation not permitted when stream is capturing"), good=good)
    engine = engine_on(device, tiny.llama())

    assert_tokens_of_the_plain_loop(engine)
    assert_tokens_of_the_plain_loop(engine)

    assert (device.trials, device.captures) == (1, 1 + good)
    assert caplog.text.count("no CUDA graph of this model") == 1


def test_a_device_that_is_full_is_no_answer_about_the_model() -> None:
    device = FakeDevice(fails=torch.OutOfMemoryError("CUDA out of memory"))
    engine = engine_on(device, tiny.llama())

    with pytest.raises(torch.OutOfMemoryError):
        engine.generate(PROMPTS, MASK, SAMPLING, group_size=4)

    assert engine._capture is not None and engine._capture.is_possible


def test_the_cache_of_a_prompt_is_given_back_by_layers_to_memory_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = 5
    engine = engine_on(FakeDevice(), tiny.llama(num_hidden_layers=layers))
    short = Sampling(max_length=12, pad_token_id=tiny.PAD, eos_token_ids=(), seed=3)
    engine.generate(PROMPTS, MASK, short)
    alive: list[int] = []
    load = cuda_graphs.FixedShapeLayer.load

    class Watched(cuda_graphs.CudaGraphDecoder):
        def _loaded(self, source: Any, *others: Any) -> Any:
            old = [weakref.ref(layer) for layer in source.layers]

            def counted(layer: Any, tokens: Any) -> None:
                alive.append(sum(each() is not None for each in old))
                load(layer, tokens)

            monkeypatch.setattr(cuda_graphs.FixedShapeLayer, "load", counted)
            return super()._loaded(source, *others)

    assert engine._decoder is not None
    engine._decoder.__class__ = Watched

    engine.generate(PROMPTS, MASK, short)

    assert alive == [4, 3, 2, 1, 0]


def test_two_steps_of_a_bucket_come_before_its_capture() -> None:
    """Libraries initialize in the first steps of a shape, which must not happen in a capture."""
    device = FakeDevice()
    engine = engine_on(device, tiny.llama())
    first: list[int] = []
    capture = device.capture

    def noted(step: Any, pool: Any) -> FakeGraph | Keeper:
        if isinstance(step, functools.partial):
            first.append(step.args[1].forward.count)
        return capture(step, pool)

    device.capture = noted  # type: ignore[method-assign]

    engine.generate(PROMPTS, MASK, dataclasses.replace(SAMPLING, eos_token_ids=()))
    engine.generate(PROMPTS, MASK, dataclasses.replace(SAMPLING, eos_token_ids=()))

    assert len(first) >= 2 and min(first) == 2


def test_old_and_new_cache_are_never_held_at_once_by_more_than_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer of the old cache is given back before the memory of its new layer is made."""
    layers = 5
    old: list[weakref.ref[Any]] = []
    alive: list[int] = []

    class Watched(cuda_graphs.CudaGraphDecoder):
        def _loaded(self, source: Any, *others: Any) -> Any:
            old[:] = [weakref.ref(layer) for layer in source.layers]
            return super()._loaded(source, *others)

        def _new_layer(self, number: int, *others: Any) -> Any:
            alive.append(sum(layer() is not None for layer in old[: number + 1]))
            return super()._new_layer(number, *others)

    monkeypatch.setattr(cuda_graphs, "CudaGraphDecoder", Watched)
    model = tiny.llama(num_hidden_layers=layers)
    TransformersGenerator(model, fixed_shapes=True).generate(
        PROMPTS, MASK, Sampling(max_length=100, pad_token_id=tiny.PAD, seed=3)
    )

    assert alive == [0] * 2 * layers, "the prompt's cache is moved once, and once for more room"


def test_sampling_is_a_graph_of_each_bucket_and_setting_with_the_tokens_of_the_plain_loop() -> None:
    """Temperature, filters, ends and greedy choice are constants of a graph; noise and tokens are its tensors."""
    model, sampling = FakeDevice(), FakeDevice()
    engine = engine_on(model, tiny.llama(), sampling)
    endless = [
        SAMPLING,
        dataclasses.replace(SAMPLING, top_k=6, top_p=0.8),
        dataclasses.replace(SAMPLING, do_sample=False),
    ]
    ending = [
        dataclasses.replace(SAMPLING, temperature=0.6, eos_token_ids=(1, 7)),
        dataclasses.replace(SAMPLING, min_p=0.2, stop_sequences=((4, 4), (2, 9, 2), (11,))),
    ]
    for one in (*endless, *ending, *endless):
        assert_tokens_of_the_plain_loop(engine, sampling=one)
    captures = sampling.captures
    assert sampling.trials == 1 and captures >= 2 * len(endless)

    for one in endless:
        assert_tokens_of_the_plain_loop(engine, sampling=dataclasses.replace(one, seed=5))

    assert sampling.captures == captures, "other seeds replay the same graphs"


def test_a_stop_sequence_over_two_buffers_ends_its_row() -> None:
    """Every place of a sequence of three tokens: also where the buffers double between its tokens, at 64 columns."""
    engine = engine_on(FakeDevice(), tiny.llama(), FakeDevice())
    never = dataclasses.replace(SAMPLING, eos_token_ids=())
    made = TransformersGenerator(tiny.llama()).generate(PROMPTS, MASK, never).sequences
    for column in (61, 62, 63, 64, 65):
        stops = tuple(tuple(row[column - 2 : column + 1].tolist()) for row in made)
        assert_tokens_of_the_plain_loop(engine, sampling=dataclasses.replace(never, stop_sequences=stops), group_size=1)


def test_rows_of_other_lengths_leave_the_graphs_with_all_their_tokens() -> None:
    engine, plain = engine_on(FakeDevice(), tiny.llama(), FakeDevice()), TransformersGenerator(tiny.llama())
    limits, seeds = [1, 2, 9, 30, 70, 90], list(range(6))
    never = dataclasses.replace(SAMPLING, eos_token_ids=())

    for _ in range(2):
        made, expected = (
            one.generate(PROMPTS, MASK, never, group_size=2, row_seeds=seeds, row_limits=limits)
            for one in (engine, plain)
        )

        assert torch.equal(made.sequences, expected.sequences) and made.lengths.tolist() == limits
        assert made.log_probs is not None and expected.log_probs is not None
        torch.testing.assert_close(made.log_probs, expected.log_probs, atol=ROUNDING, rtol=0)


def test_sampling_that_cannot_be_captured_leaves_the_graphs_of_the_model(caplog: pytest.LogCaptureFixture) -> None:
    device = FakeDevice()
    engine = engine_on(device, tiny.llama(), FakeDevice(fails=RuntimeError("this filter reads back")))
    for _ in range(2):
        assert_tokens_of_the_plain_loop(engine)
    captures = device.captures

    assert_tokens_of_the_plain_loop(engine)

    assert caplog.messages == ["no CUDA graph of this sampling, its tokens take longer: this filter reads back"]
    assert device.captures == captures > 0


@pytest.mark.parametrize("build", [functools.partial(tiny.llama, num_hidden_layers=1), tiny.gemma3])
def test_between_two_looks_a_token_is_two_replays_and_nothing_else(build: Any) -> None:
    """Launches of the host outside of graphs, by the settings of a usual rollout and with every filter."""
    usual = dataclasses.replace(SAMPLING, eos_token_ids=(62, 63), temperature=0.7)
    for sampling in (usual, dataclasses.replace(usual, top_k=9, top_p=0.9, min_p=0.01, stop_sequences=((62, 63),))):
        inside, eager = (engine_on(FakeDevice(), build(), device) for device in (FakeDevice(), None))

        # A look is at the tokens 8, 16 and 24.
        nine, fifteen, twentyfive = (launches_outside(inside, sampling, tokens) for tokens in (9, 15, 25))

        assert fifteen == nine
        assert twentyfive - nine == 2 * 2
        assert launches_outside(eager, sampling, 15) - launches_outside(eager, sampling, 9) > 6 * 10


def launches_outside(engine: TransformersGenerator, sampling: Sampling, tokens: int) -> int:
    sampling = dataclasses.replace(sampling, max_length=PROMPTS.shape[1] + tokens)
    for _ in range(2):
        engine.generate(PROMPTS, MASK, sampling)
    with Launches() as seen:
        engine.generate(PROMPTS, MASK, sampling)
    return len(seen.names)
