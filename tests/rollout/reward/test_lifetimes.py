"""Lives of the things that reward functions keep and start: one event loop, and programs that end with the worker."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipeline.rollout.reward.functions import FunctionReward, load_reward_function
from pipeline.rollout.reward.pool import RewardPool
from tests.support.daemon import is_alive, wait_until

FUNCTIONS = """
import asyncio

room = asyncio.Semaphore(1)
client = {}

async def with_semaphore(input_ids, attention_mask, **_):
    async with room:
        await asyncio.sleep(0)
    return 1.0

async def with_client(input_ids, attention_mask, **_):
    # As the connections of a client.
    loop = client.setdefault("loop", asyncio.get_running_loop())
    answer = loop.create_future()
    loop.call_soon(answer.set_result, 2.0)
    return await answer
"""
OF_THE_IMPORT = """
import asyncio

at_import = asyncio.get_event_loop()

async def of_the_import(input_ids, attention_mask, **_):
    return float(at_import is asyncio.get_running_loop())
"""
WITHOUT_LIMIT = """
import subprocess, sys
from unittest.mock import MagicMock
from pipeline.config.load import load
from pipeline.rollout import process

def load_local(*_):
    print(subprocess.Popen(["sleep", "900"]).pid, flush=True)
    sys.stdin.read()

process.load_local = load_local
process.prepare = lambda *_: (None, None)
sets = ['rewards=["lives:with_client"]', "rollout.reward_timeout_s=0"]
process.run(load(None, sets, {}).config, MagicMock())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "lives.py").write_text(FUNCTIONS)
    (tmp_path / "imported.py").write_text(OF_THE_IMPORT)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with contextlib.chdir(tmp_path):
        yield tmp_path
    sys.modules.pop("lives", None)


@pytest.fixture(scope="module")
def tokenizer(task: Path) -> str:
    return str(task / "model")


def score(rewards: RewardPool | FunctionReward, answers: list[str]) -> list[float]:
    rows = len(answers)
    return rewards(
        input_ids=torch.ones(rows, 4, dtype=torch.int64),
        attention_mask=torch.ones(rows, 4, dtype=torch.int64),
        response_start=torch.ones(rows, dtype=torch.int64),
        response_end=torch.full((rows,), 3),
        gt_answer=answers,
    ).tolist()


def test_a_semaphore_and_a_client_of_a_module_serve_all_calls_of_a_scorer(folder: Path, tokenizer: str) -> None:
    names = ["lives:with_semaphore", "lives:with_client", "imported:of_the_import"]
    with RewardPool(names, tokenizer, timeout_s=20.0) as rewards:
        calls = [score(rewards, ["a", "b"]) for _ in range(3)]

    assert calls == [[4.0, 4.0]] * 3


def test_a_semaphore_and_a_client_of_a_module_serve_all_calls_in_this_process(folder: Path) -> None:
    functions = [load_reward_function(f"lives:{name}") for name in ("with_semaphore", "with_client")]
    rewards = FunctionReward(functions, None)

    assert [score(rewards, ["a", "b"]) for _ in range(3)] == [[3.0, 3.0]] * 3


def test_without_a_limit_what_a_function_has_started_ends_at_a_kill_of_the_worker() -> None:
    command = [sys.executable, "-c", WITHOUT_LIMIT]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
    ) as worker:
        assert worker.stdout
        program = int(worker.stdout.readline())
        assert is_alive(program)

        worker.send_signal(signal.SIGKILL)
        wait_until(lambda: not is_alive(program), 30.0, "the end of the program")
