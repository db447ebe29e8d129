"""Several functions with weights, batched and async ones, and columns: in this process and in a pool."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config.rewards import RewardConfig
from pipeline.errors import ConfigError, RewardError
from pipeline.rollout.reward.functions import FunctionReward, load_reward_function
from pipeline.rollout.reward.pool import RewardPool
from tests.support.daemon import task  # noqa: F401 - a fixture

FUNCTIONS = """
import asyncio, os, threading, time
from pipeline import batched

calls = []

def one(input_ids, attention_mask, *, level, **_):
    if level == "raise":
        raise KeyError(level)
    return 10.0 * level

def plain(input_ids, attention_mask, *, gt_answer, response_start, response_end, tokenizer):
    return 1

def columns(input_ids, attention_mask, *, gt_answer, response_start, response_end, tokenizer, **columns):
    return sum(columns.values())

@batched
def both(input_ids, attention_mask, *, gt_answer, response_start, response_end, level, **others):
    assert input_ids.shape[0] == len(level) == len(gt_answer) == len(response_start)
    calls.append(len(level))
    if "die" in gt_answer:
        os._exit(3)
    if "hang" in gt_answer:
        threading.Event().wait()
    scores = [len(level) + 0.25 * len(calls) for _ in level]
    return [None if answer == "none" else KeyError("x") if answer == "error" else score
            for answer, score in zip(gt_answer, scores)]

@batched
def short(input_ids, attention_mask, **_):
    return [1.0]

async def slowly(input_ids, attention_mask, *, gt_answer, **_):
    if gt_answer == "late":
        await asyncio.sleep(60)
    if gt_answer == "fail":
        raise OSError("no route")
    if gt_answer == "now":
        return 0.5
    await asyncio.sleep(0.3)
    return 0.5

@batched
async def all_slowly(input_ids, attention_mask, *, level, **_):
    await asyncio.sleep(0.01)
    return level
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("together")
    (folder / "together_rewards.py").write_text(FUNCTIONS)
    with contextlib.chdir(folder):
        sys.path.append(str(folder))
        yield folder
        sys.path.remove(str(folder))


def rows(answers: Sequence[Any], columns: Sequence[dict[str, Any]] | None = None) -> dict[str, Any]:
    count = len(answers)
    return {
        "input_ids": torch.arange(1, 5).repeat(count, 1),
        "attention_mask": torch.ones(count, 4, dtype=torch.int64),
        "response_start": torch.ones(count, dtype=torch.int64),
        "response_end": torch.full((count,), 3),
        "gt_answer": answers,
        "columns": [{"level": row} for row in range(count)] if columns is None else columns,
    }


def loaded(*names: str, **options: Any) -> FunctionReward:
    functions = [load_reward_function(f"together_rewards:{name}") for name in names]
    return FunctionReward(functions, None, **options)


@contextlib.contextmanager
def pooled(folder: Path, tokenizer: Path, *names: str, timeout_s: float = 30.0, **options: Any) -> Iterator[RewardPool]:
    functions = [name if name in ("exact", "length") else f"together_rewards:{name}" for name in names]
    with RewardPool(functions, str(tokenizer / "model"), timeout_s=timeout_s, **options) as pool:
        pool.wait_ready(120)
        yield pool


def test_results_are_weighted_and_kept_as_they_were(folder: Path) -> None:
    parts: list[Sequence[float]] = []
    reward = loaded("one", "plain", "both", weights=[0.5, -2, 0], on_row=parts.append, labels=["a", "b", "c"])

    scores = reward(**rows(["", ""]))

    assert scores.tolist() == [-2.0, 3.0]
    assert [list(one) for one in parts] == [[0.0, -2.0, 0.0], [5.0, -2.0, 0.0]]
    assert reward.parts[:, :2].tolist() == [[0.0, 1.0], [10.0, 1.0]] and (reward.parts[:, 2] > 2).all()


def test_a_weight_for_each_function_or_none() -> None:
    with pytest.raises(ConfigError, match="1 weights for 2 reward functions"):
        FunctionReward([print, print], None, weights=[1.0])


def test_a_function_gets_the_columns_that_it_names_or_all_of_them(folder: Path) -> None:
    given = [{"level": 1, "other": 2, "response": 0}, {"level": 2}]

    assert loaded("columns")(**rows(["", ""], [{"level": 1, "other": 2}, {"level": 2}])).tolist() == [3, 2]
    assert loaded("one", "plain")(**rows(["", ""], given)).tolist() == [11, 21]
    with pytest.raises(
        RewardError, match=r"one raised LookupError.*needs the column 'level', the prompt's row has other"
    ):
        loaded("one")(**rows([""], [{"other": 1}]))


def test_one_without_a_reward_among_batched_rows_is_an_error_of_its_row(folder: Path) -> None:
    with pytest.raises(RewardError, match="both returned None for row 1"):
        loaded("both")(**rows(["", "none"]))
    with pytest.raises(RewardError, match=r"both raised KeyError\('x'\) for row 0"):
        loaded("both")(**rows(["error", ""]))
    with pytest.raises(RewardError, match="short returned 1 scores for 2 rows"):
        loaded("short")(**rows(["", ""]))


def test_async_calls_run_at_the_same_time_and_end_at_the_limit(folder: Path) -> None:
    began_s = time.monotonic()

    assert loaded("slowly")(**rows([""] * 40)).tolist() == [0.5] * 40
    assert time.monotonic() - began_s < 40 * 0.3 / 2
    with pytest.raises(RewardError, match=r"slowly raised TimeoutError\(\) for row 1"):
        loaded("slowly", timeout_s=0.5)(**rows(["now", "late"]))


def test_a_pool_scores_rows_one_by_one_and_together_alike(folder: Path, task: Path) -> None:  # noqa: F811
    names = ("both", "one", "slowly", "length", "all_slowly", "columns")
    settings = RewardConfig(length_limit=4, length_buffer=4)
    parts: list[Sequence[float] | None] = []
    with pooled(folder, task, *names, settings=settings, weights=[1, 1, 1, 8, 100, 0], on_row=parts.append) as pool:
        first = pool(**rows(["", "", ""]))
        second = pool(**rows(["", "", ""]))
        none = pool(**rows([]))

    # One call for the three rows, then one more: 3.25, 3.5; 10 a level; 0.5; -0.5 for two tokens, by 8; 100 a level.
    assert first.tolist() == [3.25 + 0.5 - 4.0 + 110 * level for level in range(3)]
    assert (second - first).tolist() == [0.25] * 3
    assert none.tolist() == []
    assert parts[1] == [3.25, 10.0, 0.5, -4.0, 100.0, 0.0]
    assert pool.parts.shape == (0, 6)


def test_rows_of_a_pool_fail_alone_where_they_can(folder: Path, task: Path) -> None:  # noqa: F811
    problems: list[str] = []
    with pooled(folder, task, "slowly", "one", timeout_s=5.0, on_problem=problems.append) as pool:
        levels = [{"level": 1}, {"level": 2}, {"level": 3}, {"level": "raise"}]

        scores = pool(**rows(["now", "late", "fail", "now"], levels)).tolist()
        missing = pool(**rows(["now", "now"], [{"level": 1}, {}])).tolist()
        texts = pool.problem

    assert scores[0] == 10.5 and all(map(math.isnan, scores[1:]))
    assert problems == ["timeout", "exception", "exception", "exception"]
    assert missing[0] == 10.5 and math.isnan(missing[1])
    assert texts is not None and "needs the column 'level', the prompt's row has no further columns" in texts.text


def test_a_batched_call_that_dies_or_hangs_costs_its_rows_and_the_next_call_is_scored(
    folder: Path,
    task: Path,  # noqa: F811
) -> None:
    problems: list[str] = []
    with pooled(folder, task, "both", "plain", timeout_s=5.0, on_problem=problems.append) as pool:
        dead = pool(**rows(["", "die"])).tolist()
        hung = pool(**rows(["hang", ""])).tolist()
        good = pool(**rows(["", ""])).tolist()

    assert all(map(math.isnan, dead + hung))
    assert problems == ["exception"] * 2 + ["timeout"] * 2
    assert good == [3.25, 3.25]


def test_columns_are_sent_to_functions_that_take_them(folder: Path) -> None:
    assert not loaded("plain").wants_columns
    assert loaded("plain", "one").wants_columns and loaded("columns").wants_columns


def test_a_batched_function_gets_all_rows_in_one_call_after_its_scorer_was_ended(folder: Path, task: Path) -> None:  # noqa: F811
    """The successor is still starting when the next call begins."""
    with pooled(folder, task, "both", timeout_s=1.0) as pool:
        hung = pool(**rows(["hang", ""])).tolist()
        good = pool(**rows(["", ""])).tolist()

    assert all(map(math.isnan, hung))
    assert good == [2.25, 2.25]


def test_a_pool_that_was_not_waited_for_scores_as_one_that_was(folder: Path, task: Path) -> None:  # noqa: F811
    names = ["together_rewards:one", "together_rewards:both"]
    with RewardPool(names, str(task / "model"), timeout_s=30.0) as pool:
        assert pool(**rows(["", ""])).tolist() == [2.25, 12.25]
