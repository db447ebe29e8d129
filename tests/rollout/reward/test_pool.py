"""Reward functions in killable processes: real ones, of modules that this test writes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from pipeline.errors import ConfigError, DeadlineError
from pipeline.experience.vision_rows import VisionRows
from pipeline.rollout.reward.pool import RewardPool
from tests.support.daemon import is_alive, task, wait_until  # noqa: F401 - a fixture

FUNCTIONS = """
import os, signal, threading

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

def first_token(input_ids, attention_mask, **_):
    return float(input_ids[0])

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
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("judges")
    (folder / "judges.py").write_text(FUNCTIONS)
    (folder / "broken.py").write_text("import nothing_of_that_name\n")
    with contextlib.chdir(folder):
        yield folder


@pytest.fixture(scope="module")
def tokenizer(task: Path) -> str:  # noqa: F811
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
    folder: Path, tokenizer: str, capfd: pytest.CaptureFixture[str]
) -> None:
    problems: list[str] = []
    answers = ["a", "hang", {"b": [1, None]}, "raise", "die", None, "nan", "text", 2**70, "freeze", "c", "exit", "d"]
    functions = ("judges:by_answer", "judges:length")
    parts: list[Sequence[float] | None] = []
    with RewardPool(functions, tokenizer, timeout_s=1.0, on_problem=problems.append, on_row=parts.append) as rewards:
        rewards.wait_ready()

        scores = score(rewards, answers)
        of_each = parts[:]

        pid = int(score(rewards, ["pid"])[0]) - 2
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid), 5.0, "it is dead")
        assert score(rewards, ["a", "b"]) == [right(0), right(1)], "one that dies between two calls costs no row"

    bad = [row for row, answer in enumerate(answers) if isinstance(answer, str) and answer in BAD]
    assert [row for row, value in enumerate(scores) if math.isnan(value)] == bad, "errored is no reward, and not 0"
    assert all(value == right(row) for row, value in enumerate(scores) if row not in bad)
    assert problems == [BAD[answers[row]] for row in bad]
    assert [row for row, each in enumerate(of_each) if each is None] == bad
    assert all(each is None or (sum(each) == right(row) and len(each) == 2) for row, each in enumerate(of_each))
    assert "in by_answer" in capfd.readouterr().err, "the log shows where the one that hung was"


FORKING = """
import json, os, sys, threading
import torch
from pipeline.rollout.reward.pool import RewardPool

if sys.argv[2] == "thread":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
with RewardPool(["judges:by_answer", "judges:by_answer"], sys.argv[1], timeout_s=30.0, may_fork=True) as rewards:
    rewards.wait_ready()
    rows = dict(
        input_ids=torch.arange(1, 5).repeat(4, 1), attention_mask=torch.ones(4, 4, dtype=torch.int64),
        response_start=torch.ones(4, dtype=torch.int64), response_end=torch.full((4,), 3),
        gt_answer=["a", "die", "a", None],
    )
    print(json.dumps([rewards(**rows).tolist(), type(rewards._process).__name__]))
"""


def test_scorers_are_forks_of_a_process_without_threads_and_score_the_same(folder: Path, tokenizer: str) -> None:
    forked, executed = (
        json.loads(
            subprocess.run(
                [sys.executable, "-c", FORKING, tokenizer, how], cwd=folder, capture_output=True, text=True, check=True
            ).stdout.replace("NaN", "null")
        )
        for how in ("alone", "thread")
    )

    assert forked == [[10.0, None, 10.0, 10.0], "ForkedChild"]
    assert executed == [[10.0, None, 10.0, 10.0], "Popen"]


def long_rows(rewards: RewardPool, rows: int) -> list[float]:
    """Score rows beyond what a socket holds; each is its first token, by `first_token`."""
    ids = torch.arange(1, rows + 1).unsqueeze(1).repeat(1, 100_000)
    ones, ends = torch.ones(rows, dtype=torch.int64), torch.full((rows,), 3)
    scores = rewards(ids, torch.ones_like(ids), ones, ends, [None] * rows)
    assert scores.dtype == torch.float32
    return scores.tolist()


def test_a_row_half_said_to_a_scorer_that_is_stopped_costs_no_other(folder: Path, tokenizer: str) -> None:
    with RewardPool(["judges:first_token"], tokenizer, timeout_s=1.0) as rewards:
        rewards.wait_ready()
        assert long_rows(rewards, 2) == [1.0, 2.0]
        os.kill(rewards._scorers[0].pid, signal.SIGSTOP)

        first, *others = long_rows(rewards, 4)

        assert math.isnan(first) and others == [2.0, 3.0, 4.0]
        os.kill(rewards._scorers[0].pid, signal.SIGKILL)
        assert long_rows(rewards, 2) == [1.0, 2.0]


def test_a_scorer_that_dies_while_nobody_tells_of_it_ends_the_pool(folder: Path, tokenizer: str) -> None:
    with RewardPool(["judges:by_answer"], tokenizer, timeout_s=0.2) as rewards:
        rewards.wait_ready()
        os.kill(rewards._process.pid, signal.SIGSTOP)
        os.kill(rewards._scorers[0].pid, signal.SIGKILL)

        with pytest.raises(DeadlineError, match="has not answered for 4 s"):
            score(rewards, ["a"])


def test_after_three_rows_in_a_row_that_hang_the_rest_is_not_tried(folder: Path, tokenizer: str) -> None:
    problems: list[str] = []
    with RewardPool(["judges:by_answer"], tokenizer, timeout_s=0.2, on_problem=problems.append) as rewards:
        rewards.wait_ready()

        scores = score(rewards, ["hang"] * 20)

        assert all(map(math.isnan, scores))
        assert problems == ["timeout"] * 20
        assert score(rewards, ["a"]) == [right(0) - 2], "the next call tries again"


def test_two_processes_share_the_rows_and_end_with_the_pool(folder: Path, tokenizer: str) -> None:
    with RewardPool(["judges:pid_of"], tokenizer, timeout_s=30.0, processes=2) as rewards:
        rewards.wait_ready()
        scores = score(rewards, ["a"] * 8)
    pids = {int(pid) for pid in scores}

    assert len(pids) == 2
    wait_until(lambda: not any(map(is_alive, pids)), 5.0, "they die with it")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken:f", "cannot import broken: No module named 'nothing_of_that_name'"),
        ("judges:none", "judges has no function none"),
    ],
)
def test_functions_that_do_not_load_are_bad_configuration(
    folder: Path, tokenizer: str, name: str, message: str
) -> None:
    with RewardPool([name], tokenizer, timeout_s=1.0) as rewards, pytest.raises(ConfigError, match=message):
        rewards.wait_ready()


def test_a_function_that_names_images_gets_those_of_the_row(folder: Path, tokenizer: str) -> None:
    vision = VisionRows(
        pixel_values=[torch.arange(8.0).reshape(4, 2), None],
        image_grid_thws=[torch.tensor([[1, 2, 2]]), None],
        pixel_values_videos=[None, torch.ones(2, 2, dtype=torch.bfloat16)],
        video_grid_thws=[None, torch.tensor([[2, 1, 1]])],
        raw_images=[["a.png"], None],
    )
    with RewardPool(["judges:pixels"], tokenizer, timeout_s=30.0) as rewards:
        rewards.wait_ready()

        assert score(rewards, ["image", "video"], vision=vision) == [28.0 + 4 + 5, 4.0 + 2]


def test_a_cause_is_logged_once_with_the_prompt_and_then_counted(
    folder: Path, tokenizer: str, caplog: pytest.LogCaptureFixture
) -> None:
    line = next(number for number, text in enumerate(FUNCTIONS.splitlines(), 1) if "raise KeyError" in text)
    answers = ["raise", "a", "nan", *["raise"] * 8]
    with RewardPool(("judges:by_answer",), tokenizer, timeout_s=5.0) as rewards:
        rewards.wait_ready()
        rewards.problems.begin(["p.jsonl:7", "p.jsonl:9", "p.jsonl:10"], 1)
        score(rewards, answers[:2])
        score(rewards, answers[2:])
        score(rewards, ["raise"])

    place = f"({folder}/judges.py:{line})"
    assert caplog.messages == [
        f"reward errored: row=0 reason=exception: judges:by_answer raised KeyError for row 0 {place} prompt=p.jsonl:7",
        "reward errored: row=0 reason=invalid: judges:by_answer returned nan for row 0; a reward is a finite number "
        f"({folder}/judges.py:7) prompt=p.jsonl:10",
        f"reward errored again: cause=judges:by_answer raised KeyError {place} times=10",
    ]
