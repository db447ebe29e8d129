"""`rlhfd config check` finds what a start finds: tokenizer, chat template, adapters, engine, rewards, prompts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from pipeline.cli.main import main
from pipeline.config import vllm_release
from pipeline.config.schema import Config
from pipeline.config.sections import ModelConfig
from pipeline.models.lora import ADAPTER_FILE, Saved, adapt
from pipeline.rollout.start_check import findings


@pytest.fixture
def folder(task: Path, tmp_path: Path) -> Path:
    """A copy of the embedded task's model, under a name of the user's."""
    made = Path(shutil.copytree(task / "model", tmp_path / "model"))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "73>", "answer": "37"}\n')
    return made


def found(folder: Path, **sections: Any) -> list[str]:
    values: dict[str, Any] = {
        "model": {"actor": str(folder)},
        "prompts": {"path": str(folder.parent / "prompts.jsonl")},
        "rewards": ["pipeline.sort_digits:exact_answer"],
    }
    for section, keys in sections.items():
        values[section] = keys if isinstance(keys, list) else {**values.get(section, {}), **keys}
    return findings(Config.model_validate(values))["problems"]


def change(file: Path, **keys: Any) -> None:
    described = {**json.loads(file.read_bytes()), **keys}
    file.write_text(json.dumps({key: value for key, value in described.items() if value is not None}))


def test_a_model_without_faults_has_no_problem(folder: Path) -> None:
    assert found(folder, model={"lora_rank": 2, "lora_targets": ["q_proj"]}) == []


def test_each_problem_is_found_at_once_and_begins_with_its_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_release.importlib.util, "find_spec", lambda name: None)
    (folder.parent / "held_out.jsonl").write_text('{"prompt": [{"role": "user", "content": "73>"}]}\n')

    problems = found(
        folder,
        model={"lora_rank": 2, "lora_targets": ["nope"]},
        rollout={"engine": "vllm"},
        rewards=["pipeline.sort_digits:nope"],
        evaluation={"files": [str(folder.parent / "held_out.jsonl")]},
    )

    keys = [problem.partition(":")[0] for problem in problems]
    assert keys == ["rollout.engine", "rewards", "model.lora_targets", "evaluation.files"]
    assert "vllm is not installed here" in problems[0] and "no function nope" in problems[1]
    assert "no linear layer is called 'nope'" in problems[2] and "needs a chat template" in problems[3]


def test_an_adapter_to_begin_with_is_compared_with_the_settings(folder: Path, tmp_path: Path) -> None:
    made = ModelConfig(lora_rank=4, lora_alpha=8, lora_targets=["q_proj"])
    model = adapt(AutoModelForCausalLM.from_pretrained(folder), made, seed=1)
    Saved(model, made).save_pretrained(tmp_path / "saved")
    adapter = tmp_path / "saved" / ADAPTER_FILE.parent
    begins = {"lora_adapter": str(adapter), "lora_rank": 4, "lora_alpha": 8, "lora_targets": ["q_proj"]}

    assert found(folder, model=begins) == []
    (rank,) = found(folder, model={**begins, "lora_rank": 2})
    (layers,) = found(folder, model={**begins, "lora_targets": ["k_proj"]})

    assert rank == f"model.lora_adapter: {adapter} has lora_rank = 4, model.lora_rank is 2"
    assert f"model.lora_adapter: {adapter} is of other layers: " in layers


def test_a_config_json_without_a_kind_of_model_is_one_problem(folder: Path) -> None:
    (folder / "config.json").write_text("{}")

    (problem,) = found(folder)

    assert "model.actor: cannot load a model from" in problem


def test_a_chat_template_that_does_not_compile_is_told_with_its_line(folder: Path) -> None:
    """Each prompt was set aside with "raised TemplateSyntaxError": its text is kept out of a log without texts."""
    template = "{% for one in messages %}\n{{ one['content'] {% endfor %}"
    (folder / "chat_template.jinja").write_text(template)

    (problem,) = found(folder, prompts={"template": "chat"})

    assert "needs a chat template, and the tokenizer's does not compile: " in problem
    assert problem.endswith(" in its line 2")


def test_a_tokenizer_without_pad_and_end_and_one_larger_than_the_model_are_found(folder: Path) -> None:
    change(folder / "config.json", vocab_size=20)
    assert (
        found(folder)[0].startswith("model.actor: the tokenizer in") and "is larger than the model" in found(folder)[0]
    )
    change(folder / "tokenizer_config.json", pad_token=None, eos_token=None)
    change(folder / "generation_config.json", eos_token_id=[])
    (folder / "special_tokens_map.json").unlink(missing_ok=True)

    (problem,) = found(folder)

    assert problem.startswith("model.actor: ") and "neither a pad token nor an eos token" in problem


@pytest.mark.parametrize(
    ("prompts", "rollout", "told"),
    [
        ({"template": "chat"}, {}, "needs a chat template"),
        ({}, {"max_prompt_length": 2, "max_new_tokens": 4}, "none of the first 64 prompts can be rolled out"),
        ({}, {"max_length": 3}, "leave no room for a response"),
    ],
)
def test_prompts_that_cannot_be_rolled_out_are_found(
    folder: Path, prompts: dict[str, Any], rollout: dict[str, Any], told: str
) -> None:
    (problem,) = found(folder, prompts=prompts, rollout=rollout)

    assert problem.startswith("prompts.path: ") and told in problem


@pytest.mark.parametrize("log_texts", [False, True])
def test_a_refusal_that_quotes_the_prompt_is_shown_only_if_texts_are_allowed(folder: Path, log_texts: bool) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no: ' ~ messages[0]['content']) }}")
    (folder.parent / "prompts.jsonl").write_text('{"prompt": [{"role": "user", "content": "secret"}]}\n')

    (problem,) = found(folder, daemon={"log_texts": log_texts})

    assert "which raised TemplateError" in problem and ("no: secret" in problem) is log_texts


def test_odd_ends_are_notes(folder: Path) -> None:
    (folder.parent / "prompts.jsonl").write_text('{"prompt": "73><eos>", "answer": "37"}\n')
    change(folder / "generation_config.json", eos_token_id=[1, 7])
    values = {"model": {"actor": str(folder)}, "prompts": {"path": str(folder.parent / "prompts.jsonl")}}

    result = findings(Config.model_validate(values))

    assert result["problems"] == []
    assert any("no special tokens: ids=[7]" in note for note in result["notes"])
    assert any("it ends with a token that ends responses" in note for note in result["notes"])


def test_the_command_places_each_problem_and_ends_with_78(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    Path("c.toml").write_text(
        '[model]\nactor = "model"\nlora_rank = 2\nlora_targets = ["nope"]\n[prompts]\npath = "prompts.jsonl"\n'
        '[[rewards]]\nname = "pipeline.sort_digits:exact_answer"\n'
    )

    refused = CliRunner().invoke(main, ["config", "check", "--config", "c.toml"])

    assert refused.exit_code == 78
    assert "c.toml:4:16: model.lora_targets: no linear layer is called 'nope'" in refused.output
