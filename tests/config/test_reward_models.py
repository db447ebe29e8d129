"""Several reward models in tables: their labels, messages, identity, and the memory that each takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from transformers import LlamaForSequenceClassification

from pipeline.config.changes import compare
from pipeline.config.identity import identifying_settings, identity_of
from pipeline.config.load import ConfigErrors, load, render
from pipeline.config.plan import models_of, needs
from pipeline.config.rewards import part_labels, part_names, reward_models
from pipeline.config.schema import Config
from pipeline.supervisor.preflight import problems_of_files
from pipeline.trainer.row_means import RowMeans
from tests.support import tiny

TABLES = """
[[rewards]]
name = "model"
path = "a"
weight = 0.5
label = "kind"

[[rewards]]
name = "length"

[[rewards]]
name = "model"
path = "~/b"
tokenizer = "own"
"""


def of(*tables: Any, **sections: Any) -> Config:
    return Config.model_validate({"rewards": list(tables), **sections})


def model(path: str = "r", **options: Any) -> dict[str, Any]:
    return {"name": "model", "path": path, **options}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "c.toml").write_text(TABLES)
    return tmp_path / "c.toml"


def test_each_table_is_a_model_of_its_folder_label_weight_and_tokenizer(file: Path) -> None:
    loaded = load(file, ["rewards.model.path=c", "rewards.kind.weight=-2"], {})

    first, second = reward_models(loaded.config)
    assert first[:4] == ("kind", str(file.parent / "a"), -2.0, "policy")
    assert second[:4] == ("model", str(file.parent / "c"), 1.0, "own")
    assert loaded.where("rewards.kind.path") == f"{file}:4:8: rewards.kind.path"
    assert part_labels(loaded.config) == ["length", "kind", "model"]
    assert part_names(loaded.config) == ["length", "kind", "model"]
    shown = render(loaded, effective=True, origin=True)
    assert f'[[rewards]]\nname = "model"  # {file}:3:8\n' in shown
    assert 'label = "kind"' in shown and "# label is left out\n" in shown
    again = file.with_name("again.toml")
    again.write_text(shown)
    assert reward_models(load(again, [], {}).config) == [first, second]


def test_a_label_of_the_command_line_is_the_label(file: Path) -> None:
    loaded = load(file, ["rewards.model.label=texts"], {})

    assert [one.key for one in reward_models(loaded.config)] == ["rewards.kind.path", "rewards.texts.path"]
    assert loaded.where("rewards.texts.path") == f"{file}:13:8: rewards.texts.path"


def test_each_of_two_rewards_of_one_name_can_be_the_test_of_a_right_response() -> None:
    judges = [{"name": "judge", "url": "http://127.0.0.1:1/v1", "model": one} for one in "ab"]

    config = of(*judges, evaluation={"pass_function": "judge-2"})

    assert part_names(config) == ["judge", "judge-2"]
    with pytest.raises(ValidationError, match=r"must be one of rewards \(judge, judge-2\), got judge-3"):
        of(*judges, evaluation={"pass_function": "judge-3"})


def test_model_reward_is_a_table_of_weight_one() -> None:
    short = of(model={"reward": "/r", "reward_tokenizer": "own"})
    table = of(model("/r", tokenizer="own"))

    (one,), (other,) = reward_models(short), reward_models(table)
    assert one[:4] == other[:4] == ("model", "/r", 1.0, "own")
    assert (one.key, one.tokenizer_key) == ("model.reward", "model.reward_tokenizer")
    assert (other.key, other.tokenizer_key) == ("rewards.model.path", "rewards.model.tokenizer")
    assert part_labels(of("m:model", model={"reward": "/r"})) == ["m:model", "model"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[rewards]]\nname = "model"', "2:8: rewards.model: must have a path"),
        ('[[rewards]]\nname = "model"\npath = ""', '3:8: rewards.model.path: must be a path, got ""'),
        ('[[rewards]]\nname = "model"\npath = "a"\nlabel = "A b"',
         '4:9: rewards.A b.label: must be made of a-z, 0-9 and -, got "A b"'),
        ('[[rewards]]\nname = "model"\npath = "a"\ntokenizer = "theirs"',
         '4:13: rewards.model.tokenizer: must be "policy" or "own", got "theirs"'),
        ('[[rewards]]\nname = "model"\npath = "a"\nfolder = "b"',
         "4:10: rewards.model: unknown key folder, the keys are name, weight, path, label, tokenizer"),
        (TABLES + '[[rewards]]\nname = "model"\npath = "c"\nlabel = "kind"',
         '18:9: rewards.kind-2.label: must be another one than that of any other function or model, got "kind"'),
        (TABLES + '[[rewards]]\nname = "model"\npath = "c"\nlabel = "length"',
         'rewards.length-2.label: must be another one than that of any other function or model, got "length"'),
        (TABLES + '[model]\nreward = "c"',
         'model.reward: must be left out with a table [[rewards]] of the name "model": each reward model has a table'),
        (TABLES + '[model]\nreward_tokenizer = "own"', "model.reward_tokenizer: needs model.reward"),
        (TABLES + '[rollout]\nenvironment = "m:E"',
         '14:13: rewards.model.tokenizer: must be "policy" with rollout.environment: '),
        (TABLES + '[evaluation]\npass_function = "texts"',
         "evaluation.pass_function: must be one of rewards (length, kind, model), got texts"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_at_its_place(file: Path, text: str, message: str) -> None:
    file.write_text(text)

    with pytest.raises(ConfigErrors) as raised:
        load(file, [], {})

    assert len(raised.value.errors) == 1 and message in str(raised.value), str(raised.value)


def test_at_most_as_many_tables_as_metrics() -> None:
    tables = [model(f"/{number}") for number in range(16)]

    assert part_labels(of(*tables))[::15] == ["model", "model-16"]
    with pytest.raises(ValueError, match="must have at most 16 functions and models, got 17"):
        of(*tables, "length")


def test_the_folder_of_each_model_is_checked(file: Path) -> None:
    actor = tiny.llama()
    actor.save_pretrained("actor")
    Path("a").mkdir()
    Path("a", "adapter_config.json").write_text("{}")
    smaller = LlamaForSequenceClassification(type(actor.config)(**{**actor.config.to_dict(), "vocab_size": 5}))
    smaller.save_pretrained("c")
    for folder in ("actor", "c"):
        tokens = {"model": {"vocab": {letter: at for at, letter in enumerate("abcde" if folder == "c" else "edcba")}}}
        Path(folder, "tokenizer.json").write_text(json.dumps(tokens))
    file.write_text(TABLES + '[[rewards]]\nname = "model"\npath = "c"\nlabel = "small"\n[model]\nactor = "actor"\n')

    with pytest.raises(ConfigErrors) as raised:
        load(file, ["prompts.path=builtin:sort-digits"], {}, check_files=problems_of_files)

    found = [error for error in raised.value.errors if "rewards" in error]
    assert len(found) == 3, raised.value.errors
    assert (
        found[0] == f"{file}:4:8: rewards.kind.path: {file.parent}/a is a LoRA adapter: merge it into its model first"
    )
    home = f"{file.parent}/home/b"
    assert found[1].startswith(f"{file}:13:8: rewards.model.path: no such directory: {home} (models are local")
    assert found[2].startswith(f"{file}:17:8: rewards.small.path: {file.parent}/c has a smaller vocabulary than model.")
    assert found[2].endswith('; rewards.small.tokenizer = "own" gives it texts')


def test_the_identity_of_a_run_is_that_of_its_models_whatever_their_order_label_and_weight() -> None:
    one, two = model("/a", tokenizer="own"), model("/b")
    both = of(one, two, "exact")

    assert identity_of(of(one)) == identity_of(of(model={"reward": "/a", "reward_tokenizer": "own"}))
    assert identity_of(of(model("/b"))) == identity_of(of(model={"reward": "/b"}))
    assert identity_of(of({**two, "label": "b", "weight": 2.0}, one)) == identity_of(both)
    others = [of("exact"), of(one), of(two), of(one, model("/c")), of(model("/a"), two), of(one, two, two)]
    assert len({identity_of(other) for other in [*others, both]}) == 7
    assert identifying_settings(both)["rewards"] == [["/a", "own"], ["/b", "policy"]]
    assert identifying_settings(of(one))["model.reward"] == "/a" and "rewards" not in identifying_settings(of(one))


def test_a_reload_names_the_changed_option_of_a_model() -> None:
    before, after = of(model("/a", label="kind"), model("/b")), of(model("/a", label="kind", weight=2.0), model("/c"))

    changes = compare(before, after)

    assert not changes.live
    assert [(each.key, each.after) for each in changes.restart] == [
        ("rewards.kind.weight", 2.0), ("rewards.model.path", "/c"),
    ]  # fmt: skip


@pytest.mark.parametrize("on_cards", [False, True])
def test_a_worker_has_the_memory_of_each_model_and_loads_the_largest(tmp_path: Path, on_cards: bool) -> None:
    large = tiny.llama(hidden_size=64, intermediate_size=256)
    large.save_pretrained(tmp_path / "large")
    small = tiny.llama()
    small.save_pretrained(tmp_path / "small")
    folder = str(tmp_path / "small")
    config = Config.model_validate({
        "model": {"actor": folder},
        "rewards": [model(folder, label="kind"), model(str(tmp_path / "large"))],
    })  # fmt: skip

    found = needs(config, models_of(config), on_cards=on_cards)

    assert found.worker["reward kind"] == 4 * small.num_parameters()
    assert found.worker["reward model"] == 4 * large.num_parameters() and "reward" not in found.worker
    assert found.worker_load == 4 * large.num_parameters()
    one = config.model_copy(update={"rewards": config.rewards[1:]})
    assert needs(one, models_of(one), on_cards=on_cards).worker["reward"] == 4 * large.num_parameters()


def test_the_mean_of_one_model_is_before_its_weight() -> None:
    assert RowMeans.of(of(model(weight=0.5, label="kind")))._rewards == {"kind": ("score", 0.5)}
    assert RowMeans.of(of(model(weight=0.5, label="kind"), "exact"))._rewards == {
        "exact": ("reward.exact", 1.0), "kind": ("reward.kind", 1.0),
    }  # fmt: skip
