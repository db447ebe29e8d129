"""Environments in processes that can be killed: a step that hangs or crashes costs its own row only.

    worker                                process (`pipeline.rollout.environment.process`), many rows at a time
      Step, for each response     ----->  makes the row's environment with the first one, calls `step`
      Forget, of dropped rows     ----->
                                  <-----  Ready once, then an Answer for each Step, as it ends

A row stays with one process. A process that ends is replaced, and each step carries all responses of its row: the
successor repeats them, in as many times the limit of a step. Steps that a process had in hand when it ended are tried
again one at a time, so that the row at fault is found; it has no answer, the others have theirs. A process ends by
itself when a step takes too long; the worker waits a little longer, then kills it. It leads a session: the programs
that it has started are killed with it, whoever ends it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.errors import ConfigError, DeadlineError, RlhfdError
from pipeline.rollout.environment import process as environment_process
from pipeline.rollout.environment.wire import Answer, Forget, Problem, Ready, Step, frame, to_pool, unframe
from pipeline.runtime.lifeline import PARENT_VARIABLE

STARTUP_TIMEOUT_S = 120.0
_GRACE_S = 3.0
_READ_BYTES = 1 << 16
_TIMEOUTS_IN_A_ROW = 3
_EARLY_ENDS = 3
"""Successors that may end before they have imported the environment."""

log = logging.getLogger(__name__)


@dataclasses.dataclass
class EnvironmentCounts:
    """The work of a pool since its start.

    Attributes:
        answers: Steps that were answered.
        tools_failed: Of these, those whose response called a tool in vain.
        problems: Rows without an answer, by reason.
    """

    answers: int = 0
    tools_failed: int = 0
    problems: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


class EnvironmentPool:
    """The environments of a worker's rows, each in one of some processes.

    Not thread-safe; close it. Its processes die with this one.

    Args:
        name: ``module:Factory``.
        timeout_s: Longest time of a step.
        processes: Number of processes.
        on_progress: Called at least once a second while steps are waited for.
        log_texts: Whether the log quotes exceptions.

    Attributes:
        counts: The work so far.
        problem: The last row without an answer; None if there was none since it was set to None.
    """

    def __init__(
        self,
        name: str,
        *,
        timeout_s: float,
        processes: int = 1,
        on_progress: Callable[[], None] = lambda: None,
        log_texts: bool = False,
    ) -> None:
        self.counts = EnvironmentCounts()
        self.problem: Answer | None = None
        self._on_progress = on_progress
        self._log_texts = log_texts
        self._new_row = itertools.count().__next__
        self._callbacks: dict[int, Callable[[Answer], None]] = {}
        self._processes = [_Process(name, timeout_s) for _ in range(processes)]

    def wait_ready(self, timeout_s: float = STARTUP_TIMEOUT_S) -> None:
        """Wait until every process has imported the environment.

        Raises:
            ConfigError: If it cannot be imported, or is no environment.
            DeadlineError: If that takes longer than `timeout_s`.
            RlhfdError: If a process was killed before that.
        """
        deadline_s = time.monotonic() + timeout_s
        while not all(process.is_ready for process in self._processes):
            self.step(max(0.0, deadline_s - time.monotonic()))
            if time.monotonic() > deadline_s:
                raise DeadlineError(f"the environment was not imported within {timeout_s:g} s")

    @property
    def is_busy(self) -> bool:
        """Whether a step is waited for."""
        return bool(self._callbacks)

    def new_row(self) -> int:
        """Return the number of a new row."""
        return self._new_row()

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
        self._process_of(row).submit(Step(row, row_json, list(responses), is_last))

    def forget(self, rows: Sequence[int]) -> None:
        """Drop rows; their answers are not reported any more."""
        for row in rows:
            self._callbacks.pop(row, None)
        for process in self._processes:
            process.forget([row for row in rows if self._process_of(row) is process])

    def step(self, timeout_s: float) -> None:
        """Report the answers that are there; without one wait for the first, at most a second.

        Raises:
            ConfigError: If a process that was started anew cannot import the environment.
            RlhfdError: If the processes end one after another before they have imported it.
            DeadlineError: If one is not ready in time.
        """
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                selector.register(process.link, process.events, process)
            ready = selector.select(min(1.0, timeout_s))
        readable = [key.data for key, events in ready if events & selectors.EVENT_READ]
        # A look that neither waits nor finds an answer is no progress: an engine that hangs would look alive.
        if readable or timeout_s > 0:
            self._on_progress()
        for key, events in ready:
            if events & selectors.EVENT_WRITE:
                key.data.flush()
        answers = [answer for process in readable for answer in process.receive()]
        for process in self._processes:
            if process not in readable:
                answers += process.replace_if_ended()
        for process in self._processes:
            process.kill_if_overdue()
        for answer in answers:
            self._report(answer)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.close()

    def _process_of(self, row: int) -> _Process:
        return self._processes[row % len(self._processes)]

    def _report(self, answer: Answer) -> None:
        callback = self._callbacks.pop(answer.row, None)
        if callback is None:
            return
        if answer.problem:
            self.problem = answer
            self.counts.problems[answer.problem] += 1
            # The first one, then the tenth, the hundredth...
            if str(count := self.counts.problems[answer.problem]).strip("0") == "1":
                text = answer.text if self._log_texts else answer.bare
                log.warning("environment errored: reason=%s times=%d: %s", answer.problem, count, text)
        else:
            self.counts.answers += 1
            self.counts.tools_failed += answer.tool_failed
        callback(answer)


class _Process:
    """A process and its successors.

    Attributes:
        link: The socket to it.
        is_ready: Whether it has imported the environment.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._waiting: collections.deque[Step] = collections.deque()
        self._sent: dict[int, Step] = {}
        # Of those sent, the rows that were dropped since.
        self._dropped: set[int] = set()
        # Rows whose environment the process has: their former steps are not repeated.
        self._held: set[int] = set()
        # Rows whose process ended, and that are tried once more, alone.
        self._alone: set[int] = set()
        self._timeouts = 0
        self._was_ready = False
        self._early_ends = 0
        self._start()

    @property
    def events(self) -> int:
        """The events of the link to wait for."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unwritten else 0)

    def submit(self, step: Step) -> None:
        """Send a step, now or when the process is ready."""
        self._waiting.append(step)
        self._send()

    def forget(self, rows: list[int]) -> None:
        """Drop rows."""
        if not rows:
            return
        self._waiting = collections.deque(step for step in self._waiting if step.row not in rows)
        self._alone.difference_update(rows)
        self._held.difference_update(rows)
        # These are answered still, as soon as the process can.
        self._dropped.update(self._sent.keys() & rows)
        if self.is_ready:
            self._write(frame(Forget(rows)))

    def flush(self) -> None:
        """Write as much as the link takes: a process that is stopped or at work must not keep the worker waiting."""
        # One that is dead reads nothing; its successor gets the steps.
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._unwritten:
                del self._unwritten[: self.link.send(self._unwritten)]

    def receive(self) -> list[Answer]:
        """Return the answers that have come; replace a process that has ended.

        Raises:
            ConfigError: If the process cannot import the environment.
            RlhfdError: As `EnvironmentPool.step`.
        """
        answers = []
        try:
            data = self.link.recv(_READ_BYTES)
        except ConnectionError:
            data = b""
        self._read += data
        while (body := unframe(self._read)) is not None:
            match to_pool.decode(body):
                case Ready(error=error) if error:
                    raise ConfigError(error)
                case Ready():
                    self.is_ready = self._was_ready = True
                    self._early_ends = 0
                case Answer() as answer:
                    self._take(answer)
                    answers.append(answer)
        if data:
            # The time of a step begins anew: the process answers, it does not hang.
            self._begin_watch()
        else:
            answers += self._replace()
        self._send()
        return answers

    def replace_if_ended(self) -> list[Answer]:
        """Replace a process that has ended although its end of the link is open, in a child of its own.

        Raises:
            ConfigError: As `receive`.
            RlhfdError: As `receive`.
        """
        # It is not reaped before its group is killed: until then no other group has the same number.
        with contextlib.suppress(ChildProcessError):
            if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return []
        with contextlib.suppress(BlockingIOError):
            return self.receive()
        answers = self._replace()
        self._send()
        return answers

    def kill_if_overdue(self) -> None:
        """Kill a process that does not answer; `receive` then finds its end.

        Raises:
            DeadlineError: If it has not imported the environment in time.
        """
        if time.monotonic() < self._deadline_s or (self.is_ready and not self._sent):
            return
        if not self.is_ready:
            raise DeadlineError(f"the environment was not imported within {STARTUP_TIMEOUT_S:g} s")
        self._kill()

    def close(self) -> None:
        """End the process."""
        self.link.close()
        self._kill()
        self._process.wait()

    def _start(self) -> None:
        self.link, other = socket.socketpair()
        self.link.setblocking(False)
        self._read, self._unwritten = bytearray(), bytearray()
        self.is_ready = False
        self._held.clear()
        self._dropped.clear()
        self._began_s = time.monotonic()
        self._deadline_s = self._began_s + STARTUP_TIMEOUT_S
        with other:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", environment_process.__name__),
                    *(str(other.fileno()), self._name, str(self._timeout_s)),
                ],
                stdin=subprocess.DEVNULL,
                # The output of environments goes into the worker's log.
                stdout=2,
                pass_fds=[other.fileno()],
                env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
                # Its own session, and the programs that it starts are killed with it.
                start_new_session=True,
            )

    def _kill(self) -> None:
        """Kill the process and the programs that it has started, before it is reaped."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()

    def _limit_s(self, step: Step) -> float:
        """Return the longest time of a step: former ones are repeated in a process that does not have the row."""
        return self._timeout_s * (1 if step.row in self._held else max(1, len(step.responses)))

    def _begin_watch(self) -> None:
        self._began_s = time.monotonic()
        longest_s = max((self._limit_s(step) for step in self._sent.values()), default=self._timeout_s)
        self._deadline_s = self._began_s + longest_s + _GRACE_S

    def _take(self, answer: Answer) -> None:
        step = self._sent.pop(answer.row, None)
        self._alone.discard(answer.row)
        if answer.row in self._dropped:
            self._dropped.discard(answer.row)
            return
        self._timeouts = self._timeouts + 1 if answer.problem == "timeout" else 0
        if step is None or step.is_last or answer.done or answer.problem:
            self._held.discard(answer.row)
        else:
            self._held.add(answer.row)

    def _send(self) -> None:
        """Send the steps that wait; those to be tried alone one by one, when no other is in hand."""
        while self.is_ready and self._waiting:
            is_alone = self._waiting[0].row in self._alone
            if self._sent and (is_alone or self._alone & self._sent.keys()):
                return
            step = self._waiting.popleft()
            longest_s = max((self._limit_s(one) for one in self._sent.values()), default=0.0)
            self._sent[step.row] = step
            if not longest_s:
                self._begin_watch()
            elif (limit_s := self._limit_s(step)) > longest_s:
                self._deadline_s = max(self._deadline_s, time.monotonic() + limit_s + _GRACE_S)
            self._write(frame(step))

    def _write(self, data: bytes) -> None:
        self._unwritten += data
        self.flush()

    def _replace(self) -> list[Answer]:
        """Start a successor of a process that has ended; return the answers of rows that it took with it.

        Raises:
            ConfigError: If it ended by itself before it had imported the environment, and none has imported it yet.
            RlhfdError: If it was killed before that; if several ended so one after another, where one has imported it.
        """
        took_s = time.monotonic() - self._began_s
        self.link.close()
        self._kill()
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if not self.is_ready:
            self._early_ends += 1
            text = f"rollout.environment: the process that imports {self._name} {how}"
            if not self._was_ready:
                # The kernel kills for want of memory: that is no matter of the code, and the worker is restarted.
                raise RlhfdError(text) if code == -signal.SIGKILL else ConfigError(text)
            # One has imported it before: this one was killed, or the machine lacks memory.
            if self._early_ends > _EARLY_ENDS:
                raise RlhfdError(f"{text}, {self._early_ends} times in a row")
            self._start()
            return []
        in_hand, self._sent = list(self._sent.values()), {}
        lost = [step for step in in_hand if step.row not in self._dropped]
        limit_s = max((self._limit_s(step) for step in lost), default=0.0)
        is_late = took_s >= limit_s
        self._start()
        if not lost:
            return []
        # Whoever ended the process: a row that was not alone in it, or not known to end it, is tried alone.
        if len(in_hand) > 1 or (not is_late and lost[0].row not in self._alone):
            self._alone.update(step.row for step in lost)
            self._waiting.extendleft(reversed(lost))
            return []
        problem: Problem = "timeout" if is_late else "exception"
        text = f"no answer within {limit_s:g} s" if problem == "timeout" else f"the process of the row {how}"
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


def row_json(prompt: Any, answer: Any, columns: Any) -> str:
    """Return what `Environment.reset` gets, as JSON."""
    return json.dumps([prompt, answer, dict(columns)])
