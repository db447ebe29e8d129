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


def by_name(response: Any, answer: Any = None, **_: Any) -> float:
    return 0.0


def test_a_keyword_in_the_place_of_the_tokens_is_refused_before_a_start() -> None:
    assert "multiple values for argument 'response': its parameters are (input_ids," in problem_of_call(by_name)


def both(prompts: Any, completions: Any = None, solution_str: Any = None, ground_truth: Any = None) -> float:
    return 0.0


def any_keyword(**columns: Any) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("function", "style", "trainer"),
    [
        (both, "auto", "TRL"),
        (both, "trl", "TRL"),
        (any_keyword, "auto", ""),
        (any_keyword, "trl", "TRL"),
        (any_keyword, "verl", "verl"),
        (any_keyword, "rlhfd", ""),
        (own, "rlhfd", ""),
        (openrlhf, "rlhfd", ""),
    ],
)
def test_the_style_of_a_table_stands_above_the_parameters(
    function: Callable[..., Any], style: str, trainer: str
) -> None:
    assert trainer_of(function, style) == trainer


@pytest.mark.parametrize(
    ("function", "style", "problem"),
    [
        (own, "trl", 'does not fit style = "trl" ('),
        (own, "trl", "and it needs input_ids, attention_mask; its parameters are (input_ids, attention_mask, "),
        (verl, "trl", "TRL gives prompts, completions, completion_ids, the columns of the row, and it does not take "),
        (own, "verl", "and it needs input_ids, attention_mask, response, gt_answer; its parameters are (input_ids, "),
        (trl, "verl", 'style = "auto" goes by them'),
        (both, "verl", "and it needs prompts; its parameters are (prompts, completions, "),
    ],
)
def test_a_function_that_does_not_fit_its_style_is_named(
    function: Callable[..., Any], style: str, problem: str
) -> None:
    found = problem_of_call(function, style)

    assert problem in found and "\n" not in found


@pytest.mark.parametrize(
    ("function", "style"),
    [(trl, "trl"), (verl, "verl"), (own, "rlhfd"), (any_keyword, "trl"), (any_keyword, "verl")],
)
def test_a_function_that_fits_its_style_has_no_problem(function: Callable[..., Any], style: str) -> None:
    assert problem_of_call(function, style) == ""
