"""Messages between a reward pool and its processes, and their bytes."""

from __future__ import annotations

import json
import struct
from typing import Any, Literal

import msgspec
import torch

from pipeline.experience.vision_rows import MODEL_KEYWORDS, VisionRows

Problem = Literal["", "timeout", "exception", "invalid"]
"""Why a row has no score: its function took too long, raised or died, or did not return a finite number."""

_LENGTH = struct.Struct("<I")


class Pixels(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of one row's images."""

    dtype: str
    shape: list[int]
    data: bytes


class RowToScore(msgspec.Struct, frozen=True, array_like=True):
    """A row to score: int64 ids, one byte of mask a token, the answer as JSON."""

    ids: bytes
    mask: bytes
    start: int
    end: int
    answer: str
    vision: list[Pixels | None] = []
    raw_images: str = "null"


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A scorer has loaded the functions, or failed with an error; whether a function takes images."""

    pid: int
    error: str = ""
    sees_images: bool = False


class RowScore(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The score of a row and its parts by function; or a problem, its text, and text and cause without user data."""

    score: float = 0.0
    problem: Problem = ""
    text: str = ""
    bare: str = ""
    parts: list[float] = []
    cause: str = ""


class Died(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A scorer has ended, with an exit code or minus the signal; another one is being forked."""

    code: int


decoder = msgspec.msgpack.Decoder(Loaded | RowScore | Died)


def frame(message: msgspec.Struct) -> bytes:
    """Return a message's bytes, preceded by their length."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def unframe(data: bytearray) -> bytes | None:
    """Remove the first complete message from the bytes read, and return it; None if there is none yet."""
    if len(data) < _LENGTH.size or len(data) < _LENGTH.size + _LENGTH.unpack_from(data)[0]:
        return None
    end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    body = bytes(data[_LENGTH.size : end])
    del data[:end]
    return body


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


def vision_of(row: RowToScore) -> VisionRows | None:
    """Return the images of a row; None if it has none."""
    if not row.vision:
        return None
    tensors = [
        None
        if pixels is None
        else torch.frombuffer(bytearray(pixels.data), dtype=getattr(torch, pixels.dtype)).reshape(pixels.shape)
        for pixels in row.vision
    ]
    fields: dict[str, Any] = {name: [tensor] for name, tensor in zip(MODEL_KEYWORDS, tensors, strict=True)}
    return VisionRows(**fields, raw_images=[json.loads(row.raw_images)])
