"""Reward functions in killable processes: real ones, of modules that this test writes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipeline.experience.vision_rows import VisionRows
from pipeline.rollout.reward.pool import RewardPool
from pipeline.rollout.reward.row_rewards import RewardProblems
from tests.support.daemon import is_alive, wait_until
from tests.support.told import Told

FUNCTIONS = """
import gc, os, signal, threading

def length(input_ids, attention_mask, *, gt_answer, response_start, response_end, tokenizer):
    return 2 if response_end - response_start == 2 and response_start == 1 else 1000

def by_answer(input_ids, attention_mask, *, gt_answer, response_start, response_end, tokenizer):
    if gt_answer == "hang":
        threading.Event().wait()
    if gt_answer == "raise":
        raise KeyError("no such thing")
    if gt_answer == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if gt_answer == "exit":
        os._exit(3)
    if gt_answer == "nan":
        return float("nan")
    if gt_answer == "text":
        return "good"
    if gt_answer == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    if gt_answer == "pid":
        return os.getpid()
    return float(input_ids[response_start:response_end].sum()) + 0.25 * (attention_mask.tolist() == [1, 1, 1, 0])

def pixels(input_ids, attention_mask, *, gt_answer, pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw,
           raw_images, **_):
    if gt_answer == "image":
        assert pixel_values_videos is None and video_grid_thw is None
        return float(pixel_values.sum()) + int(image_grid_thw.prod()) + len(raw_images[0])
    assert pixel_values is None and image_grid_thw is None and raw_images is None
    return float(pixel_values_videos.float().sum()) + int(video_grid_thw.prod())

def pid_of(input_ids, attention_mask, *, tokenizer, **_):
    assert tokenizer.decode(input_ids)
    return os.getpid()

def kept_from_collections(*_, **__):
    return gc.get_freeze_count() if gc.isenabled() else 0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("judges")
    (folder / "judges.py").write_text(FUNCTIONS)
    (folder / "broken.py").write_text("import nothing_of_that_name\n")
    (folder / "ending.py").write_text("import os\nos._exit(9)\n")
    with contextlib.chdir(folder):
        yield folder


@pytest.fixture(scope="module")
def tokenizer(task: Path) -> str:
    return str(task / "model")


def score(rewards: RewardPool, answers: list, **images: VisionRows) -> list[float]:
    rows = len(answers)
    ids = torch.arange(1, 5).repeat(rows, 1) * torch.arange(1, rows + 1).unsqueeze(1)
    scores = rewards(
        input_ids=ids,
        attention_mask=torch.tensor([[1, 1, 1, 0]]).repeat(rows, 1),
        response_start=torch.ones(rows, dtype=torch.int64),
        response_end=torch.full((rows,), 3),
        gt_answer=answers,
        **images,
    )
    assert scores.dtype == torch.float32
    return scores.tolist()


def right(row: int) -> float:
    """Tokens 1 and 2 of row r are 2 (r + 1) and 3 (r + 1), a quarter for the right mask, 2 by the second function."""
    return 5 * (row + 1) + 0.25 + 2


BAD = {
    "hang": "timeout",
    "freeze": "timeout",
    "raise": "exception",
    "die": "exception",
    "exit": "exception",
    "nan": "invalid",
    "text": "invalid",
}
"""The function's action for an answer, and the reason the row is counted under."""


def test_a_row_without_a_reward_is_errored_and_the_others_are_scored(
    folder: Path, tokenizer: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever happens to it: the function, a scorer that is stopped or killed, many rows that hang."""
    told = Told()
    problems = told.counted["reward_errored"]
    functions = ("judges:by_answer", "judges:length")
    with RewardPool(functions, tokenizer, timeout_s=1.5, telemetry=told) as rewards:
        rewards.wait_ready()
        rows_that_fail_cost_no_other(rewards, problems)
        assert "in by_answer" in capfd.readouterr().err, "the log shows where the one that hung was"
        both = "judges:by_answer or judges:length"
        for said in (
            f"reason=timeout: {both} gave no score within 1.5 s (rollout.reward_timeout_s)",
            f"reason=exception: the process that called {both} was killed by SIGKILL",
            f"reason=exception: the process that called {both} ended with exit code 3",
        ):
            assert any(said in line for line in caplog.messages), "both may be the one at fault"
        a_row_half_said_to_a_stopped_scorer_costs_no_other(rewards)
        problems.clear()
        after_three_rows_that_hang_the_rest_is_not_tried(rewards)
        assert problems == ["timeout"] * 20
        caplog.clear()
        a_cause_is_logged_once_with_the_prompt_and_then_counted(rewards)
    line = next(number for number, text in enumerate(FUNCTIONS.splitlines(), 1) if "raise KeyError" in text)
    place = f"({folder}/judges.py:{line})"
    assert caplog.messages == [
        f"reward errored: row=1 reason=exception: judges:by_answer raised KeyError {place} prompt=p.jsonl:9",
        "reward errored: row=0 reason=invalid: judges:by_answer returned nan; a reward is a finite number "
        f"({folder}/judges.py:7) prompt=p.jsonl:10",
        f"reward errored again: cause=judges:by_answer raised KeyError {place} times=10",
    ]


def rows_that_fail_cost_no_other(judged: RewardPool, problems: list[str]) -> None:
    answers = ["a", "hang", {"b": [1, None]}, "raise", "die", None, "nan", "text", 2**70, "freeze", "c", "exit", "d"]

    scores = score(judged, answers)

    bad = [row for row, answer in enumerate(answers) if isinstance(answer, str) and answer in BAD]
    assert [row for row, value in enumerate(scores) if math.isnan(value)] == bad, "errored is no reward, and not 0"
    assert all(value == right(row) for row, value in enumerate(scores) if row not in bad)
    assert problems == [BAD[answers[row]] for row in bad]
    assert judged.parts.shape == (len(answers), 2)
    assert [row for row, each in enumerate(judged.parts) if each.isnan().all()] == bad
    assert all(float(each.sum()) == right(row) for row, each in enumerate(judged.parts) if row not in bad)

    pid = int(score(judged, ["pid"])[0]) - 2
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid), 5.0, "it is dead")
    assert score(judged, ["a", "b"]) == [right(0), right(1)], "one that dies between two calls costs no row"


FORKING = """
import json, os, sys, threading
import torch
from pipeline.errors import ConfigError
from pipeline.models.loading import load_tokenizer
from pipeline.rollout.reward.pool import RewardPool

# As a worker has done it before: each of the three forks would import transformers anew.
load_tokenizer(sys.argv[1])

def scored():
    with RewardPool(["judges:by_answer", "judges:by_answer"], sys.argv[1], timeout_s=30.0, may_fork=True) as rewards:
        rewards.wait_ready()
        rows = dict(
            input_ids=torch.arange(1, 5).repeat(4, 1), attention_mask=torch.ones(4, 4, dtype=torch.int64),
            response_start=torch.ones(4, dtype=torch.int64), response_end=torch.full((4,), 3),
            gt_answer=["a", "die", "a", None],
        )
        return [rewards(**rows).tolist(), type(rewards._pool.forkserver).__name__]

def refused(name):
    with RewardPool([name], sys.argv[1], timeout_s=1.0, may_fork=True) as rewards:
        try:
            rewards.wait_ready()
        except ConfigError as error:
            return str(error)

seen = [scored(), refused("broken:f"), refused("ending:f")]
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(json.dumps([*seen, scored()]))
"""


def test_scorers_are_forks_of_a_process_without_threads_and_score_the_same(folder: Path, tokenizer: str) -> None:
    """Functions that do not load are bad configuration."""
    done = subprocess.run(
        [sys.executable, "-c", FORKING, tokenizer], cwd=folder, capture_output=True, text=True, check=True
    )
    forked, broken, ending, executed = json.loads(done.stdout.splitlines()[-1].replace("NaN", "null"))

    assert forked == [[10.0, None, 10.0, 10.0], "ForkedChild"]
    assert executed == [[10.0, None, 10.0, 10.0], "Popen"]
    assert broken.endswith("cannot import broken: No module named 'nothing_of_that_name'")
    assert ending == "rewards: the process that loads them ended with exit code 9"


def long_rows(rewards: RewardPool, rows: int) -> list[float]:
    """Score rows beyond what a socket holds, by `by_answer` and `length`: five times the row's number, and 2."""
    ids = torch.arange(1, 100_001).repeat(rows, 1) * torch.arange(1, rows + 1).unsqueeze(1)
    ones, ends = torch.ones(rows, dtype=torch.int64), torch.full((rows,), 3)
    return rewards(ids, torch.ones_like(ids), ones, ends, [None] * rows).tolist()


def send(judged: RewardPool, number: signal.Signals) -> None:
    (scorer,) = judged._pool.processes
    assert scorer.is_ready
    os.kill(scorer.pid, number)


def a_row_half_said_to_a_stopped_scorer_costs_no_other(judged: RewardPool) -> None:
    assert long_rows(judged, 2) == [7.0, 12.0]
    send(judged, signal.SIGSTOP)

    first, *others = long_rows(judged, 4)

    assert math.isnan(first) and others == [12.0, 17.0, 22.0]
    send(judged, signal.SIGKILL)
    assert long_rows(judged, 2) == [7.0, 12.0]


def after_three_rows_that_hang_the_rest_is_not_tried(judged: RewardPool) -> None:
    assert all(map(math.isnan, score(judged, ["hang"] * 20)))
    assert score(judged, ["a"]) == [right(0)], "the next call tries again"


def a_cause_is_logged_once_with_the_prompt_and_then_counted(judged: RewardPool) -> None:
    judged.problems = RewardProblems()
    judged.problems.begin(["p.jsonl:7", "p.jsonl:9"], 1)
    score(judged, ["a", "raise"])
    judged.problems.begin(["p.jsonl:10"], 9)
    score(judged, ["nan", *["raise"] * 8])
    score(judged, ["raise"])


def test_two_processes_share_the_rows_with_their_images_and_end_with_the_pool(folder: Path, tokenizer: str) -> None:
    vision = VisionRows(
        pixel_values=[torch.arange(8.0).reshape(4, 2), None] * 4,
        image_grid_thws=[torch.tensor([[1, 2, 2]]), None] * 4,
        pixel_values_videos=[None, torch.ones(2, 2, dtype=torch.bfloat16)] * 4,
        video_grid_thws=[None, torch.tensor([[2, 1, 1]])] * 4,
        raw_images=[["a.png"], None] * 4,
    )
    functions = ["judges:pixels", "judges:pid_of", "judges:kept_from_collections"]
    with RewardPool(functions, tokenizer, timeout_s=30.0, processes=2) as rewards:
        rewards.wait_ready()
        assert os.getpgid(rewards._pool.forkserver.pid) != os.getpgrp(), "a signal to this group is this process's"
        score(rewards, ["image", "video"] * 4, vision=vision)
        values, pids, kept = rewards.parts.T.tolist()

    assert values == [28.0 + 4 + 5, 4.0 + 2] * 4
    assert len(set(pids)) == 2
    assert min(kept) > 100_000, "a collection in a scorer does not copy the objects of the imports"
    assert not any(is_alive(int(pid)) for pid in pids), "they die with it"


def test_rows_that_hang_at_the_same_time_are_not_rows_in_a_row(folder: Path, tokenizer: str) -> None:
    """As many rows as there are processes can hang at the front of a call, and say nothing of those behind them."""
    with RewardPool(["judges:by_answer", "judges:length"], tokenizer, timeout_s=1.0, processes=3) as rewards:
        rewards.wait_ready()
        scores = score(rewards, ["hang"] * 3 + ["a"] * 4)

    assert all(map(math.isnan, scores[:3])) and scores[3:] == [right(row) for row in range(3, 7)]
