"""`rollout.log_probs`: the engine's own log-probs, a pass of the worker, or none for the trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.models.log_probs import action_log_probs
from pipeline.rollout import loader
from pipeline.rollout.shaping import shaping_of
from pipeline.trainer.prefetch import Gathering
from tests.rollout.test_loader import rollers, stages  # noqa: F401 - a fixture
from tests.support import row_stream, whole_rows

STREAM = f"{row_stream.__name__}:new_engine"
SILENT = f"{whole_rows.__name__}:new_engine"


def experience_of(rollers: Any, **rollout: Any) -> tuple[Any, Any, list[str]]:  # noqa: F811
    roller, _, telemetry = rollers(rollout=rollout)
    return roller, roller.roll(0, 2).rows.padded(), stages(telemetry)


@pytest.mark.parametrize("engine", ["transformers", STREAM])
def test_the_engines_own_save_the_workers_pass(rollers, engine) -> None:  # noqa: F811
    roller, experience, seen = experience_of(rollers, engine=engine, log_probs="engine")

    assert "logprob" not in seen
    assert experience.behaviour_log_probs is None, "they are the log-probs themselves"
    mask = experience.action_mask
    inputs = experience.sequences, experience.attention_mask, mask.shape[1]
    expected = action_log_probs(roller.maker.actor, *inputs)
    torch.testing.assert_close(experience.action_log_probs[mask], expected[mask], atol=1e-4, rtol=0)


def test_a_pass_of_the_worker_keeps_those_of_another_engine_beside_its_own(rollers) -> None:  # noqa: F811
    _, experience, seen = experience_of(rollers, engine=STREAM, log_probs="worker")

    assert "logprob" in seen
    mask = experience.action_mask
    assert experience.behaviour_log_probs is not None
    torch.testing.assert_close(
        experience.action_log_probs[mask], experience.behaviour_log_probs[mask], atol=1e-4, rtol=0
    )


@pytest.mark.parametrize(("engine", "has_own"), [("transformers", True), (STREAM, True), (SILENT, False)])
def test_rows_for_the_trainer_have_those_of_the_engine_alone(rollers, engine, has_own, tmp_path, monkeypatch) -> None:  # noqa: F811
    monkeypatch.chdir(tmp_path)
    _, experience, seen = experience_of(rollers, engine=engine, log_probs="trainer")

    assert "logprob" not in seen
    assert experience.action_log_probs is None
    assert (experience.behaviour_log_probs is not None) == has_own
    assert experience.advantages is not None and experience.kl is not None


def test_an_engine_without_log_probs_is_refused_at_the_start(rollers, tmp_path, monkeypatch) -> None:  # noqa: F811
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r'^rollout.log_probs: "engine" needs an engine that returns log-probs'):
        rollers(rollout={"engine": SILENT, "log_probs": "engine"})


@pytest.mark.parametrize(
    ("engine", "dtype", "given", "expected"),
    [
        ("transformers", "float32", None, "engine"),
        ("transformers", "bfloat16", None, "worker"),
        ("my:engine", "float32", None, "worker"),
        ("transformers", "float32", "worker", "worker"),
        ("my:engine", "bfloat16", "trainer", "trainer"),
    ],
)
def test_left_out_it_is_the_engine_where_its_numbers_are_the_trainers(engine, dtype, given, expected) -> None:
    rollout = {"engine": engine, **({} if given is None else {"log_probs": given})}

    assert loader.log_probs_by(Config.model_validate({"model": {"dtype": dtype}, "rollout": rollout})) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "trainer"),
        ({"rollout": {"engine": "my:engine"}}, "trainer"),
        ({"buffer": {"max_staleness": 0}}, "engine"),
        ({"trainer": {"policy_loss": "ppo"}}, "engine"),
        ({"trainer": {"policy_loss": "reinforce", "kind": "external"}}, "engine"),
        ({"rollout": {"algorithm": "ppo", "kl_coef": 0.1}}, "engine"),
        ({"rollout": {"log_probs": "worker"}}, "worker"),
    ],
)
def test_a_loss_without_a_ratio_has_stale_rows_corrected_by_default(changes, expected) -> None:
    given = {"model": {"dtype": "float32"}, "trainer": {"policy_loss": "reinforce"}, "buffer": {"max_staleness": 1}}
    config = Config.model_validate({**given, **changes})

    assert loader.log_probs_by(config) == expected
    assert Gathering.of(config).needs_log_probs == (expected != "trainer")
    shaping = shaping_of(config)
    assert (shaping.log_probs_by == "trainer") == (expected == "trainer")
    assert shaping.keeps_engine_log_probs or expected != "trainer"


def test_the_default_falls_back_to_a_pass_of_the_worker(rollers, tmp_path, monkeypatch) -> None:  # noqa: F811
    """An engine that returns none is no mistake where nothing asks for its own."""
    monkeypatch.chdir(tmp_path)
    _, experience, seen = experience_of(rollers, engine=SILENT)

    assert "logprob" in seen and experience.action_log_probs is not None
