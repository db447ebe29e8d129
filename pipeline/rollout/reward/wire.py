"""Messages between a reward pool and its processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import torch

from pipeline.errors import RewardError
from pipeline.experience.vision_rows import MODEL_KEYWORDS, VisionRows
from pipeline.rollout.reward.numbers import Scored
from pipeline.runtime.pool_process import Ready

Problem = Literal["", "timeout", "exception", "invalid"]
"""The reason why a row has no score: its function was late, raised or died, or returned no finite number."""


class Pixels(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of one row's images."""

    dtype: str
    shape: list[int]
    data: bytes


class RowToScore(msgspec.Struct, frozen=True, array_like=True):
    """A row to score: int64 ids, one byte of mask a token, the answer and the prompt's further columns as JSON."""

    ids: bytes
    mask: bytes
    start: int
    end: int
    answer: str
    vision: list[Pixels | None] = []
    raw_images: str = "null"
    columns: str = "{}"


class RowsToScore(msgspec.Struct, frozen=True, array_like=True):
    """Numbers of functions, and the rows that they score: one row, or all of them for functions that need them."""

    functions: list[int]
    rows: list[RowToScore]


class RowScore(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The parts of a row's reward by function; or a problem, its text, and text and cause without user data.

    A part is NaN where its function does not apply to the row. `numbers` are the further numbers of each part, if any.
    """

    problem: Problem = ""
    text: str = ""
    bare: str = ""
    parts: list[float] = []
    cause: str = ""
    numbers: list[dict[str, float]] = []


class RowsScored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The results of `RowsToScore`, a row each."""

    rows: list[RowScore]


messages = msgspec.msgpack.Decoder(Ready | RowsScored)


def row_score(found: Sequence[Scored | RewardError], *, is_joint: bool) -> RowScore:
    """Return the result of a row, of the scores of its functions up to an error, which is the last.

    Args:
        found: The scores; at least one element.
        is_joint: Whether the function of the error scores all rows together, with a limit of their time.
    """
    if isinstance(error := found[-1], RewardError):
        problem: Problem = "exception" if error.raised else "invalid"
        if is_joint and isinstance(error.__cause__, TimeoutError):
            problem = "timeout"
        return RowScore(problem=problem, text=str(error), bare=error.bare, cause=error.cause)
    parts = [part for part in found if not isinstance(part, RewardError)]
    numbers = [dict(part.numbers) for part in parts]
    return RowScore(parts=[part.reward for part in parts], numbers=numbers if any(numbers) else [])


def with_images(row: RowToScore, vision: VisionRows) -> RowToScore:
    """Return the row with its images."""
    tensors = [getattr(vision, name)[0] for name in MODEL_KEYWORDS]
    pixels = [
        None
        if tensor is None
        else Pixels(
            str(tensor.dtype).removeprefix("torch."),
            list(tensor.shape),
            tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes(),
        )
        for tensor in tensors
    ]
    return msgspec.structs.replace(row, vision=pixels, raw_images=json.dumps(vision.raw_images[0]))


def vision_of(rows: Sequence[RowToScore]) -> VisionRows | None:
    """Return the images of rows; None if they have none."""
    if not rows or not rows[0].vision:
        return None
    tensors = [[None if pixels is None else _tensor(pixels) for pixels in row.vision] for row in rows]
    fields: dict[str, Any] = {
        name: list(column) for name, column in zip(MODEL_KEYWORDS, zip(*tensors, strict=True), strict=True)
    }
    return VisionRows(**fields, raw_images=[json.loads(row.raw_images) for row in rows])


def _tensor(pixels: Pixels) -> torch.Tensor:
    return torch.frombuffer(bytearray(pixels.data), dtype=getattr(torch, pixels.dtype)).reshape(pixels.shape)
