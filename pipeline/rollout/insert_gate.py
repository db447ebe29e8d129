"""The insert gate: checks of a rollout before its extent is sealed.

    reason      refused
    malformed   token ids that are not integers, an entry of `info` that is not a tensor
    lengths     fields whose rows or columns disagree
    mask        an action mask that does not match the sampled tokens; observations of an environment are none of them
    vocabulary  a token that the model does not have
    not_finite  a log-prob, score or pixel that is NaN or infinite

The worker makes these checks, because the buffer reads no payload byte. The buffer makes those that the worker cannot
make: whether the weights were published, and whether the sizes are possible (`pipeline.buffer.admission.refusal`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pipeline.errors import FieldError
from pipeline.experience.checks import check_finite, check_travels, sum_of
from pipeline.experience.types import ACTION_FIELDS, SCORE_FIELDS, VISION_FIELDS, Experience
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


def find_fault(
    experience: Experience, *, vocabulary: int, pad_token_id: int, has_observations: bool = False
) -> Fault | None:
    """Find the first fault that keeps experience out of the buffer.

    Args:
        experience: On the CPU and as a maker leaves it, prompts padded on the left, responses on the right.
        vocabulary: Tokens that the model has; ids are below it.
        pad_token_id: The token after the end of a response.
        has_observations: Whether tokens between the actions of a row may be an environment's.

    Returns:
        The fault; None if there is none.
    """
    # In this order: each check relies on those before it.
    try:
        check_travels(experience)
    except FieldError as error:
        return Fault("malformed", str(error))
    if problem := _problem_of_lengths(experience):
        return Fault("lengths", problem)
    if problem := _problem_of_masks(experience, pad_token_id, has_observations=has_observations):
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


def _problem_of_masks(experience: Experience, pad_token_id: int, *, has_observations: bool) -> str:
    assert experience.attention_mask is not None and experience.action_mask is not None
    real, actions = experience.attention_mask.numpy() != 0, experience.action_mask.numpy() != 0
    prompt = real.shape[1] - actions.shape[1]
    if has_observations:
        # Up to a row's last action: it ends with a response.
        response = np.logical_or.accumulate(actions[:, ::-1], axis=1)[:, ::-1]
    else:
        response = actions
    behind = ~response & (experience.sequences.numpy()[:, prompt:] != pad_token_id)
    stretches = real[:, 0].astype(int) + (real[:, 1:] & ~real[:, :-1]).sum(axis=1)
    for problem, wrong in (
        ("attention_mask and action_mask disagree on its response", (response != real[:, prompt:]).any(axis=1)),
        ("its response has no token in its first column", ~actions[:, 0]),
        ("its tokens are not contiguous", stretches != 1),
        ("a token of its response is outside action_mask", behind.any(axis=1)),
    ):
        if wrong.any():
            return f"row {int(wrong.argmax())}: {problem}"
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
        # A row without a further number of a reward has NaN there.
        if name.startswith(f"info['{PREFIX}"):
            continue
        if value.is_floating_point() and not math.isfinite(sum_of(value)) and not bool(value.isfinite().all()):
            first = (~value.isfinite()).nonzero()[0].tolist()
            return f"{name} is {value[tuple(first)].item()} at {tuple(first)}; it must be finite"
    return ""


def _other_numbers(experience: Experience) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that have no column per action: those of `info`, and pixels."""
    yield from ((f"info[{name!r}]", value) for name, value in (experience.info or {}).items())
    for name, _, _ in VISION_FIELDS:
        value = getattr(experience, name, None)
        if value is not None:
            yield name, value
