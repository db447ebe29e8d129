"""The forkserver of a `pipeline.rollout.reward.pool`: loads torch and the tokenizer, forks scorers, replaces dead ones.

It never calls a reward function and imports no user module; so it has no thread and no device that a fork could break.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import socket
import sys
from typing import Any, NoReturn

import msgspec
import numpy
import setproctitle
import torch

from pipeline.config import user_modules
from pipeline.config.rewards import RewardConfig
from pipeline.errors import ExitCode, RlhfdError
from pipeline.models.loading import load_tokenizer
from pipeline.rollout.environment.wire import frame, unframe
from pipeline.rollout.reward.functions import FunctionReward, load_reward_function
from pipeline.rollout.reward.wire import (
    Died,
    Loaded,
    RowScore,
    RowsScored,
    RowsToScore,
    row_score,
    vision_of,
)
from pipeline.runtime.lifeline import PARENT_VARIABLE, die_with_parent

AWAITED_GRACE_S = 1.0


def run_forked(
    descriptors: list[int], functions: list[str], tokenizer_path: str, timeout_s: float, settings: str
) -> None:
    """Run `main` in a fork of a process that may have used its random numbers, its output and threads."""
    # The output of functions goes into the worker's log.
    os.dup2(2, 1)
    random.seed()
    numpy.random.seed()
    torch.manual_seed(torch.initial_seed())
    main([socket.socket(fileno=number) for number in descriptors], functions, tokenizer_path, timeout_s, settings)


def main(
    links: list[socket.socket], functions: list[str], tokenizer_path: str, timeout_s: float, settings: str
) -> None:
    """Keep one scorer alive at each link until the worker exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setproctitle.setproctitle("rlhfd: reward")
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(tokenizer_path)
    os.environ[PARENT_VARIABLE] = str(os.getpid())

    def fork(link: socket.socket) -> int:
        if (pid := os.fork()) == 0:
            _serve(link, functions, tokenizer, timeout_s, settings)
        return pid

    scorers = {fork(link): link for link in links}
    while scorers:
        pid, status = os.wait()
        link, code = scorers.pop(pid), os.waitstatus_to_exitcode(status)
        if code not in (ExitCode.OK, ExitCode.BAD_CONFIG):
            try:
                link.sendall(frame(Died(code)))
            except BrokenPipeError:
                # The worker has exited.
                return
            scorers[fork(link)] = link


def _serve(link: socket.socket, functions: list[str], tokenizer: Any, timeout_s: float, settings: str) -> NoReturn:
    """Score rows until the worker exits; runs in the forked process."""
    code = ExitCode.FAILED
    try:
        die_with_parent()
        # As in the worker.
        user_modules.extend_path()
        options = RewardConfig.model_validate_json(settings)
        reward = FunctionReward(
            [load_reward_function(name, options) for name in functions], tokenizer, timeout_s=timeout_s
        )
        # One socket a scorer: the next scorer must not read the unread rest of a dead scorer's row.
        rows, workers_end = socket.socketpair()
        loaded = Loaded(
            os.getpid(),
            sees_images=reward.sees_images,
            wants_columns=reward.wants_columns,
            together=reward.together,
        )
        socket.send_fds(link, [frame(loaded)], [workers_end.fileno()])
        workers_end.close()
        read = bytearray()
        while data := rows.recv(1 << 16):
            read += data
            while (body := unframe(read)) is not None:
                work = msgspec.msgpack.decode(body, type=RowsToScore)
                is_joint = bool(set(work.functions) & set(reward.together))
                # A function may hang with the GIL held: only a C timer runs then. Calls that are awaited end by
                # themselves at the same time, and the rest of their rows has rewards.
                faulthandler.dump_traceback_later(timeout_s + (AWAITED_GRACE_S if is_joint else 0.0), exit=True)
                scored = RowsScored(_score(reward, work, is_joint=is_joint))
                faulthandler.cancel_dump_traceback_later()
                link.sendall(frame(scored))
        code = ExitCode.OK
    except RlhfdError as error:
        link.sendall(frame(Loaded(os.getpid(), str(error))))
        code = ExitCode.BAD_CONFIG
    finally:
        # Never return into the loop of the process that forked this one.
        os._exit(code)


def _score(reward: FunctionReward, work: RowsToScore, *, is_joint: bool) -> list[RowScore]:
    rows = work.rows
    keywords: dict[str, Any] = {
        "input_ids": torch.stack([torch.frombuffer(bytearray(row.ids), dtype=torch.int64) for row in rows]),
        "attention_mask": torch.stack([torch.frombuffer(bytearray(row.mask), dtype=torch.bool) for row in rows]).long(),
        "response_start": torch.tensor([row.start for row in rows]),
        "response_end": torch.tensor([row.end for row in rows]),
        "gt_answer": [json.loads(row.answer) for row in rows],
        "vision": vision_of(rows),
        "columns": [json.loads(row.columns) for row in rows],
    }
    return [row_score(found, is_joint=is_joint) for found in reward.results(work.functions, **keywords)]


if __name__ == "__main__":
    die_with_parent()
    main([socket.socket(fileno=number) for number in json.loads(sys.argv[1])], *json.loads(sys.argv[2]))
