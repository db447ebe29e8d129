"""Environments of the real verifiers library, whose harness calls the model as an OpenAI client does."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import re
import sys
import types
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from pipeline import verifiers_environment
from pipeline.config.user_modules import FOLDER_VARIABLE
from pipeline.errors import ConfigError
from pipeline.rollout.environment.pool import EnvironmentPool, row_json
from pipeline.rollout.environment.verifiers import _Host, _template_of
from pipeline.rollout.environment.wire import Answer

# CI has it not, for its size (CONTRIBUTING.md).
needs_verifiers = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None, reason="verifiers is not installed: pip install 'rlhfd[verifiers]'"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

GUESSES = '''
"""A taskset, its harness and its environment: guess a number, with hints or with a tool."""
import asyncio, os
from pathlib import Path
import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["Guesses", "Loop", "Hints"]
ASK = {"type": "function", "function": {"name": "parity", "parameters": {"type": "object", "properties": {}}}}

class Data(vf.TaskData):
    number: int
    kind: str

class Guess(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.assistant_messages[-1].content == str(self.data.number))

    @vf.reward(weight=-0.25)
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)

class Guesses(vf.Taskset[Guess, vf.TasksetConfig]):
    def load(self):
        kinds = "once", "hints", "tool", "rewritten", "two", "swallowed"
        return [Guess(Data(prompt="a number?", number=7, kind=kind, system_prompt="guess")) for kind in kinds]

class Loop(vf.Harness[vf.HarnessConfig]):
    """A harness in this process: it calls the model until a response has no tool call."""
    APPENDS_SYSTEM_PROMPT, SUPPORTS_RESUME, EXECUTES_CODE, NEEDS_CONTAINER = True, True, False, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        prompt = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt
        said = [message_to_wire(one) for one in [vf.SystemMessage(content=system), *prompt]]
        more = {"tools": [ASK]} if data.kind == "tool" else {}
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as model:
            while True:
                if data.kind == "swallowed":
                    try:
                        await asyncio.gather(*(model.chat.completions.create(model=ctx.model, messages=said)
                                               for _ in range(2)))
                    except Exception:
                        break
                done = await model.chat.completions.create(model=ctx.model, messages=said, **more)
                said.append(done.choices[0].message.model_dump(exclude_none=True))
                if data.kind == "rewritten":
                    said[1]["content"] += "!"
                    said.append({"role": "user", "content": "again"})
                    continue
                if not done.choices[0].message.tool_calls:
                    break
                for call in done.choices[0].message.tool_calls:
                    told = f"{call.function.name}({call.function.arguments}) is odd"
                    said.append({"role": "tool", "tool_call_id": call.id, "content": told})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

class Hints(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task, agents):
        if task.data.kind not in ("hints", "two"):
            await agents.agent.run(task)
            return
        if task.data.kind == "two":
            await asyncio.gather(agents.agent.run(task), agents.agent.run(task))
            return
        async with agents.agent.interaction(task) as talk:
            segment = await talk.turn()
            while segment.last_reply != str(task.data.number):
                if segment.last_reply == "raise":
                    raise ValueError("no number")
                if segment.last_reply == "hang":
                    Path(os.environ["GUESSES_NOTE"]).write_text("hangs")
                    try:
                        await asyncio.sleep(1000)
                    finally:
                        Path(os.environ["GUESSES_NOTE"]).write_text("cancelled")
                if segment.last_reply == "tasks":
                    names = [one.get_coro().__qualname__ for one in asyncio.all_tasks()]
                    segment = await talk.turn(str(names.count("_Host.run")))
                    continue
                segment = await talk.turn("higher" if int(segment.last_reply) < task.data.number else "lower")

def load():
    config = {"taskset": {"id": "guesses"}, "agent": {"runtime": {"type": "subprocess"}}, "max_concurrent_agents": None}
    return vf.load_environment(vf.resolve_env_config(config))

def render(messages):
    return "".join(f"<{one['role']}>{one['content']}" for one in messages) + "<assistant>"

def broken():
    raise OSError("no device")

from pipeline import verifiers_environment
make = verifiers_environment(load, render=render)
make_broken = verifiers_environment(broken, render=render)
make_endless = verifiers_environment(lambda: endless(load()), render=render)

def endless(env):
    env.taskset.INFINITE = True
    return env
'''
PLACES = {name: place for place, name in enumerate(("once", "hints", "tool", "rewritten", "two", "swallowed"))}
PROMPT = [{"role": "user", "content": "a number?"}]


class Guessing:
    """A pool of one process with `GUESSES`, and rows of it."""

    def __init__(self, name: str) -> None:
        self.pool = EnvironmentPool(f"guesses:{name}", timeout_s=60.0)
        self.rows: list[tuple[int, str, list[str]]] = []
        self.answers: dict[int, list[Answer]] = {}

    def begin(self, kind: str, prompt: Any = PROMPT, **columns: Any) -> int:
        self.rows.append((self.pool.new_row(), row_json(prompt, None, {"task": PLACES.get(kind), **columns}), []))
        return len(self.rows) - 1

    def submit(self, row: int, response: str) -> None:
        number, told, responses = self.rows[row]
        responses.append(response)
        answers = self.answers.setdefault(row, [])
        self.pool.submit(number, told, responses, answers.append, is_last=False)

    def say(self, row: int, response: str) -> Answer:
        count = len(self.answers.get(row, []))
        self.submit(row, response)
        while len(self.answers[row]) == count:
            self.pool.step(1.0)
        return self.answers[row][-1]


@pytest.fixture
def guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Guessing]]:
    (tmp_path / "guesses.py").write_text(GUESSES)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GUESSES_NOTE", str(tmp_path / "note"))
    begun: list[Guessing] = []

    def begin(name: str = "make") -> Guessing:
        begun.append(Guessing(name))
        begun[-1].pool.wait_ready()
        return begun[-1]

    yield begin
    for one in begun:
        one.pool.close()


@needs_verifiers
def test_a_task_of_one_response_has_the_reward_of_its_rubric(guess: Callable[..., Guessing]) -> None:
    guessing = guess()

    right = guessing.say(guessing.begin("once"), "7")
    wrong = guessing.say(guessing.begin("once", prompt="a number?"), "8")

    assert (right.problem, right.reward, right.done) == ("", 1.75, True)
    assert (wrong.problem, wrong.reward, wrong.done) == ("", -0.25, True)


@needs_verifiers
def test_each_message_of_the_environment_is_the_observation_of_its_turn(guess: Callable[..., Guessing]) -> None:
    guessing = guess()
    row, other = guessing.begin("hints"), guessing.begin("hints")

    answers = [guessing.say(row, "3"), guessing.say(other, "9"), guessing.say(row, "8"), guessing.say(row, "7")]

    told = [(answer.problem, answer.observation, answer.reward, answer.done) for answer in answers]
    assert told == [
        ("", "<user>higher<assistant>", 0.0, False),
        ("", "<user>lower<assistant>", 0.0, False),
        ("", "<user>lower<assistant>", 0.0, False),
        ("", "", 1.25, True),
    ]


@needs_verifiers
def test_a_tool_call_in_the_text_is_a_call_for_the_harness(guess: Callable[..., Guessing]) -> None:
    guessing = guess()
    row, failing = guessing.begin("tool"), guessing.begin("tool")

    called = guessing.say(row, 'so: <tool_call>{"name": "parity", "arguments": {"of": 1}}</tool_call>')
    answered = guessing.say(row, "7")
    failed = guessing.say(failing, "<tool_call>{parity}</tool_call>")

    assert (called.problem, called.observation) == ("", '<tool>parity({"of": 1}) is odd<assistant>')
    assert (answered.done, answered.reward, answered.tool_failed) == (True, 1.5, False)
    assert (failed.done, failed.reward, failed.tool_failed) == (True, -0.25, True)


@needs_verifiers
def test_a_row_is_repeated_with_the_same_answers_in_another_process(guess: Callable[..., Guessing]) -> None:
    guessing, successor = guess(), guess()
    row, again = guessing.begin("hints"), successor.begin("hints")
    first = [guessing.say(row, "3"), guessing.say(row, "8")]

    successor.rows[again][2].append("3")
    repeated = successor.say(again, "8")

    assert repeated.observation == first[1].observation == "<user>lower<assistant>"
    assert successor.say(again, "7").reward == guessing.say(row, "7").reward == 1.25


@needs_verifiers
def test_a_failure_leaves_its_row_out_with_the_reason(guess: Callable[..., Guessing]) -> None:
    guessing = guess()

    def failure(kind: str, *responses: str, **options: Any) -> str:
        row = guessing.begin(kind, **options)
        for response in responses:
            answer = guessing.say(row, response)
        assert answer.problem == "exception", answer
        return answer.text

    assert "ValueError: no number" in failure("hints", "raise")
    assert "column task is 77: no task of 6 in the taskset" in failure("once", "7", task=77)
    assert "the prompt of task 0 is another one" in failure("once", "7", prompt="a letter?")
    assert "changed earlier messages" in failure("rewritten", "7")
    assert "a second conversation with the model" in failure("two", "7")
    assert "a second conversation with the model" in failure("swallowed", "7")
    assert guessing.say(guessing.begin("once"), "7").reward == 1.75


@needs_verifiers
def test_a_dropped_row_ends_its_episode_and_leaves_no_task(guess: Callable[..., Guessing], tmp_path: Path) -> None:
    guessing = guess()
    waiting, hanging, asking = guessing.begin("hints"), guessing.begin("hints"), guessing.begin("hints")
    assert guessing.say(waiting, "3").observation == "<user>higher<assistant>"
    assert guessing.say(asking, "tasks").observation == "<user>2<assistant>"
    guessing.submit(hanging, "hang")
    while not (tmp_path / "note").exists():
        guessing.pool.step(0.1)

    guessing.pool.forget([guessing.rows[waiting][0], guessing.rows[hanging][0]])
    while (tmp_path / "note").read_text() != "cancelled":
        guessing.pool.step(0.1)

    while (told := guessing.say(asking, "tasks").observation) != "<user>1<assistant>":
        assert told in ("<user>2<assistant>", "<user>3<assistant>")


@needs_verifiers
@pytest.mark.parametrize(
    ("name", "problem"), [("make_broken", "OSError: no device"), ("make_endless", "the taskset has no end: bound it")]
)
def test_an_environment_that_cannot_be_used_is_refused(guess: Callable[..., Guessing], name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        guess(name)


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)

    with pytest.raises(ConfigError, match=re.escape("pip install 'rlhfd[verifiers]'")):
        verifiers_environment(lambda: None, render=str)()


class Taskset(list[Any]):
    bounded = True


class LateServers:
    """An environment whose servers start at the second attempt."""

    starts = 0
    taskset = Taskset()
    _interception = None

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        self.starts += 1
        if self.starts == 1:
            raise OSError("the port is taken")
        yield


def test_servers_that_did_not_start_are_started_for_the_next_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that wait for the same start have its error."""
    library = types.SimpleNamespace(ModelContext=lambda *_: None, TrainClientConfig=lambda **_: None)
    monkeypatch.setitem(sys.modules, "verifiers", types.ModuleType("verifiers"))
    monkeypatch.setitem(sys.modules, "verifiers.v1", library)
    env = LateServers()

    async def serve() -> list[BaseException | None]:
        host = _Host(env)
        first = await asyncio.gather(host.serve(), host.serve(), return_exceptions=True)
        return [*first, *await asyncio.gather(host.serve(), host.serve(), return_exceptions=True)]

    errors = asyncio.run(serve())

    assert list(map(repr, errors)) == ["OSError('the port is taken')"] * 2 + ["None"] * 2
    assert env.starts == 2


def test_exactly_one_rendering_is_given() -> None:
    with pytest.raises(ConfigError, match="needs either tokenizer or render"):
        verifiers_environment(lambda: None)
    with pytest.raises(ConfigError, match="needs either tokenizer or render"):
        verifiers_environment(lambda: None, tokenizer="a", render=str)


def test_a_chat_template_renders_what_stands_between_two_responses(tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<|im_end|>": 0, "?": 1}, unk_token="?")), eos_token="<|im_end|>"
    )
    tokenizer.save_pretrained(tmp_path / "bare")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path / "chat")
    tokenizer.eos_token = "?"
    tokenizer.save_pretrained(tmp_path / "other")
    message = [{"role": "tool", "content": "odd [the response]"}]

    told = "\n<|im_start|>tool\nodd [the response]<|im_end|>\n<|im_start|>assistant\n"
    assert _template_of(str(tmp_path / "chat"))(message) == told
    assert _template_of(str(tmp_path / "other"))(message) == "<|im_end|>" + told
    (tmp_path / "other" / "generation_config.json").write_text('{"eos_token_id": [1, 0]}')
    assert _template_of(str(tmp_path / "other"))(message) == told, "the model ends its turn with that token, too"
    with pytest.raises(ConfigError, match="has no chat template"):
        _template_of(str(tmp_path / "bare"))
