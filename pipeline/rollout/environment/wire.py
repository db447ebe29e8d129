"""Messages between an environment pool and its processes. It loads no torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from pipeline.runtime.pool_process import Ready

Problem = Literal["", "timeout", "exception", "invalid"]
"""The reason why a row has no answer: a step was late, raised or killed its process, or returned no `Turn`."""


class Step(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A response to answer.

    Attributes:
        row: The row's number, unique in the pool.
        row_json: Prompt, answer and columns as JSON, for `reset`.
        responses: All responses of the row; a process without the row's environment repeats the former ones.
        is_last: Whether the row has no further turn, so that its environment can be dropped.
    """

    row: int
    row_json: str
    responses: list[str]
    is_last: bool


class Forget(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Rows that were dropped."""

    rows: list[int]


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The `Turn` of a step; or a problem, its text, and a text without user data."""

    row: int
    problem: Problem = ""
    text: str = ""
    bare: str = ""
    observation: str = ""
    reward: float = 0.0
    done: bool = False
    tool_failed: bool = False


to_process = msgspec.msgpack.Decoder(Step | Forget)
to_pool = msgspec.msgpack.Decoder(Ready | Answer)
