"""Reward functions in processes that can be killed: a function that hangs or crashes costs its own row only.

A batched function that hangs or crashes costs the rows of its call, which are all of a ticket's.

    worker                                      scorer (`pipeline.rollout.reward.process`), one row at a time
      RowsToScore                     ------>   calls the functions; over a socket of this scorer's own
                                      <------   Loaded once, with that socket's other end, then RowsScored each time
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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from pipeline.config.rewards import RewardConfig
from pipeline.errors import ConfigError, DeadlineError, RlhfdError
from pipeline.experience.vision_rows import VisionRows
from pipeline.rollout.environment.wire import frame, unframe
from pipeline.rollout.reward import process as reward_process
from pipeline.rollout.reward.problems import RewardProblems
from pipeline.rollout.reward.wire import (
    Died,
    Loaded,
    Problem,
    RowScore,
    RowsScored,
    RowsToScore,
    RowToScore,
    decoder,
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
        functions: A name or ``module:function`` each; their results add up.
        tokenizer: Directory of the tokenizer that is passed to the functions.
        timeout_s: Longest time the functions may take for one row, and one that is batched or async for all rows.
        processes: Rows that are scored at the same time.
        on_problem: Called with the reason of each row without a score.
        on_progress: Called at least once a second while rows are scored.
        on_row: Called with the results of the functions for each row, None for a row without a reward; in order.
        problems: Logs the rows without a score.
        may_fork: Whether the processes may be forks of this one, which has torch loaded and no state that a function
            must not have; a fork is refused, and a new process started, where it has threads or a GPU.
        settings: Options of the functions that are known by name.
        weights: One a function; None: 1 each.
        labels: A name of each function, of its column in an experience's `info`; without them there is no column.

    Attributes:
        labels: As given.
        parts: ``(B, functions)`` float32, the results of the last call before their weights, NaN in a row without
            a score.
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
        settings: RewardConfig | None = None,
        weights: Sequence[float] | None = None,
        labels: Sequence[str] = (),
    ) -> None:
        self.labels = list(labels)
        self._count = len(functions)
        self._weights = list(weights or [1.0] * len(functions))
        self.parts = torch.empty(0, len(functions))
        self.problems = problems or RewardProblems()
        self.problem: RowScore | None = None
        self._timeout_s = timeout_s
        self._on_problem = on_problem
        self._on_progress = on_progress
        self._on_row = on_row
        pairs = [socket.socketpair() for _ in range(processes)]
        descriptors = [other.fileno() for _, other in pairs]
        options = (settings or RewardConfig()).model_dump_json()
        self._process = _started(descriptors, [list(functions), tokenizer, timeout_s, options], may_fork=may_fork)
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
        columns: Sequence[Mapping[str, Any]] | None = None,
    ) -> Tensor:
        """Score rows.

        Args:
            input_ids: ``(B, S)`` int64, right-padded.
            attention_mask: ``(B, S)``, 1 where the token is real.
            response_start: ``(B,)`` int64, column of the first response token.
            response_end: ``(B,)`` int64, column after the last response token.
            gt_answer: One JSON value a row.
            vision: Images and videos of the rows, for the functions that name them.
            columns: The further columns of each row's prompt, JSON values; None: there are none.

        Returns:
            ``(B,)`` float32, NaN where the functions gave no finite number in time.

        Raises:
            RlhfdError: If the processes have ended or do not answer, or a new one cannot load the functions.
        """
        if all(scorer.together is None for scorer in self._scorers):
            # Functions say once what they take, and a scorer that has ended has said so.
            self.wait_ready()
        fields = zip(
            input_ids.cpu().numpy(),
            (attention_mask != 0).cpu().numpy(),
            response_start.tolist(),
            response_end.tolist(),
            gt_answer,
            strict=True,
        )
        rows = [
            RowToScore(ids.tobytes(), mask.tobytes(), start, end, json.dumps(answer))
            for ids, mask, start, end, answer in fields
        ]
        if vision is not None and any(scorer.sees_images for scorer in self._scorers):
            rows = [with_images(row, vision.rows([place])) for place, row in enumerate(rows)]
        if columns is not None and any(scorer.wants_columns for scorer in self._scorers):
            rows = [
                msgspec.structs.replace(row, columns=json.dumps(named))
                for row, named in zip(rows, columns, strict=True)
            ]
        scores = self._score(rows)
        weighted = [
            [weight * part for weight, part in zip(self._weights, score.parts, strict=False)] for score in scores
        ]
        for score, parts in zip(scores, weighted, strict=True):
            self._on_row(None if score.problem else parts)
        missing = [math.nan] * self._count
        raw = [missing if score.problem else score.parts for score in scores]
        self.parts = torch.tensor(raw, dtype=torch.float32).reshape(len(scores), self._count)
        problems = [(row, score) for row, score in enumerate(scores) if score.problem]
        self.problem = problems[0][1] if problems else None
        for _, score in problems:
            self._on_problem(score.problem)
        self.problems.report(len(scores), problems)
        sums = [math.nan if score.problem else sum(parts) for score, parts in zip(scores, weighted, strict=True)]
        return torch.tensor(sums, dtype=torch.float32)

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
        together = next(scorer.together for scorer in self._scorers if scorer.together is not None)
        alone = [at for at in range(self._count) if at not in together]
        # All rows of a function that needs them first: it takes longest, beside the other rows in other processes.
        work = [RowsToScore([at], rows) for at in together if rows]
        work += [RowsToScore(alone, [row]) for row in rows if alone]
        done = self._work(work)
        joint = len(together) if rows else 0
        scores = []
        for row in range(len(rows)):
            found = {at: done[number][row] for number, at in enumerate(together)}
            own = done[joint + row][0] if alone else RowScore()
            results = [*found.values(), own]
            if problem := next((score for score in results if score.problem), None):
                scores.append(problem)
                continue
            parts = {**{at: score.parts[0] for at, score in found.items()}, **dict(zip(alone, own.parts, strict=True))}
            scores.append(RowScore(parts=[parts[at] for at in range(self._count)]))
        return scores

    def _work(self, work: list[RowsToScore]) -> list[list[RowScore]]:
        """Return the scores of each piece of work."""
        scores: dict[int, list[RowScore]] = {}
        waiting = collections.deque(range(len(work)))
        tried_again: set[int] = set()
        timeouts = 0
        while len(scores) < len(work):
            for scorer in self._scorers:
                if waiting and scorer.pid and scorer.work is None:
                    scorer.begin((at := waiting.popleft()), work[at], self._timeout_s)
            for at, found, died in self._receive(self._scorers, min(scorer.deadline_s for scorer in self._scorers)):
                if died and at not in tried_again:
                    # The scorer may have died before it read the rows.
                    tried_again.add(at)
                    waiting.appendleft(at)
                    continue
                # A scorer that has ended gives one score for all rows.
                scores[at] = found if len(found) == len(work[at].rows) else found * len(work[at].rows)
                if len(found) == 1:
                    timeouts = timeouts + 1 if found[0].problem == "timeout" else 0
            if timeouts >= _TIMEOUTS_IN_A_ROW:
                text = f"not tried: {timeouts} rows in a row took longer than {self._timeout_s:g} s"
                late = RowScore(problem="timeout", text=text)
                scores |= {at: [late] * len(work[at].rows) for at in waiting}
                waiting.clear()
            for scorer in self._scorers:
                scorer.kill_if_overdue()
        return [scores[at] for at in range(len(work))]

    def _receive(self, scorers: list[_Scorer], deadline_s: float) -> list[tuple[int, list[RowScore], bool]]:
        """Handle the messages of these scorers; wait for the first one until the deadline. Return the work done."""
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
        wants_columns: Whether its functions take further columns.
        together: Numbers of the functions that score all rows in one call; None before the first scorer is ready.
        work: The number of the work in hand; None for none.
        deadline_s: The end of the time for its work, or for its start.
    """

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.pid = 0
        self.sees_images = False
        self.wants_columns = False
        self.together: list[int] | None = None
        self.work: int | None = None
        self.deadline_s = time.monotonic() + STARTUP_TIMEOUT_S
        self._began_s = 0.0
        self._kills = 0
        self._rows: socket.socket | None = None
        self._read = bytearray()

    def begin(self, number: int, work: RowsToScore, timeout_s: float) -> None:
        """Send work to the scorer."""
        assert self._rows is not None, "no scorer has sent Loaded"
        self.work = number
        self._began_s = time.monotonic()
        self.deadline_s = self._began_s + timeout_s + _GRACE_S
        # A stopped or dead scorer reads nothing, or a part; `kill_if_overdue` handles it.
        with contextlib.suppress(OSError):
            self._rows.sendall(frame(work))

    def close(self) -> None:
        """Close the sockets."""
        self.link.close()
        if self._rows is not None:
            self._rows.close()

    def receive(self, timeout_s: float) -> list[tuple[int, list[RowScore], bool]]:
        """Handle the messages of the link; return the work done, each with its scores and whether its scorer died.

        A scorer that died has one score for all rows.

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
                case Loaded() as loaded:
                    self.pid, self.sees_images, self.deadline_s = loaded.pid, loaded.sees_images, math.inf
                    self.wants_columns, self.together = loaded.wants_columns, loaded.together
                case RowsScored(rows=rows) if self.work is not None:
                    done.append((self.work, rows, False))
                    self.work, self.deadline_s = None, math.inf
                case Died(code=code):
                    if self.work is not None:
                        score = self._verdict(code, timeout_s)
                        done.append((self.work, [score], score.problem != "timeout"))
                    self._kills = 0
                    self.pid, self.work, self.deadline_s = 0, None, time.monotonic() + STARTUP_TIMEOUT_S
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
