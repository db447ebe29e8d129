"""Reward functions in processes that can be killed: one that hangs or crashes costs its row, no other.

    worker                                      scorer (`pipeline.rollout.reward_process`), one a row at a time
      RowToScore                      ------>   calls the functions; over a socket of this scorer's own
                                      <------   Loaded once, with that socket's other end, then a RowScore a row
                                      <------   Died: the scorer is gone, from the process that forked it

What is half said to a scorer goes with its socket: the next one never reads the rest of a row that was not its own.
A scorer gives up on a row by itself after `timeout_s`: it writes where it hangs to the log and ends. The worker waits a
little longer, then kills a scorer that cannot even do that. Its place is taken within milliseconds by a fork of a
process that has torch and the tokenizer loaded already and has never called anybody's function.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import ConfigError, DeadlineError, RlhfdError
from pipeline.experience.vision_rows import VisionRows
from pipeline.rollout.reward_wire import (
    Died,
    Loaded,
    Problem,
    RowScore,
    RowToScore,
    _decoder,
    _with_images,
    frame,
    unframe,
)
from pipeline.runtime.lifeline import PARENT_VARIABLE

log = logging.getLogger(__name__)


STARTUP_TIMEOUT_S = 120.0
_GRACE_S = 2.0
_KILLS = 2
_TIMEOUTS_IN_A_ROW = 3
_READ_BYTES = 1 << 16
_PROBLEMS_LOGGED = 8


class RewardPool:
    """Reward functions by name, at the reward seam; a row without a reward scores NaN.

    Not thread-safe; close it, or use it as a context manager. Its processes die with this one.

    Args:
        functions: ``module:function`` each; their results add up.
        tokenizer: Directory of the tokenizer that is handed to them.
        timeout_s: Longest time the functions may take for one row.
        processes: How many rows are scored at the same time.
        on_problem: Told why a row has no score, once a row.
        on_progress: Called once a second at least while rows are scored.
        on_row: Told what each function gave for a row, None where it has no reward; in the order of rows.
        log_texts: Whether what a function raised or returned is logged in its own words.

    Attributes:
        problem: The first problem of the last call, if it had one.
    """

    def __init__(
        self,
        functions: Sequence[str],
        tokenizer: str,
        *,
        timeout_s: float,
        processes: int = 1,
        on_problem: Callable[[Problem], None] = lambda problem: None,
        on_progress: Callable[[], None] = lambda: None,
        on_row: Callable[[Sequence[float] | None], None] = lambda parts: None,
        log_texts: bool = False,
    ) -> None:
        self.log_texts = log_texts
        self.problem: RowScore | None = None
        self._timeout_s = timeout_s
        self._on_problem = on_problem
        self._on_progress = on_progress
        self._on_row = on_row
        pairs = [socket.socketpair() for _ in range(processes)]
        descriptors = [other.fileno() for _, other in pairs]
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "pipeline.rollout.reward_process"),
                json.dumps(descriptors),
                json.dumps([list(functions), tokenizer, timeout_s]),
            ],
            stdin=subprocess.DEVNULL,
            # What a function prints belongs into the worker's log.
            stdout=2,
            pass_fds=descriptors,
            # A process with threads of a library could not be forked safely.
            env={
                **os.environ,
                PARENT_VARIABLE: str(os.getpid()),
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
            },
        )
        for _, other in pairs:
            other.close()
        self._scorers = [_Scorer(link) for link, _ in pairs]

    def wait_ready(self, timeout_s: float = STARTUP_TIMEOUT_S) -> None:
        """Wait until every scorer has loaded the functions.

        Raises:
            ConfigError: If a function cannot be loaded.
            DeadlineError: If that takes longer than `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        while waiting := [scorer for scorer in self._scorers if not scorer.pid]:
            if not self._hear(waiting, deadline_s) and time.monotonic() > deadline_s:
                raise DeadlineError(f"the reward functions were not loaded within {timeout_s:g} s")

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        response_start: Tensor,
        response_end: Tensor,
        gt_answer: Sequence[Any],
        vision: VisionRows | None = None,
    ) -> Tensor:
        """Score rows.

        Args:
            input_ids: ``(B, S)`` int64, right-padded.
            attention_mask: ``(B, S)``, 1 where the token is real.
            response_start: ``(B,)`` int64, column of the first response token.
            response_end: ``(B,)`` int64, column after the last response token.
            gt_answer: One JSON value a row.
            vision: Images and videos of the rows; they go to functions that name them.

        Returns:
            ``(B,)`` float32, NaN where the functions gave no finite number in time.

        Raises:
            RlhfdError: If the processes have ended or do not answer, or a new one can no longer load the functions.
        """
        columns = zip(
            input_ids.cpu().numpy(),
            (attention_mask != 0).cpu().numpy(),
            response_start.tolist(),
            response_end.tolist(),
            gt_answer,
            strict=True,
        )
        rows = [
            RowToScore(ids.tobytes(), mask.tobytes(), start, end, json.dumps(answer))
            for ids, mask, start, end, answer in columns
        ]
        if vision is not None and any(scorer.sees_images for scorer in self._scorers):
            rows = [_with_images(row, vision.rows([place])) for place, row in enumerate(rows)]
        scores = self._score(rows)
        for score in scores:
            self._on_row(None if score.problem else score.parts)
        problems = [(row, score) for row, score in enumerate(scores) if score.problem]
        self.problem = problems[0][1] if problems else None
        for row, score in problems:
            self._on_problem(score.problem)
            if row in [first for first, _ in problems[:_PROBLEMS_LOGGED]]:
                text = score.text if self.log_texts or not score.bare else score.bare
                log.warning("reward errored: row=%d reason=%s: %s", row, score.problem, text)
        return torch.tensor([math.nan if score.problem else score.score for score in scores], dtype=torch.float32)

    def close(self) -> None:
        """End the processes."""
        for scorer in self._scorers:
            scorer.close()
        # Its scorers die with it, the hanging ones too.
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _score(self, rows: list[RowToScore]) -> list[RowScore]:
        scores: dict[int, RowScore] = {}
        waiting = collections.deque(range(len(rows)))
        tried_again: set[int] = set()
        timeouts = 0
        while len(scores) < len(rows):
            for scorer in self._scorers:
                if waiting and scorer.pid and scorer.row is None:
                    scorer.begin(waiting.popleft(), rows, self._timeout_s)
            for row, score, died in self._hear(self._scorers, min(scorer.deadline_s for scorer in self._scorers)):
                if died and row not in tried_again:
                    # It may have been dead before it saw the row.
                    tried_again.add(row)
                    waiting.appendleft(row)
                    continue
                scores[row] = score
                timeouts = timeouts + 1 if score.problem == "timeout" else 0
            if timeouts >= _TIMEOUTS_IN_A_ROW:
                text = f"not tried: {timeouts} rows in a row took longer than {self._timeout_s:g} s"
                scores |= {row: RowScore(problem="timeout", text=text) for row in waiting}
                waiting.clear()
            for scorer in self._scorers:
                scorer.press_on()
        return [scores[row] for row in range(len(rows))]

    def _hear(self, scorers: list[_Scorer], deadline_s: float) -> list[tuple[int, RowScore, bool]]:
        """Take note of what these scorers say, waiting for the first word until the deadline; return rows done."""
        with selectors.DefaultSelector() as selector:
            for scorer in scorers:
                selector.register(scorer.link, selectors.EVENT_READ, scorer)
            # No longer than a second: this pool is the watchdog of its scorers, and not itself at a loss.
            ready = selector.select(min(1.0, max(0.0, deadline_s - time.monotonic())))
        self._on_progress()
        return [done for key, _ in ready for done in key.data.receive(self._timeout_s)]


class _Scorer:
    """The link to one scorer, and to those that take its place.

    Attributes:
        pid: The scorer that is ready; 0 while none is.
        sees_images: Whether its functions name images among their parameters.
        row: What it works on; None for nothing.
        deadline_s: When it will have taken too long, for its row or for its start.
    """

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.pid = 0
        self.sees_images = False
        self.row: int | None = None
        self.deadline_s = time.monotonic() + STARTUP_TIMEOUT_S
        self._began_s = 0.0
        self._kills = 0
        self._rows: socket.socket | None = None
        self._read = bytearray()

    def begin(self, row: int, rows: list[RowToScore], timeout_s: float) -> None:
        """Hand a row over."""
        assert self._rows is not None, "no scorer has said that it is there"
        self.row = row
        self._began_s = time.monotonic()
        self.deadline_s = self._began_s + timeout_s + _GRACE_S
        # One that was stopped or has died takes nothing, or a part; `press_on` sees to it.
        with contextlib.suppress(OSError):
            self._rows.sendall(frame(rows[row]))

    def close(self) -> None:
        """Say no more, and hear nothing."""
        self.link.close()
        if self._rows is not None:
            self._rows.close()

    def receive(self, timeout_s: float) -> list[tuple[int, RowScore, bool]]:
        """Take note of what was said; return the row that is done, if one is, and whether its scorer died of it.

        Raises:
            ConfigError: If the functions cannot be loaded.
            RlhfdError: If the process behind the scorers has ended.
        """
        data, descriptors, _, _ = socket.recv_fds(self.link, _READ_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        for descriptor in descriptors:
            self._talk_over(socket.socket(fileno=descriptor))
        if not data:
            raise RlhfdError("the process that scores rewards has ended; the log may say why")
        self._read += data
        done = []
        while (body := unframe(self._read)) is not None:
            match _decoder.decode(body):
                case Loaded(error=error) if error:
                    raise ConfigError(error)
                case Loaded(pid=pid, sees_images=sees_images):
                    self.pid, self.sees_images, self.deadline_s = pid, sees_images, math.inf
                case RowScore() as answer if self.row is not None:
                    done.append((self.row, answer, False))
                    self.row, self.deadline_s = None, math.inf
                case Died(code=code):
                    if self.row is not None:
                        score = self._verdict(code, timeout_s)
                        done.append((self.row, score, score.problem != "timeout"))
                    self._kills = 0
                    self.pid, self.row, self.deadline_s = 0, None, time.monotonic() + STARTUP_TIMEOUT_S
        return done

    def press_on(self) -> None:
        """Kill a scorer that is overdue; that it is dead will be told.

        Raises:
            DeadlineError: If there is none to kill, because the next one is not ready in time; or if the process that
                is to tell of its death does not.
        """
        if time.monotonic() < self.deadline_s:
            return
        if not self.pid:
            raise DeadlineError(f"the reward functions were not loaded within {STARTUP_TIMEOUT_S:g} s")
        if self._kills == _KILLS:
            raise DeadlineError(
                f"the process that starts reward processes has not answered for {_KILLS * _GRACE_S:g} s"
            )
        _kill(self.pid)
        self._kills += 1
        self.deadline_s = time.monotonic() + _GRACE_S

    def _talk_over(self, rows: socket.socket) -> None:
        if self._rows is not None:
            self._rows.close()
        rows.settimeout(_GRACE_S)
        self._rows = rows

    def _verdict(self, code: int, timeout_s: float) -> RowScore:
        if time.monotonic() - self._began_s >= timeout_s:
            return RowScore(problem="timeout", text=f"no score within {timeout_s:g} s")
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return RowScore(problem="exception", text=f"the process that called the function {how}")


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
