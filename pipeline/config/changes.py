"""What differs between two configurations, and which of that a running instance may take up."""

from __future__ import annotations

from typing import Any, NamedTuple

from pipeline.config.conflicts import conflicts
from pipeline.config.schema import Config
from pipeline.errors import ConfigError


class Change(NamedTuple):
    """A key with another value, the values as JSON has them."""

    key: str
    before: Any
    after: Any


class Changes(NamedTuple):
    """What differs: keys that are taken up while an instance runs, and keys that need a restart."""

    live: list[Change]
    restart: list[Change]


def is_live(key: str) -> bool:
    """Whether a running instance takes up a new value of ``section.key``; declared on the field."""
    section, _, name = key.partition(".")
    extra = type(getattr(Config(), section)).model_fields[name].json_schema_extra
    return isinstance(extra, dict) and extra.get("x-reload") == "live"


def compare(running: Config, wanted: Config) -> Changes:
    """Return what `wanted` has otherwise than `running`, in the order of the sections."""
    before, after = running.model_dump(mode="json"), wanted.model_dump(mode="json")
    changes = [
        Change(f"{section}.{name}", value, after[section][name])
        for section, values in before.items()
        for name, value in values.items()
        if value != after[section][name]
    ]
    return Changes([each for each in changes if is_live(each.key)], [each for each in changes if not is_live(each.key)])


def with_live(running: Config, wanted: Config) -> Config:
    """Return what an instance runs with after a reload: the live keys of `wanted`, all others as they were.

    Raises:
        ConfigError: If these do not go together.
    """
    sections: dict[str, Any] = {}
    for section in Config.model_fields:
        new, old = getattr(wanted, section), getattr(running, section)
        live = {name: getattr(new, name) for name in type(new).model_fields if is_live(f"{section}.{name}")}
        sections[section] = old.model_copy(update=live)
    config = Config.model_construct(**sections)
    if found := conflicts(config):
        lines = [f"{conflict.keys[0]}: {conflict.message}, with what needs a restart as it was" for conflict in found]
        raise ConfigError("\n".join(lines))
    return config
