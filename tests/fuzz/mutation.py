"""Malformed input: random bytes, real messages damaged, well-formed messages with absurd values."""

from __future__ import annotations

import random
import typing
from collections.abc import Sequence
from typing import Any

import msgspec

from pipeline.runtime import messages

ABSURD_INTEGERS = (-(2**63), -(2**53), -2, -1, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
ABSURD_TEXTS = ("", "-", "worker", "worker-", "worker-x", "worker--1", "trainer-x", "trainer-1e9", "buffer", "\0", "\n",
                "worker-99999999999", "trainer-99999999999", "worker-٣", "../../etc", "worker-00")  # fmt: skip
_HINTS = {kind: typing.get_type_hints(kind) for kind in (*messages.KINDS, messages.ExtentRows, messages.PromptResult)}


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Return `data` with bits flipped, cut short, with a part repeated or with bytes of no sense in it."""
    at = rng.randrange(len(data)) if data else 0
    match rng.randrange(6):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]
        case 2:
            return data[:at] + data[at : at + 16] * rng.randrange(2, 40) + data[at:]
        case 3:
            return rng.randbytes(rng.randrange(256))
        case 4:
            # Deep nesting: arrays or maps of one element, without end.
            return data[:at] + rng.choice((b"\x91", b"\x81\xa0", b"[", b'{"a":')) * rng.randrange(1, 3000)
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def forged(
    rng: random.Random, kind: type[messages.Message], names: Sequence[str], integers: Sequence[int]
) -> messages.Message:
    """Return a well-formed message of a kind, each field true (`names`, `integers`) or absurd."""
    return kind(**{name: _value(rng, hint, names, integers) for name, hint in _HINTS[kind].items()})


def _value(rng: random.Random, hint: Any, names: Sequence[str], integers: Sequence[int]) -> Any:
    absurd = rng.random() < 0.2
    if hint is int:
        return rng.choice(ABSURD_INTEGERS if absurd else integers)
    if hint is str:
        return rng.choice(ABSURD_TEXTS if absurd else names)
    if hint is bool:
        return rng.random() < 0.5
    if hint is float:
        return rng.choice((0.0, -1.0, 1e308, float("inf"), float("nan")))
    if typing.get_origin(hint) is list:
        (inner,) = typing.get_args(hint)
        return [_value(rng, inner, names, integers) for _ in range(rng.randrange(4))]
    if typing.get_origin(hint) is typing.Literal:
        return rng.choice(typing.get_args(hint))
    return forged(rng, hint, names, integers)


def wrong_types(rng: random.Random, kind: type[messages.Message]) -> bytes:
    """Return the form of a message of a kind, its fields of any type and number."""
    values = (None, True, -1, 2**64 - 1, 1e308, "x", "worker-0", b"\0", [], [[[]]], {}, {"type": "Ack"})
    return msgspec.msgpack.encode([kind.__name__, *(rng.choice(values) for _ in range(rng.randrange(12)))])
