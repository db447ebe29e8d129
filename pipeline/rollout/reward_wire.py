"""Messages between a reward pool and its processes, and their bytes."""

from __future__ import annotations

import json
import struct
from typing import Any, Literal

import msgspec
import torch

from pipeline.experience.vision_rows import MODEL_KEYWORDS, VisionRows

Problem = Literal["", "timeout", "exception", "invalid"]
"""Why a row has no score: its function took too long, raised or died, or returned what is no finite number."""

_LENGTH = struct.Struct("<I")


class Pixels(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a row's images."""

    dtype: str
    shape: list[int]
    data: bytes


class RowToScore(msgspec.Struct, frozen=True, array_like=True):
    """One row for a scorer: int64 ids, one byte of mask a token, the answer as JSON."""

    ids: bytes
    mask: bytes
    start: int
    end: int
    answer: str
    vision: list[Pixels | None] = []
    raw_images: str = "null"


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A scorer has loaded the functions, or why it could not; whether they want to see images."""

    pid: int
    error: str = ""
    sees_images: bool = False


class RowScore(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What came of the row, by function too; a problem in words, and in words fit for a log."""

    score: float = 0.0
    problem: Problem = ""
    text: str = ""
    bare: str = ""
    parts: list[float] = []


class Died(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A scorer has ended with this exit code, or minus the signal; another one is on its way."""

    code: int


_decoder = msgspec.msgpack.Decoder(Loaded | RowScore | Died)


def frame(message: msgspec.Struct) -> bytes:
    """Return a message with its length in front."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def unframe(data: bytearray) -> bytes | None:
    """Take the first whole message off what was read; None if there is none yet."""
    if len(data) < _LENGTH.size or len(data) < _LENGTH.size + _LENGTH.unpack_from(data)[0]:
        return None
    end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    body = bytes(data[_LENGTH.size : end])
    del data[:end]
    return body


def _with_images(row: RowToScore, vision: VisionRows) -> RowToScore:
    """Add the images of one row."""
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
    """Return the images that came with a row."""
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
