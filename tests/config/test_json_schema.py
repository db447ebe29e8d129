"""The JSON schema agrees with the fields, and refuses the same values."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import fastjsonschema
import pytest
from pydantic import ValidationError

from pipeline.config.advice import SECTIONS
from pipeline.config.json_schema import bounds, schema
from pipeline.config.rewards import REWARD_NAMES
from pipeline.config.schema import Config
from tests.config.test_mistakes import MISTAKES

ROOT = Path(__file__).parents[2]
KEYS = [(section, name) for section, model in SECTIONS.items() for name in type(model).model_fields]
SCHEMA = schema()
validate = fastjsonschema.compile(SCHEMA, use_default=False)


def test_the_embedded_configuration_names_the_schema_for_editors() -> None:
    first = (ROOT / "config.toml").read_text().splitlines()[0]

    assert first == "#:schema docs/config.schema.json"


def test_every_key_has_type_bound_and_one_sentence() -> None:
    for section, name in KEYS:
        described = SCHEMA["properties"][section]["properties"][name]

        assert re.fullmatch(r"[A-Z].*[.]", described["description"]) and ". " not in described["description"], name
        kinds = [described, *described.get("anyOf", ())]
        assert any("type" in kind or "enum" in kind for kind in kinds), name
        for kind in kinds:
            if kind.get("type") in ("integer", "number"):
                assert "minimum" in kind or "exclusiveMinimum" in kind, f"{name} is without a bound"
        assert described["x-reload"] in ("live", "restart")


def test_bounds_are_those_of_the_field() -> None:
    trainer, rollout = type(SECTIONS["trainer"]).model_fields, type(SECTIONS["rollout"]).model_fields

    assert bounds(trainer["publish_every"]) == {"minimum": 1, "maximum": 65536}
    assert bounds(rollout["top_p"]) == {"exclusiveMinimum": 0, "maximum": 1}


def test_the_schema_takes_the_embedded_configuration_and_every_default() -> None:
    validate(tomllib.loads((ROOT / "config.toml").read_text()))
    defaults = Config().model_dump(mode="json")
    defaults["rewards"] = [{n: v for n, v in table.items() if v is not None} for table in defaults["rewards"]]
    sections = {s: values for s, values in defaults.items() if s != "rewards"}
    validate(
        {
            "rewards": defaults["rewards"],
            **{s: {n: v for n, v in values.items() if v is not None} for s, values in sections.items()},
        }
    )
    validate({"buffer": {"arena_bytes": "2GiB", "row_bytes": "4 MiB"}, "rollout": {"stop_token_ids": [[1, 2], [3]]}})


@pytest.mark.parametrize("name", [*REWARD_NAMES, "rewards:exact"])
def test_the_schema_takes_a_name_alone_where_its_table_needs_no_option(name: str) -> None:
    try:
        Config.model_validate({"rewards": [name]})
        is_enough = True
    except ValidationError:
        is_enough = False

    try:
        validate({"rewards": [name]})
        is_taken = True
    except fastjsonschema.JsonSchemaException:
        is_taken = False
    assert is_taken is is_enough is (name not in ("judge", "model", "remote"))


# Errors that involve several keys, or types that JSON lacks: 1.0 is an integer there, a date a text.
BEYOND = (
    r"got \d+\.0$|with GRPO|each needs|must be finite|one of builtin:|must be a path|1979|group of|rows of buffer|"
    r"at least the|must be below rollout|must be the sum|a row has at|with rollout\.algorithm = |tokens of a response|"
    "rows of a step|of limit_tokens|of rollout.reward_timeout_s|at most 512 with|of your own|sets itself|"
    "carry a signal|that math gives|must be one of rewards|must divide the|multiple of trainer.nodes|"
    r"with rollout\.sleep"
)


def test_the_schema_refuses_what_the_fields_refuse() -> None:
    tried = 0
    for text, error in MISTAKES:
        try:
            tables = tomllib.loads(text if isinstance(text, str) else text.decode())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError):
            continue
        if not re.search(", got |: unknown ", error) or re.search(BEYOND, error):
            continue
        tried += 1
        try:
            validate(tables)
        except fastjsonschema.JsonSchemaException:
            continue
        pytest.fail(f"taken: {text!r}, {error}")
    assert tried > 60
