"""Reward functions with the signature of TRL or verl, called as their trainer calls them.

TRL   fn(prompts, completions, completion_ids=, **columns) -> a number or None a row, one call for all rows, also async
verl  fn(data_source=, solution_str=, ground_truth=, extra_info=) -> a number, or a dict with "score", a call a row

Both get the text of a response without special tokens, as these trainers decode it, and neither gets tokens by column.
A function that cannot take a keyword is called without it. Numbers beside the score: `pipeline.rollout.reward.numbers`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from pipeline.config.user_modules import ANSWER, PROMPT, trainer_of
from pipeline.errors import RewardError
from pipeline.rollout.reward.numbers import REWARD, Scored
from pipeline.rollout.reward.signatures import batched, is_async

Function = Callable[..., Any]


def adapted(function: Function, style: str = "auto") -> Function:
    """Return a reward function with the signature of this project; one that has it already is returned as it is.

    Args:
        function: A function with the signature of this project, TRL or verl.
        style: `RewardStyle` of its table: "auto" goes by the signature.
    """
    match trainer_of(function, style):
        case "TRL":
            return _named_as(_of_trl(function), function, (PROMPT, ANSWER), takes_any=True)
        case "verl":
            return _named_as(_of_verl(function), function, ("data_source", "extra_info"), takes_any=False)
    return function


def _of_trl(function: Function) -> Function:
    takes = _taken_by(function)

    def keywords(ids: torch.Tensor, columns: dict[str, Any]) -> dict[str, Any]:
        prompts, tokenizer = columns.pop(PROMPT), columns.pop("tokenizer")
        spans = zip(columns.pop("response_start"), columns.pop("response_end"), strict=True)
        columns.setdefault(ANSWER, columns.pop("gt_answer"))
        completion_ids = [row[start:end].tolist() for row, (start, end) in zip(ids, spans, strict=True)]
        texts = _texts(tokenizer, completion_ids)
        # TRL's conversational form: the response is the last message.
        completions = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        return takes({**columns, "prompts": prompts, "completions": completions, "completion_ids": completion_ids})

    return batched(_called(function, keywords))


def _of_verl(function: Function) -> Function:
    takes = _taken_by(function)

    def keywords(ids: torch.Tensor, row: dict[str, Any]) -> dict[str, Any]:
        if row["gt_answer"] is None:
            lacks = (
                "the row has no ground truth: prompts.answer_column names its column, in the data of verl "
                '"reward_model.ground_truth"'
            )
            raise RewardError(lacks, raised=True, cause=lacks)
        (text,) = _texts(row["tokenizer"], [ids[row["response_start"] : row["response_end"]].tolist()])
        return takes(
            {
                "data_source": row.get("data_source") or "",
                "solution_str": text,
                "ground_truth": row["gt_answer"],
                "extra_info": row.get("extra_info") or {},
            }
        )

    def score(result: Any) -> Any:
        if not isinstance(result, Mapping):
            return result
        if "score" in result:
            return Scored(result["score"], {key: value for key, value in result.items() if key != "score"})
        if REWARD not in result:
            raise RewardError(f'the dict has no "score", its keys are {", ".join(map(str, result))}')
        return result

    return _called(function, keywords, score)


def _called(
    function: Function,
    keywords: Callable[[torch.Tensor, dict[str, Any]], dict[str, Any]],
    score: Callable[[Any], Any] = lambda result: result,
) -> Function:
    """Return a call of a function by the keywords of its trainer, async if the function is."""
    if is_async(function):

        async def call_async(ids: torch.Tensor, mask: torch.Tensor, **given: Any) -> Any:
            return score(await function(**keywords(ids, given)))

        return call_async

    def call(ids: torch.Tensor, mask: torch.Tensor, **given: Any) -> Any:
        return score(function(**keywords(ids, given)))

    return call


def _texts(tokenizer: Any, rows: Sequence[Sequence[int]]) -> list[str]:
    return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in rows]


def _taken_by(function: Function) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that leaves out the keywords that a function does not take."""
    parameters = inspect.signature(function).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return lambda keywords: keywords
    return lambda keywords: {name: value for name, value in keywords.items() if name in parameters}


def _named_as(call: Function, function: Function, columns: Iterable[str], *, takes_any: bool) -> Function:
    """Return a call that is shown under the name and location of a function, with its own parameters."""
    shown = functools.wraps(function)(call)
    kinds = inspect.Parameter
    named = [kinds(name, kinds.KEYWORD_ONLY, default=None) for name in columns]
    any_other = [kinds("columns", kinds.VAR_KEYWORD)] if takes_any else []
    rows = [kinds(name, kinds.POSITIONAL_OR_KEYWORD) for name in ("input_ids", "attention_mask")]
    # The signature of a wrapper is otherwise that of the function in it.
    shown.__signature__ = inspect.Signature([*rows, *named, *any_other])  # type: ignore[attr-defined]
    return shown
