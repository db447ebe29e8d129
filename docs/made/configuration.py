"""docs/configuration.md: the keys of each section, from the JSON schema."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from pipeline.config.advice import toml
from pipeline.config.json_schema import schema
from pipeline.config.own_model import SHOWN
from pipeline.config.rewards import DEFAULT_REWARD

_INTRODUCTION: Final = """\
# Configuration

<!-- Made by `python -m docs.made`; checked by tests/project/test_made_pages.py. -->

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
- `rlhfd reload` applies new values of keys marked *live* to a running instance, and names the other changed keys, and
  those with which the next start is another run
- `rlhfd config schema` is for editors: with `#:schema FILE` in the first line of a configuration, editors that support
  it, such as taplo or Even Better TOML, complete keys and mark mistakes

Keys that end in `_s` are in seconds. Bytes are a number or a text such as `"64MiB"` or `"2GiB"`. An optional key has no
default here; its meaning names the value in force if it is left out. Where a section has two columns of defaults, the
second is that of a run whose `model.actor` is a model of its own.
"""


def page() -> str:
    """Return docs/configuration.md."""
    properties = schema()["properties"]
    rewards = properties.pop("rewards")
    lines = (line for section, described in properties.items() for line in _section_lines(section, described))
    return "\n".join([_INTRODUCTION, *lines, *_rewards_lines(rewards)])


def _section_lines(section: str, described: dict[str, Any]) -> Iterator[str]:
    yield f"## [{section}]\n"
    yield f"{described['description']}\n"
    yield from _rows(described["properties"], section)
    for name, key in described["properties"].items():
        if (inner := key.get("items", {})).get("type") == "object":
            yield f"### [[{section}.{name}]]\n"
            yield f"{inner['description']}\n"
            yield from _rows(inner["properties"])


def _rewards_lines(described: dict[str, Any]) -> Iterator[str]:
    _, *tables, own = described["items"]["anyOf"]
    yield "## [[rewards]]\n"
    yield f"{described['description']} [rewards.md](rewards.md) has examples.\n"
    yield f"Left out: `{DEFAULT_REWARD.name}`; with a model of its own {SHOWN['rewards']}.\n"
    name = {"type": "string", "description": own["properties"]["name"]["description"]}
    yield from _rows({**own["properties"], "name": name})
    for table in tables:
        options = {key: found for key, found in table["properties"].items() if key not in own["properties"]}
        if options:
            yield f'### name = "{table["properties"]["name"]["const"]}"\n'
            yield f"{table['description']}\n"
            yield from _rows(options)


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
