"""A process with the environments of some rows: each step in turn or, where they await something, at the same time.

A step that does not return ends the process, which the pool replaces; see `pipeline.rollout.environment.pool`. This
module and its imports load no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import inspect
import json
import numbers
import selectors
import sys
import time
import traceback
from typing import Any

from pipeline.config import user_modules
from pipeline.errors import ConfigError, LinkEndedError
from pipeline.rollout.environment.types import Environment, Turn
from pipeline.rollout.environment.wire import Answer, Forget, Step, to_process
from pipeline.runtime.link import Link
from pipeline.runtime.pool_process import Load, Serve

CONCURRENCY = 64
"""Steps at the same time in a process."""

BLOCKED_GRACE_S = 1.0

_LARGEST = (2 - 2**-23) * 2.0**127
"""The largest number of float32."""


class Environments:
    """The environments of the rows, and their steps.

    Args:
        factory: Makes an environment.
        timeout_s: Longest time of a step; as many times that if former steps have to be repeated.
    """

    def __init__(self, factory: Any, timeout_s: float) -> None:
        self._factory = factory
        module = sys.modules.get(getattr(factory, "__module__", ""))
        self._file = getattr(module, "__file__", None)
        self._timeout_s = timeout_s
        self._rows: dict[int, tuple[Environment, int]] = {}
        # Rows with a step that was taken and is not answered, and those of them that were dropped since.
        self._in_hand: set[int] = set()
        self._dropped: set[int] = set()
        # Task and deadline of each step under way.
        self._running: dict[int, tuple[asyncio.Task[Any], float]] = {}

    def take(self, step: Step) -> None:
        """Take a step over, for which `answer` is called later; `forget` reaches it from now on."""
        self._in_hand.add(step.row)

    async def answer(self, step: Step) -> Answer:
        """Return the answer to a step's last response."""
        answer = None if step.row in self._dropped else await self._answer(step)
        self._in_hand.discard(step.row)
        if answer is None or step.row in self._dropped:
            self._dropped.discard(step.row)
            answer = self._failed(step, "exception", "dropped")
        return answer

    def forget(self, rows: list[int]) -> None:
        """Drop the environments of rows; steps under way are cancelled, or end unheard."""
        for row in rows:
            self._rows.pop(row, None)
            if row in self._in_hand:
                self._dropped.add(row)
            if row in self._running:
                self._running[row][0].cancel()

    async def _answer(self, step: Step) -> Answer:
        _, done = self._rows.get(step.row, (None, 0))
        limit_s = self._timeout_s * max(1, len(step.responses) - done)
        task = asyncio.current_task()
        assert task is not None
        self._running[step.row] = task, time.monotonic() + limit_s
        self._arm()
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                turn = await self._turn(step)
            if problem := _problem_of(turn):
                return self._failed(step, "invalid", problem)
            answer = Answer(
                step.row,
                observation=str(turn.observation),
                reward=float(turn.reward),
                done=bool(turn.done),
                tool_failed=bool(turn.tool_failed),
            )
        except (SystemExit, KeyboardInterrupt, GeneratorExit):
            raise
        # The code of the user may raise anything, a TimeoutError and a CancelledError of its own too.
        except BaseException as error:
            # The cancellation that the limit made a TimeoutError has the lines that awaited.
            location = self._location_of((limit.expired() and error.__cause__) or error)
            if limit.expired():
                return self._failed(step, "timeout", f"{told_late(limit_s)}{location}")
            if isinstance(error, asyncio.CancelledError) and task.cancelling() > 0 and step.row not in self._dropped:
                # The end of the loop.
                raise
            kind = type(error).__name__
            return self._failed(
                step, "exception", f"{kind}: {_message_of(error)}{location}", f"raised {kind}{location}"
            )
        finally:
            del self._running[step.row]
            self._arm()
        if step.is_last or answer.done:
            self._rows.pop(step.row, None)
        return answer

    def _arm(self) -> None:
        """Have the process end, its stack logged, once all steps under way have had their time.

        A step may hang with the GIL held: only a C timer runs then. An answer that waits for the worker to read it is
        no step under way.
        """
        if not self._running:
            faulthandler.cancel_dump_traceback_later()
            return
        left_s = max(end_s for _, end_s in self._running.values()) - time.monotonic()
        faulthandler.dump_traceback_later(max(0.0, left_s) + BLOCKED_GRACE_S, exit=True)

    async def _turn(self, step: Step) -> Any:
        environment, done = self._rows.get(step.row, (None, 0))
        if environment is None or done != len(step.responses) - 1:
            environment, done = self._factory(), 0
            await _awaited(environment.reset(*json.loads(step.row_json)))
        for response in step.responses[done:]:
            turn = await _awaited(environment.step(response))
        self._rows[step.row] = environment, len(step.responses)
        return turn

    def _location_of(self, error: BaseException) -> str:
        """Return `` (file:line)``, the last line of the environment's file that was under way; empty if not known."""
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == self._file]
        return f" ({self._file}:{lines[-1]})" if lines else ""

    def _failed(self, step: Step, problem: Any, text: str, bare: str = "") -> Answer:
        self._rows.pop(step.row, None)
        # A lone surrogate cannot be sent.
        text = text.encode("utf-8", "replace").decode()
        return Answer(step.row, problem, text, bare or text)


def told_late(limit_s: float) -> str:
    """Return the problem of a step that has taken its time."""
    return f"no answer within {limit_s:g} s (rollout.environment_timeout_s)"


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    # The error's message is code of the user too.
    except Exception:  # noqa: BLE001
        return "without a message"


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _problem_of(turn: Any) -> str:
    if not isinstance(turn, Turn):
        return f"step returned a {type(turn).__name__}, not a Turn"
    if not isinstance(turn.observation, str):
        return f"the observation is a {type(turn.observation).__name__}, not a str"
    try:
        turn.observation.encode()
    except UnicodeEncodeError:
        return "the observation holds half of a surrogate pair"
    reward = turn.reward
    if not isinstance(reward, numbers.Real) or isinstance(reward, bool):
        return f"the reward is a {type(reward).__name__}, not a number"
    # An int may be larger than any float.
    if not -sys.float_info.max <= reward <= sys.float_info.max:
        return "the reward is not a finite number"
    if abs(reward) > _LARGEST:
        return f"the reward {float(reward):g} is beyond float32, in which it is trained"
    return ""


async def _serve(link: Link[Step | Forget], environments: Environments) -> None:
    """Answer the steps of a pool until it closes its end of the link."""
    loop, room, readable = asyncio.get_running_loop(), asyncio.Semaphore(CONCURRENCY), asyncio.Event()
    # The loop itself refers to a task weakly.
    tasks: set[asyncio.Task[None]] = set()

    def write() -> None:
        # The end of the link is found by the next read.
        with contextlib.suppress(LinkEndedError):
            link.flush()
            if not link.events & selectors.EVENT_WRITE:
                loop.remove_writer(link)

    async def one(step: Step) -> None:
        async with room:
            answer = await environments.answer(step)
        with contextlib.suppress(LinkEndedError):
            link.post(answer)
            loop.add_writer(link, write)

    loop.add_reader(link, readable.set)
    while True:
        await readable.wait()
        readable.clear()
        for message in link.receive():
            if isinstance(message, Forget):
                environments.forget(message.rows)
                continue
            environments.take(message)
            tasks.add(task := loop.create_task(one(message)))
            task.add_done_callback(tasks.discard)


def prepare(name: str, timeout_s: float) -> Load:
    """Return the import of an environment; see `EnvironmentPool` for the arguments."""
    return functools.partial(_load, name, timeout_s)


def _load(name: str, timeout_s: float) -> tuple[Serve, dict[str, Any]]:
    runner = asyncio.Runner()
    # Before the import: clients that the module makes belong to this loop.
    runner.get_loop()
    factory = user_modules.load_function("rollout.environment", name)
    # In the loop, as for each row: a client may ask for the running one.
    runner.run(_check(factory, name))
    environments = Environments(factory, timeout_s)
    return lambda end: runner.run(_serve(Link(end, to_process), environments)), {}


async def _check(factory: Any, name: str) -> None:
    """Refuse a factory whose object is no environment."""
    try:
        environment = factory()
    # The code of the user may raise anything.
    except Exception as error:
        raise ConfigError(f"rollout.environment: {name}() raised {type(error).__name__}: {error}") from error
    for method in ("reset", "step"):
        if not callable(getattr(environment, method, None)):
            kind = type(environment).__name__
            raise ConfigError(f"rollout.environment: the {kind} of {name} has no method {method}")
