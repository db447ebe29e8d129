"""Messages about wrong keys and values; a wrong key with the key that was probably meant.

An option of TRL, verl or OpenRLHF has the answer of `pipeline.config.foreign`, never the nearest spelling. No other
value is suggested: a converted value may be right by its type and another one than its author means.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from pipeline.config.foreign.lookup import PAGE, answer, answer_to_section
from pipeline.config.schema import Config

SECTIONS: dict[str, BaseModel] = {
    name: info.default for name, info in Config.model_fields.items() if isinstance(info.default, BaseModel)
}
_TYPE_MESSAGES = {
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "model_type": "must be a table",
    "finite_number": "must be finite",
    "string_pattern_mismatch": "must be made of a-z, 0-9 and -",
}
_NEW_REWARDS = 'a table [[rewards]] with a name for each function, or rewards = ["math", "format"] above all sections'
_SHOWN_CHARACTERS = 60
_BARE = re.compile("[A-Za-z0-9_-]+")
"""A key that TOML takes without quotes."""
_SAME_KEY = 0.8
"""Least likeness of two names that mean one key: below it a pointer is often to a key of another meaning."""
_ALL_KEYS = f"`rlhfd config show --effective` lists all, {PAGE} those of other trainers"


def problem_of_section(section: str, table: object) -> str:
    """Return the problem of a table or key at the top of a file; empty if it is a section."""
    if section in SECTIONS:
        shown = toml(_without_passwords(table))
        return "" if isinstance(table, dict) else f"{section}: must be a section [{section}], got {shown}"
    if isinstance(table, dict):
        if theirs := answer_to_section(section):
            return f"unknown section {key(section)}, {theirs}"
        close = _close(section, SECTIONS)
        return f"unknown section {key(section)}, " + (
            f"did you mean {close}?" if close else f"the sections are {', '.join(SECTIONS)}"
        )
    return f"unknown key {key(section)}, {_meant('', section)}"


def problem_of_key(section: str, name: str) -> str:
    """Return the problem of a key of a section; empty if the section has the key."""
    if name in type(SECTIONS[section]).model_fields:
        return ""
    return f"unknown key {section}.{key(name)}, {_meant(section, name)}"


def _meant(section: str, name: str) -> str:
    lower = name.lower().replace("-", "_")
    if lower in ("rewards", "reward_fn", "reward_funcs", "reward_functions"):
        return f"did you mean rewards? {_NEW_REWARDS}"
    names = type(SECTIONS[section]).model_fields if section else {}
    all_keys = {f"{home}.{field}": field for home, model in SECTIONS.items() for field in type(model).model_fields}
    if lower not in all_keys.values() and (theirs := answer(lower)):
        return theirs.replace(f"did you mean {section}.", "did you mean ") if section else theirs
    same = [full for full, field in all_keys.items() if field == lower]
    found = (
        (lower if lower in names else "")
        or _near(lower, names)
        or (same[0] if same else "")
        or _close(lower, names, _SAME_KEY)
        or next((field for field in names if field.startswith(f"{lower}_") or field.endswith(f"_{lower}")), "")
        or next((full for full, field in all_keys.items() if field == _close(lower, all_keys.values(), _SAME_KEY)), "")
    )
    return f"did you mean {found.removeprefix(f'{section}.') if section else found}?" if found else _ALL_KEYS


def _near(wrong: str, names: Iterable[str]) -> str:
    """Return the name of the same section that differs by a letter or two, or that ends with the wrong one."""
    near = difflib.get_close_matches(wrong, names, n=1, cutoff=0.88)
    ends = [name for name in names if name.endswith(f"_{wrong}")]
    return next(iter(near or (ends if len(ends) == 1 else [])), "")


def _close(wrong: str, right: Iterable[str], cutoff: float = 0.6) -> str:
    return next(iter(difflib.get_close_matches(wrong.lower(), right, n=1, cutoff=cutoff)), "")


def describe(section: str, name: str, given: Any, details: ErrorDetails) -> str:
    """Return the problem of a value and the value itself, as it was given.

    Args:
        section: Section of the key.
        name: Name of the key.
        given: The whole value; the error may be about a part of it.
        details: The error of pydantic.
    """
    label, nested = _inner(section, name, details)
    if problem := _of_keys(details, nested):
        return problem
    problem = _of_value(details, label=label)
    return f"{problem}{_suggestion(section, name, given)}"


def describe_option(table: type[BaseModel], details: ErrorDetails) -> str:
    """Return the problem of an option of a reward function.

    Args:
        table: The table of the function.
        details: The error of pydantic.
    """
    return _of_keys(details, list(table.model_fields)) or _of_value(details)


def _of_keys(details: ErrorDetails, names: list[str]) -> str:
    """Return the problem of a key that a table has not, or lacks; empty for a problem of a value."""
    name = str(details["loc"][-1]) if details["loc"] else ""
    if details["type"] == "extra_forbidden":
        close = _close(name, names)
        meant = f"did you mean {close}?" if close else f"the keys are {', '.join(names)}"
        return f"unknown key {key(name)}, {meant}"
    return f"must have a {name}" if details["type"] == "missing" else ""


def _of_value(details: ErrorDetails, *, label: str = "") -> str:
    problem = _TYPE_MESSAGES.get(details["type"]) or re.sub(r"^\w+ should ", "must ", details["msg"])
    problem = problem.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    if details["type"] == "literal_error":
        problem = problem.replace("'", '"')
    problem = f"{label} {problem}" if label else problem
    is_url = bool(details["loc"]) and details["loc"][-1] == "url"
    return f"{problem}, got {shown_value(details['input'], is_url=is_url)}"


def shown_value(value: object, *, is_url: bool = False) -> str:
    """Return a value for an error: short, and without passwords."""
    shown = toml(_without_passwords(value, is_url=is_url))
    return shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[:_SHOWN_CHARACTERS]}..."


def without_password(text: str) -> str:
    """Return a text, user and password of a URL in it replaced by ``***``: error lines are logged and passed on."""
    return re.sub(r"://.*@", "://***@", text, flags=re.DOTALL)


def _without_passwords(value: Any, *, is_url: bool = False) -> Any:
    if isinstance(value, list):
        return [_without_passwords(one, is_url=is_url) for one in value]
    if isinstance(value, dict):
        return {name: _without_passwords(one, is_url=is_url) for name, one in value.items()}
    if not isinstance(value, str):
        return value
    # A URL without its scheme.
    return re.sub(r"^.*@", "***@", value, flags=re.DOTALL) if is_url and "://" not in value else without_password(value)


def _inner(section: str, name: str, details: ErrorDetails) -> tuple[str, list[str]]:
    """Return the key of a table inside a value that an error is about, and all keys of such a table."""
    kinds = get_args(type(SECTIONS[section]).model_fields[name].annotation)
    if not kinds or not (isinstance(kinds[0], type) and issubclass(kinds[0], BaseModel)):
        return "", []
    return ".".join(str(part) for part in details["loc"][2:]), list(kinds[0].model_fields)


def _suggestion(section: str, name: str, given: Any) -> str:
    """Return the advice about a text that stands for no value; empty for any other value."""
    is_none = isinstance(given, str) and given.lower() in ("none", "null", "")
    field = type(SECTIONS[section]).model_fields[name]
    return ", leave the key out for none" if is_none and field.default is None else ""


def key(name: str) -> str:
    """Return a key in TOML."""
    return name if re.fullmatch(r"[\w.-]+", name) else toml(name)


def toml(value: object) -> str:
    """Return a value in TOML."""
    match value:
        case bool():
            return str(value).lower()
        case str() | Path():
            # Of JSON's own escapes TOML lacks the pairs of surrogates alone.
            return printable(json.dumps(str(value), ensure_ascii=False))
        case list() | tuple():
            return f"[{', '.join(map(toml, value))}]"
        case BaseModel():
            return toml({name: inner for name, inner in value if inner is not None})
        case dict():
            pairs = [
                f"{name if _BARE.fullmatch(name) else toml(name)} = {toml(inner)}" for name, inner in value.items()
            ]
            return f"{{{', '.join(pairs)}}}"
    return str(value)


def printable(text: str) -> str:
    """Return a text without control characters, which are escaped as in TOML."""
    return "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    return f"\\u{ord(character):04x}" if ord(character) <= 0xFFFF else f"\\U{ord(character):08x}"
