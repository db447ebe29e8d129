"""JSON records that hold a checksum of their own: a flipped byte is damage, not another value.

A record's last member is ``seal``, the xxh3-64 of all others.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from pipeline.errors import ConfigError
from pipeline.storage.files import UNREADABLE

_SEAL = "seal"

_T = TypeVar("_T", bound=msgspec.Struct)


def encode(record: msgspec.Struct, *, indent: int = 2) -> bytes:
    """Return a record as JSON, with its seal and a newline: indented, or with `indent` below 0 as one line."""
    members = msgspec.to_builtins(record)
    return msgspec.json.format(msgspec.json.encode({**members, _SEAL: _seal_of(members)}), indent=indent) + b"\n"


def decode(data: bytes, kind: type[_T]) -> _T:
    """Return the record that `encode` wrote.

    Raises:
        msgspec.DecodeError: If it is no such record, or has another seal.
    """
    members = msgspec.json.decode(data)
    if not isinstance(members, dict):
        raise msgspec.DecodeError("no JSON object")
    if members.pop(_SEAL, None) != _seal_of(members):
        raise msgspec.DecodeError("damaged: its seal is not that of its members")
    return msgspec.convert(members, kind)


def read(path: Path, kind: type[_T], advice: str) -> _T | None:
    """Return the record in a file; None if there is none.

    Raises:
        ConfigError: If it cannot be read, or is no such record; the message ends with the advice, unless this user may
            not read it.
    """
    try:
        return decode(path.read_bytes(), kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"{path}: {error}; {advice}") from error


def _seal_of(members: dict[str, object]) -> str:
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(members))
