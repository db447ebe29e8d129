"""Messages between an environment pool and its processes, and their bytes. It loads no torch."""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

Problem = Literal["", "timeout", "exception", "invalid"]
"""Why a row has no answer: a step took too long, raised or killed its process, or returned no valid `Turn`."""

_LENGTH = struct.Struct("<I")


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


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A process has imported the environment, or failed with an error."""

    error: str = ""


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


def frame(message: msgspec.Struct) -> bytes:
    """Return a message's bytes, preceded by their length."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def unframe(data: bytearray) -> bytes | None:
    """Remove the first complete message from the bytes read, and return it; None if there is none yet."""
    if len(data) < _LENGTH.size or len(data) < (end := _LENGTH.size + _LENGTH.unpack_from(data)[0]):
        return None
    body = bytes(data[_LENGTH.size : end])
    del data[:end]
    return body
