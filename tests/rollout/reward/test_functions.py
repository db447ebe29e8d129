"""Reward functions with the interface of a reward model, and results that are not rewards."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.errors import ConfigError, RewardError
from pipeline.rollout.reward.functions import FunctionReward, checked_scores, load_reward_function

IDS = torch.tensor([[5, 6, 7, 1, 0], [5, 8, 1, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]])
START, END = torch.tensor([1, 1]), torch.tensor([4, 3])


def score(*functions: Any, answers: list[Any] | None = None) -> Tensor:
    reward = FunctionReward(functions, tokenizer="the tokenizer")
    return reward(
        input_ids=IDS, attention_mask=MASK, response_start=START, response_end=END, gt_answer=answers or [None, None]
    )


def test_a_function_gets_one_row_in_coatis_convention() -> None:
    seen: list[Any] = []

    def record(input_ids: Tensor, attention_mask: Tensor, **keywords: Any) -> float:
        seen.append((input_ids.tolist(), attention_mask.tolist(), keywords))
        return 1.0

    score(record, answers=["a", "b"])

    expected = {"gt_answer": "b", "response_start": 1, "response_end": 3, "tokenizer": "the tokenizer"}
    assert len(seen) == 2
    assert seen[1] == ([5, 8, 1, 0, 0], [1, 1, 1, 0, 0], expected)


def test_several_functions_add_up() -> None:
    def length(ids: Tensor, mask: Tensor, *, response_start: int, response_end: int, **_: Any) -> int:
        return response_end - response_start

    def half(ids: Tensor, mask: Tensor, **_: Any) -> Tensor:
        return torch.tensor([0.5])

    def right(ids: Tensor, mask: Tensor, **_: Any) -> bool:
        return bool(ids[1] == 8)

    scores = score(length, half, right)

    assert scores.tolist() == [3.5, 3.5]
    assert scores.dtype == torch.float32


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "judge returned nan"),
        (float("inf"), "judge returned inf"),
        (torch.zeros(2), r"judge returned shape \(2,\)"),
        (torch.zeros(2, 3), r"judge returned shape \(2, 3\)"),
        ("x" * 1000, r"judge returned 'x{79}"),
        (None, "judge returned None"),
        ("good", "judge returned 'good'"),
        ("0.5", "judge returned '0.5'"),
        (b"1", "judge returned b'1'"),
    ],
)
def test_what_is_no_finite_number_is_an_error_that_names_function_row_and_value(value: Any, message: str) -> None:
    def judge(ids: Tensor, mask: Tensor, **_: Any) -> Any:
        return value if ids[1] == 8 else 1.0

    with pytest.raises(RewardError, match=rf"^row 1: tests\.rollout\.reward\.test_functions:.*<locals>\.{message}"):
        score(judge)


def test_a_function_that_returns_none_is_left_out_of_its_rows_sum() -> None:
    def of_some(ids: Tensor, mask: Tensor, **_: Any) -> Any:
        return None if ids[1] == 8 else 2.0

    def of_all(ids: Tensor, mask: Tensor, **_: Any) -> float:
        return 0.25

    assert score(of_some, of_all).tolist() == [2.25, 0.25]
    with pytest.raises(RewardError, match="row 1: every reward function returned None: no reward applies to the row"):
        score(of_some, of_some)


def test_a_raising_function_is_an_error_and_not_reward_zero() -> None:
    def judge(ids: Tensor, mask: Tensor, **_: Any) -> float:
        raise KeyError("answer")

    with pytest.raises(RewardError, match=r"^row 0: .*judge raised KeyError\('answer'\) \("):
        score(judge)


def test_an_error_names_the_row_of_the_call_where_functions_get_a_part_of_it() -> None:
    def judge(ids: Tensor, mask: Tensor, **_: Any) -> float:
        return math.nan if ids[1] == 8 else 1.0

    reward = FunctionReward([judge], tokenizer=None)
    reward.bound(1)

    with pytest.raises(RewardError, match=r"^row 1: "):
        reward(IDS, MASK, START, END, [None, None])


def test_an_error_names_the_line_of_the_function_even_if_a_library_raised() -> None:
    def judge(ids: Tensor, mask: Tensor, **_: Any) -> float:
        return float(json.loads("[")[0])

    with pytest.raises(RewardError) as raised:
        score(judge)

    place = f"({__file__}:{judge.__code__.co_firstlineno + 1})"
    assert raised.value.bare.endswith(f"judge raised JSONDecodeError {place}")
    assert raised.value.cause.endswith(f"judge raised JSONDecodeError {place}")


def test_without_functions_there_is_no_reward() -> None:
    with pytest.raises(ConfigError, match="no reward functions"):
        FunctionReward([], tokenizer=None)


def test_a_function_of_another_signature_is_refused_before_it_is_called() -> None:
    def of_trl(completions: list[str], **columns: Any) -> list[float]:
        raise AssertionError

    said = r"of_trl, a function of TRL, cannot be called \(\S+:\d+\), too many positional arguments: its parameters are"
    with pytest.raises(ConfigError, match=said):
        score(of_trl)


def test_a_function_is_loaded_by_name() -> None:
    import math

    assert load_reward_function("math:sqrt") is math.sqrt


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mathematics", "'mathematics' is not of the form module:function"),
        (":sqrt", "not of the form"),
        ("no_such_module_of_rewards:f", "cannot import no_such_module_of_rewards"),
        ("math:no_such", "math has no function no_such"),
        ("math:pi", "math has no function pi"),
        ("broken_rewards_module:f", "cannot import broken_rewards_module: invalid syntax"),
        ("raising_rewards_module:f", "cannot import raising_rewards_module: KeyError: 'HOME_OF_REWARDS'"),
    ],
)
def test_a_name_that_is_no_function_is_a_configuration_error(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_rewards_module.py").write_text("def f(:\n")
    (tmp_path / "raising_rewards_module.py").write_text("raise KeyError('HOME_OF_REWARDS')\n")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(ConfigError, match=rf"rewards: .*{message}"):
        load_reward_function(name)


def test_scores_of_a_reward_model_are_one_finite_number_a_row() -> None:
    assert checked_scores(torch.tensor([1, 2]), 2, "model").dtype == torch.float32
    assert checked_scores([0.5, 1.5], 2, "model").tolist() == [0.5, 1.5]
    with pytest.raises(RewardError, match=r"model returned scores of shape \(2, 1\), not \(2,\)"):
        checked_scores(torch.zeros(2, 1), 2, "model")
    with pytest.raises(RewardError, match="model returned a NoneType, not one number a row"):
        checked_scores(None, 2, "model")
    with pytest.raises(RewardError, match="model returned nan for row 1"):
        checked_scores(torch.tensor([0.0, torch.nan]), 2, "model")


def test_what_each_function_gave_is_kept_row_by_row() -> None:
    functions = [lambda ids, mask, **_: float(ids[0]), lambda ids, mask, **_: 0.5]
    reward = FunctionReward(functions, "the tokenizer")

    scores = reward(IDS, MASK, START, END, [None, None])

    assert reward.parts.tolist() == [[float(ids[0]), 0.5] for ids in IDS]
    assert scores.tolist() == reward.parts.sum(dim=1).tolist()
