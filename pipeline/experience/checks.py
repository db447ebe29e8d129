"""Checks of rows and batches; errors name the field, the row and both sizes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import FieldError, ShapeError
from pipeline.experience.types import (
    ACTION_FIELDS,
    SCORE_FIELDS,
    VISION_FIELDS,
    BufferItem,
    BufferItemVL,
    Experience,
)

_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})
_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
_MASKS = _INTEGERS | {torch.bool}
_VISION_TENSORS = tuple(name for names in VISION_FIELDS for name in names[:2])

_DTYPES = {
    # Floats because LightRFT's own examples have them; shared memory carries integers only (`check_travels`).
    "sequences": (_INTEGERS | _FLOATS, "numbers"),
    "attention_mask": (_MASKS, "bool or integers"),
    "action_mask": (_MASKS, "bool or integers"),
    "action_log_probs": (_FLOATS, "floating point"),
    "base_action_log_probs": (_FLOATS, "floating point"),
    "behaviour_log_probs": (_FLOATS, "floating point"),
    "action_entropy": (_FLOATS, "floating point"),
    **dict.fromkeys(SCORE_FIELDS, (_FLOATS | _INTEGERS, "numbers")),
}


def check_kinds(items: Sequence[Any]) -> bool:
    """Refuse objects that are not rows, and rows of two kinds.

    Args:
        items: The rows.

    Returns:
        True if they are rows of vision-language experience.

    Raises:
        FieldError: If an item is not a `BufferItem`, or some are `BufferItemVL` and others are not.
    """
    for row, item in enumerate(items):
        if not isinstance(item, BufferItem):
            raise FieldError(f"row {row} is a {type(item).__name__}, not a BufferItem")
    vision = [isinstance(item, BufferItemVL) for item in items]
    if len(set(vision)) > 1:
        raise FieldError(
            f"{sum(vision)} of {len(items)} items are BufferItemVL, row {vision.index(True)} the first, and row "
            f"{vision.index(False)} is not; a batch is of one kind"
        )
    return any(vision)


def num_actions(item: BufferItem) -> int:
    """Return the number of action columns of a row, A."""
    return _action_columns(item)[1]


def check_item(item: BufferItem, row: int, *, masks: bool = True) -> None:
    """Refuse a row whose fields are not tensors, have a wrong dtype, or disagree on its length.

    Args:
        item: The row.
        row: The row's number, for the error.
        masks: Whether the widths of `attention_mask` and `action_mask` must be those of the row.

    Raises:
        ShapeError: If the row has no tokens, or a field's shape is not that of the row.
        FieldError: If `sequences` is None, a field is not a tensor, or its dtype is not allowed for the field.
    """
    if item.sequences is None:
        raise FieldError(f"row {row}: sequences is None")
    for name, (dtypes, meant) in _DTYPES.items():
        value = getattr(item, name)
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise FieldError(f"row {row}: {name} is a {type(value).__name__}, not a tensor")
        if value.dtype not in dtypes:
            raise FieldError(f"row {row}: {name} is {value.dtype}; it holds {meant}")
        if value.dim() != 1 and name not in SCORE_FIELDS:
            raise ShapeError(f"row {row}: {name} of shape {tuple(value.shape)} is not 1-D")
    length = len(item.sequences)
    if length == 0:
        raise ShapeError(f"row {row}: sequences has 0 tokens, a row has at least 1")
    if masks and item.attention_mask is not None and len(item.attention_mask) != length:
        raise ShapeError(f"row {row}: attention_mask has {len(item.attention_mask)} columns, sequences has {length}")
    counted_field, actions = _action_columns(item if masks else dataclasses.replace(item, action_mask=None))
    if actions > length:
        raise ShapeError(f"row {row}: {counted_field} has {actions} columns, more than the {length} of sequences")
    for name in (*ACTION_FIELDS, *SCORE_FIELDS):
        value = getattr(item, name)
        if value is None or value.shape == (actions,) or (name == "action_mask" and not masks):
            continue
        if name not in SCORE_FIELDS or (value.dim() != 0 and value.shape != (1,)):
            raise ShapeError(
                f"row {row}: {name} has shape {tuple(value.shape)}, the row has {actions} actions ({counted_field})"
            )


def check_travels(experience: Experience) -> None:
    """Refuse values that a batch may hold but shared memory does not carry.

    Args:
        experience: A batch, padded or packed.

    Raises:
        FieldError: If token ids are not integers, `info` has a name that is not a str or a value that is not a tensor,
            or pixels or grids are not a tensor.
    """
    for sequences in experience.sequences if isinstance(experience.sequences, list) else [experience.sequences]:
        kind = sequences.dtype if isinstance(sequences, Tensor) else f"a {type(sequences).__name__}"
        if kind not in _INTEGERS:
            raise FieldError(f"sequences is {kind}; shared memory carries token ids as a tensor of integers")
    for name, value in (experience.info or {}).items():
        if not isinstance(name, str):
            raise FieldError(
                f"info has the name {name!r}, a {type(name).__name__}; shared memory carries names that are str"
            )
        if not isinstance(value, Tensor):
            held = type(value).__name__
            raise FieldError(f"info[{name!r}] is a {held}; shared memory carries only tensors, one element a row")
    values = vars(experience)
    for name in _VISION_TENSORS:
        value = values.get(name)
        if value is not None and not isinstance(value, Tensor):
            raise FieldError(f"{name}: only tensors are stored, got {type(value).__name__}")


def check_one_kind(name: str, values: Sequence[Tensor | None], actions: Sequence[int]) -> None:
    """Refuse a field with one number a row in some rows and one an action in others; padding would hide the error.

    Args:
        name: The field.
        values: The field's value in each row.
        actions: Action columns of each row.

    Raises:
        ShapeError: If the rows differ in kind.
    """
    rows = [(row, value) for row, value in enumerate(values) if value is not None and value.dim() == 1]
    singles = [row for row, value in rows if len(value) == 1 != actions[row]]
    for row, value in rows:
        if singles and len(value) != 1:
            raise ShapeError(
                f"{name} has shape {tuple(value.shape)} in row {row}, (1,) in row {singles[0]} "
                f"of {actions[singles[0]]} actions"
            )


def check_present(name: str, values: Sequence[Any]) -> bool:
    """Refuse a field that only some rows have.

    Args:
        name: The field.
        values: The field's value in each row.

    Returns:
        True if the rows have the field.

    Raises:
        FieldError: If the field is None in some rows and not in others.
    """
    missing = [row for row, value in enumerate(values) if value is None]
    if missing and len(missing) != len(values):
        raise FieldError(f"{name} is None in row {missing[0]} and in {len(missing)} of {len(values)} rows, not in all")
    return not missing


def check_alike(name: str, tensors: Sequence[Tensor]) -> None:
    """Refuse rows of a field that differ in dtype or in number of dimensions.

    Args:
        name: The field.
        tensors: The field's value in each row.

    Raises:
        FieldError: If dtypes differ.
        ShapeError: If numbers of dimensions differ.
    """
    first = tensors[0]
    for row, tensor in enumerate(tensors):
        if tensor.dtype != first.dtype:
            raise FieldError(f"{name} is {tensor.dtype} in row {row}, {first.dtype} in row 0")
        if tensor.dim() != first.dim():
            raise ShapeError(f"{name} has shape {tuple(tensor.shape)} in row {row}, {tuple(first.shape)} in row 0")


def check_finite(columns: dict[str, Any]) -> None:
    """Refuse log-probs, entropies and scores of a batch that are NaN or infinite where there is an action.

    Args:
        columns: The fields of the batch by name, tensors or lists of one tensor a row.

    Raises:
        FieldError: If a number is not finite; the message names field, row and column.
    """
    mask = columns["action_mask"]
    for name in (*ACTION_FIELDS, *SCORE_FIELDS):
        column = columns[name]
        if name == "action_mask" or column is None or not len(column):
            continue
        # A tensor is not indexed here: indexing takes as long as the sum.
        if not (column if isinstance(column, Tensor) else column[0]).is_floating_point():
            continue
        whole = column if isinstance(column, Tensor) else torch.cat([row.reshape(-1) for row in column])
        if not math.isfinite(sum_of(whole)):
            for row, value in enumerate(column):
                _check_row_finite(name, row, value, None if mask is None else mask[row])


def sum_of(tensor: Tensor) -> float:
    """Return the sum of a field: a finite sum has only finite terms.

    The sum is one read of the field. It may overflow; if it is not finite, the caller has to check each term.

    Args:
        tensor: Floating point, on any device.
    """
    tensor = tensor.detach()
    if tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64):
        # Summed in this thread: beside busy processes torch waits far longer for its other threads than the sum takes.
        with np.errstate(over="ignore", invalid="ignore"):
            return float(tensor.numpy().sum())
    return tensor.sum().item()


def _check_row_finite(name: str, row: int, value: Tensor, mask: Tensor | None) -> None:
    wrong = ~torch.isfinite(value)
    if mask is not None and mask.shape == value.shape:
        wrong &= mask != 0
    if bool(wrong.any()):
        column = int(wrong.reshape(-1).nonzero()[0])
        where = f" in column {column} of {len(value)}" if value.dim() else ""
        raise FieldError(f"row {row}: {name} is {value.reshape(-1)[column].item()}{where}; it must be finite")


def _action_columns(item: BufferItem) -> tuple[str, int]:
    """Return the field that defines the number of action columns of the row, and that number."""
    for name in ("action_mask", "action_log_probs", "base_action_log_probs", "action_entropy", "behaviour_log_probs"):
        value = getattr(item, name)
        if value is not None:
            return name, len(value)
    # Without any per-action field the longest score defines the number of columns.
    scores = [(name, getattr(item, name)) for name in SCORE_FIELDS]
    counts = [(name, len(value)) for name, value in scores if value is not None and value.dim() == 1]
    return max(counts, key=lambda count: count[1], default=("action_mask", 0))
