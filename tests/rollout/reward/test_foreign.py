"""Reward functions of TRL and verl are called as their trainers call them, in this process and in a pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config.user_modules import REWARD_KEYWORDS, problem_of_call
from pipeline.errors import RewardError
from pipeline.models.loading import load_tokenizer
from pipeline.rollout.reward.functions import FunctionReward, load_reward_function
from pipeline.rollout.reward.pool import RewardPool
from pipeline.rollout.reward.signatures import Signature
from tests.support.folders import importable

# Written as their documentations write them.
FUNCTIONS = """
def trl_lengths(completions, **kwargs):
    return [float(len(completion)) for completion in completions]

def trl_all(prompts, completions, completion_ids, answer, level, **kwargs):
    assert "prompt" not in kwargs and "tokenizer" not in kwargs and "response_start" not in kwargs
    return [
        [prompt, completion, ids, right, at] == ["21>", "12", [4, 5, 1], "12", 7]
        for prompt, completion, ids, right, at in zip(prompts, completions, completion_ids, answer, level)
    ]

async def trl_chat(prompts, completions):
    return [
        None if prompt[-1]["content"] == "skip" else float(completion == [{"role": "assistant", "content": "12"}])
        for prompt, completion in zip(prompts, completions)
    ]

class Awaited:
    async def __call__(self, **given):
        return [2.0] * len(given["completions"]) if "completions" in given else float(given["solution_str"] == "12")

class AwaitedTrl(Awaited):
    async def __call__(self, prompts, completions):
        return await super().__call__(completions=completions)

class AwaitedVerl(Awaited):
    async def __call__(self, solution_str, ground_truth):
        return await super().__call__(solution_str=solution_str)

trl_object, verl_object = AwaitedTrl(), AwaitedVerl()

def verl_score(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, extra_info) == ("digits", {"split": "train"})
    return {"score": float(solution_str == ground_truth), "acc": True}

def verl_short(solution_str, ground_truth):
    return solution_str == ground_truth

def verl_odd(data_source, solution_str, ground_truth, extra_info=None):
    return {"points": 1.0}

def named(input_ids, attention_mask, *, prompt, answer, gt_answer, **columns):
    assert "prompt" not in columns
    return float((prompt, answer, gt_answer) == ("21>", "12", "12"))

def own_column(input_ids, attention_mask, *, answer, gt_answer, **_):
    return float((answer, gt_answer) == ("of the row", "12"))
"""


class Digits:
    """A tokenizer of digits: id 3 + d is digit d, 0 is padding, 1 ends a response, 2 is ``>``."""

    pad_token_id, eos_token_id = 0, 1

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids."""
        return "".join({0: "", 1: "", 2: ">"}.get(one, str(one - 3)) for one in ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with importable(tmp_path_factory.mktemp("foreign"), foreign_rewards=FUNCTIONS) as folder:
        yield folder


def row(prompt: Any = "21>", answer: Any = "12", **columns: Any) -> dict[str, Any]:
    """Return the row ``21>12<eos>`` with its columns."""
    return {
        "input_ids": torch.tensor([[5, 4, 2, 4, 5, 1, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 0]]),
        "response_start": torch.tensor([3]),
        "response_end": torch.tensor([6]),
        "gt_answer": [answer],
        "columns": [{"prompt": prompt, **columns}],
    }


def scored(name: str, **given: Any) -> float:
    function = load_reward_function(f"foreign_rewards:{name}")
    return FunctionReward([function], Digits())(**row(**given)).item()


@pytest.mark.parametrize(
    ("name", "given", "reward"),
    [
        ("trl_lengths", {}, 2.0),
        ("trl_all", {"level": 7}, 1.0),
        ("trl_all", {"level": 8}, 0.0),
        ("trl_chat", {"prompt": [{"role": "user", "content": "21>"}]}, 1.0),
        ("verl_score", {"data_source": "digits", "extra_info": {"split": "train"}}, 1.0),
        ("verl_score", {"data_source": "digits", "extra_info": {"split": "train"}, "answer": "21"}, 0.0),
        ("verl_short", {}, 1.0),
        ("trl_object", {}, 2.0),
        ("verl_object", {}, 1.0),
        ("named", {}, 1.0),
    ],
)
def test_a_function_gets_what_its_trainer_gives(folder: Path, name: str, given: dict[str, Any], reward: float) -> None:
    assert scored(name, **given) == reward


def test_a_further_column_named_answer_is_no_other_name_of_the_answer(folder: Path) -> None:
    given = row()
    given["columns"][0]["answer"] = "of the row"

    assert FunctionReward([load_reward_function("foreign_rewards:own_column")], Digits())(**given).item() == 1.0


@pytest.mark.parametrize(
    ("name", "given", "problem"),
    [
        (
            "trl_chat",
            {"prompt": [{"role": "user", "content": "skip"}]},
            "row 0: foreign_rewards:trl_chat returned None: ",
        ),
        ("trl_all", {}, "trl_all raised TypeError"),
        ("verl_short", {"answer": None}, r'verl_short: the row has no ground truth.*"reward_model\.ground_truth"'),
        ("verl_odd", {}, r'verl_odd raised .*the dict has no \\?"score\\?", its keys are points'),
    ],
)
def test_a_row_that_it_cannot_score_has_no_reward(folder: Path, name: str, given: dict[str, Any], problem: str) -> None:
    with pytest.raises(RewardError, match=problem):
        scored(name, **given)


def test_a_pool_calls_them_alike(folder: Path, task: Path) -> None:
    names = ["trl_lengths", "verl_short", "named"]
    functions = [f"foreign_rewards:{name}" for name in names]
    with RewardPool(functions, str(task / "model"), timeout_s=30.0) as pool:
        tokenizer = load_tokenizer(str(task / "model"))
        ids = tokenizer("21>12")["input_ids"] + [tokenizer.eos_token_id]
        scores = pool(
            torch.tensor([ids]),
            torch.ones(1, len(ids)),
            torch.tensor([3]),
            torch.tensor([len(ids)]),
            ["12"],
            columns=[{"prompt": "21>"}],
        )

        assert scores.tolist() == [2.0 + 1.0 + 1.0]
        assert pool.parts.tolist() == [[2.0, 1.0, 1.0]]


def by_position(ids: Any, mask: Any, /, *, response: str, answer: str = "", **_: Any) -> float:
    return float(response == answer)


def by_any_position(*tokens: Any, response: str, answer: str, **_: Any) -> float:
    return float(response == answer)


@pytest.mark.parametrize("function", [by_position, by_any_position])
def test_keywords_behind_parameters_without_a_name_are_given(function: Callable[..., float]) -> None:
    assert problem_of_call(function) == ""
    row = dict.fromkeys(REWARD_KEYWORDS) | {"gt_answer": "7"}

    given = Signature(function).keywords(row, {}, {}, lambda: "7")

    assert function(None, None, **given) == 1.0
