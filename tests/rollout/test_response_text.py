"""The text of a response, as rewards and environments get it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config.schema import Config
from pipeline.rollout.loader import load_environment, load_functions
from pipeline.rollout.remote import NodeTelemetry
from pipeline.rollout.response_text import ResponseText, hidden_ids
from pipeline.rollout.reward.answers import opened_by
from pipeline.rollout.reward.functions import FunctionReward, load_reward_function
from pipeline.rollout.reward.pool import RewardPool
from tests.support.byte_tokens import END, PAD, TURN_END, byte_tokenizer

MARKS = ("<think>", "</think>", "<answer>", "</answer>")


def config_of(folder: Path, *rewards: str, **rollout: Any) -> Config:
    sections = {"rewards": [*rewards]} if rewards else {}
    return Config.model_validate({"model": {"actor": str(folder)}, "rollout": rollout, **sections})


def text_of(config: Config, tokenizer: Any, response: str) -> str:
    return ResponseText(tokenizer, hidden_ids(config, tokenizer))(tokenizer(response)["input_ids"])


def test_special_tokens_are_text_and_ends_and_padding_are_none(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(MARKS, ["[CALL]"])
    response = f"<think>a</think>[CALL]{TURN_END}<answer>1</answer>{END}{PAD}"

    assert text_of(config_of(tmp_path), tokenizer, response) == f"<think>a</think>[CALL]{TURN_END}<answer>1</answer>"
    assert ResponseText.of(tokenizer)(tokenizer(response)["input_ids"]) == response.replace(END + PAD, "")
    assert text_of(config_of(tmp_path, special_tokens=False), tokenizer, response) == "a[CALL]1"


def test_an_end_of_the_models_files_or_of_the_configuration_is_no_text(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(MARKS)
    turn_end = tokenizer.convert_tokens_to_ids(TURN_END)
    response = f"<answer>1</answer>{TURN_END}"

    assert text_of(config_of(tmp_path, stop_token_ids=[turn_end]), tokenizer, response) == "<answer>1</answer>"
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [turn_end]}))
    assert text_of(config_of(tmp_path), tokenizer, response) == "<answer>1</answer>"


def test_an_end_that_is_an_ordinary_token_is_text(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer((), ["</answer>"])
    end = tokenizer.convert_tokens_to_ids("</answer>")

    assert text_of(config_of(tmp_path, stop_token_ids=[end]), tokenizer, "1</answer>") == "1</answer>"


def score(name: str, prompt: str, response: str, answer: str | None = None) -> float:
    tokenizer = byte_tokenizer(MARKS[:2])
    reward = FunctionReward([load_reward_function(name)], tokenizer)
    start = len(tokenizer(prompt)["input_ids"])
    ids = torch.tensor([tokenizer(prompt + response + END)["input_ids"]])
    return float(reward(ids, torch.ones_like(ids), torch.tensor([start]), torch.tensor([ids.shape[1]]), [answer]))


@pytest.mark.parametrize(("prompt", "response", "expected"), [
    ("user", "<think>a</think><answer>1</answer>", 1),
    ("user", "a</think><answer>1</answer>", 0),
    ("assistant\n<think>\n", "a</think><answer>1</answer>", 1),
    ("assistant\n<think>\n", "<think>a</think><answer>1</answer>", 0),
    ("assistant\n<think>", "<answer>1</answer>", 0),
    # No thoughts.
    ("<think>\n\n</think>\n\n", "<answer>1</answer>", 1),
    ("<think>\n\n</think>\n\n<answer>", "1</answer>", 1),
    # An instruction is no opened tag.
    ("Write <think> first.", "a</think><answer>1</answer>", 0),
])  # fmt: skip
def test_a_tag_that_the_chat_template_has_opened_counts_for_format(prompt: str, response: str, expected: float) -> None:
    assert score("format", prompt, response) == expected


def test_a_tag_that_the_chat_template_has_opened_counts_for_math() -> None:
    assert score("math", "<answer>", r"\frac{1}{2}", "0.5") == 1
    assert score("math", "<think>\n", r"\boxed{72}</think><answer>71</answer>", "72") == 0
    assert score("math", "<think>\n", "6*12=72</think><answer>72</answer>", "72") == 1


def test_the_end_of_a_tag_alone_opens_none() -> None:
    assert opened_by("</think>", ["think"]) == ("", [])
    assert opened_by("<answer></answer></think><think>", ["think", "answer"]) == ("<think>", [])


@pytest.mark.parametrize("timeout_s", [0, 60])
def test_rewards_and_environments_of_a_worker_get_the_same_text_in_a_process_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout_s: int
) -> None:
    module = f"my_text_{timeout_s}"
    (tmp_path / f"{module}.py").write_text(
        "def seen(input_ids, attention_mask, *, response, **_): return float(response == '<think>a</think>')\n"
        "class Quiet:\n    def reset(self, prompt, answer, columns): ...\n    def step(self, response): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    tokenizer = byte_tokenizer(MARKS[:2])
    tokenizer.save_pretrained(tmp_path)
    ids = torch.tensor([tokenizer(f"?<think>a</think>{END}")["input_ids"]])
    settings = {"environment": f"{module}:Quiet", "reward_timeout_s": timeout_s}
    config, telemetry = config_of(tmp_path, f"{module}:seen", **settings), NodeTelemetry()

    # With all special tokens hidden the tags would be, too, and the score 0.
    with contextlib.ExitStack() as undone:
        reward = load_functions(config, tokenizer, telemetry, undone)
        score = reward(ids, torch.ones_like(ids), torch.tensor([1]), torch.tensor([ids.shape[1]]), [None])
        turns = load_environment(config, tokenizer, telemetry, undone)

    assert turns is not None and turns.text is not None
    assert isinstance(reward, RewardPool if timeout_s else FunctionReward)
    assert score.tolist() == [1.0]
    assert turns.text(ids[0, 1:].tolist()) == "<think>a</think>"
