"""The key-value cache of `TransformersGenerator`: keys and values of new tokens are written into preallocated buffers.

transformers' growing layer concatenates old and new tensors at every token, which reads and writes the whole cache each
time: a third of a small model's step at 128 tokens. Here a buffer has room for half as many tokens again; attention
reads a view of the filled part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_LEAST_ROOM_TOKENS = 32


class PreallocatedLayer(DynamicLayer):
    """One layer's keys and values, ``(rows, heads, tokens, D)``: views of buffers with room for more tokens.

    Invariant: ``keys`` is ``_buffers[0][:, :, :tokens]`` and ``values`` is ``_buffers[1][:, :, :tokens]``.
    """

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers: tuple[Tensor, ...] = ()

    def update(
        self, key_states: Tensor, value_states: Tensor, *_arguments: Any, **_keywords: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the states of new tokens; return keys and values of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if not self._buffers or end > self._buffers[0].shape[-2]:
            room = end + max(_LEAST_ROOM_TOKENS, end // 2)
            self._buffers = tuple(
                self._with_room(new, old, start, room)
                for new, old in ((key_states, self.keys), (value_states, self.values))
            )
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = states
        self._show(end)
        return self.keys, self.values

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Give each row `repeats` copies, contiguous."""
        self._choose(lambda buffer: buffer.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Drop all rows but these."""
        self._choose(lambda buffer: buffer.index_select(0, indices))

    def _choose(self, rows: Any) -> None:
        tokens = self.get_seq_length()
        if tokens:
            self._buffers = tuple(rows(buffer) for buffer in self._buffers)
            self._show(tokens)

    def _show(self, tokens: int) -> None:
        self.keys, self.values = (buffer[:, :, :tokens] for buffer in self._buffers)

    @staticmethod
    def _with_room(new: Tensor, old: Tensor, filled: int, room: int) -> Tensor:
        buffer = torch.empty((*new.shape[:-2], room, new.shape[-1]), dtype=new.dtype, device=new.device)
        if filled:
            buffer[:, :, :filled] = old
        return buffer


def preallocated_cache(config: Any) -> DynamicCache:
    """Return an empty cache for a decoder; layers with full attention are preallocated.

    Args:
        config: The decoder's configuration. Layers of another kind (sliding window, linear attention) are
            transformers' own.
    """
    cache = DynamicCache(config=config)
    cache.layers = [PreallocatedLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
