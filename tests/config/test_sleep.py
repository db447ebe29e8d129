"""The settings with which trainer and engine cannot take turns on a card."""

import re

import pytest
from pydantic import ValidationError

from pipeline.config.schema import Config

SLEEPS = {"rollout": {"sleep": True, "engine": "mine:new_engine"}, "buffer": {"max_staleness": 0}}


def made(**changes):
    sections = {*SLEEPS, *changes}
    return Config.model_validate({name: {**SLEEPS.get(name, {}), **changes.get(name, {})} for name in sections})


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"buffer": {"max_staleness": 1}}, "buffer.max_staleness", "must be 0 with rollout.sleep"),
        ({"rollout": {"engine": "transformers"}}, "rollout.sleep", "computes with the worker's own actor"),
        ({"cluster": {"engine": "ray"}}, "rollout.sleep", "another machine"),
        ({"trainer": {"kind": "external"}}, "rollout.sleep", "does not tell when it steps"),
    ],
)
def test_what_cannot_take_turns_is_refused_in_one_line(changes, key, message):
    with pytest.raises(ValidationError, match=re.escape(f"{key}: ") + ".*" + re.escape(message)):
        made(**changes)


@pytest.mark.parametrize("engine", ["mine:new_engine", "vllm"])
def test_an_engine_that_can_sleep_is_taken_at_staleness_0(engine):
    assert made(rollout={"engine": engine}).rollout.sleep
