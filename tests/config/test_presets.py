"""Presets of `rollout.algorithm`: the values of their sources, and the keys that win over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from pipeline.cli.main import main
from pipeline.config import load as config_load
from pipeline.config.conflicts import conflicts
from pipeline.config.load import ConfigErrors, get
from pipeline.config.presets import PRESETS
from pipeline.config.schema import Config
from pipeline.experience.advantage_estimators import ADVANTAGES, AdvantageInputs

# Read from the papers and from the sources that docs/losses.md names: advantages, loss, clips, aggregation, both KLs.
SPEC: dict[str, tuple[Any, ...]] = {
    "dapo": ("grpo", "ppo", 0.2, 0.28, "token_mean", 0.0, 0.0),
    "dr_grpo": ("dr_grpo", "ppo", None, None, "dr_grpo", 0.0, 0.0),
    "rloo": ("rloo", "ppo", None, None, "dr_grpo", 0.0, 0.05),
    "gspo": ("grpo", "gspo", 3e-4, 4e-4, "sequence_mean", 0.0, 0.0),
    "cispo": ("grpo", "cispo", 1.0, 4.0, "token_mean", 0.0, 0.0),
    "reinforce++": ("reinforce_baseline", "ppo", None, None, "token_mean", 1e-5, 0.0),
}
KEYS = (
    "rollout.advantages", "trainer.policy_loss", "trainer.clip_low", "trainer.clip_high", "trainer.loss_aggregation",
    "trainer.kl_coef", "rollout.kl_coef",
)  # fmt: skip


def loaded(*sets: str, path: Path | None = None) -> config_load.LoadedConfig:
    return config_load.load(path, sets, {})


def in_force(config: Config, keys: tuple[str, ...] = KEYS) -> tuple[Any, ...]:
    return tuple(get(config, key) for key in keys)


@pytest.mark.parametrize("name", SPEC)
def test_a_preset_has_the_values_of_its_source(name: str) -> None:
    config = loaded(f"rollout.algorithm={name}").config

    assert in_force(config) == SPEC[name]
    assert (config.rollout.algorithm, config.group_size) == ("grpo", 8)
    assert conflicts(config) == []


def test_every_preset_has_a_spec() -> None:
    assert SPEC.keys() == PRESETS.keys()


def test_dapo_refills_and_has_its_penalty_of_length_where_the_longest_response_is_known() -> None:
    keys = ("rollout.max_refill", "rollout.overlong_buffer_tokens", "rollout.overlong_penalty")

    bounded = loaded("rollout.algorithm=dapo", "rollout.max_prompt_length=100", "rollout.max_new_tokens=20480")
    unbounded = loaded("rollout.algorithm=dapo")

    by_row = loaded("rollout.algorithm=dapo", "rollout.max_prompt_length=100", "rollout.max_length=150")

    assert in_force(bounded.config, keys) == (9, 4096, 1.0)
    assert in_force(by_row.config, keys) == (9, 10, 1.0)
    assert in_force(unbounded.config, keys) == (9, 0, 1.0)


def test_what_a_preset_says_of_another_loss_or_other_advantages_is_not_taken() -> None:
    clips = ("trainer.clip_low", "trainer.clip_high", "rollout.max_refill")

    by_range = loaded("rollout.algorithm=dapo", "trainer.clip_range=0.1").config
    other_loss = loaded("rollout.algorithm=gspo", "trainer.policy_loss=ppo").config
    advantages = loaded("rollout.algorithm=dapo", "rollout.advantages=reinforce_baseline").config
    its_own = loaded("rollout.algorithm=dapo", "rollout.advantages=grpo").config

    assert in_force(by_range, clips) == (None, None, 9)
    assert in_force(other_loss, clips) == (None, None, 0)
    assert in_force(advantages, clips) == (0.2, 0.28, 0)
    assert in_force(its_own, clips) == (0.2, 0.28, 9)


def test_a_key_that_is_set_anywhere_wins_over_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[rollout]\nalgorithm = "dapo"\nmax_refill = 0\n[trainer]\nclip_high = 0.3\n')

    of_file = loaded(path=file)
    of_set = loaded("rollout.algorithm=gspo", path=file)
    without = loaded("rollout.algorithm=grpo", path=file)

    assert in_force(of_file.config, ("rollout.max_refill", "trainer.clip_low", "trainer.clip_high")) == (0, 0.2, 0.3)
    assert (of_set.config.trainer.policy_loss, of_set.config.trainer.clip_high) == ("gspo", 0.3)
    assert without.config.trainer.clip_low is None and without.preset == frozenset()


def test_the_configuration_shows_the_keys_of_the_preset_and_means_the_same_printed(tmp_path: Path) -> None:
    shown = CliRunner().invoke(main, ["config", "show", "--origin", "--set", "rollout.algorithm=cispo"]).output
    printed = tmp_path / "printed.toml"
    printed.write_text(shown)

    assert 'algorithm = "grpo"  # --set rollout.algorithm; preset cispo' in shown.splitlines()
    assert "clip_high = 4.0  # default; preset cispo" in shown.splitlines()
    assert in_force(loaded(path=printed).config) == SPEC["cispo"]


@pytest.mark.parametrize("given", ["dappo", "reinforce", "7"])
def test_another_name_is_refused_with_the_names(given: str) -> None:
    with pytest.raises(ConfigErrors) as raised:
        loaded(f"rollout.algorithm={given}")

    names = "must be grpo, ppo, dapo, dr_grpo, rloo, gspo, cispo or reinforce++"
    shown = given if given.isdecimal() else f'"{given}"'
    assert str(raised.value) == f"--set rollout.algorithm: {names}, got {shown}"


def test_a_conflict_with_a_preset_is_placed_at_the_key_that_was_set() -> None:
    with pytest.raises(ConfigErrors, match=r"^--set rollout\.num_generations: .*must be at least 2") as raised:
        loaded("rollout.algorithm=rloo", "rollout.num_generations=1")

    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["rloo", "dr_grpo"])
def test_the_advantages_of_a_preset_are_those_of_its_paper(name: str) -> None:
    rewards = torch.tensor([1.0, 0.0, 0.25, 3.0, -2.0, 5.5, 5.5, 1.0], dtype=torch.float64)
    config = loaded(f"rollout.algorithm={name}").config
    found = ADVANTAGES[config.advantages](AdvantageInputs(rewards, 4, torch.ones(8, 1, dtype=torch.bool)))

    expected = []
    for start in (0, 4):
        group = rewards[start : start + 4].tolist()
        for index, reward in enumerate(group):
            others = [one for other, one in enumerate(group) if other != index]
            expected.append(reward - (sum(others) / 3 if name == "rloo" else sum(group) / 4))

    assert found.tolist() == pytest.approx(expected, rel=1e-6)
