"""Rows laid end to end, without padding, and the actions in them: the input of packed passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.errors import ShapeError

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FlatRows:
    """B rows of T tokens, of which N are actions; a token before each action is in its row.

    Attributes:
        tokens: ``(T,)`` int64.
        action: ``(N,)`` int64, the index of each action in `tokens`, ascending.
        row: ``(N,)`` int64, the row of each action.
        lengths: ``(B,)`` int64 on the host, tokens of each row.
        counts: ``(B,)`` int64 on the host, actions of each row.
        prompts: ``(B,)`` int64 on the host, tokens of each row before its first action.
    """

    tokens: Tensor
    action: Tensor
    row: Tensor
    lengths: Index
    counts: Index
    prompts: Index

    @classmethod
    def of(cls, tokens: Tensor, lengths: Index, action: Index, row: Index) -> Self:
        """Return rows of the tokens on a device, and of lengths and actions on the host.

        Raises:
            ShapeError: If the first token of a row is an action.
        """
        counts, starts = np.bincount(row, minlength=len(lengths)), starts_of(lengths)
        has_action, firsts = counts > 0, starts_of(counts)
        prompts = np.where(has_action, 0, lengths)
        prompts[has_action] = action[firsts[has_action]] - starts[has_action]
        if not prompts[has_action].all():
            first = int(np.flatnonzero(has_action & (prompts == 0))[0])
            raise ShapeError(f"row {first} has no token before one of its actions")
        device = tokens.device
        return cls(tokens, on_device(action, device), on_device(row, device), lengths, counts, prompts)

    def __len__(self) -> int:
        """Return the number of rows, B."""
        return len(self.lengths)

    def rows(self, index: Index) -> tuple[Self, Index]:
        """Return rows by their indices, and the indices of their actions."""
        starts, firsts = starts_of(self.lengths), starts_of(self.counts)
        lengths, counts = self.lengths[index], self.counts[index]
        device = self.tokens.device
        actions = ranges(firsts[index], counts)
        moved = np.repeat(starts_of(lengths) - starts[index], counts)
        return type(self)(
            tokens=self.tokens[on_device(ranges(starts[index], lengths), device)],
            action=self.action[on_device(actions, device)] + on_device(moved, device),
            row=on_device(np.repeat(np.arange(len(index)), counts), device),
            lengths=lengths,
            counts=counts,
            prompts=self.prompts[index],
        ), actions

    @property
    def labels(self) -> Tensor:
        """``(N,)`` int64, the token of each action."""
        return self.tokens[self.action]

    def padded(self, width_multiple: int = 1) -> PaddedPass:
        """Return the rows as a padded batch in which they end together, as wide as a multiple of tokens."""
        device, longest = self.tokens.device, int(self.lengths.max())
        width = longest + -longest % width_multiple
        row = np.repeat(np.arange(len(self)), self.lengths)
        column = ranges(width - self.lengths, self.lengths)
        index = on_device(row * width + column, device)
        sequences = self.tokens.new_zeros((len(self), width))
        sequences.view(-1)[index] = self.tokens
        mask = torch.zeros_like(sequences)
        mask.view(-1)[index] = 1
        actions = max(int((self.lengths - self.prompts).max()), 1)
        # From a token's index to its column among the last `actions` columns of its row.
        shift = on_device(np.arange(1, len(self) + 1) * actions - np.cumsum(self.lengths), device)
        return PaddedPass(sequences, mask, actions, self.action + shift[self.row])


@dataclass(frozen=True, slots=True)
class PaddedPass:
    """Rows padded on the left, for a model that cannot be packed.

    Attributes:
        sequences: ``(B, S)`` int64.
        attention_mask: ``(B, S)`` int64.
        num_actions: Columns that have an action, A, at the end.
        index: ``(N,)`` int64, the index of each action among the ``B x A`` columns.
    """

    sequences: Tensor
    attention_mask: Tensor
    num_actions: int
    index: Tensor

    def flat(self, values: Tensor) -> Tensor:
        """Return the values ``(N,)`` of the actions from those of all columns, ``(B, A)``."""
        return values.reshape(-1)[self.index]


def starts_of(lengths: Index) -> Index:
    """Return the sum of the lengths before each."""
    return np.cumsum(lengths) - lengths


def ranges(starts: Index, lengths: Index) -> Index:
    """Return ``start, start + 1, ...`` of each start, as many as its length, end to end."""
    return np.repeat(starts - starts_of(lengths), lengths) + np.arange(int(lengths.sum()))


def on_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor on a device; a card receives it in the order of its stream, and the host goes on."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    # From other memory a copy would wait for all that the card has been given before.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
