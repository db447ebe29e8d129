"""Environments in processes that can be killed: a step that hangs or crashes costs its own row only.

    worker                                process (`pipeline.rollout.environment.process`), many rows at a time
      Step, for each response     ----->  makes the row's environment with the first one, calls `step`
      Forget, of dropped rows     ----->
                                  <-----  Ready once, then an Answer for each Step, as it ends

A row stays with one process. Processes, their links and ends are those of `pipeline.runtime.pool`. A process that ends
is replaced, and each step carries all responses of its row: the successor repeats them, in as many times the limit of
a step. Steps that a process had in hand when it ended are tried again one at a time, so that the row at fault is found;
it has no answer, the others have theirs. A process ends by itself when a step takes too long; the worker waits a little
longer, then kills it.
"""

from __future__ import annotations

import collections
import itertools
import json
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.progress import Telemetry
from pipeline.rollout.environment.process import prepare, told_late
from pipeline.rollout.environment.wire import Answer, Forget, Problem, Step, to_pool
from pipeline.runtime.pool import STARTUP_TIMEOUT_S, Ended, PoolProcess, ProcessPool, how_ended

_GRACE_S = 3.0
_TIMEOUTS_IN_A_ROW = 3

log = logging.getLogger(__name__)


class EnvironmentPool:
    """The environments of a worker's rows, each in one of some processes.

    Not thread-safe; close it. Its processes die with this one.

    Args:
        name: ``module:Factory``.
        timeout_s: Longest time of a step.
        processes: Number of processes.
        telemetry: Told of progress at least once a second while steps are waited for, and of each answer.

    Attributes:
        new_row: Returns the number of a new row.
        problem: The last row without an answer; None if there was none since it was set to None.
    """

    def __init__(
        self,
        name: str,
        *,
        timeout_s: float,
        processes: int = 1,
        telemetry: Telemetry = Telemetry.none(),
    ) -> None:
        self.problem: Answer | None = None
        self._problems = collections.Counter[str]()
        self._telemetry = telemetry
        self.new_row = itertools.count().__next__
        self._callbacks: dict[int, Callable[[Answer], None]] = {}
        self._pool: ProcessPool[Answer] = ProcessPool(
            prepare,
            [name, timeout_s],
            to_pool,
            processes=processes,
            title="environment",
            late="the environment was not imported",
            loads=f"rollout.environment: the process that imports {name}",
            telemetry=telemetry,
            variables={},
            # This process has torch, which no environment needs.
            may_fork=False,
        )
        self._rows = [_Rows(process, timeout_s) for process in self._pool.processes]

    def wait_ready(self, timeout_s: float = STARTUP_TIMEOUT_S) -> None:
        """Wait until every process has imported the environment; see `ProcessPool.wait_ready` for errors."""
        self._pool.wait_ready(self.step, timeout_s)

    @property
    def is_busy(self) -> bool:
        """Whether a step is waited for."""
        return bool(self._callbacks)

    def submit(
        self, row: int, row_json: str, responses: Sequence[str], callback: Callable[[Answer], None], *, is_last: bool
    ) -> None:
        """Have a response answered; `step` calls `callback` with the answer.

        Args:
            row: A number of `new_row`, the same for all steps of a row.
            row_json: Prompt, answer and columns of the row as JSON.
            responses: All its responses so far.
            callback: Called once.
            is_last: Whether the row has no further step, whatever the answer.
        """
        self._callbacks[row] = callback
        self._rows_with(row).submit(Step(row, row_json, list(responses), is_last))

    def forget(self, rows: Sequence[int]) -> None:
        """Drop rows; their answers are not reported any more."""
        for row in rows:
            self._callbacks.pop(row, None)
        for one in self._rows:
            one.forget([row for row in rows if self._rows_with(row) is one])

    def step(self, timeout_s: float) -> None:
        """Report the answers that are there; without one wait for the first, at most a second.

        See `ProcessPool.step` for errors.
        """
        answers: list[Answer] = []
        for process, event in self._pool.step(timeout_s):
            rows = self._rows[process.index]
            if isinstance(event, Ended):
                answers += rows.lost(event)
            elif isinstance(event, Answer):
                rows.take(event)
                answers.append(event)
            rows.send()
        for answer in answers:
            self._report(answer)

    def close(self) -> None:
        """End the processes."""
        self._pool.close()

    def _rows_with(self, row: int) -> _Rows:
        return self._rows[row % len(self._rows)]

    def _report(self, answer: Answer) -> None:
        callback = self._callbacks.pop(answer.row, None)
        if callback is None:
            return
        if answer.problem:
            self.problem = answer
            self._problems[answer.problem] += 1
            # The first one, then the tenth, the hundredth...
            if str(count := self._problems[answer.problem]).strip("0") == "1":
                text = answer.text if self._telemetry.log_texts else answer.bare
                log.warning("environment errored: reason=%s times=%d: %s", answer.problem, count, text)
        result = answer.problem or ("tool_failed" if answer.tool_failed else "ok")
        self._telemetry.count("environment_answered", result)
        callback(answer)


class _Rows:
    """The rows of a process and of its successors."""

    def __init__(self, process: PoolProcess[Answer], timeout_s: float) -> None:
        self._process = process
        self._timeout_s = timeout_s
        self._waiting: collections.deque[Step] = collections.deque()
        self._sent: dict[int, Step] = {}
        # Rows that were sent and dropped since.
        self._dropped: set[int] = set()
        # Rows whose environment the process has: their former steps are not repeated.
        self._held: set[int] = set()
        # Rows whose process ended, and that are tried once more, alone.
        self._alone: set[int] = set()
        self._timeouts = 0

    def submit(self, step: Step) -> None:
        """Send a step, now or when the process is ready."""
        self._waiting.append(step)
        self.send()

    def forget(self, rows: list[int]) -> None:
        """Drop rows."""
        if not rows:
            return
        self._waiting = collections.deque(step for step in self._waiting if step.row not in rows)
        self._alone.difference_update(rows)
        self._held.difference_update(rows)
        # These are answered still, as soon as the process can.
        self._dropped.update(self._sent.keys() & rows)
        if self._process.is_ready:
            self._process.post(Forget(rows))

    def send(self) -> None:
        """Send the steps that wait; those to be tried alone one by one, when no other is in hand."""
        while self._process.is_ready and self._waiting:
            is_alone = self._waiting[0].row in self._alone
            if self._sent and (is_alone or self._alone & self._sent.keys()):
                return
            step = self._waiting.popleft()
            longest_s = max((self._limit_s(one) for one in self._sent.values()), default=0.0)
            self._sent[step.row] = step
            if not longest_s:
                self._watch()
            elif (limit_s := self._limit_s(step)) > longest_s:
                self._process.allow(limit_s + _GRACE_S)
            self._process.post(step)

    def take(self, answer: Answer) -> None:
        """Take note of an answer."""
        step = self._sent.pop(answer.row, None)
        self._alone.discard(answer.row)
        if answer.row in self._dropped:
            self._dropped.discard(answer.row)
        else:
            self._timeouts = self._timeouts + 1 if answer.problem == "timeout" else 0
            if step is None or step.is_last or answer.done or answer.problem:
                self._held.discard(answer.row)
            else:
                self._held.add(answer.row)
        self._watch()

    def lost(self, ended: Ended) -> list[Answer]:
        """Return the answers of the rows that a process took with it when it ended; the others are tried again."""
        in_hand, self._sent = list(self._sent.values()), {}
        lost = [step for step in in_hand if step.row not in self._dropped]
        limit_s = max((self._limit_s(step) for step in lost), default=0.0)
        is_late = ended.took_s >= limit_s
        self._held.clear()
        self._dropped.clear()
        if not lost:
            return []
        # Whoever ended the process: a row that was not alone in it, or not known to end it, is tried alone.
        if len(in_hand) > 1 or (not is_late and lost[0].row not in self._alone):
            self._alone.update(step.row for step in lost)
            self._waiting.extendleft(reversed(lost))
            return []
        problem: Problem = "timeout" if is_late else "exception"
        how = how_ended(ended.code)
        text = told_late(limit_s) if problem == "timeout" else f"the process of the row {how}"
        self._timeouts = self._timeouts + 1 if problem == "timeout" else 0
        answers = [Answer(step.row, problem, text, text) for step in lost]
        if self._timeouts >= _TIMEOUTS_IN_A_ROW:
            text = f"not tried: {self._timeouts} rows in a row took longer than {self._timeout_s:g} s"
            late = [step for step in self._waiting if step.row in self._alone]
            self._waiting = collections.deque(step for step in self._waiting if step.row not in self._alone)
            answers += [Answer(step.row, "timeout", text, text) for step in late]
            self._timeouts = 0
        self._alone.difference_update(answer.row for answer in answers)
        return answers

    def _limit_s(self, step: Step) -> float:
        """Return the longest time of a step: former ones are repeated in a process that does not have the row."""
        return self._timeout_s * (1 if step.row in self._held else max(1, len(step.responses)))

    def _watch(self) -> None:
        """Begin the time of the steps in hand."""
        limits_s = [self._limit_s(step) + _GRACE_S for step in self._sent.values()]
        self._process.watch(max(limits_s, default=math.inf))


def row_json(prompt: Any, answer: Any, columns: Any) -> str:
    """Return what `Environment.reset` gets, as JSON."""
    return json.dumps([prompt, answer, dict(columns)])
