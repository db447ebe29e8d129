"""The fields of a padded batch as arrays over its tensors' memory, and their headers in an extent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from pipeline.errors import FieldError, ShapeError
from pipeline.experience.checks import check_travels
from pipeline.experience.extent_format import Array, Columns, FieldHeader, as_array, field_headers
from pipeline.experience.types import OBJECT_FIELDS, SCORE_FIELDS, TOKEN_FIELDS, Experience

# In stored order: `ACTION_FIELDS`, and `SCORE_FIELDS`, which may be (B, A).
_PER_ACTION_FIELDS = (
    "action_log_probs", "base_action_log_probs", "behaviour_log_probs", "values", "returns", "kl", "advantages",
    "action_mask", "action_entropy", "reward",
)  # fmt: skip
TEXT_FIELDS = (*TOKEN_FIELDS, *_PER_ACTION_FIELDS, *OBJECT_FIELDS)


class FieldArrays(NamedTuple):
    """The text fields of a batch that are not None: their headers, and an array (B, ...) each, in stored order.

    `action_columns`: A, 0 if no field has action columns.
    """

    headers: tuple[FieldHeader, ...]
    arrays: dict[str, Array]
    action_columns: int


def field_arrays(experience: Experience) -> FieldArrays:
    """Return the text fields of a batch on the CPU.

    Raises:
        ShapeError: If a field's shape does not fit `sequences`, naming the field.
        FieldError: If a field or an element of `info` is not a tensor of B rows, or cannot be stored.
    """
    check_travels(experience)
    rows, width = experience.sequences.shape
    values = vars(experience)
    found = {name: value for name in TEXT_FIELDS if (value := values[name]) is not None}
    if experience.info:
        found.update({f"info.{key}": value for key, value in experience.info.items()})
    try:
        # The usual tensors: one call each.
        arrays: dict[str, Array] = dict(zip(found, map(torch.Tensor.numpy, found.values()), strict=True))
    except (RuntimeError, TypeError):
        # A tensor with a gradient or of bfloat16, or no tensor.
        arrays = {name: _as_array(name, value) for name, value in found.items()}
    for name, array in arrays.items():
        if not array.ndim or len(array) != rows:
            raise ShapeError(f"{shown_name(name)}: {array.shape} for {rows} rows")
    columns = action_columns(arrays)
    described = [
        (name, found[name].dtype, *_columns_and_tail(name, array.shape, width, columns))
        for name, array in arrays.items()
    ]
    return FieldArrays(field_headers(tuple(described)), arrays, columns)


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


def _as_array(name: str, value: Any) -> Array:
    if not isinstance(value, torch.Tensor):
        raise FieldError(f"{shown_name(name)}: only tensors are stored, got {type(value).__name__}")
    return as_array(value.detach() if value.requires_grad else value)


def _columns_and_tail(
    name: str, shape: tuple[int, ...], width: int, action_columns: int
) -> tuple[Columns, tuple[int, ...]]:
    is_token = name in TOKEN_FIELDS
    if not is_token and not (name in _PER_ACTION_FIELDS and len(shape) == 2):
        return "", shape[1:]
    expected = width if is_token else action_columns
    if len(shape) == 2 and shape[1] == expected:
        return "S" if is_token else "A", ()
    if name in SCORE_FIELDS and shape[1] == 1:
        # One number a row as (B, 1), the form in LightRFT.
        return "", shape[1:]
    raise ShapeError(f"{name}: {shape}, expected ({shape[0]}, {expected})")


def shown_name(name: str) -> str:
    """Return a field's name as code has it: ``info['length']`` for ``info.length``."""
    return f"info[{name.removeprefix('info.')!r}]" if name.startswith("info.") else name
