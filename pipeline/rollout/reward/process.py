"""The processes of a reward pool. Their forkserver loads torch and the tokenizer, and calls no reward function."""

from __future__ import annotations

import faulthandler
import functools
import random
import socket
from typing import Any

import msgspec
import numpy
import torch

from pipeline.config.rewards import of_json
from pipeline.models.loading import load_tokenizer
from pipeline.rollout.response_text import ResponseText
from pipeline.rollout.reward.functions import FunctionReward, load_reward_function
from pipeline.rollout.reward.given_rows import unpacked
from pipeline.rollout.reward.signatures import event_loop
from pipeline.rollout.reward.wire import RowsScored, RowsToScore, row_score
from pipeline.runtime.link import Link
from pipeline.runtime.pool_process import Load, Serve

AWAITED_GRACE_S = 1.0


def prepare(functions: str, tokenizer_path: str, timeout_s: float, hidden: list[int] | None) -> Load:
    """Load what all scorers share; see `RewardPool` for the arguments."""
    # This may be a fork of a process that has used its random numbers and threads.
    random.seed()
    numpy.random.seed()
    torch.manual_seed(torch.initial_seed())
    torch.set_num_threads(1)
    return functools.partial(_load, functions, load_tokenizer(tokenizer_path), timeout_s, hidden)


def _load(functions: str, tokenizer: Any, timeout_s: float, hidden: list[int] | None) -> tuple[Serve, dict[str, Any]]:
    # Before the import of the functions: clients that their modules make belong to it.
    event_loop()
    reward = FunctionReward(
        [load_reward_function(one) for one in of_json(functions)],
        tokenizer,
        timeout_s=timeout_s,
        text=ResponseText(tokenizer, hidden),
    )
    return functools.partial(_serve, reward, timeout_s), reward.facts


def _serve(reward: FunctionReward, timeout_s: float, end: socket.socket) -> None:
    link = Link(end, msgspec.msgpack.Decoder(RowsToScore))
    while True:
        for work in link.receive(None):
            is_joint = bool(set(work.functions) & set(reward.together))
            # A function may hang with the GIL held: only a C timer runs then. Calls that are awaited end by themselves
            # at the same time, and the rest of their rows has rewards.
            faulthandler.dump_traceback_later(timeout_s + (AWAITED_GRACE_S if is_joint else 0.0), exit=True)
            results = reward.results(work.functions, unpacked(work.rows))
            scored = RowsScored([row_score(found, is_joint=is_joint) for found in results])
            faulthandler.cancel_dump_traceback_later()
            link.send(scored)
