"""The insert gate: what a rollout must be before its extent may be sealed.

    reason      what is refused
    malformed   token ids that are no integers, an entry of `info` that is no tensor
    lengths     fields whose rows or columns disagree
    mask        an action mask that is not that of the sampled tokens
    vocabulary  a token that the model does not have
    not_finite  a log-prob, score or pixel that is NaN or infinite

The worker asks, for the buffer sees no payload byte; the buffer asks what the worker cannot know, whether the weights
were published and the sizes are possible (`pipeline.admission.refusal`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pipeline.errors import FieldError
from pipeline.experience import ACTION_FIELDS, SCORE_FIELDS, VISION_FIELDS, Experience
from pipeline.messages import FaultReason
from pipeline.row_checks import check_finite, check_travels, sum_of


@dataclasses.dataclass(frozen=True)
class Fault:
    """Why experience is refused: what it is counted by, and field, row and value."""

    reason: FaultReason
    detail: str


def find_fault(experience: Experience, *, vocabulary: int, pad_token_id: int) -> Fault | None:
    """Look for the first thing that keeps experience out of the buffer.

    Args:
        experience: On the CPU and as a maker leaves it, prompts padded on the left, responses on the right.
        vocabulary: Tokens that the model has; ids are below it.
        pad_token_id: What stands behind the end of a response.

    Returns:
        The fault, or None if it may come in.
    """
    # In this order: each check relies on those before it.
    try:
        check_travels(experience)
    except FieldError as error:
        return Fault("malformed", str(error))
    if problem := _problem_of_lengths(experience):
        return Fault("lengths", problem)
    if problem := _problem_of_masks(experience, pad_token_id):
        return Fault("mask", problem)
    if problem := _problem_of_tokens(experience.sequences, vocabulary):
        return Fault("vocabulary", problem)
    if problem := _problem_of_numbers(experience):
        return Fault("not_finite", problem)
    return None


def _problem_of_lengths(experience: Experience) -> str:
    for name in ("sequences", "attention_mask", "action_mask"):
        value = getattr(experience, name)
        if value is None or value.ndim != 2:
            return f"{name} is {'None' if value is None else f'of shape {tuple(value.shape)}'}, expected two dimensions"
    assert experience.action_mask is not None
    (rows, width), actions = experience.sequences.shape, experience.action_mask.shape[1]
    if not rows or not 1 <= actions <= width:
        return f"{rows} rows of {width} columns, {actions} of them actions"
    per_action: tuple[int, ...] = (rows, actions)
    whole: list[tuple[int, ...]] = [(rows,), (rows, 1), per_action]
    for names, shapes in ((("attention_mask",), [(rows, width)]), (ACTION_FIELDS, [per_action]), (SCORE_FIELDS, whole)):
        for name in names:
            value = getattr(experience, name)
            if value is not None and tuple(value.shape) not in shapes:
                shape = tuple(value.shape)
                return f"{name} has shape {shape}, sequences ({rows}, {width}), action_mask {per_action}"
    for name, value in (experience.info or {}).items():
        if value.ndim == 0 or len(value) != rows:
            return f"info[{name!r}] has shape {tuple(value.shape)} for {rows} rows"
    return ""


def _problem_of_masks(experience: Experience, pad_token_id: int) -> str:
    assert experience.attention_mask is not None and experience.action_mask is not None
    real, actions = experience.attention_mask.numpy() != 0, experience.action_mask.numpy() != 0
    prompt = real.shape[1] - actions.shape[1]
    behind = ~actions & (experience.sequences.numpy()[:, prompt:] != pad_token_id)
    runs = real[:, 0].astype(int) + (real[:, 1:] & ~real[:, :-1]).sum(axis=1)
    for what, wrong in (
        (
            "attention_mask and action_mask do not say the same of its response",
            (actions != real[:, prompt:]).any(axis=1),
        ),
        ("its response has no token in its first column", ~actions[:, 0]),
        ("its tokens are not in one run", runs != 1),
        ("a token of its response is outside action_mask", behind.any(axis=1)),
    ):
        if wrong.any():
            return f"row {int(wrong.argmax())}: {what}"
    return ""


def _problem_of_tokens(sequences: Tensor, vocabulary: int) -> str:
    ids: npt.NDArray[np.int64] = sequences.numpy()
    if ids.min() >= 0 and ids.max() < vocabulary:
        return ""
    row, column = np.argwhere((ids < 0) | (ids >= vocabulary))[0].tolist()
    return f"row {row}: sequences has token {ids[row, column]} in column {column}; the vocabulary has {vocabulary:,}"


def _problem_of_numbers(experience: Experience) -> str:
    try:
        check_finite(vars(experience))
    except FieldError as error:
        return str(error)
    for name, value in _other_numbers(experience):
        if value.is_floating_point() and not math.isfinite(sum_of(value)) and not bool(value.isfinite().all()):
            first = (~value.isfinite()).nonzero()[0].tolist()
            return f"{name} is {value[tuple(first)].item()} at {tuple(first)}; it must be finite"
    return ""


def _other_numbers(experience: Experience) -> Iterator[tuple[str, Tensor]]:
    """Yield what has no column an action: the tensors of `info`, and pixels."""
    yield from ((f"info[{name!r}]", value) for name, value in (experience.info or {}).items())
    for name, _, _ in VISION_FIELDS:
        value = getattr(experience, name, None)
        if value is not None:
            yield name, value
