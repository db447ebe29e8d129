"""Types of configuration values: their forms in TOML, their bounds and their validators."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

Conflicts = Iterator[tuple[tuple[str, ...], str]]
"""Keys, the one to change first, and message of each conflict between keys whose values are each valid alone."""

BUILTIN_PREFIX = "builtin:"
BUILTINS = ("builtin:sort-digits",)
_BYTE_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_BYTES_TEXT = re.compile(r"([0-9]+)\s*([KMGT]iB|B)")
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_ADDRESS = "(auto|[^/]+:[0-9]+)"
_ENGINE = f"(transformers|vllm|{FUNCTION.pattern})"


def matches(pattern: str, message: str) -> AfterValidator:
    """Return the validator of texts of a pattern; any other one has the message as its error."""

    def check(value: str) -> str:
        if re.fullmatch(pattern, value) is None:
            raise PydanticCustomError("pattern", "{message}", {"message": message})
        return value

    return AfterValidator(check)


def _parse_bytes(value: object) -> object:
    if not isinstance(value, str):
        return value
    match = _BYTES_TEXT.fullmatch(value.strip())
    if match is None:
        raise PydanticCustomError("bytes", 'must be a number of bytes or a text such as "64MiB" or "2GiB"')
    return int(match[1]) * _BYTE_UNITS[match[2]]


def _check_devices(value: object) -> object:
    if value == "auto":
        return value
    if not isinstance(value, list) or any(type(device) is not int or device < 0 for device in value):
        raise PydanticCustomError("devices", 'must be "auto" or a list of device numbers')
    if not value:
        raise PydanticCustomError("devices", 'must be "auto" or name at least one device')
    if len(set(value)) < len(value):
        raise PydanticCustomError("devices", "must name each device once")
    return value


def _check_auto(value: object) -> object:
    if value != "auto" and not isinstance(value, bool):
        raise PydanticCustomError("auto", 'must be true, false or "auto"')
    return value


def _check_targets(value: object) -> object:
    if value == "all-linear":
        return value
    if not isinstance(value, list) or not value or not all(isinstance(name, str) and name for name in value):
        raise PydanticCustomError("targets", 'must be "all-linear" or a list of names of layers')
    return value


def _check_betas(value: object) -> object:
    betas = tuple(value) if isinstance(value, list | tuple) else ()
    if len(betas) == 2 and all(type(beta) in (int, float) and 0 <= beta < 1 for beta in betas):
        return betas
    raise PydanticCustomError("betas", "must be a list of two numbers, each at least 0 and less than 1")


def _check_stops(value: object) -> object:
    def is_sequence(ids: object) -> bool:
        return isinstance(ids, list) and all(type(token) is int and token >= 0 for token in ids)

    if value is None or is_sequence([value]) or is_sequence(value):
        return value
    if isinstance(value, list) and all(ids and is_sequence(ids) for ids in value):
        return value
    raise PydanticCustomError(
        "stops", "must be a token id, a list of ids, or a list of sequences such as [[5, 6], [7]]"
    )


def stop_sequences_of(value: int | list[int] | list[list[int]] | None) -> tuple[tuple[int, ...], ...]:
    """Return `rollout.stop_token_ids` as sequences: each of several ids ends a response on its own."""
    alternatives = [] if value is None else value if isinstance(value, list) else [value]
    return tuple((ids,) if isinstance(ids, int) else tuple(ids) for ids in alternatives)


def _check_stop_strings(value: object) -> object:
    strings = [value] if isinstance(value, str) else value
    if isinstance(strings, list) and all(isinstance(string, str) and string for string in strings):
        return strings
    raise PydanticCustomError("stop_strings", 'must be a text or a list of texts such as ["</answer>"], none empty')


def _check_source(value: str) -> str:
    if not value or "\0" in value:
        raise PydanticCustomError("source", f"must be a path or one of {', '.join(BUILTINS)}")
    if value.startswith(BUILTIN_PREFIX) and value not in BUILTINS:
        raise PydanticCustomError("source", f"must be one of {', '.join(BUILTINS)} where it is no path")
    return value


def _check_path(value: object) -> object:
    if not isinstance(value, Path) and (not isinstance(value, str) or not value or "\0" in value):
        raise PydanticCustomError("path", "must be a path")
    return value


def _check_url(value: str) -> str:
    try:
        parts = urlsplit(value)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise PydanticCustomError("url", "must be an address such as http://127.0.0.1:8000/score")
    if parts.username is not None:
        raise PydanticCustomError("url", "must have no password: api_key_variable names a variable with one")
    return value


_BytesText = Annotated[str, Field(pattern=rf"^{_BYTES_TEXT.pattern}$")]

_Natural = Annotated[int, Field(ge=0)]

_Sequence = Annotated[list[_Natural], Field(min_length=1)]

_Beta = Annotated[float, Field(ge=0, lt=1)]

_StopText = Annotated[str, Field(min_length=1)]

_Names = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
_DeviceList = Annotated[list[_Natural], Field(min_length=1, json_schema_extra={"uniqueItems": True})]

_Betas = Annotated[list[_Beta], Field(min_length=2, max_length=2)]

Bytes = Annotated[int, BeforeValidator(_parse_bytes, json_schema_input_type=int | _BytesText)]

Devices = Annotated[
    Literal["auto"] | list[int],
    BeforeValidator(_check_devices, json_schema_input_type=Literal["auto"] | _DeviceList),
]

AutoOrBool = Annotated[Literal["auto"] | bool, BeforeValidator(_check_auto)]

LoraTargets = Annotated[
    Literal["all-linear"] | list[str],
    BeforeValidator(_check_targets, json_schema_input_type=Literal["all-linear"] | _Names),
]

AnyPath = Annotated[Path, Field(strict=False), BeforeValidator(_check_path)]

Source = Annotated[str, AfterValidator(_check_source)]

Url = Annotated[str, AfterValidator(_check_url), Field(json_schema_extra={"pattern": "^https?://[^/@]+([/?].*)?$"})]

ClusterAddress = Annotated[
    str,
    matches(_ADDRESS, 'must be host:port of the head of a Ray cluster, or "auto"'),
    Field(json_schema_extra={"pattern": f"^{_ADDRESS}$"}),
]

EngineName = Annotated[
    str,
    matches(_ENGINE, 'must be auto, transformers, vllm, or of the form "module:function"'),
    Field(json_schema_extra={"pattern": f"^(auto|{_ENGINE})$"}),
]

StopTokenIds = Annotated[
    int | list[int] | list[list[int]] | None,
    BeforeValidator(_check_stops, json_schema_input_type=_Natural | list[_Natural] | list[_Sequence] | None),
]

StopStrings = Annotated[
    list[str],
    BeforeValidator(_check_stop_strings, json_schema_input_type=_StopText | list[_StopText]),
]

Betas = Annotated[tuple[float, float], BeforeValidator(_check_betas, json_schema_input_type=_Betas)]
