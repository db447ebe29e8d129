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
from pipeline.errors import ExitCode, RewardError, RlhfdError
from pipeline.models.loading import load_tokenizer
from pipeline.rollout.reward.functions import FunctionReward, load_reward_function
from pipeline.rollout.reward.wire import Died, Loaded, Problem, RowScore, RowToScore, frame, unframe, vision_of
from pipeline.runtime.lifeline import PARENT_VARIABLE, die_with_parent


def run_forked(descriptors: list[int], functions: list[str], tokenizer_path: str, timeout_s: float) -> None:
    """Run `main` in a fork of a process that may have used its random numbers, its output and threads."""
    # The output of functions goes into the worker's log.
    os.dup2(2, 1)
    random.seed()
    numpy.random.seed()
    torch.manual_seed(torch.initial_seed())
    main([socket.socket(fileno=number) for number in descriptors], functions, tokenizer_path, timeout_s)


def main(links: list[socket.socket], functions: list[str], tokenizer_path: str, timeout_s: float) -> None:
    """Keep one scorer alive at each link until the worker exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setproctitle.setproctitle("rlhfd: reward")
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(tokenizer_path)
    os.environ[PARENT_VARIABLE] = str(os.getpid())

    def fork(link: socket.socket) -> int:
        if (pid := os.fork()) == 0:
            _serve(link, functions, tokenizer, timeout_s)
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


def _serve(link: socket.socket, functions: list[str], tokenizer: Any, timeout_s: float) -> NoReturn:
    """Score rows until the worker exits; runs in the forked process."""
    code = ExitCode.FAILED
    try:
        die_with_parent()
        # As in the worker.
        user_modules.extend_path()
        parts: list[float] = []
        loaded = [load_reward_function(name) for name in functions]
        reward = FunctionReward(loaded, tokenizer, on_row=parts.extend)
        # One socket a scorer: the next scorer must not read the unread rest of a dead scorer's row.
        rows, workers_end = socket.socketpair()
        socket.send_fds(link, [frame(Loaded(os.getpid(), sees_images=reward.sees_images))], [workers_end.fileno()])
        workers_end.close()
        read = bytearray()
        while data := rows.recv(1 << 16):
            read += data
            while (body := unframe(read)) is not None:
                # A function may hang with the GIL held: only a C timer runs then.
                faulthandler.dump_traceback_later(timeout_s, exit=True)
                parts.clear()
                score = _score(reward, msgspec.msgpack.decode(body, type=RowToScore))
                faulthandler.cancel_dump_traceback_later()
                link.sendall(frame(msgspec.structs.replace(score, parts=parts)))
        code = ExitCode.OK
    except RlhfdError as error:
        link.sendall(frame(Loaded(os.getpid(), str(error))))
        code = ExitCode.BAD_CONFIG
    finally:
        # Never return into the loop of the process that forked this one.
        os._exit(code)


def _score(reward: FunctionReward, row: RowToScore) -> RowScore:
    ids = torch.frombuffer(bytearray(row.ids), dtype=torch.int64)
    mask = torch.frombuffer(bytearray(row.mask), dtype=torch.bool).long()
    keywords: dict[str, Any] = {
        "input_ids": ids.unsqueeze(0),
        "attention_mask": mask.unsqueeze(0),
        "response_start": torch.tensor([row.start]),
        "response_end": torch.tensor([row.end]),
        "gt_answer": [json.loads(row.answer)],
        "vision": vision_of(row),
    }
    try:
        return RowScore(float(reward(**keywords)))
    except RewardError as error:
        problem: Problem = "exception" if error.raised else "invalid"
        return RowScore(problem=problem, text=str(error), bare=error.bare, cause=error.cause)


if __name__ == "__main__":
    die_with_parent()
    main([socket.socket(fileno=number) for number in json.loads(sys.argv[1])], *json.loads(sys.argv[2]))
