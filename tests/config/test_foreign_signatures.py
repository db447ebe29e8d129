"""Reward functions written for other trainers are known by their parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipeline.config.user_modules import problem_of_call, trainer_of


def trl(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
    return [0.0]


def trl_short(completions: Any, answer: Any, **kwargs: Any) -> list[float]:
    return [0.0]


def verl(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None) -> float:
    return 0.0


def openrlhf(queries: Any, prompts: Any, labels: Any) -> float:
    return 0.0


def own(input_ids: Any, attention_mask: Any, *, response: Any, gt_answer: Any, prompts: Any = None, **_: Any) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("function", "trainer"),
    [(trl, "TRL"), (trl_short, "TRL"), (verl, "verl"), (openrlhf, "OpenRLHF"), (own, ""), (print, "")],
)
def test_a_function_of_another_trainer_is_known_by_its_parameters(function: Callable[..., Any], trainer: str) -> None:
    assert trainer_of(function) == trainer


def test_the_signature_of_openrlhf_is_named_with_that_of_here() -> None:
    problem = problem_of_call(openrlhf)

    assert problem.startswith("has the signature of OpenRLHF (")
    assert "(input_ids, attention_mask, *, response, gt_answer, **_)" in problem and "\n" not in problem


@pytest.mark.parametrize("function", [trl, trl_short, verl, own])
def test_a_function_of_here_of_trl_and_of_verl_has_no_problem(function: Callable[..., Any]) -> None:
    assert problem_of_call(function) == ""
