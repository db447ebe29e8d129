"""Reward functions: names and tables, their options by ``--set`` and the environment, their origins, a reload."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import load as config_load
from pipeline.config.changes import Change, compare, with_live
from pipeline.config.load import ConfigErrors, Origin
from pipeline.config.rewards import (
    ExactReward,
    FormatReward,
    JsonSchemaReward,
    JudgeReward,
    MathReward,
    OwnReward,
    RewardConfig,
    of_json,
    reward_of,
    to_json,
)
from pipeline.config.schema import Config

TABLES = """\
[rollout]
workers = 2
[[rewards]]
name = "judge"
url = "http://127.0.0.1:8001/v1"
model = "small"
[[rewards]]
name = "own:score"
weight = -0.5
"""
JUDGE = JudgeReward(name="judge", url="http://127.0.0.1:8001/v1", model="small")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def loaded(text: str = "", *sets: str, **environ: str) -> config_load.LoadedConfig:
    Path("c.toml").write_text(text)
    return config_load.load(Path("c.toml"), sets, environ)


def rewards(text: str = "", *sets: str, **environ: str) -> list[RewardConfig]:
    return list(loaded(text, *sets, **environ).config.rewards)


def test_names_and_tables_are_two_forms_of_one_key() -> None:
    both = [MathReward(name="math"), FormatReward(name="format", weight=0.2), OwnReward(name="own:score")]

    assert rewards('rewards = ["math", {name = "format", weight = 0.2}, "own:score"]') == both
    assert rewards('[[rewards]]\nname = "math"\n[[rewards]]\nname = "format"\nweight = 0.2\n'
                   '[[rewards]]\nname = "own:score"') == both  # fmt: skip
    assert rewards() == [OwnReward(name="pipeline.sort_digits:exact_answer")]


@pytest.mark.parametrize(
    "given", ["math,exact", "math, exact", '["math", "exact"]', '[{name = "math"}, "exact"]']
)  # fmt: skip
def test_set_and_the_environment_take_the_place_of_all_functions(given: str) -> None:
    expected = [MathReward(name="math"), ExactReward(name="exact")]

    assert rewards(TABLES, f"rewards={given}") == expected
    assert rewards(TABLES, RLHFD_REWARDS=given) == expected
    assert rewards(TABLES, f"rewards={given}", RLHFD_REWARDS="regex") == expected


def test_an_option_of_one_function_is_set_above_the_file_and_keeps_the_others() -> None:
    sets = ("rewards.judge.url=http://h/v1", "rewards.judge.model=7", "rewards.score.weight=2")

    judge, own = rewards(TABLES, *sets, RLHFD_REWARDS__JUDGE__CONCURRENCY="3", RLHFD_REWARDS__JUDGE__MODEL="of_env")

    assert judge == JudgeReward(name="judge", url="http://h/v1", model="7", concurrency=3)
    assert own == OwnReward(name="own:score", weight=2.0)
    assert rewards(TABLES, "rewards.own:score.weight=3")[1].weight == 3


def test_functions_of_one_name_are_told_apart_as_in_the_metrics() -> None:
    text = 'rewards = [{name = "regex", pattern = "a"}, {name = "regex", pattern = "b"}]'

    first, second = rewards(text, "rewards.regex.weight=2", "rewards.regex-2.weight=3")

    assert (first.weight, second.weight) == (2, 3)


@pytest.mark.parametrize("key", ["rewards.juge.model", "rewards.judge.name", "rewards.model", "rewards.x.y.z"])
def test_an_option_of_no_function_is_refused_with_the_names(key: str) -> None:
    with pytest.raises(ConfigErrors) as refused:
        rewards(TABLES, f"{key}=a")

    assert refused.value.errors == (f"--set {key}: must be rewards.NAME.OPTION, with a name of judge, score",)


def test_files_are_relative_as_other_paths_are(folder: Path) -> None:
    (folder / "etc").mkdir()
    (folder / "etc/c.toml").write_text('[[rewards]]\nname = "json_schema"\nschema_file = "s.json"\n')

    def of(*sets: str) -> RewardConfig:
        return config_load.load(folder / "etc/c.toml", sets, {}).config.rewards[0]

    assert of() == JsonSchemaReward(name="json_schema", schema_file=folder / "etc/s.json")
    assert of("rewards.json_schema.schema_file=7") == JsonSchemaReward(name="json_schema", schema_file=folder / "7")


def test_each_option_has_its_origin_and_an_error_about_it_its_place() -> None:
    found = loaded(TABLES, "rewards.judge.model=big")

    assert {key: origin for key, origin in found.origins.items() if key.startswith("rewards.")} == {
        "rewards.judge.name": Origin("file", "c.toml:4:8"),
        "rewards.judge.url": Origin("file", "c.toml:5:7"),
        "rewards.judge.model": Origin("set", "--set rewards.judge.model"),
        "rewards.score.name": Origin("file", "c.toml:8:8"),
        "rewards.score.weight": Origin("file", "c.toml:9:10"),
    }
    assert found.placed("rewards.judge.url: no") == "c.toml:5:7: rewards.judge.url: no"
    assert found.placed("rewards.judge.template_file: no") == "c.toml:4:8: rewards.judge.template_file: no"
    assert found.placed("rewards.judge.model: no") == "--set rewards.judge.model: no"
    assert found.placed("rewards: own:score raised").startswith("c.toml:3:3: rewards: own:score")


def test_show_prints_tables_that_load_again_as_the_same() -> None:
    found = loaded(TABLES, "rewards.judge.model=big")

    assert config_load.render(found, effective=False, origin=True) == (
        "[rollout]\nworkers = 2  # c.toml:2:11\n\n"
        '[[rewards]]\nname = "judge"  # c.toml:4:8\nurl = "http://127.0.0.1:8001/v1"  # c.toml:5:7\n'
        'model = "big"  # --set rewards.judge.model\n\n'
        '[[rewards]]\nname = "own:score"  # c.toml:8:8\nweight = -0.5  # c.toml:9:10\n'
    )
    shown = config_load.render(found, effective=True, origin=True)
    assert "deadline_s = 45.0  # default\n" in shown and "# template_file is left out\n" in shown
    assert rewards(shown) == found.config.rewards


def test_show_prints_no_functions_above_all_sections_and_the_limits_of_length_in_force() -> None:
    sets = ("rewards=[]", "rollout.environment=own:Game")

    none = config_load.render(loaded("", *sets), effective=True, origin=True)
    length = config_load.render(
        loaded('rewards = ["length"]\n[rollout]\nmax_prompt_length = 4\nmax_new_tokens = 50'),
        effective=True,
        origin=True,
    )

    assert none.startswith("rewards = []  # --set rewards\n\n[daemon]\n") and "[[rewards]]" not in none
    assert rewards(none) == []
    assert "limit_tokens = 50  # default; by the length of a response\n" in length
    assert "buffer_tokens = 10  # default; by the length of a response\n" in length


def test_options_of_the_file_that_something_above_it_overrides_are_named() -> None:
    found = loaded(TABLES, "rewards.judge.model=big", "rewards.judge.url=http://127.0.0.1:8001/v1")

    assert config_load.overridden(found) == {"rewards.judge.model": "--set rewards.judge.model"}
    assert config_load.overridden(loaded(TABLES, "rewards=math")) == {"rewards": "--set rewards"}


def test_a_reload_names_the_changed_options_and_keeps_those_in_force() -> None:
    running = Config(rewards=[JUDGE, OwnReward(name="own:score")])
    wanted = Config(rewards=[JUDGE.model_copy(update={"model": "big"}), OwnReward(name="own:score", weight=2.0)])
    others = Config(rewards=[MathReward(name="math")])

    changes = compare(running, wanted)

    assert changes.live == []
    assert changes.restart == [
        Change("rewards.judge.model", "small", "big"), Change("rewards.score.weight", 1.0, 2.0)
    ]  # fmt: skip
    assert compare(running, others).restart == [Change("rewards", ["judge", "own:score"], ["math"])]
    assert with_live(running, wanted).rewards == running.rewards


def test_another_process_gets_every_option() -> None:
    given = [JUDGE, reward_of("math"), reward_of("own:score")]

    assert of_json(to_json(given)) == given
    config = Config(rewards=given)
    assert Config.model_validate_json(config.model_dump_json()) == config
