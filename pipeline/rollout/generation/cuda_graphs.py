"""Decoding steps over tensors of fixed address and shape, so that a GPU replays each step as one CUDA graph.

A step of a small batch is hundreds of kernels of some microseconds each, and their launch takes longer than they do. A
graph is one launch, but only for the tensors that it was captured with. Therefore a token's place in the cache is a
number on the GPU, attention reads the whole buffer through a mask, and rows leave when half of them have ended. Buffers
begin small and double, because attention to unused room costs as much as attention to tokens. A layer that slides a
window has no more columns than its window: a token takes the place of the one that leaves it.

The next token is sampled over tensors of the same buckets, as a graph of its own for each setting of the sampling
(temperature, filters, ends): so a token costs two launches, and the host looks at tokens only where rows may leave.

A capture costs some twenty steps. So rows and room are rounded up to buckets, and the tensors of every bucket are views
of the same memory, which stays from batch to batch: a batch of a bucket that was captured before replays its graph. If
a bucket needs more memory than there is, the memory is made anew, and all buckets are captured again.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from pipeline.config.plan import row_bucket
from pipeline.models.pass_size import released_when_full
from pipeline.models.varlen_attention import FULL, SLIDING, uses_varlen_attention, windows_of
from pipeline.rollout.generation.graph_capture import GraphCapture
from pipeline.rollout.generation.kv_cache import PreallocatedLayer
from pipeline.rollout.generation.token_sampler import NO_TOKEN, BegunRows, TokenSampler

Forward = Callable[[Tensor, Tensor | dict[str, Tensor], Tensor, Any], Tensor]
"""Returns ``(rows, V)`` float32 logits of tokens, mask or masks by kind of layer, positions and cache."""

_LEAST_ROOM_TOKENS = 64
_LEAST_NEW_TOKENS = 32
_EAGER_STEPS = 2
"""Steps before the capture: libraries initialize in them, and initialization must not be captured."""
_MOST_BUCKETS = 128
"""A graph holds some MB of a card's memory; beyond this number the one that was not used for longest is dropped."""


def room_bucket(filled: int, most: int, multiple: int = 1) -> int:
    """Return the columns of the buffers for a batch.

    Args:
        filled: Columns that hold a token.
        most: Columns that rows can have in all, above `filled`.
        multiple: The result is a multiple of it.

    Returns:
        64 and its doublings, with room for 32 more tokens, or `most`, if that is less.
    """
    room = -(-_LEAST_ROOM_TOKENS // multiple) * multiple
    while room < filled + _LEAST_NEW_TOKENS:
        room *= 2
    return min(room, -(-most // multiple) * multiple)


class FixedShapeLayer(PreallocatedLayer):
    """One layer's keys and values, ``(rows, heads, columns, D)``: the whole buffer, zero in columns without a token.

    Args:
        keys: The buffer of the keys.
        values: The buffer of the values.
        column: ``(1,)`` int64 on the device, the column of the next token.
        window: Tokens of the layer's sliding window, the most columns that it has; None for whole rows.
    """

    def __init__(self, keys: Tensor, values: Tensor, column: Tensor, window: int | None) -> None:
        super().__init__()
        self.sliding_window = window
        self._column = column
        self._buffers = (keys, values)
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_arguments: Any, **_keywords: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one token's states; return the whole buffers."""
        self.keys.index_copy_(2, self._column, key_states)
        self.values.index_copy_(2, self._column, value_states)
        return self.keys, self.values

    def load(self, tokens: tuple[Tensor, ...]) -> None:
        """Hold the keys and values of some rows, each ``(rows, heads, filled, D)``, and zeros elsewhere."""
        for buffer, held in zip(self._buffers, tokens, strict=True):
            # Zeros: masked values are multiplied by 0, and a NaN in uninitialized memory would stay NaN.
            buffer.zero_()
            buffer[: held.shape[0], :, : held.shape[2]] = held


@dataclass(eq=False)
class _Steps:
    """The steps of one kind over the tensors of a bucket.

    Attributes:
        sampler: Samples in these steps; None for the passes of the model. It is kept, since a graph reads its tensors.
        graph: None before the capture.
        count: Steps so far.
    """

    sampler: TokenSampler | None = None
    graph: torch.cuda.CUDAGraph | None = None
    count: int = 0

    def take(self, step: Callable[[], None], capture: GraphCapture) -> None:
        """Take a step: eagerly at first, then captured."""
        if self.graph is not None:
            self.graph.replay()
        elif self.count < _EAGER_STEPS:
            step()
        else:
            self.graph = capture.run_or_capture(step)
        self.count += 1


@dataclass(eq=False)
class _Ring:
    """Where layers of one window have their tokens: at their columns, modulo the number that the layers hold.

    Attributes:
        column: ``(1,)`` int64, the place of the next token.
        mask: ``(rows, 1, 1, columns)`` in the dtype of the keys, 0 where the token is real, else -inf: added to the
            scores as it is, where one of bools would be made such a mask anew in each layer.
    """

    column: Tensor
    mask: Tensor

    def load(self, mask: Tensor, filled: int) -> None:
        """Hold the mask of some rows, ``(rows, any)``, of which so many columns have a token."""
        columns = self.mask.shape[3]
        held = mask[:, max(filled - columns, 0) : filled]
        if filled > columns:
            held = held.roll(filled, 1)
        self.mask.fill_(-torch.inf)
        self.mask[: len(held), 0, 0, : held.shape[1]].masked_fill_(held != 0, 0.0)


@dataclass(eq=False)
class _Bucket:
    """The tensors of a number of rows and columns, and the graphs over them.

    Attributes:
        room: Columns of the buffers of whole rows.
        column: ``(1,)`` int64, the column of these tokens.
        tokens: ``(rows, 1)`` int64, those of the next step.
        positions: Positions of these tokens, ``(rows, 1)``, or ``(3, rows, 1)``.
        rings: Places and masks of the layers, by their window, None for whole rows.
        logits: ``(rows, V)``, of the last step.
        noise: ``(rows, room + 1)`` float64, the draw of the token of each column.
        sampled: ``(rows, room + 1)`` int64, the response's token of each column; `NO_TOKEN` where there is none.
        log_probs: ``(rows, room + 1)`` float32, their log-probs where they were sampled here.
        alive: ``(rows,)`` bool, the rows that have not ended.
        cache: The key-value cache, with layers of `FixedShapeLayer`.
        forward: The passes of the model.
        sampling: The steps that sample, by their settings.
    """

    room: int
    column: Tensor
    tokens: Tensor
    positions: Tensor
    rings: dict[int | None, _Ring]
    logits: Tensor
    noise: Tensor
    sampled: Tensor
    log_probs: Tensor
    alive: Tensor
    cache: DynamicCache
    forward: _Steps = field(default_factory=_Steps)
    sampling: dict[Hashable, _Steps] = field(default_factory=dict)

    @property
    def layers(self) -> list[Any]:
        """The layers of the cache."""
        layers: list[Any] = self.cache.layers
        return layers

    @property
    def mask(self) -> Tensor | dict[str, Tensor]:
        """The mask of all layers; of two kinds of layers their masks by the names of the kinds in transformers."""
        masks = {FULL if window is None else SLIDING: ring.mask for window, ring in self.rings.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))


class CudaGraphDecoder:
    """The decoding steps of one engine, for one batch after the other.

    It holds memory for the largest batch so far, until `release`.

    Args:
        capture: Captures the passes of the engine's model.
        sampling_capture: Captures its sampling.
        width_multiple: Multiple to which the columns of the buffers are rounded up.

    Attributes:
        filled: Columns that hold a token.
    """

    def __init__(self, capture: GraphCapture, sampling_capture: GraphCapture, width_multiple: int = 1) -> None:
        self.filled = 0
        self._capture = capture
        self._sampling_capture = sampling_capture
        # The column of the first token that is sampled in the present bucket.
        self._first = 0
        self._width_multiple = width_multiple
        self._buckets: OrderedDict[tuple[int, int], _Bucket] = OrderedDict()
        self._current: _Bucket | None = None
        self._memory: dict[str, Tensor] = {}
        self._most_rows = self._most_area = 0
        self._weights: Hashable = None
        released_when_full(self)

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another token."""
        return self._current is None or self.filled == self._current.room

    def release(self) -> None:
        """Give all memory back, and with it the graphs and their pool."""
        self._drop_buckets()
        self._capture.release()
        self._sampling_capture.release()

    def _drop_buckets(self) -> None:
        """Release buffers and graphs; the memory of the pool stays for the next graphs."""
        self._buckets.clear()
        self._memory.clear()
        self._current = None
        self._most_rows = self._most_area = 0

    def compute_with(self, weights: Hashable) -> None:
        """Drop the graphs if the model's weights are at other addresses than before: they would read the old ones.

        Args:
            weights: The addresses.
        """
        if weights != self._weights:
            self._drop_buckets()
            self._weights = weights

    def begin(
        self, cache: DynamicCache, chosen: Tensor, mask: Tensor, positions: Tensor, logits: Tensor, begun: BegunRows
    ) -> None:
        """Take over the rows of a batch, of which the prompts are in a cache.

        Args:
            cache: A cache that `can_run_fixed_shapes`; its layers are given back, one after the other.
            chosen: ``(rows,)`` int64, the cache's row of each row.
            mask: ``(rows, columns)``, 1 where a token is real; as wide as the longest possible row.
            positions: Positions of the next tokens, ``(rows, 1)``, or ``(3, rows, 1)``.
            logits: ``(any, V)``, for number and dtype of the logits.
            begun: The rows' tokens, the next ones to be read included.
        """
        self.filled = cache.get_seq_length()
        self._current = None
        self._current = self._loaded(cache, chosen, mask, positions, logits, begun)

    def go_on(self, chosen: Tensor, mask: Tensor, positions: Tensor, begun: BegunRows) -> None:
        """Go on with some of the rows, in larger buffers if these are full; arguments as for `begin`."""
        assert self._current is not None
        # Without the memory of the last logits, which are not needed any more.
        like = self._current.logits.new_empty(0, self._current.logits.shape[1])
        self._current = self._loaded(self._current.cache, chosen, mask, positions, like, begun)

    def step(self, forward: Forward, tokens: Tensor | None) -> Tensor:
        """Return logits after one more token of each row, ``(at least rows, V)``; the next step overwrites them.

        Args:
            forward: The model's.
            tokens: ``(rows,)`` int64, the tokens that it reads; None: those that `sample` has sampled.
        """
        bucket = self._current
        assert bucket is not None
        if tokens is not None:
            bucket.tokens[: len(tokens), 0] = tokens
        bucket.forward.take(functools.partial(self._run, forward, bucket), self._capture)
        self.filled += 1
        return bucket.logits if tokens is None else bucket.logits[: len(tokens)]

    def sample(self, sampler: TokenSampler) -> None:
        """Sample a token of each row by the logits of the last step, and find the rows that it ends."""
        bucket = self._current
        assert bucket is not None
        steps = bucket.sampling.setdefault(sampler.key, _Steps(sampler))
        steps.take(functools.partial(self._sample, steps.sampler or sampler, bucket), self._sampling_capture)

    def alive(self, rows: int) -> Tensor:
        """Return which of the rows have not ended, ``(rows,)`` bool; the next `sample` overwrites it."""
        assert self._current is not None
        return self._current.alive[:rows]

    def next_tokens(self, rows: int) -> Tensor:
        """Return the rows' newest tokens, ``(rows,)``, of those that have ended too."""
        assert self._current is not None
        return self._current.tokens[:rows, 0].clone()

    def sampled(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return the rows' tokens since `begin` or `go_on`, and their log-probs, each ``(rows, steps)``."""
        assert self._current is not None
        columns = slice(self._first, self.filled + 1)
        return self._current.sampled[:rows, columns], self._current.log_probs[:rows, columns]

    def _run(self, forward: Forward, bucket: _Bucket) -> None:
        for ring in bucket.rings.values():
            if ring.column is not bucket.column:
                torch.remainder(bucket.column, ring.mask.shape[3], out=ring.column)
            ring.mask.index_fill_(3, ring.column, 0.0)
        bucket.logits.copy_(forward(bucket.tokens, bucket.mask, bucket.positions, bucket.cache))
        # Until here a step that raised has changed nothing that a second call does not write again.
        bucket.column += 1
        bucket.positions += 1

    def _sample(self, sampler: TokenSampler, bucket: _Bucket) -> None:
        column = bucket.column
        noise = bucket.noise.index_select(1, column).squeeze(1) if sampler.draws else None
        tokens, log_probs = sampler.next(bucket.logits, noise)
        bucket.sampled.index_copy_(1, column, sampler.kept(bucket.alive, tokens).unsqueeze(1))
        bucket.log_probs.index_copy_(1, column, log_probs.unsqueeze(1))
        bucket.tokens.copy_(sampler.fed(tokens).unsqueeze(1))

        def last(count: int) -> Tensor:
            # Columns before the response have no token, which is in no sequence.
            columns = column + torch.arange(1 - count, 1, device=column.device)
            return bucket.sampled.index_select(1, columns.clamp(min=0))

        # Last: until here a step that raised has changed nothing that a second call does not write again.
        bucket.alive.copy_(sampler.go_on(bucket.alive, tokens, last))

    def _loaded(
        self,
        source: DynamicCache,
        chosen: Tensor,
        mask: Tensor,
        positions: Tensor,
        logits: Tensor,
        begun: BegunRows,
    ) -> _Bucket:
        rows, filled = len(chosen), self.filled
        # A copy, as of keys and values: the memory of all buckets is the same.
        alive = begun.alive.clone()
        size = row_bucket(rows), room_bucket(filled, mask.shape[1], self._width_multiple)
        is_own = self._current is not None
        grows = size[0] > self._most_rows or size[0] * size[1] > self._most_area
        if grows:
            # Graphs hold addresses. The layers of the source are still needed, and leave one after the other.
            most = max(size[0], self._most_rows), max(size[0] * size[1], self._most_area)
            self._drop_buckets()
            self._most_rows, self._most_area = most
        layers: list[Any] = source.layers
        bucket = self._buckets.get(size)
        is_new = bucket is None
        if bucket is None:
            bucket = self._new_bucket(size, copy.copy(source), positions, logits)
        for number in range(len(layers)):
            window, held = _window_of(layers[number]), _held(layers[number], chosen, filled)
            if grows or not is_own:
                # A layer at a time: old and new buffers of all layers at once would be half of the cache more.
                layers[number] = None
            if is_new:
                bucket.layers.append(self._new_layer(number, size, held, bucket.rings[window].column, window))
            bucket.layers[number].load(held)
            del held
        bucket.column.fill_(filled)
        for ring in bucket.rings.values():
            ring.load(mask, filled)
        bucket.positions.zero_()
        bucket.positions[..., :rows, :] = positions
        self._first = filled + 1
        self._load_response(bucket, begun, alive)
        self._buckets[size] = bucket
        self._buckets.move_to_end(size)
        if len(self._buckets) > _MOST_BUCKETS:
            self._buckets.popitem(last=False)
        return bucket

    def _load_response(self, bucket: _Bucket, begun: BegunRows, alive: Tensor) -> None:
        rows, made = begun.tokens.shape
        bucket.sampled.fill_(NO_TOKEN)
        bucket.sampled[:rows, self._first - made : self._first] = begun.tokens
        more = min(begun.noise.shape[1], bucket.noise.shape[1] - self._first)
        bucket.noise.zero_()
        bucket.noise[:rows, self._first : self._first + more] = begun.noise[:, :more]
        bucket.log_probs.zero_()
        bucket.alive.fill_(False)
        bucket.alive[:rows] = alive

    def _new_bucket(self, size: tuple[int, int], cache: DynamicCache, positions: Tensor, logits: Tensor) -> _Bucket:
        rows, room = size
        layers: list[Any] = cache.layers
        like: Tensor = layers[0].keys
        windows = {_window_of(layer) for layer in layers}
        cache.layers = []
        column = self._view("column", (1,), positions, 1)
        before = positions.shape[:-2]
        return _Bucket(
            room=room,
            column=column,
            tokens=self._view("tokens", (rows, 1), positions, self._most_rows).zero_(),
            positions=self._view("positions", (*before, rows, 1), positions, math.prod(before) * self._most_rows),
            rings={window: self._new_ring(window, size, column, like) for window in windows},
            logits=self._view("logits", (rows, logits.shape[1]), logits, logits.shape[1] * self._most_rows),
            noise=self._of_columns("noise", size, positions, torch.float64),
            sampled=self._of_columns("sampled", size, positions, torch.int64),
            log_probs=self._of_columns("log_probs", size, positions, torch.float32),
            alive=self._view("alive", (rows,), positions.new_empty(0, dtype=torch.bool), self._most_rows),
            cache=cache,
        )

    def _new_ring(self, window: int | None, size: tuple[int, int], column: Tensor, like: Tensor) -> _Ring:
        name, place = "mask", column
        if window is not None:
            name, place = f"mask {window}", self._view(f"column {window}", (1,), column, 1)
        shape = size[0], 1, 1, min(size[1], window or size[1])
        return _Ring(place, self._view(name, shape, like, self._elements(window)))

    def _new_layer(
        self, number: int, size: tuple[int, int], held: tuple[Tensor, ...], column: Tensor, window: int | None
    ) -> FixedShapeLayer:
        rows, room = size
        keys, values = (
            self._view(
                f"{kind} {number}",
                (rows, like.shape[1], min(room, window or room), like.shape[3]),
                like,
                self._elements(window) * like.shape[1] * like.shape[3],
            )
            for kind, like in zip(("keys", "values"), held, strict=True)
        )
        return FixedShapeLayer(keys, values, column, window)

    def _elements(self, window: int | None) -> int:
        """Return the rows times columns of the largest buffers of a window."""
        return self._most_area if window is None else min(self._most_area, self._most_rows * window)

    def _of_columns(self, name: str, size: tuple[int, int], like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a number for each row and column, and for the column after the last."""
        elements = self._most_area + self._most_rows
        return self._view(name, (size[0], size[1] + 1), like.new_empty(0, dtype=dtype), elements)

    def _view(self, name: str, shape: tuple[int, ...], like: Tensor, elements: int) -> Tensor:
        """Return the first elements of a tensor of the memory in a shape; it is made if it does not exist."""
        if name not in self._memory:
            self._memory[name] = torch.empty(elements, dtype=like.dtype, device=like.device)
        return self._memory[name][: math.prod(shape)].view(shape)


def _window_of(layer: Any) -> int | None:
    """Return the tokens of the sliding window of a layer of a cache; None for whole rows."""
    window: int | None = getattr(layer, "sliding_window", None)
    return window


def _held(layer: Any, chosen: Tensor, filled: int) -> tuple[Tensor, ...]:
    """Return keys and values of some rows of a layer as a buffer holds them, each ``(rows, heads, any, D)``.

    They are copies: the buffers may be those that the rows move to.
    """
    held = tuple(tensor[chosen, :, :filled] for tensor in (layer.keys, layer.values))
    if type(layer) is DynamicSlidingWindowLayer and filled >= layer.sliding_window:
        # The last tokens of a window, in their order and without the one that the next token would drop.
        held = tuple(functional.pad(tensor, (0, 0, 1, 0)).roll(filled, 2) for tensor in held)
    return held


def can_run_fixed_shapes(model: PreTrainedModel, cache: DynamicCache) -> bool:
    """Return whether a model attends by sdpa, and each layer to all earlier tokens or a window, by the mask alone."""
    if getattr(model.config.get_text_config(), "alibi", False):
        # Its biases come from a mask of two dimensions.
        return False
    if not (model.config._attn_implementation == "sdpa" or uses_varlen_attention(model)):
        return False
    layers: list[Any] = cache.layers
    kinds = PreallocatedLayer, DynamicSlidingWindowLayer
    if not all(type(layer) in kinds and layer.is_initialized for layer in layers):
        return False
    windows = [_window_of(layer) for layer in layers]
    if not any(windows):
        return True
    # The layers of chunked attention have a window in the cache alone. Masks by kinds are for models that transformers
    # itself gives these.
    return windows == windows_of(model) and (all(windows) or model._can_compile_fullgraph)
