"""Reward functions in processes that can be killed: a function that hangs or crashes costs its own row only.

    worker                                      scorer (`pipeline.rollout.reward.process`), one row at a time
      RowToScore                      ------>   calls the functions; over a socket of this scorer's own
                                      <------   Loaded once, with that socket's other end, then a RowScore a row
                                      <------   Died: the scorer has ended, from the process that forked it

A row that a scorer has read in part is lost with its socket: the next scorer never reads the rest. A scorer ends a row
by itself after `timeout_s`: it logs the stack of the hang and exits. The worker waits a little longer, then kills a
scorer that has not exited. It is replaced within milliseconds by a fork of a process that has torch and the tokenizer
loaded, and has never called a reward function. That process is a fork of the worker itself, from the time before the
worker had threads or a GPU.
"""

from __future__ import annotations

import collections
import contextlib
import json
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
from pipeline.rollout.reward import process as reward_process
from pipeline.rollout.reward.problems import RewardProblems
from pipeline.rollout.reward.wire import (
    Died,
    Loaded,
    Problem,
    RowScore,
    RowToScore,
    decoder,
    frame,
    unframe,
    with_images,
)
from pipeline.runtime.forking import ForkedChild, unfit_to_fork
from pipeline.runtime.lifeline import PARENT_VARIABLE

STARTUP_TIMEOUT_S = 120.0
_GRACE_S = 2.0
_KILLS = 2
_TIMEOUTS_IN_A_ROW = 3
_READ_BYTES = 1 << 16


class RewardPool:
    """Reward functions by name, with the interface of a reward model; a row without a reward scores NaN.

    Not thread-safe; close it, or use it as a context manager. Its processes die with this one.

    Args:
        functions: ``module:function`` each; their results add up.
        tokenizer: Directory of the tokenizer that is passed to the functions.
        timeout_s: Longest time the functions may take for one row.
        processes: Rows that are scored at the same time.
        on_problem: Called with the reason of each row without a score.
        on_progress: Called at least once a second while rows are scored.
        on_row: Called with the results of the functions for each row, None for a row without a reward; in order.
        problems: Logs the rows without a score.
        may_fork: Whether the processes may be forks of this one, which has torch loaded and no state that a function
            must not have; a fork is refused, and a new process started, where it has threads or a GPU.

    Attributes:
        problem: The first row without a score of the last call; None if all had one.
        problems: Logs the rows without a score.
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
        problems: RewardProblems | None = None,
        may_fork: bool = False,
    ) -> None:
        self.problems = problems or RewardProblems()
        self.problem: RowScore | None = None
        self._timeout_s = timeout_s
        self._on_problem = on_problem
        self._on_progress = on_progress
        self._on_row = on_row
        pairs = [socket.socketpair() for _ in range(processes)]
        descriptors = [other.fileno() for _, other in pairs]
        self._process = _started(descriptors, [list(functions), tokenizer, timeout_s], may_fork=may_fork)
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
            if not self._receive(waiting, deadline_s) and time.monotonic() > deadline_s:
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
            vision: Images and videos of the rows, for the functions that name them.

        Returns:
            ``(B,)`` float32, NaN where the functions gave no finite number in time.

        Raises:
            RlhfdError: If the processes have ended or do not answer, or a new one cannot load the functions.
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
            rows = [with_images(row, vision.rows([place])) for place, row in enumerate(rows)]
        scores = self._score(rows)
        for score in scores:
            self._on_row(None if score.problem else score.parts)
        problems = [(row, score) for row, score in enumerate(scores) if score.problem]
        self.problem = problems[0][1] if problems else None
        for _, score in problems:
            self._on_problem(score.problem)
        self.problems.report(len(scores), problems)
        return torch.tensor([math.nan if score.problem else score.score for score in scores], dtype=torch.float32)

    def close(self) -> None:
        """End the processes."""
        for scorer in self._scorers:
            scorer.close()
        # Its scorers die with it, hanging ones too.
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
            for row, score, died in self._receive(self._scorers, min(scorer.deadline_s for scorer in self._scorers)):
                if died and row not in tried_again:
                    # The scorer may have died before it read the row.
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
                scorer.kill_if_overdue()
        return [scores[row] for row in range(len(rows))]

    def _receive(self, scorers: list[_Scorer], deadline_s: float) -> list[tuple[int, RowScore, bool]]:
        """Handle the messages of these scorers; wait for the first one until the deadline. Return the rows done."""
        with selectors.DefaultSelector() as selector:
            for scorer in scorers:
                selector.register(scorer.link, selectors.EVENT_READ, scorer)
            # At most a second: the worker's heartbeat goes on while this pool, their watchdog, waits for its scorers.
            ready = selector.select(min(1.0, max(0.0, deadline_s - time.monotonic())))
        self._on_progress()
        return [done for key, _ in ready for done in key.data.receive(self._timeout_s)]


def _started(descriptors: list[int], arguments: list[Any], *, may_fork: bool) -> ForkedChild | subprocess.Popen[bytes]:
    """Start the forkserver of the scorers, with the ends of their links.

    A fork takes milliseconds, a new process the seconds in which it imports torch.
    """
    # No library threads: a process with threads cannot be forked safely.
    variables = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if may_fork and not unfit_to_fork():
        return ForkedChild(lambda: reward_process.run_forked(descriptors, *arguments), descriptors, variables)
    return subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", reward_process.__name__),
            json.dumps(descriptors),
            json.dumps(arguments),
        ],
        stdin=subprocess.DEVNULL,
        # The output of functions goes into the worker's log.
        stdout=2,
        pass_fds=descriptors,
        env={**os.environ, PARENT_VARIABLE: str(os.getpid()), **variables},
    )


class _Scorer:
    """The link to one scorer and to its successors.

    Attributes:
        pid: The scorer that is ready; 0 while none is.
        sees_images: Whether its functions name images among their parameters.
        row: The row in work; None for none.
        deadline_s: The end of the time for its row, or for its start.
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
        """Send a row to the scorer."""
        assert self._rows is not None, "no scorer has sent Loaded"
        self.row = row
        self._began_s = time.monotonic()
        self.deadline_s = self._began_s + timeout_s + _GRACE_S
        # A stopped or dead scorer reads nothing, or a part; `kill_if_overdue` handles it.
        with contextlib.suppress(OSError):
            self._rows.sendall(frame(rows[row]))

    def close(self) -> None:
        """Close the sockets."""
        self.link.close()
        if self._rows is not None:
            self._rows.close()

    def receive(self, timeout_s: float) -> list[tuple[int, RowScore, bool]]:
        """Handle the messages of the link; return the rows done, each with its score and whether its scorer died.

        Raises:
            ConfigError: If the functions cannot be loaded.
            RlhfdError: If the process behind the scorers has ended.
        """
        data, descriptors, _, _ = socket.recv_fds(self.link, _READ_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        for descriptor in descriptors:
            self._connect(socket.socket(fileno=descriptor))
        if not data:
            raise RlhfdError("the process that scores rewards has ended; the log may say why")
        self._read += data
        done = []
        while (body := unframe(self._read)) is not None:
            match decoder.decode(body):
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

    def kill_if_overdue(self) -> None:
        """Kill a scorer that is overdue; a `Died` reports its death.

        Raises:
            DeadlineError: If the next scorer is not ready in time, or the process that forks scorers does not report
                the death.
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

    def _connect(self, rows: socket.socket) -> None:
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
