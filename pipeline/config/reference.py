"""The configuration for people and for editors: docs/configuration.md and a JSON schema, generated from the fields.

python -m pipeline.config.reference > docs/configuration.md
rlhfd config schema > docs/config.schema.json
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any, Final

from pydantic.fields import FieldInfo

from pipeline.config.advice import SECTIONS, toml
from pipeline.config.changes import is_live
from pipeline.config.own_model import SHOWN
from pipeline.config.rewards import DEFAULT_REWARD, REWARD_NAMES, RewardConfig, table_of
from pipeline.config.schema import Config
from pipeline.config.types import FUNCTION

_BOUNDS: Final = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_INTRODUCTION: Final = """\
# Configuration

<!-- Made by `python -m pipeline.config.reference`; checked by tests/config/test_reference.py. -->

A TOML file: `--config FILE`, or else the file that RLHFD_CONFIG names; without a file, the embedded run. A key that is
set in several places has the value of the first of these:

1. `--set section.key=value`, of `start`, `config` and every command that reads a configuration
2. the variable `RLHFD_SECTION__KEY`, such as `RLHFD_ROLLOUT__WORKERS=4`
3. the file
4. the default

Values of the first two are TOML, or else text without quotes. Relative paths of the file and of defaults are relative
to the file's folder, all others to the current folder.

- `rlhfd config check` prints all mistakes at once, with line, column and the probable correction
- `rlhfd config show --effective --origin` shows the values in force and the origin of each
- `rlhfd reload` applies new values of keys marked *live* to a running instance, and names the other changed keys
- `rlhfd config schema` is for editors: with `#:schema FILE` in the first line of a configuration, editors that support
  it, such as taplo or Even Better TOML, complete keys and mark mistakes

Keys that end in `_s` are in seconds. Bytes are a number or a text such as `"64MiB"` or `"2GiB"`. An optional key has no
default here; its meaning names the value in force if it is left out. Where a section has two columns of defaults, the
second is that of a run whose `model.actor` is a model of its own.
"""


def schema() -> dict[str, Any]:
    """Return the JSON schema (draft 7, which editors support) of a configuration file.

    In addition to the standard keywords, each key has ``x-reload``: ``live`` or ``restart``, and ``x-own-model``: the
    default for a model of its own, if that is another one.
    """
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Configuration of rlhfd",
        "type": "object",
        "additionalProperties": False,
        "properties": {**{section: _section_schema(section) for section in SECTIONS}, "rewards": _rewards_schema()},
    }


def reference() -> str:
    """Return docs/configuration.md."""
    lines = (line for section in SECTIONS for line in _section_lines(section))
    return "\n".join([_INTRODUCTION, *lines, *_rewards_lines()])


def bounds(field: FieldInfo) -> dict[str, int | float]:
    """Return the bounds of a number, by the keywords of JSON schema."""
    return {_BOUNDS[kind]: getattr(each, kind) for each in field.metadata for kind in _BOUNDS if hasattr(each, kind)}


def _section_schema(section: str) -> dict[str, Any]:
    model = type(SECTIONS[section])
    described = model.model_json_schema()
    tables = {f"#/$defs/{name}": _table_schema(found) for name, found in described.get("$defs", {}).items()}
    properties = described["properties"]
    for found in properties.values():
        if (reference := found.get("items", {}).get("$ref")) in tables:
            found["items"] = tables[reference]
    return {
        "type": "object",
        "description": model.__doc__,
        "additionalProperties": False,
        "properties": {name: _key_schema(section, name, properties[name]) for name in model.model_fields},
    }


def _rewards_schema() -> dict[str, Any]:
    """Return the schema of the reward functions: names that need no options, and a kind of table for each name."""
    bare = (name for name in REWARD_NAMES if _required(table_of(name)) == ["name"])
    name = {"type": "string", "pattern": f"^({'|'.join(bare)}|{FUNCTION.pattern})$"}
    return {
        "type": "array",
        "description": Config.meanings()["rewards"],
        "items": {"anyOf": [name, *(_reward_schema(one) for one in (*REWARD_NAMES, ""))]},
        "default": [DEFAULT_REWARD.name],
        "x-reload": "restart",
    }


def _reward_schema(name: str) -> dict[str, Any]:
    """Return the schema of the table of a name; of one of your own if it is empty."""
    model = table_of(name)
    properties = _plain_properties(model.model_json_schema())
    meaning = {"description": RewardConfig.meanings()["name"]}
    kind = {"const": name} if name else {"type": "string", "pattern": f"^{FUNCTION.pattern}$"}
    properties["name"] = {**kind, **meaning}
    return {
        "type": "object",
        "description": model.__doc__,
        "additionalProperties": False,
        "required": _required(model),
        "properties": properties,
    }


def _required(model: type[RewardConfig]) -> list[str]:
    return [key for key, field in model.model_fields.items() if field.is_required()]


def _rewards_lines() -> Iterator[str]:
    yield "## [[rewards]]\n"
    yield f"{Config.meanings()['rewards']} [rewards.md](rewards.md) has examples.\n"
    yield f"Left out: `{DEFAULT_REWARD.name}`; with a model of its own {SHOWN['rewards']}.\n"
    own = _reward_schema("")["properties"]
    yield from _rows({**own, "name": {"type": "string", "description": own["name"]["description"]}})
    for name in REWARD_NAMES:
        described = _reward_schema(name)
        options = {key: found for key, found in described["properties"].items() if key not in own}
        if options:
            yield f'### name = "{name}"\n'
            yield f"{described['description']}\n"
            yield from _rows(options)


def _table_schema(found: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a table inside a value."""
    return {
        "type": "object",
        "description": found["description"],
        "additionalProperties": False,
        "required": found["required"],
        "properties": _plain_properties(found),
    }


def _plain_properties(table: dict[str, Any]) -> dict[str, Any]:
    properties = {name: _plain(described) for name, described in table["properties"].items()}
    for described in properties.values():
        if described.get("default", 0) is None:
            del described["default"]
    return properties


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a key without title and null: TOML has no null, a key is left out instead."""
    for word in ("title", "x-reload", "format"):
        found.pop(word, None)
    choices = [choice for choice in found.pop("anyOf", ()) if choice != {"type": "null"}]
    if len(choices) == 1:
        found |= choices[0]
    elif choices:
        found["anyOf"] = choices
    return found


def _key_schema(section: str, name: str, found: dict[str, Any]) -> dict[str, Any]:
    field = type(SECTIONS[section]).model_fields[name]
    found = _plain(found)
    found.pop("default", None)
    for kind in (found, *found.get("anyOf", ())):
        for word in (*_BOUNDS, "format"):
            kind.pop(word, None)
        if kind.get("type") in ("integer", "number"):
            kind |= bounds(field)
    default = SECTIONS[section].model_dump(mode="json")[name]
    if own := SHOWN.get(f"{section}.{name}"):
        found["x-own-model"] = own.replace("`", "")
    return {
        **found,
        **({} if default is None else {"default": default}),
        "x-reload": "live" if is_live(f"{section}.{name}") else "restart",
    }


def _section_lines(section: str) -> Iterator[str]:
    model = type(SECTIONS[section])
    yield f"## [{section}]\n"
    yield f"{model.__doc__}\n"
    properties = _section_schema(section)["properties"]
    yield from _rows(properties, section)
    for name, described in properties.items():
        if (inner := described.get("items", {})).get("type") == "object":
            yield f"### [[{section}.{name}]]\n"
            yield f"{inner['description']}\n"
            yield from _rows(inner["properties"])


def _rows(properties: dict[str, Any], section: str = "") -> Iterator[str]:
    """Yield a table; with a column more in a section of which keys have another default for a model of its own."""
    has_own = any(f"{section}.{name}" in SHOWN for name in properties)
    yield f"| key | value | default{': embedded run | default: own model' if has_own else ''} | reload | meaning |"
    yield f"|---|---|---|{'---|' if has_own else ''}---|---|"
    for name, described in properties.items():
        default = f"`{toml(described['default'])}`" if "default" in described else ""
        live = "live" if described.get("x-reload") == "live" else ""
        meaning = described["description"].replace("|", "\\|")
        own = f" {SHOWN.get(f'{section}.{name}', default)} |" if has_own else ""
        yield f"| `{name}` | {_value(described)} | {default} |{own} {live} | {meaning} |"
    yield ""


def _value(described: dict[str, Any]) -> str:
    """Return the allowed values in words."""
    if "anyOf" in described:
        return ", or ".join(_value(choice) for choice in described["anyOf"])
    if "enum" in described:
        return ", ".join(f"`{toml(one)}`" for one in described["enum"])
    if "const" in described:
        return f"`{toml(described['const'])}`"
    kind = described["type"]
    if kind == "array":
        size = f"{described['minItems']} " if described.get("minItems") == described.get("maxItems") is not None else ""
        inner = "tables" if described["items"].get("type") == "object" else _value(described["items"])
        return f"list of {size}{inner}"
    if kind == "object":
        return "table"
    words = {"integer": "integer", "number": "number", "boolean": "`true`, `false`", "string": "text"}[kind]
    limits = [
        f"{sign} {_number(described[word])}"
        for word, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
        if word in described
    ]
    return words + (f" {', '.join(limits)}" if limits else "")


def _number(value: float) -> str:
    power = int(value).bit_length() - 1
    return f"2^{power}" if value == 1 << max(power, 0) and power >= 16 else re.sub(r"\.0$", "", f"{value:,}")


if __name__ == "__main__":
    sys.stdout.write(reference())
