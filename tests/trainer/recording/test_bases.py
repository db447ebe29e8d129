"""The settings on which a replayed step depends."""

from __future__ import annotations

import pytest

from pipeline.config.schema import Config
from pipeline.trainer.recording.bases import effective


@pytest.mark.parametrize(
    ("section", "key", "value", "is_alike"),
    [
        # `start` decides it, `start --serial` does not: one rank holds whole models either way.
        ("trainer", "sharding", "none", True),
        ("trainer", "keep_checkpoints", 9, True),
        ("trainer", "learning_rate", 0.5, False),
        ("rollout", "advantages", "rloo", False),
        ("rollout", "top_p", 0.5, True),
    ],
)
def test_a_step_depends_on_settings_that_change_its_bits(section: str, key: str, value: object, is_alike: bool) -> None:
    given = {"rollout": {"algorithm": "grpo"}}
    other = {**given, section: {**given.get(section, {}), key: value}}

    one, two = (effective(Config.model_validate(values)) for values in (given, other))

    assert (one == two) == is_alike
