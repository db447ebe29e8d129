"""Sampled rows laid end to end, as the maker computes with them; a pass pads those of its mini-batch on the spot."""

from __future__ import annotations

import dataclasses
import functools
from typing import Self

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import FieldError, RewardError, ShapeError, TokenError
from pipeline.experience.vision_rows import VisionRows
from pipeline.models.flat_rows import FlatRows, Index, ranges, starts_of
from pipeline.rollout.environment.turn_rows import TurnColumns


@dataclasses.dataclass(frozen=True)
class Rows:
    """Sampled rows; B rows of T tokens, of which N are of responses.

    Formulas over the actions of a row take values by columns, ``(B, A)``; `columns` and `flat` change between both.

    Attributes:
        tokens: ``(T,)`` int64, the prompt and the response of each row, row after row.
        prompts: ``(B,)`` int64, tokens of each prompt.
        lengths: ``(B,)`` int64, tokens of each response, observations included, from 1 to A.
        prompt_columns: Columns of prompt, P, in a batch for a model that is given whole rows.
        num_actions: The room of a response, A.
        pad_token_id: The token in padding.
        cut: ``(B,)`` bool, the row ended at a limit of tokens or turns.
        sampled_log_probs: ``(N,)`` float32, those of the engine; None if it computes none.
        vision: Images and videos of the rows; None where rows are text alone.
        turns: Columns of rows of several turns; None for one response a row.
    """

    tokens: Tensor
    prompts: Index
    lengths: Index
    prompt_columns: int
    num_actions: int
    pad_token_id: int
    cut: Tensor
    sampled_log_probs: Tensor | None = None
    vision: VisionRows | None = None
    turns: TurnColumns | None = None

    def __len__(self) -> int:
        """Return the number of rows, B."""
        return len(self.lengths)

    @functools.cached_property
    def totals(self) -> Index:
        """``(B,)``, tokens of each row."""
        return self.prompts + self.lengths

    @functools.cached_property
    def starts(self) -> Index:
        """``(B,)``, the index of each row's first token."""
        return starts_of(self.totals)

    @functools.cached_property
    def is_response(self) -> Tensor:
        """``(B, A)`` bool, True in the columns that a response has, the environment's tokens included."""
        return torch.from_numpy(np.arange(self.num_actions) < self.lengths[:, None])

    @functools.cached_property
    def action_mask(self) -> Tensor:
        """``(B, A)`` bool; observations of an environment, which the actor did not sample, are left out."""
        # A copy: an estimator of the user's may change it.
        return self.is_response.clone() if self.turns is None else self.columns(~self.turns.observed)

    def columns(self, values: Tensor) -> Tensor:
        """Return the values ``(N,)`` of responses by columns, ``(B, A)``, 0 behind the end of a response."""
        return values.new_zeros(self.is_response.shape).masked_scatter_(self.is_response, values)

    def flat(self, values: Tensor) -> Tensor:
        """Return the values of responses, ``(N,)``, from those by columns, ``(B, A)``."""
        return values[self.is_response]

    def rows(self, index: Index) -> Self:
        """Return the rows at an index."""
        tokens = torch.from_numpy(ranges(self.starts[index], self.totals[index]))
        actions = torch.from_numpy(self.actions_of(index))
        return dataclasses.replace(
            self,
            tokens=self.tokens[tokens],
            prompts=self.prompts[index],
            lengths=self.lengths[index],
            cut=self.cut[torch.from_numpy(index)],
            sampled_log_probs=None if self.sampled_log_probs is None else self.sampled_log_probs[actions],
            vision=self.vision_of(index),
            turns=None if self.turns is None else self.turns.rows(torch.from_numpy(index), actions),
        )

    def actions_of(self, index: Index) -> Index:
        """Return the places of some rows' responses in columns ``(N,)``."""
        return ranges(starts_of(self.lengths)[index], self.lengths[index])

    def vision_of(self, index: Index) -> VisionRows | None:
        """Return images and videos of some rows; None where rows are text alone."""
        return None if self.vision is None else self.vision.rows(index.tolist())

    def for_packing(self, device: torch.device) -> FlatRows:
        """Return the rows for packed passes, with their tokens on a device; the actor did not sample observations."""
        places = ranges(self.starts + self.prompts, self.lengths)
        row = np.repeat(np.arange(len(self)), self.lengths)
        if self.turns is not None:
            sampled = ~self.turns.observed.numpy()
            places, row = places[sampled], row[sampled]
        return FlatRows.of(self.tokens.to(device), self.totals, places, row)

    def padded(self, index: Index, *, trim: bool, multiple: int = 1) -> tuple[Tensor, Tensor, int]:
        """Return ids and mask of some rows: prompts padded on the left, responses on the right.

        Args:
            index: The rows.
            trim: Leave out the columns that are padding in all rows; else there are P + A.
            multiple: With `trim`, the width is rounded up to a multiple of it, by padding on the left.

        Returns:
            ``(rows, width)`` int64 both, and the number of action columns at their right end.
        """
        prompt_columns, columns = self.prompt_columns, self.num_actions
        if trim:
            columns = int(self.lengths[index].max())
            prompt_columns = int(self.prompts[index].max())
            prompt_columns += -(prompt_columns + columns) % multiple
        return *self._block(index, prompt_columns - self.prompts[index], prompt_columns + columns), columns

    def right_padded(self, index: Index, *, trim: bool, multiple: int = 1) -> tuple[Tensor, Tensor]:
        """Return ids and mask of some rows, the first token in column 0.

        Args:
            index: The rows.
            trim: Make the result as wide as the longest row, in place of P + A.
            multiple: With `trim`, the width is rounded up to a multiple of it.

        Returns:
            ``(rows, width)`` int64 both.
        """
        longest = int(self.totals[index].max())
        width = longest + -longest % multiple if trim else self.prompt_columns + self.num_actions
        return self._block(index, np.zeros_like(index), width)

    def _block(self, index: Index, first: Index, width: int) -> tuple[Tensor, Tensor]:
        """Return ids and mask of rows whose tokens begin at the columns `first`."""
        places = torch.from_numpy(ranges(np.arange(len(index)) * width + first, self.totals[index]))
        ids = torch.full((len(index), width), self.pad_token_id, dtype=torch.int64)
        mask = torch.zeros((len(index), width), dtype=torch.int64)
        ids.view(-1)[places] = self.tokens[torch.from_numpy(ranges(self.starts[index], self.totals[index]))]
        mask.view(-1)[places] = 1
        return ids, mask

    def row_of(self, place: int) -> tuple[int, int]:
        """Return the row of a place in columns ``(N,)``, and the number within the row."""
        return _row_of(place, self.lengths)


def rows_with_reward(scores: Tensor, group_size: int) -> Index | None:
    """Return the rows of the groups whose rewards are all finite; None for all of them.

    Args:
        scores: ``(B,)``.
        group_size: Contiguous rows that are kept or dropped together.

    Raises:
        RewardError: If no row is left.
    """
    good = torch.isfinite(scores)
    if bool(good.all()):
        return None
    good = good.reshape(-1, group_size).all(dim=1).repeat_interleave(group_size)
    if not bool(good.any()):
        errored = int((~torch.isfinite(scores)).sum())
        raise RewardError(f"{errored} of {len(scores)} rows have no reward, and no row is left")
    return np.flatnonzero(good.numpy())


def check_prompts(input_ids: Tensor, attention_mask: Tensor) -> None:
    """Refuse prompts that are not padded on the left.

    Args:
        input_ids: ``(prompts, P)``.
        attention_mask: ``(prompts, P)``.

    Raises:
        ShapeError: If the shapes differ, or a prompt has no real token.
        FieldError: If a prompt has padding after a real token, ids are not integers, or an argument is not a tensor.
    """
    for name, given in (("input_ids", input_ids), ("attention_mask", attention_mask)):
        if not isinstance(given, Tensor):
            raise FieldError(f"{name} is a {type(given).__name__}, not a tensor")
    if input_ids.dim() != 2 or attention_mask.shape != input_ids.shape or not len(input_ids):
        raise ShapeError(
            f"input_ids of shape {tuple(input_ids.shape)}, attention_mask {tuple(attention_mask.shape)}: "
            "both must be (prompts, P), with at least one prompt"
        )
    if input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool:
        raise FieldError(f"input_ids is {input_ids.dtype}; token ids are integers")
    real = attention_mask != 0
    empty = ~real.any(dim=1)
    if bool(empty.any()):
        raise ShapeError(f"row {int(empty.nonzero()[0])}: attention_mask has no real token; a prompt cannot be empty")
    gaps = (real[:, :-1] & ~real[:, 1:]).any(dim=1) | ~real[:, -1]
    if bool(gaps.any()):
        raise FieldError(f"row {int(gaps.nonzero()[0])}: the prompt has padding after a real token; pad on the left")


def check_lengths(lengths: Index, num_actions: int) -> None:
    """Refuse a response that does not have from 1 to A tokens.

    Raises:
        ShapeError: If there is one; the message names the row.
    """
    wrong = np.flatnonzero((lengths < 1) | (lengths > num_actions))
    if len(wrong):
        raise ShapeError(f"row {wrong[0]}: a response of {lengths[wrong[0]]} tokens, not from 1 to {num_actions}")


def check_tokens(tokens: Tensor, lengths: Index, vocabulary: int) -> None:
    """Refuse tokens outside the vocabulary: a forward pass over them fails, and on a GPU ends the whole process.

    Args:
        tokens: ``(T,)`` int64, row after row.
        lengths: ``(B,)``, tokens of each row.
        vocabulary: Tokens of the model.

    Raises:
        TokenError: If there is one; the message names row and position.
    """
    wrong = (tokens < 0) | (tokens >= vocabulary)
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0])
        row, number = _row_of(place, lengths)
        raise TokenError(
            f"row {row}: token {int(tokens[place])} at position {number}; the vocabulary has {vocabulary:,}"
        )


def _row_of(place: int, lengths: Index) -> tuple[int, int]:
    """Return the row of a place in rows laid end to end, and the number within the row."""
    starts = starts_of(lengths)
    row = int(np.searchsorted(starts, place, side="right")) - 1
    return row, place - int(starts[row])
