"""Messages between a reward pool and its processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from pipeline.errors import RewardError
from pipeline.rollout.reward.given_rows import PackedRows
from pipeline.rollout.reward.numbers import Scored
from pipeline.runtime.pool_process import Ready

Problem = Literal["", "timeout", "exception", "invalid"]
"""The reason why a row has no score: its function was late, raised or died, or returned no finite number."""


class RowsToScore(msgspec.Struct, frozen=True, array_like=True):
    """Numbers of functions, and the rows that they score: one row, or all of them for functions that need them."""

    functions: list[int]
    count: int
    rows: PackedRows


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
