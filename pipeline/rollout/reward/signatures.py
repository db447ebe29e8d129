"""The call of a reward function by its signature: a row or all rows at once, awaited or not, and its keywords.

sync, a row a call            fn(ids (S,), mask (S,), gt_answer=, response_start=, ...) -> a number
async                         the same; the calls of all rows run at the same time
batched (`batched`), or both  fn(ids (B, S), mask (B, S), gt_answer=[...], ...) -> B numbers, one call for all rows
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch

from pipeline.config.user_modules import (
    ANSWER,
    PROMPT,
    RESPONSE,
    REWARD_KEYWORDS,
    VISION_KEYWORDS,
    keywords_of,
    named_in,
    needed_columns,
)
from pipeline.errors import RewardError

F = TypeVar("F", bound=Callable[..., Any])
CONCURRENCY: Final = 64
_loops: Final = threading.local()


def batched(function: F) -> F:
    """Mark a reward function that scores all rows of a call at once.

    Args:
        function: Gets ``input_ids (B, S)``, ``attention_mask (B, S)``, and each keyword as a list with one element a
            row, except `tokenizer`. It returns B numbers; None, NaN or an exception in place of a number leaves its row
            without a reward. It may be async.

    Returns:
        The function itself.

    Examples:
        >>> @batched
        ... def lengths(input_ids, attention_mask, *, response_start, response_end, **_):
        ...     return [end - start for start, end in zip(response_start, response_end)]
        >>> lengths.is_batched
        True
    """
    function.is_batched = True  # type: ignore[attr-defined]
    return function


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a call of a function, or of an object that is called as one, is awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function, or of a module's ``forward``, by name."""
    try:
        return inspect.signature(_called(function)).parameters
    # Some functions written in C have no signature, and so no named parameters.
    except (TypeError, ValueError):
        return {}


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    return function.forward if isinstance(function, torch.nn.Module) else function


class Signature:
    """The parameters of a reward function.

    Attributes:
        is_batched: Whether one call scores all rows.
        is_async: Whether calls are awaited.
        wants_columns: Whether the function takes columns of the prompt's row.
        wants_prompt: Whether the function names the prompt.
        vision: The image keywords that it names.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Read the parameters of a reward function."""
        self.is_batched = bool(getattr(function, "is_batched", False))
        self.is_async = is_async(_called(function))
        parameters = parameters_of(function)
        named = named_in(parameters)
        self._takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        self.vision: list[str] = [name for name in VISION_KEYWORDS if name in named]
        self._wants_response = RESPONSE in named
        reserved = {*REWARD_KEYWORDS, RESPONSE, PROMPT, *VISION_KEYWORDS}
        self._columns = [name for name in keywords_of(parameters) if name not in reserved]
        self._needed = needed_columns(function, "rlhfd")
        self.wants_prompt = PROMPT in named
        self._reserved = reserved
        self.wants_columns = self._takes_any or bool(self._columns)

    def keywords(
        self, row: Mapping[str, Any], seen: Mapping[str, Any], columns: Mapping[str, Any], response: Callable[[], str]
    ) -> dict[str, Any]:
        """Return the keywords of one row's call.

        Args:
            row: The row's values of `REWARD_KEYWORDS`.
            seen: The image keywords.
            columns: The further columns of the prompt's row, and its prompt.
            response: Returns the text of the response.

        Raises:
            RewardError: If the row lacks a column that the function needs.
        """
        for name in self._needed:
            if name not in columns:
                known = ", ".join(sorted(columns)) or "no further columns"
                lacks = f"needs the column {name!r}, the prompt's row has {known}"
                raise RewardError(lacks, raised=True, cause=lacks)
        given = {
            name: value
            for name, value in columns.items()
            if name not in self._reserved and (self._takes_any or name in self._columns)
        }
        if ANSWER in self._columns:
            given.setdefault(ANSWER, row["gt_answer"])
        if self.wants_prompt:
            given[PROMPT] = columns.get(PROMPT)
        given |= {**row, **{name: seen[name] for name in self.vision}}
        if self._wants_response:
            given[RESPONSE] = response()
        return given

    def together(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the keywords of one call for all rows, of the keywords of each."""
        names = dict.fromkeys(name for row in rows for name in row)
        lists: dict[str, Any] = {name: [row.get(name) for row in rows] for name in names if name != "tokenizer"}
        return {**lists, "tokenizer": rows[0]["tokenizer"]}


def awaited(calls: Sequence[Callable[[], Coroutine[Any, Any, Any]]], timeout_s: float) -> list[Any]:
    """Run coroutines at the same time, 64 at most; return the result or the exception of each, in order.

    All calls of a process run in one event loop (`event_loop`).

    Args:
        calls: Each makes a coroutine.
        timeout_s: Limit of all together; a TimeoutError is the result of those that are not done then. 0: none.
    """

    async def run() -> list[Any]:
        room = asyncio.Semaphore(CONCURRENCY)
        deadline_s = asyncio.get_running_loop().time() + timeout_s if timeout_s else None

        async def one(call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
            async with asyncio.timeout_at(deadline_s), room:
                return await call()

        return await asyncio.gather(*map(one, calls), return_exceptions=True)

    return event_loop().run(run())


def event_loop() -> asyncio.Runner:
    """Return the runner of this thread's event loop, the same for the life of the process.

    Semaphores, clients and connections that a module keeps belong to the loop in which they were first used; tasks that
    a function leaves go on during its next call.
    """
    if getattr(_loops, "process", 0) != os.getpid():
        # A fork has no use for the loop of its parent.
        _loops.runner, _loops.process = asyncio.Runner(), os.getpid()
        # The loop is the current one of this thread from now on.
        _loops.runner.get_loop()
    runner: asyncio.Runner = _loops.runner
    return runner
