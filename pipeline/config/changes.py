"""Differences between two configurations, divided into those that a running instance can apply and the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeline.config.conflicts import conflicts
from pipeline.config.rewards import labels_of
from pipeline.config.schema import Config
from pipeline.errors import ConfigError


class Change(NamedTuple):
    """A key whose value differs, both values in their JSON form."""

    key: str
    before: Any
    after: Any


class Changes(NamedTuple):
    """Changed keys: those that a running instance applies, and those that need a restart."""

    live: list[Change]
    restart: list[Change]


def is_live(key: str) -> bool:
    """Return whether a running instance applies a new value of ``section.key``; declared on the field."""
    section, _, name = key.partition(".")
    if section == "rewards":
        return False
    extra = type(Config.model_fields[section].default).model_fields[name].json_schema_extra
    return isinstance(extra, dict) and extra.get("x-reload") == "live"


def compare(running: Config, wanted: Config) -> Changes:
    """Return the keys whose values differ, in section order."""
    before, after = running.model_dump(mode="json"), wanted.model_dump(mode="json")
    changes = [
        Change(f"{section}.{name}", value, after[section][name])
        for section, values in before.items()
        if section != "rewards"
        for name, value in values.items()
        if value != after[section][name]
    ]
    changes += _of_rewards(before["rewards"], after["rewards"])
    return Changes([each for each in changes if is_live(each.key)], [each for each in changes if not is_live(each.key)])


def told(before: Mapping[str, Any], config: Config) -> str:
    """Return the keys whose values differ from those on disk, as `` trainer.learning_rate=0.0004->0.0001``.

    Args:
        before: The configuration as JSON, perhaps of another release, whose further keys are left out.
        config: The configuration now.
    """
    after = config.model_dump(mode="json")
    found = [
        f" {section}.{key}={was[key]}->{value}"
        for section, now in after.items()
        if isinstance(was := before.get(section), dict)
        for key, value in now.items()
        if key in was and was[key] != value
    ]
    was = before.get("rewards", after["rewards"])
    return "".join(found if was == after["rewards"] else [*found, f" rewards={was}->{after['rewards']}"])


def _of_rewards(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[Change]:
    """Return the changed options of the reward functions; other functions are one change, of their names."""
    names, others = [one["name"] for one in before], [one["name"] for one in after]
    if names != others:
        return [Change("rewards", names, others)]
    labels = labels_of([one.get("label") or one["name"] for one in before])
    return [
        Change(f"rewards.{label}.{option}", value, other[option])
        for label, one, other in zip(labels, before, after, strict=True)
        for option, value in one.items()
        if value != other[option]
    ]


def with_live(running: Config, wanted: Config) -> Config:
    """Return the configuration in force after a reload: the live keys of `wanted`, all others of `running`.

    Raises:
        ConfigError: If these values conflict.
    """
    sections: dict[str, Any] = {}
    for section in Config.model_fields:
        new, old = getattr(wanted, section), getattr(running, section)
        if section == "rewards":
            sections[section] = old
            continue
        live = {name: getattr(new, name) for name in type(new).model_fields if is_live(f"{section}.{name}")}
        sections[section] = old.model_copy(update=live)
    config = Config.model_construct(**sections)
    if found := conflicts(config):
        lines = [f"{each.keys[0]}: {each.message}, with the keys that need a restart unchanged" for each in found]
        raise ConfigError("\n".join(lines))
    return config
