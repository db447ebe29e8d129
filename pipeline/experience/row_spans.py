"""The columns of each row's tokens and actions in a padded batch; the codec stores these columns alone."""

from __future__ import annotations

import operator
from typing import NamedTuple

import numpy as np

from pipeline.errors import FieldError
from pipeline.experience.extent_format import Array


class Spans(NamedTuple):
    """The spans of rows: columns ``end - tokens:end`` of the sequences are tokens, ``end - actions:end`` actions.

    `full_masks`: the masks that are 1 on exactly each row's span.
    """

    tokens: list[int]
    actions: list[int]
    end: list[int]
    full_masks: tuple[str, ...]

    @classmethod
    def of(cls, shape: tuple[int, int], columns: int, mask: Array | None, action_mask: Array | None) -> Spans:
        """Return the spans of a batch.

        Args:
            shape: (B, S): rows, and columns of the sequences.
            columns: Action columns, A.
            mask: Attention mask (B, S); None if every column is a token.
            action_mask: Action mask (B, A); None if every action column up to the last token is an action.

        Raises:
            FieldError: If a row has no token, or an action behind its last token.
        """
        rows, width = shape
        tokens = [width] * rows if mask is None else _ones_at_the_end(mask)
        taken = [columns] * rows if action_mask is None else _ones_at_the_end(action_mask)
        if tokens is None or taken is None or not width:
            return cls._in_general(shape, columns, mask, action_mask)
        # The common case: all rows end in the last column, and so do their actions. Lists, because rows are few, and
        # numpy takes as long for three numbers as for a thousand.
        is_within = all(map(operator.le, taken, tokens))
        actions = taken if is_within else list(map(min, tokens, taken))
        full_masks: tuple[str, ...] = () if mask is None else ("attention_mask",)
        if action_mask is not None and is_within:
            full_masks += ("action_mask",)
        return cls(tokens, actions, [width] * rows, full_masks)

    @classmethod
    def _in_general(cls, shape: tuple[int, int], columns: int, mask: Array | None, action_mask: Array | None) -> Spans:
        rows, width = shape
        shift = width - columns
        if mask is None:
            start, end = np.zeros(rows, np.intp), np.full(rows, width)
            is_full = False
        else:
            start, end, count = _ones(mask)
            is_full = (count is None or bool((count == end - start).all())) and _is_plain(mask)
            if count is not None and not count.all():
                raise FieldError(f"attention_mask: row {int(np.flatnonzero(count == 0)[0])} has no token")
        full_masks: tuple[str, ...] = ("attention_mask",) if is_full else ()
        first = np.maximum(start, shift)
        if action_mask is not None:
            start_of, end_of, count = _ones(action_mask)
            if count is not None:
                start_of, end_of = np.where(count, start_of, columns), np.where(count, end_of, 0)
            taken = end_of - start_of if count is None else count
            # Of a row without an action the ends above are no columns.
            behind = (end_of + shift > end) & (taken > 0)
            if behind.any():
                row = int(np.flatnonzero(behind)[0])
                raise FieldError(f"action_mask: row {row} masks in an action behind its last token")
            first = np.maximum(start, start_of + shift)
        actions = np.maximum(end - first, 0)
        if action_mask is not None:
            # The numbers may agree though an action is before the first token: then another one is missing.
            is_within = bool((start_of + shift >= start).all())
            if is_within and (taken == actions).all() and _is_plain(action_mask):
                full_masks += ("action_mask",)
        return cls((end - start).tolist(), actions.tolist(), end.tolist(), full_masks)


def _ones_at_the_end(mask: Array) -> list[int] | None:
    """Return the number of ones of each row, if every row is zeros followed by at least one 1; else None."""
    kind, itemsize = mask.dtype.kind, mask.itemsize
    if not mask.size or kind not in "biu" or mask.strides[1] != itemsize or not mask[:, -1].all():
        return None
    # The search ends at the first byte that is not zero, so that it reads the padding alone.
    start = mask.view(np.bool_).argmax(1) // itemsize
    ones: list[int] = (mask.shape[1] - start).tolist()
    # Before the first column that is not zero all are zeros; from it on there are as many columns as ones.
    return ones if np.count_nonzero(mask if kind == "b" else mask == 1) == sum(ones) else None


def _is_plain(mask: Array) -> bool:
    """Return whether a mask holds zeros and ones alone."""
    if mask.dtype == bool or not mask.size:
        return True
    if mask.dtype.kind in "iu":
        # As numbers without a sign, negative ones are large.
        return bool(np.maximum.reduce(mask.view(f"u{mask.itemsize}"), axis=None) <= 1)
    return bool((mask == (mask != 0)).all())


def _ones(mask: Array) -> tuple[Array, Array, Array | None]:
    """Return for each row the column of the first nonzero value, the column behind the last, and their number.

    The numbers are None if each row has such values, and has them side by side. For a row without a nonzero value only
    the number, 0, is defined.
    """
    present = mask if mask.dtype == bool else mask != 0
    rows, columns = present.shape
    if columns == 0:
        none = np.zeros(rows, np.intp)
        return none, none, none
    start, last = present.argmax(1), present[:, -1]
    # Where a run of ones ends before the last column.
    ends = present[:, :-1] > present[:, 1:]
    runs = np.count_nonzero(ends) + np.count_nonzero(last)
    if columns > 1 and runs == rows == np.count_nonzero(np.logical_or.reduce(present, axis=1)):
        end = ends.argmax(1) + 1
        end[last] = columns
        return start, end, None
    end = np.full(rows, columns) if last.all() else columns - present[:, ::-1].argmax(1)
    return start, end, np.count_nonzero(present, axis=1)
