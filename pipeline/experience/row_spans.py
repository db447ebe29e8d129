"""The columns of each row's tokens and actions in a padded batch; the codec stores these columns alone."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping

import numpy as np

from pipeline.errors import FieldError, ShapeError
from pipeline.experience.extent_format import Array
from pipeline.experience.types import SCORE_FIELDS


@dataclasses.dataclass(frozen=True)
class Spans:
    """The spans of rows: the tokens are columns ``start:end`` of the sequences, the actions ``end - actions:end``.

    `end_together`: all rows end in the same column. `full_masks`: the masks that are 1 on exactly each row's span.
    """

    start: list[int]
    end: list[int]
    actions: list[int]
    width: int
    action_columns: int
    end_together: bool
    full_masks: list[str]

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
        start = [0] * rows if mask is None else _starts_of_ones(mask)
        first = [0] * rows if action_mask is None else _starts_of_ones(action_mask)
        if start is None or first is None or not width:
            return cls._in_general(shape, columns, mask, action_mask)
        # The common case: all rows end in the last column, and so do their actions. Lists, because rows are few, and
        # numpy takes as long for three numbers as for a thousand.
        taken = [columns - column for column in first]
        tokens = [width - column for column in start]
        is_within = all(map(operator.le, taken, tokens))
        actions = taken if is_within else list(map(min, tokens, taken))
        full_masks = [] if mask is None else ["attention_mask"]
        if action_mask is not None and is_within:
            full_masks.append("action_mask")
        return cls(start, [width] * rows, actions, width, columns, True, full_masks)

    @classmethod
    def _in_general(cls, shape: tuple[int, int], columns: int, mask: Array | None, action_mask: Array | None) -> Spans:
        rows, width = shape
        start, end, count = _ones(np.ones((rows, width), bool) if mask is None else mask)
        if not count.all():
            raise FieldError(f"attention_mask: row {int(np.flatnonzero(count == 0)[0])} has no token")
        full_masks = []
        if mask is not None and _is_plain(mask) and (count == end - start).all():
            full_masks.append("attention_mask")
        first: Array | int = 0
        if action_mask is not None:
            start_of, end_of, taken = _ones(action_mask)
            first, last = np.where(taken, start_of, columns), np.where(taken, end_of, 0)
            beyond = np.flatnonzero(last > end - (width - columns))
            if beyond.size:
                raise FieldError(f"action_mask: row {int(beyond[0])} masks in an action behind its last token")
        actions = np.maximum(end - np.maximum(start, width - columns + first), 0)
        if action_mask is not None and _is_plain(action_mask) and (taken == actions).all():
            full_masks.append("action_mask")
        together = bool((end == end[0]).all())
        return cls(start.tolist(), end.tolist(), actions.tolist(), width, columns, together, full_masks)


def action_columns(arrays: Mapping[str, Array]) -> int:
    """Return A, by the rule of `pipeline.experience.checks` for a row; 0 if no field has action columns.

    Raises:
        ShapeError: If a per-action field is not (B, A).
    """
    for name in ("action_mask", "action_log_probs", "base_action_log_probs", "action_entropy", "behaviour_log_probs"):
        if (value := arrays.get(name)) is not None:
            if value.ndim != 2:
                raise ShapeError(f"{name}: {value.shape}, expected (B, A)")
            return int(value.shape[1])
    scores = [arrays[name] for name in SCORE_FIELDS if name in arrays]
    return max((value.shape[1] for value in scores if value.ndim == 2), default=0)


def _starts_of_ones(mask: Array) -> list[int] | None:
    """Return the column of each row's first one, if every row is zeros followed by at least one 1; else None."""
    kind = mask.dtype.kind
    if not mask.size or kind not in "biu":
        return None
    # One read of the mask finds values other than 0 and 1: as numbers without a sign, negative ones are large.
    if kind != "b" and np.maximum.reduce(mask.view(f"u{mask.itemsize}"), axis=None) > 1:
        return None
    start: list[int] = mask.argmax(1).tolist()
    count = np.count_nonzero(mask) if kind == "b" else np.add.reduce(mask, axis=None)
    # A row has at most as many ones as columns from its first one on.
    return start if count == mask.size - sum(start) else None


def _is_plain(mask: Array) -> bool:
    """Return whether a mask holds zeros and ones alone."""
    if mask.dtype == bool or not mask.size:
        return True
    if mask.dtype.kind in "iu":
        return bool(mask.min() >= 0 and mask.max() <= 1)
    return bool((mask == (mask != 0)).all())


def _ones(mask: Array) -> tuple[Array, Array, Array]:
    """Return for each row the column of the first nonzero value, the column behind the last, and their number.

    For a row without a nonzero value only the number, 0, is defined.
    """
    present = mask if mask.dtype == bool else mask != 0
    columns = present.shape[1]
    if columns == 0:
        none = np.zeros(len(present), np.int64)
        return none, none, none
    right_aligned = present[:, -1].all()
    end = np.full(len(present), columns) if right_aligned else columns - present[:, ::-1].argmax(axis=1)
    return present.argmax(axis=1), end, np.count_nonzero(present, axis=1)
