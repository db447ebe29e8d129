"""The insert gate: checks of a rollout before its extent is sealed.

    reason      refused
    malformed   token ids that are not integers
    lengths     fields whose rows or columns disagree; a response without a token, or with more than its room
    mask        a row without a prompt or a response; a response that begins or ends with a token of an environment, or
                has one where there is none
    vocabulary  a token that the model does not have
    not_finite  a log-prob, score or pixel that is NaN or infinite

The first two are refused where rows are made of responses, and columns of rows
(`pipeline.rollout.prompt_batch.PromptBatch`, `pipeline.experience.ragged.RaggedRows.of_columns`).

The worker makes these checks, because the buffer reads no payload byte. The buffer makes those that the worker cannot
make: whether the weights were published, and whether the sizes are possible (`pipeline.buffer.admission.refusal`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
from torch import Tensor

from pipeline.experience.checks import sum_of
from pipeline.experience.field_arrays import shown_name
from pipeline.experience.ragged import RaggedRows
from pipeline.experience.vision_rows import PIXELS
from pipeline.rollout.reward.numbers import PREFIX
from pipeline.runtime.messages import FaultReason


@dataclasses.dataclass(frozen=True)
class Fault:
    """The reason for which experience is refused.

    Attributes:
        reason: The label it is counted under.
        detail: Field, row and value.
    """

    reason: FaultReason
    detail: str


def find_fault(rows: RaggedRows, *, vocabulary: int, has_observations: bool = False) -> Fault | None:
    """Find the first fault that keeps experience out of the buffer.

    Args:
        rows: The experience.
        vocabulary: Tokens that the model has; ids are below it.
        has_observations: Whether tokens between the actions of a row may be an environment's.

    Returns:
        The fault; None if there is none.
    """
    if problem := _problem_of_masks(rows, has_observations=has_observations):
        return Fault("mask", problem)
    if problem := _problem_of_tokens(rows, vocabulary):
        return Fault("vocabulary", problem)
    if problem := _problem_of_numbers(rows):
        return Fault("not_finite", problem)
    return None


def _problem_of_masks(rows: RaggedRows, *, has_observations: bool) -> str:
    for row, (length, count) in enumerate(zip(rows.lengths, rows.counts, strict=True)):
        if not 1 <= count < length:
            return f"row {row}: {count} of its {length} tokens are a response"
    mask = rows.columns.get("action_mask")
    if mask is None:
        return ""
    starts = np.array(rows.starts("A"))
    first, last = starts[:-1], starts[1:] - 1
    problems = [
        ("begins with a token of its environment", first[mask[first] == 0]),
        ("ends with a token of its environment", last[mask[last] == 0]),
    ]
    if not has_observations:
        problems.append(("has a token of an environment, and there is none", np.flatnonzero(mask == 0)))
    for problem, places in problems:
        if len(places):
            return f"row {_row_of(rows, 'A', int(places[0]))[0]}: its response {problem}"
    return ""


def _problem_of_tokens(rows: RaggedRows, vocabulary: int) -> str:
    ids = rows.columns["sequences"]
    if ids.min() >= 0 and ids.max() < vocabulary:
        return ""
    place = int(np.flatnonzero((ids < 0) | (ids >= vocabulary))[0])
    row, number = _row_of(rows, "S", place)
    return f"row {row}: sequences has token {ids[place]} at position {number}; the vocabulary has {vocabulary:,}"


def _problem_of_numbers(rows: RaggedRows) -> str:
    mask = rows.tensor("action_mask")
    for name, columns, values in _numbers(rows):
        if not values.is_floating_point() or math.isfinite(sum_of(values)):
            continue
        wrong = ~values.isfinite()
        if columns == "A" and mask is not None:
            wrong &= mask != 0
        if not bool(wrong.any()):
            continue
        first = wrong.nonzero()[0].tolist()
        value = values[tuple(first)].item()
        if columns == "A":
            row, number = _row_of(rows, "A", first[0])
            return f"row {row}: {name} is {value} in column {number} of {rows.counts[row]}; it must be finite"
        if name in rows.named and not name.startswith("info."):
            return f"row {first[0]}: {name} is {value}; it must be finite"
        return f"{shown_name(name)} is {value} at {tuple(first)}; it must be finite"
    return ""


def _numbers(rows: RaggedRows) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the name, the kind of columns and the values of fields that may not be NaN."""
    for field in rows.fields:
        # A row without a further number of a reward has NaN there.
        if field.name.startswith(f"info.{PREFIX}") or field.name not in rows.columns:
            continue
        values = rows.tensor(field.name)
        assert values is not None
        yield field.name, field.columns, values
    if rows.vision is not None:
        for name in PIXELS:
            for row in dict.fromkeys(rows.vision.firsts(name)):
                if (pixels := getattr(rows.vision, name)[row]) is not None:
                    yield f"row {row}: {name}", "", pixels


def _row_of(rows: RaggedRows, kind: str, place: int) -> tuple[int, int]:
    """Return the row of a column's value, and the number of the value within the row."""
    starts = rows.starts(kind)
    row = int(np.searchsorted(starts, place, side="right")) - 1
    return row, place - starts[row]
