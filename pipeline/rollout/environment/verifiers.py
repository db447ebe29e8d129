"""Environments of the `verifiers` library as an `Environment`. It loads no torch, and verifiers at its first use only.

verifiers drives the model itself. Here the episode of a row is a task, whose calls of the model wait for responses:

    reset    starts the episode, until it calls the model
    step     returns the response to that call; the episode goes on until it calls again, or has ended
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.model_files import end_token_ids
from pipeline.errors import ConfigError
from pipeline.rollout.environment.types import Environment, Turn

_MODEL = "rlhfd"
_NOWHERE = "http://127.0.0.1:9/rlhfd"
"""The endpoint by which a call of the policy is told from one of another model; nothing is ever sent there."""

_TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_RESPONSE = "[the response]"


def verifiers_environment(
    load: Callable[[], Any],
    *,
    tokenizer: str | None = None,
    render: Callable[[Sequence[Mapping[str, Any]]], str] | None = None,
) -> Callable[[], Environment]:
    """Return a factory for `rollout.environment` that runs an environment of `verifiers`.

    Args:
        load: Returns the environment, a `verifiers.v1.Env`; called once a process. The column ``task`` of a prompt's
            line is the place of its task in the taskset.
        tokenizer: Name or folder of the tokenizer whose chat template renders observations.
        render: Renders them in its place: gets the messages since the last response, with ``role`` and ``content``,
            and returns the text between that response and the next one.

    Returns:
        A function without arguments that makes the environment of a row.

    Raises:
        ConfigError: If not exactly one of `tokenizer` and `render` is given. The factory: if `verifiers` is missing,
            the tokenizer has no chat template, or the taskset has no end.
    """
    if (tokenizer is None) == (render is None):
        raise ConfigError("verifiers_environment needs either tokenizer or render")
    made: list[tuple[_Host, Callable[..., str]]] = []

    def make() -> Environment:
        if not made:
            try:
                import verifiers.v1  # noqa: F401
            except ImportError as error:
                raise ConfigError(f"pip install 'rlhfd[verifiers]' (verifiers 0.4): {error}") from error
            made.append((_Host(load()), render or _template_of(str(tokenizer))))
        return _Row(*made[0])

    return make


class _Calls:
    """The calls of the model in one row. The episode holds it, and not the row, whose end is to end the episode."""

    def __init__(self) -> None:
        self.trace_id: str | None = None
        # Of each call its request; then the error of a call that cannot be answered, or None at the episode's end.
        self.asked: asyncio.Queue[Any] = asyncio.Queue()
        self.response: asyncio.Future[Any] | None = None

    async def ask(self, dialect: Any, body: Any, trace_id: str) -> Any:
        """Return the assistant's message that answers a request."""
        from verifiers.v1.dialects import ChatDialect

        try:
            if not isinstance(dialect, ChatDialect):
                raise RuntimeError(f"the harness calls the model by {type(dialect).__name__}, not by chat completions")
            if self.response is not None or self.trace_id not in (None, trace_id):
                raise RuntimeError("the episode holds a second conversation with the model")
            request = dialect.parse_request(body)
        # verifiers would send it to the harness alone, which may go on as if nothing had happened.
        except Exception as error:
            self.asked.put_nowait(error)
            raise
        self.trace_id, self.response = trace_id, asyncio.get_running_loop().create_future()
        self.asked.put_nowait(request)
        try:
            return await self.response
        finally:
            self.response = None

    def end(self, episode: asyncio.Task[float]) -> None:
        """Report the end of the episode."""
        if not episode.cancelled():
            # It is raised by `step`, and not by one that was dropped.
            episode.exception()
        self.asked.put_nowait(None)


class _Host:
    """The environment of `verifiers` that all rows of a process share, and the model that its harnesses call."""

    def __init__(self, env: Any) -> None:
        from verifiers.v1 import ModelContext, TrainClientConfig

        if not env.taskset.bounded:
            raise ConfigError("the taskset has no end: bound it, such as env.taskset = env.taskset.take(1000)")
        self._env = env
        self._tasks = {task.data.idx: task for task in env.taskset}
        # A client for training is asked for whole responses, also where a harness streams them.
        self._context = ModelContext(_MODEL, TrainClientConfig(base_url=_NOWHERE, api_key_var="RLHFD_NO_KEY"))
        self._calls: dict[str, _Calls] = {}
        self._keeper: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None]

    def task(self, columns: Mapping[str, Any]) -> Any:
        """Return the task of a row."""
        if (task := self._tasks.get(columns.get("task"))) is None:
            raise ValueError(f"column task is {columns.get('task')!r}: no task of {len(self._tasks)} in the taskset")
        return task

    async def serve(self) -> None:
        """Start the servers of the environment, unless they are started."""
        if self._keeper is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._keeper = asyncio.create_task(self._keep())
        await asyncio.shield(self._ready)

    async def run(self, task: Any, calls: _Calls) -> float:
        """Run an episode; return the reward of the conversation with the model."""
        traces: list[str] = []

        def on_trace(trace: Any) -> None:
            traces.append(trace.id)
            self._calls[trace.id] = calls

        try:
            episode = await self._env.run_episode(task, self._context, on_trace=on_trace)
        finally:
            for trace_id in traces:
                del self._calls[trace_id]
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed")
        return float(sum(trace.reward for trace in episode.traces if trace.id == calls.trace_id))

    async def get_response(self, dialect: Any, body: Any, *_: Any, session_id: str, **__: Any) -> Any:
        """Return the response to a harness's call, as a client of `verifiers` does."""
        from verifiers.v1 import Response
        from verifiers.v1.clients.train import serialize_completion

        message = await self._calls[session_id].ask(dialect, body, session_id)
        reason = "tool_calls" if message.tool_calls else "stop"
        response = Response(id=_MODEL, created=0, model=_MODEL, message=message, finish_reason=reason)
        response.raw = serialize_completion(response, _MODEL)
        return response

    async def _keep(self) -> None:
        try:
            async with self._env.serving():
                self._env._interception = _Interception(self._env._interception, self)
                self._ready.set_result(None)
                await asyncio.Event().wait()
        # It is the error of each row.
        except Exception as error:  # noqa: BLE001
            # The next row starts them again.
            self._keeper = None
            if not self._ready.done():
                self._ready.set_exception(error)


class _Interception:
    """The environment's way from its harnesses to models; calls of the policy go to the host."""

    def __init__(self, inner: Any, host: _Host) -> None:
        self._inner = inner
        self._host = host

    @contextlib.asynccontextmanager
    async def acquire(self, session: Any) -> AsyncIterator[Any]:
        """Return the place of an agent's session."""
        async with self._inner.acquire(session) as slot:
            if session.ctx.client.base_url == _NOWHERE:
                session.client = self._host
            yield slot


class _Row:
    """The environment of one row."""

    def __init__(self, host: _Host, render: Callable[..., str]) -> None:
        self._host = host
        self._render = render
        self._calls = _Calls()
        self._episode: asyncio.Task[float] | None = None

    def __del__(self) -> None:
        # Also of a row that was dropped with a step under way. It may be collected in a thread of the environment.
        if self._episode is not None and not self._episode.done():
            with contextlib.suppress(RuntimeError):
                self._episode.get_loop().call_soon_threadsafe(self._episode.cancel)

    async def reset(self, prompt: Any, answer: Any, columns: Mapping[str, Any]) -> None:
        """Start the episode of the row's task."""
        task = self._host.task(columns)
        await self._host.serve()
        self._episode = asyncio.create_task(self._host.run(task, self._calls))
        self._episode.add_done_callback(self._calls.end)
        if (request := await self._next()) is None:
            raise RuntimeError(f"the episode ended before it called the model, with reward {self._episode.result()}")
        told = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if _without_system(told) != _without_system(map(_plain, request.messages)):
            raise ValueError(f"the prompt of task {columns['task']} is another one than that of its line")
        self._request = request

    async def step(self, response: str) -> Turn:
        """Answer the episode's call of the model."""
        if self._calls.response is None:
            raise RuntimeError("the harness gave its call of the model up")
        message, failed = _parsed(response, self._request)
        self._calls.response.set_result(message)
        if (request := await self._next()) is None:
            assert self._episode is not None
            return Turn(reward=self._episode.result(), done=True, tool_failed=failed)
        former, told = self._request.messages, len(self._request.messages)
        if request.messages[:told] != former or [one.role for one in request.messages[told : told + 1]] != [
            "assistant"
        ]:
            raise RuntimeError("the harness changed earlier messages of the conversation")
        self._request = request
        return Turn(self._render([_plain(one) for one in request.messages[told + 1 :]]), tool_failed=failed)

    async def _next(self) -> Any:
        asked = await self._calls.asked.get()
        if isinstance(asked, Exception):
            raise asked
        return asked


def _parsed(response: str, request: Any) -> tuple[Any, bool]:
    """Return the assistant's message, and whether it has a tool call that cannot be read."""
    from verifiers.v1 import AssistantMessage, ToolCall

    calls = []
    try:
        for place, text in enumerate(_TOOL_CALL.findall(response) if request.tools else ()):
            call = json.loads(text)
            arguments = call.get("arguments", {})
            arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
            call_id = f"call_{len(request.messages)}_{place}"
            calls.append(ToolCall(id=call_id, name=call["name"], arguments=arguments))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return AssistantMessage(content=response), True
    if not calls:
        return AssistantMessage(content=response), False
    return AssistantMessage(content=_TOOL_CALL.sub("", response).strip() or None, tool_calls=calls), False


def _plain(message: Any) -> dict[str, Any]:
    """Return a message of `verifiers` as a chat template takes it."""
    content = message.content or ""
    if not isinstance(content, str):
        if any(part.type != "text" for part in content):
            raise ValueError(f"a message of the {message.role} holds an image; environments are text alone")
        content = "\n".join(part.text for part in content)
    names = {name: value for name in ("name", "tool_call_id") if (value := getattr(message, name, None))}
    return {"role": message.role, "content": content, **names}


def _without_system(messages: Any) -> list[tuple[str, str]]:
    """Return role and text of each message that the row's line and the task share."""
    return [(message["role"], message["content"]) for message in messages if message["role"] != "system"]


def _template_of(name: str) -> Callable[[Sequence[Mapping[str, Any]]], str]:
    """Return a function that renders messages after a response by the chat template of a tokenizer."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(name)
    if not tokenizer.chat_template:
        raise ConfigError(f"the tokenizer of {name} has no chat template: give verifiers_environment a render function")

    listed = itertools.chain.from_iterable(end_token_ids(Path(name)).values())
    ends = [end for end in (tokenizer.eos_token, *tokenizer.convert_ids_to_tokens(list(listed))) if end]

    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        turn = [{"role": "user", "content": "."}, {"role": "assistant", "content": _RESPONSE}]
        text = tokenizer.apply_chat_template([*turn, *messages], tokenize=False, add_generation_prompt=True)
        _, found, rest = text.partition(_RESPONSE)
        if not found:
            raise RuntimeError(f"the chat template of {name} leaves the assistant's message out")
        # The model has written the end of its turn itself.
        return str(rest.removeprefix(next((end for end in ends if rest.startswith(end)), "")))

    return render
