"""Decoding steps over tensors of fixed address and shape, so that a GPU replays each step as one CUDA graph.

A step of a small batch is hundreds of kernels of some microseconds each, and their launch takes longer than they do. A
graph is one launch, but only for the tensors that it was captured with. Therefore a token's place in the cache is a
number on the GPU, attention reads the whole buffer through a mask, and rows leave when half of them have ended. Buffers
begin small and double, because attention to unused room costs as much as attention to tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from pipeline.rollout.generation.graph_capture import Graph, GraphCapture
from pipeline.rollout.generation.kv_cache import PreallocatedLayer

_LEAST_ROOM_TOKENS = 64
_EAGER_STEPS = 2
"""Steps before the capture: libraries initialize in them, and initialization must not be captured."""


class FixedShapeLayer(PreallocatedLayer):
    """One layer's keys and values, ``(rows, heads, room, D)``: the whole buffer, zero in columns without a token.

    Args:
        layer: The layer to copy tokens from.
        filled: Tokens in that layer.
        room: Columns of the buffer.
        column: ``(1,)`` int64 on the device, the column of the next token.
    """

    def __init__(self, layer: PreallocatedLayer, filled: int, room: int, column: Tensor) -> None:
        super().__init__()
        self._column = column
        self._buffers = tuple(_moved(old[:, :, :filled], room) for old in (layer.keys, layer.values))
        self.keys, self.values = self._buffers
        self.dtype, self.device = self.keys.dtype, self.keys.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_arguments: Any, **_keywords: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one token's states; return the whole buffers."""
        self.keys.index_copy_(2, self._column, key_states)
        self.values.index_copy_(2, self._column, value_states)
        return self.keys, self.values


class CudaGraphDecoder:
    """Decoding steps of a batch of rows, until the buffers are full or rows leave.

    Attributes:
        filled: Columns that hold a token.
        room: Columns of the buffers.
    """

    def __init__(
        self,
        forward: Callable[[Tensor, Tensor, Tensor, Any], Tensor],
        cache: DynamicCache,
        mask: Tensor,
        filled: int,
        positions: Tensor,
        capture: GraphCapture,
    ) -> None:
        """Take over a cache.

        Args:
            forward: Returns ``(rows, V)`` logits of tokens, mask, positions and cache.
            cache: A cache that `can_run_fixed_shapes`; its layers are replaced by larger ones.
            mask: ``(rows, columns)``, 1 where a token is real; as wide as the longest possible row.
            filled: Columns of the mask that are in the cache.
            positions: Positions of the next tokens, ``(rows, 1)``, or ``(3, rows, 1)``.
            capture: The engine's.
        """
        self.filled = filled
        self.room = min(mask.shape[1], filled + max(_LEAST_ROOM_TOKENS, filled))
        self._forward, self._cache = forward, cache
        self._column = torch.full((1,), filled, device=mask.device)
        self._positions = positions.clone()
        self._tokens = torch.zeros((len(mask), 1), dtype=torch.int64, device=mask.device)
        self._mask = torch.zeros((len(mask), 1, 1, self.room), dtype=torch.bool, device=mask.device)
        self._mask[:, 0, 0, :filled] = mask[:, :filled] != 0
        layers: list[Any] = cache.layers
        for index, layer in enumerate(layers):
            # In place, a layer at a time: old and new buffers of all layers at once would be half of the cache more.
            layers[index] = FixedShapeLayer(layer, filled, self.room, self._column)
        self._logits: Tensor | None = None
        self._graph: Graph | None = None
        self._steps = 0
        self._capture = capture

    @property
    def full(self) -> bool:
        """Whether there is no room for another token."""
        return self.filled == self.room

    def step(self, tokens: Tensor) -> Tensor:
        """Return logits after one more token of each row, ``(rows, V)``; the next step overwrites them."""
        self._tokens.copy_(tokens.unsqueeze(1))
        if self._graph is not None:
            self._graph.replay()
        elif self._steps < _EAGER_STEPS:
            self._logits = self._run()
        else:
            self._graph, self._logits = self._capture.run_or_capture(self._run)
        self.filled += 1
        self._steps += 1
        assert self._logits is not None
        return self._logits

    def _run(self) -> Tensor:
        self._mask.index_fill_(3, self._column, True)
        logits = self._forward(self._tokens, self._mask, self._positions, self._cache)
        # Until here a step that raised has changed nothing that a second call does not write again.
        self._column += 1
        self._positions += 1
        return logits


def can_run_fixed_shapes(model: PreTrainedModel, cache: DynamicCache) -> bool:
    """Return whether a model attends through a mask of bools, and every layer attends to all earlier tokens."""
    return model.config._attn_implementation == "sdpa" and all(
        isinstance(layer, PreallocatedLayer) and layer.is_initialized for layer in cache.layers
    )


def _moved(tokens: Tensor, room: int) -> Tensor:
    # Zeros: masked values are multiplied by 0, and a NaN in uninitialized memory would stay NaN.
    buffer = torch.zeros((*tokens.shape[:2], room, tokens.shape[3]), dtype=tokens.dtype, device=tokens.device)
    buffer[:, :, : tokens.shape[2]] = tokens
    return buffer
