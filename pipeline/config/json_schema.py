"""The configuration for editors: a JSON schema, generated from the fields."""

from __future__ import annotations

from typing import Any, Final

from pydantic.fields import FieldInfo

from pipeline.config.advice import SECTIONS
from pipeline.config.changes import is_live
from pipeline.config.own_model import SHOWN
from pipeline.config.rewards import DEFAULT_REWARD, REWARD_NAMES, RewardConfig, table_of
from pipeline.config.schema import Config
from pipeline.config.types import FUNCTION

_BOUNDS: Final = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


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
    return _object(model.__doc__, {name: _key_schema(section, name, properties[name]) for name in model.model_fields})


def _rewards_schema() -> dict[str, Any]:
    """Return the schema of the reward functions: names that need no options, and a kind of table for each name."""
    tables = {name: _reward_schema(name) for name in (*REWARD_NAMES, "")}
    bare = (name for name in REWARD_NAMES if tables[name]["required"] == ["name"])
    name = {"type": "string", "pattern": f"^({'|'.join(bare)}|{FUNCTION.pattern})$"}
    return {
        "type": "array",
        "description": Config.meanings()["rewards"],
        "items": {"anyOf": [name, *tables.values()]},
        "default": [DEFAULT_REWARD.name],
        "x-reload": "restart",
    }


def _reward_schema(name: str) -> dict[str, Any]:
    """Return the schema of the table of a name; of one of your own if it is empty."""
    table = _table_schema(table_of(name).model_json_schema())
    kind = {"const": name} if name else {"type": "string", "pattern": f"^{FUNCTION.pattern}$"}
    table["properties"]["name"] = {**kind, "description": RewardConfig.meanings()["name"]}
    return table


def _table_schema(found: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a table inside a value."""
    return _object(found["description"], _plain_properties(found), required=found["required"])


def _object(description: str | None, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    start = {"type": "object", "description": description, "additionalProperties": False}
    return {**start, **more, "properties": properties}


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
