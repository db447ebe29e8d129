"""Sampled rows in two layouts: the maker's (prompts on the left, responses on the right), and right-padded, no gap."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.errors import FieldError, RewardError, ShapeError, TokenError
from pipeline.experience.vision_rows import VisionRows
from pipeline.rollout.generation.interface import Responses, Sampling, TurnColumns


@dataclasses.dataclass(frozen=True)
class Rows:
    """Sampled rows; B rows, P columns of prompt, A = max_length - P columns of response.

    Attributes:
        sequences: ``(B, max_length)`` int64, prompts padded on the left, responses on the right.
        attention_mask: ``(B, max_length)`` int64.
        action_mask: ``(B, A)`` bool; observations of an environment, which the actor did not sample, are left out.
        prompt_lengths: ``(B,)`` int64, real tokens of each prompt.
        lengths: ``(B,)`` int64, tokens of each response, observations included, from 1 to A.
        pad_token_id: The token in padding.
        vision: Images and videos of the rows; None where rows are text alone.
        turns: Columns of rows of several turns; None for one response a row.
    """

    sequences: Tensor
    attention_mask: Tensor
    action_mask: Tensor
    prompt_lengths: Tensor
    lengths: Tensor
    pad_token_id: int
    vision: VisionRows | None = None
    turns: TurnColumns | None = None

    @classmethod
    def of(
        cls, prompt_mask: Tensor, responses: Responses, sampling: Sampling, *, vision: VisionRows | None = None
    ) -> Rows:
        """Combine the masks of prompts with the responses of an engine.

        Args:
            prompt_mask: ``(B, P)``, 1 where the token of the prompt is real.
            responses: The engine's result for these B rows.
            sampling: The engine's argument.
            vision: Images and videos of these B rows.

        Returns:
            The rows.

        Raises:
            ShapeError: If the engine returned another number of rows or columns, or an impossible length.
        """
        num_actions = check_responses(responses, len(prompt_mask), prompt_mask.shape[1], sampling.max_length)
        lengths = responses.lengths
        prompt_mask = (prompt_mask != 0).long()
        real, turns = torch.arange(num_actions) < lengths.unsqueeze(1), responses.turns
        return cls(
            sequences=responses.sequences,
            attention_mask=torch.cat([prompt_mask, real.long()], dim=1),
            action_mask=real if turns is None else real & ~turns.observed,
            prompt_lengths=prompt_mask.sum(dim=1),
            lengths=lengths,
            pad_token_id=sampling.pad_token_id,
            vision=vision,
            turns=turns,
        )

    @property
    def num_actions(self) -> int:
        """Action columns, A."""
        return self.action_mask.shape[1]

    def rows(self, index: Tensor) -> Rows:
        """Return the rows at an index ``(rows,)`` int64, at the same widths."""
        return dataclasses.replace(
            self,
            sequences=self.sequences[index],
            attention_mask=self.attention_mask[index],
            action_mask=self.action_mask[index],
            prompt_lengths=self.prompt_lengths[index],
            lengths=self.lengths[index],
            vision=self.vision_of(index),
            turns=None if self.turns is None else self.turns.rows(index),
        )

    def vision_of(self, index: Tensor | slice) -> VisionRows | None:
        """Return images and videos of some rows; None where rows are text alone."""
        return None if self.vision is None else self.vision.rows(index)

    def padded(self, index: Tensor, *, trim: bool, multiple: int = 1) -> tuple[Tensor, Tensor, int]:
        """Return ids and mask of some rows in the maker's layout, and the number of action columns.

        Args:
            index: The rows, ``(rows,)`` int64.
            trim: Leave out the columns that are padding in all rows.
            multiple: With `trim`, the width is rounded up to a multiple of it, by padding on the left.

        Returns:
            ``(rows, width)`` int64 both, and the number of action columns at their right end.
        """
        if not trim:
            return self.sequences[index], self.attention_mask[index], self.num_actions
        prompt_width = self.sequences.shape[1] - self.num_actions
        longest = int(self.lengths[index].max())
        columns = slice(prompt_width - int(self.prompt_lengths[index].max()), prompt_width + longest)
        padding = -(columns.stop - columns.start) % multiple
        sequences, mask = self.sequences[index, columns], self.attention_mask[index, columns]
        return (
            functional.pad(sequences, (padding, 0), value=self.pad_token_id),
            functional.pad(mask, (padding, 0)),
            longest,
        )

    def right_padded(self, part: slice, *, trim: bool, multiple: int = 1) -> tuple[Tensor, Tensor]:
        """Return ids and mask of some rows, the first real token in column 0.

        Args:
            part: The rows.
            trim: Make the result as wide as the longest row, in place of `max_length`.
            multiple: With `trim`, the width is rounded up to a multiple of it.

        Returns:
            ``(rows, width)`` int64 both.
        """
        sequences, prompts = self.sequences[part], self.prompt_lengths[part]
        max_length = sequences.shape[1]
        real = prompts + self.lengths[part]
        columns = torch.arange(-(-int(real.max()) // multiple) * multiple if trim else max_length)
        mask = columns < real.unsqueeze(1)
        starts = max_length - self.num_actions - prompts
        source = (columns + starts.unsqueeze(1)).clamp(max=max_length - 1)
        return sequences.gather(1, source).masked_fill(~mask, self.pad_token_id), mask.long()


def rows_with_reward(scores: Tensor, group_size: int) -> Tensor | None:
    """Return the rows of the groups whose rewards are all finite, ``(rows,)`` int64; None for all of them.

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
    return good.nonzero().squeeze(1)


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


def check_responses(responses: Responses, rows: int, prompt_width: int, max_length: int) -> int:
    """Refuse an engine's result of another shape than requested, or with an impossible length.

    Args:
        responses: The result.
        rows: B, as requested.
        prompt_width: P, columns of the prompts.
        max_length: As requested.

    Returns:
        Columns of response, A = `max_length` - P.

    Raises:
        ShapeError: If there is another number of rows or columns, or a response does not have from 1 to A tokens.
    """
    num_actions = max_length - prompt_width
    shape, lengths = tuple(responses.sequences.shape), responses.lengths
    if shape != (rows, max_length) or lengths.shape != (rows,):
        raise ShapeError(
            f"generator returned sequences {shape} and lengths {tuple(lengths.shape)}, "
            f"not ({rows}, {max_length}) and ({rows},)"
        )
    wrong = (lengths < 1) | (lengths > num_actions)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ShapeError(f"row {row}: a response of {int(lengths[row])} tokens, not from 1 to {num_actions}")
    return num_actions


def check_tokens(sequences: Tensor, vocabulary: int) -> None:
    """Refuse tokens outside the vocabulary: a forward pass over them fails, and on a GPU ends the whole process."""
    wrong = (sequences < 0) | (sequences >= vocabulary)
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        token = int(sequences[row, column])
        raise TokenError(f"row {row}: token {token} in column {column}; the vocabulary has {vocabulary:,}")
