"""Several functions with weights, batched and async ones, and columns: in this process and in a pool."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config.rewards import LengthReward, RewardConfig
from pipeline.errors import ConfigError, RewardError
from pipeline.rollout.reward.functions import FunctionReward, load_reward_function
from pipeline.rollout.reward.pool import RewardPool
from pipeline.rollout.reward.row_rewards import RewardProblems
from tests.support.folders import importable
from tests.support.told import Told

FUNCTIONS = """
import asyncio, os, threading, time
from pipeline import batched

calls = []

def one(input_ids, attention_mask, *, level, **_):
    if level == "raise":
        raise KeyError(level)
    return None if level is None else 10.0 * level

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
def of_level(input_ids, attention_mask, *, level, **_):
    assert input_ids.shape == attention_mask.shape == (len(level), 4)
    return [10.0 * one + float(ids[0]) for one, ids in zip(level, input_ids)]

@batched
async def of_level_async(input_ids, attention_mask, *, level, **_):
    return of_level(input_ids, attention_mask, level=level)

@batched
def short(input_ids, attention_mask, **_):
    return [1.0]

async def slowly(input_ids, attention_mask, *, gt_answer, **_):
    if gt_answer == "late":
        await asyncio.sleep(60)
    if gt_answer == "fail":
        raise OSError("no route")
    if gt_answer == "cancel":
        task = asyncio.ensure_future(asyncio.sleep(60))
        task.cancel()
        await task
    if gt_answer in ("now", "none"):
        return 0.5 if gt_answer == "now" else None
    await asyncio.sleep(0.3)
    return 0.5

@batched
async def cancels(input_ids, attention_mask, **_):
    raise asyncio.CancelledError

@batched
async def all_slowly(input_ids, attention_mask, *, level, **_):
    await asyncio.sleep(0.01)
    return level
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with importable(tmp_path_factory.mktemp("together"), together_rewards=FUNCTIONS) as folder:
        yield folder


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
    tables: dict[str, RewardConfig | str] = {
        "exact": "exact",
        "length": LengthReward(name="length", limit_tokens=4, buffer_tokens=4),
    }
    functions = [tables.get(name, f"together_rewards:{name}") for name in names]
    with RewardPool(functions, str(tokenizer / "model"), timeout_s=timeout_s, **options) as pool:
        yield pool


def test_results_are_weighted_and_kept_as_they_were(folder: Path) -> None:
    reward = loaded("one", "plain", "both", weights=[0.5, -2, 0], labels=["a", "b", "c"])

    scores = reward(**rows(["", ""]))

    assert scores.tolist() == [-2.0, 3.0]
    assert reward.parts[:, :2].tolist() == [[0.0, 1.0], [10.0, 1.0]] and (reward.parts[:, 2] > 2).all()


def test_a_weight_for_each_function_or_none() -> None:
    with pytest.raises(ConfigError, match="1 weight for 2 reward functions"):
        FunctionReward([print, print], None, weights=[1.0])


def test_a_function_gets_the_columns_that_it_names_or_all_of_them(folder: Path) -> None:
    given = [{"level": 1, "other": 2, "response": 0}, {"level": 2}]

    assert loaded("columns")(**rows(["", ""], [{"level": 1, "other": 2}, {"level": 2}])).tolist() == [3, 2]
    assert loaded("one", "plain")(**rows(["", ""], given)).tolist() == [11, 21]
    with pytest.raises(RewardError, match=r"one: needs the column 'level', the prompt's row has other$"):
        loaded("one")(**rows([""], [{"other": 1}]))


def test_one_without_a_reward_among_batched_rows_is_an_error_of_its_row(folder: Path) -> None:
    with pytest.raises(RewardError, match=r"row 1: .*both returned None"):
        loaded("both")(**rows(["", "none"]))
    with pytest.raises(RewardError, match=r"row 0: .*both raised KeyError\('x'\)"):
        loaded("both")(**rows(["error", ""]))
    with pytest.raises(RewardError, match="short returned 1 score for 2 rows"):
        loaded("short")(**rows(["", ""]))


@pytest.mark.parametrize("name", ["of_level", "of_level_async"])
def test_a_row_without_a_column_is_left_out_of_a_batched_call(folder: Path, name: str) -> None:
    columns = [{"level": 1}, {"other": 2}, {"level": 3}]
    problems = RewardProblems()

    scores = loaded(name, problems=problems)(**rows([""] * 3, columns)).tolist()
    without = loaded(name, problems=problems)(**rows([""], [{}])).tolist()

    assert (scores[0], scores[2]) == (11.0, 31.0) and all(map(math.isnan, [scores[1], *without]))
    with pytest.raises(RewardError, match=r"row 1: .*needs the column 'level', the prompt's row has other"):
        loaded(name)(**rows([""] * 3, columns))


def test_the_log_says_which_column_a_row_lacks(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It quotes no text of the run: `daemon.log_texts` is off."""
    for name in ("one", "of_level"):
        loaded(name, problems=RewardProblems())(**rows([""], [{"other": 1}]))

    lacks = "needs the column 'level', the prompt's row has other"
    assert caplog.messages == [
        f"reward errored: row=0 reason=exception: together_rewards:{name}: {lacks}" for name in ("one", "of_level")
    ]


def test_async_calls_run_at_the_same_time_and_end_at_the_limit(folder: Path) -> None:
    began_s = time.monotonic()

    assert loaded("slowly")(**rows([""] * 40)).tolist() == [0.5] * 40
    assert time.monotonic() - began_s < 40 * 0.3 / 2
    with pytest.raises(RewardError, match=r"row 1: .*slowly raised TimeoutError\(\)"):
        loaded("slowly", timeout_s=0.5)(**rows(["now", "late"]))


def test_a_function_whose_own_task_is_cancelled_costs_its_row_alone(folder: Path) -> None:
    """CancelledError is no Exception; nobody cancels the call of a function."""
    problems = RewardProblems()

    scores = loaded("slowly", problems=problems)(**rows(["now", "cancel"])).tolist()
    together = loaded("cancels", problems=problems)(**rows(["", ""])).tolist()

    assert scores[0] == 0.5 and all(map(math.isnan, [scores[1], *together]))
    with pytest.raises(RewardError, match=r"row 1: .*slowly raised CancelledError"):
        loaded("slowly")(**rows(["now", "cancel"]))


def test_a_pool_scores_rows_one_by_one_and_together_alike(folder: Path, task: Path) -> None:
    """It was not waited for."""
    names = ("both", "one", "slowly", "length", "all_slowly", "columns")
    with pooled(folder, task, *names, weights=[1, 1, 1, 8, 100, 0]) as pool:
        first = pool(**rows(["", "", ""]))
        parts = pool.parts
        second = pool(**rows(["", "", ""]))
        none = pool(**rows([]))

    # One call for the three rows, then one more: 3.25, 3.5; 10 a level; 0.5; -0.5 for two tokens, by 8; 100 a level.
    assert first.tolist() == [3.25 + 0.5 - 4.0 + 110 * level for level in range(3)]
    assert (second - first).tolist() == [0.25] * 3
    assert none.tolist() == []
    assert parts[1, :5].tolist() == [3.25, 10.0, 0.5, -0.5, 1.0] and pool.parts.shape == (0, 6)


def test_rows_of_a_pool_fail_alone_where_they_can(folder: Path, task: Path) -> None:
    told = Told()
    with pooled(folder, task, "slowly", "one", timeout_s=1.0, weights=[1, 2], telemetry=told) as pool:
        # None does not apply; 6e38 is beyond float32.
        levels = [{"level": level} for level in (1, None, 2, 3, "raise", None, 3e37)]

        scores = pool(**rows(["now", "now", "late", "fail", "now", "none", "now"], levels)).tolist()
        missing = pool(**rows(["now", "now"], [{"level": 1}, {}])).tolist()
        texts = pool.problem

    assert scores[:2] == [20.5, 0.5] and all(map(math.isnan, scores[2:]))
    assert told.counted["reward_errored"] == ["timeout", "exception", "exception", "invalid", "invalid", "exception"]
    assert missing[0] == 20.5 and math.isnan(missing[1])
    assert texts is not None and "needs the column 'level', the prompt's row has no further columns" in texts.text


def test_a_batched_call_that_dies_or_hangs_costs_its_rows_and_the_next_call_is_scored(folder: Path, task: Path) -> None:
    """The successor of a dead scorer, which is still starting as the next call begins, gets all rows in one call."""
    told = Told()
    with pooled(folder, task, "both", "plain", timeout_s=1.0, telemetry=told) as pool:
        dead = pool(**rows(["", "die"])).tolist()
        hung = pool(**rows(["hang", ""])).tolist()
        good = pool(**rows(["", ""])).tolist()

    assert all(map(math.isnan, dead + hung))
    assert told.counted["reward_errored"] == ["exception"] * 2 + ["timeout"] * 2
    assert good == [3.25, 3.25]


def test_columns_are_sent_to_functions_that_take_them(folder: Path) -> None:
    assert not loaded("plain").facts["wants_columns"]
    assert loaded("plain", "one").facts["wants_columns"] and loaded("columns").facts["wants_columns"]
