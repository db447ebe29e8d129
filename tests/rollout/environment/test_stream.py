"""Tickets of several turns in a worker's hands, over a real maker; the environments play in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from pipeline.errors import FieldError
from pipeline.experience.types import Experience
from pipeline.rollout.environment.turns import TurnSettings
from pipeline.rollout.environment.wire import Answer
from pipeline.rollout.generation.blocking import BlockingEngine
from pipeline.rollout.generation.interface import Engine
from pipeline.rollout.generation.transformers import TransformersGenerator
from pipeline.runtime.messages import Failed, Faulty, Sealed
from pipeline.telemetry.reader import MetricsReader
from tests.rollout.environment.test_turns import InProcess
from tests.rollout.test_ticket_stream import GROUP, Bench
from tests.rollout.test_ticket_stream import new_bench as new_stream  # noqa: F401 - a fixture
from tests.support.row_stream import RowStream
from tests.support.tiny import Letters

ENGINES = {
    "blocking": lambda actor: BlockingEngine(TransformersGenerator(actor)),
    "stream": lambda actor: RowStream(actor, room_rows=10),
}


class Speaking(Letters):
    """Letters both ways; a stop is none."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return super().__call__(text)

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(token + 60) for token in ids if token > 1)


class Silent(InProcess):
    """A pool whose environments never answer."""

    def step(self, timeout_s: float) -> None:
        self.waits = [*getattr(self, "waits", []), timeout_s]


def answering(row: int, turn: int, response: str) -> Answer:
    """One letter after each response, of the response alone; a row ends by its response too."""
    letter = chr(66 + sum(map(ord, response)) % 10)
    return Answer(row, observation=letter, reward=turn / 4, done=len(response) > 2, tool_failed=len(response) == 1)


@pytest.fixture
def new_bench(new_stream: Callable[..., Bench]) -> Callable[..., Bench]:  # noqa: F811
    def make(new_engine: Callable[[Any], Engine], pool: Any) -> Bench:
        bench = new_stream(new_engine)
        bench.roller.turns = TurnSettings(pool, 3, 3)
        bench.roller.tokenizer = bench.roller.maker.tokenizer = Speaking()
        return bench

    return make


def texts(experience: Experience) -> list[list[int]]:
    return [row[mask != 0].tolist() for row, mask in zip(experience.sequences, experience.attention_mask, strict=True)]


def histogram(bench: Bench, name: str, **labels: str) -> tuple[float, float]:
    """Return the number of observations and their sum."""
    (found,) = MetricsReader(bench.slab).read()._named(name, labels)
    return found.count, found.total


@pytest.mark.parametrize("engine", ENGINES)
def test_a_ticket_among_others_has_the_turns_of_one_alone(new_bench, engine: str) -> None:
    many, alone = (new_bench(ENGINES[engine], InProcess(answering)) for _ in range(2))
    for number in range(8):
        many.ticket(number, prompts=2)

    many.run(lambda: many.worker.idle)
    for number in reversed(range(8)):
        alone.ticket(number, prompts=2)
        alone.run(lambda: alone.worker.idle)

    assert sorted(many.sealed()) == sorted(alone.sealed()) == [*range(8)]
    seen = [many.experience(number) for number in range(8)]
    for number, experience in enumerate(seen):
        other = alone.experience(number)
        assert texts(experience) == texts(other)
        assert torch.equal(experience.info["score"], other.info["score"])
        assert torch.equal(experience.action_mask, other.action_mask)
    counts = torch.cat([experience.info["turns"] for experience in seen])
    assert set(counts.tolist()) == {1, 2, 3}, "rows take different numbers of turns"
    assert any((~experience.action_mask).any() for experience in seen)


def test_a_ticket_whose_environments_do_not_answer_is_late_and_forgotten(new_bench) -> None:
    pool = Silent(answering)
    bench = new_bench(ENGINES["blocking"], pool)
    bench.ticket(0, deadline_s=5.0)
    for _ in range(3):
        bench.worker.step()
    assert pool.is_busy and pool.waits == [0.25] * 3, "it waits, for the engine has nothing to do"

    bench.now_s = 6.0
    bench.worker.step()

    assert [message.reason[:15] for message in bench.sent.of(Failed)] == ["deadline passed"]
    assert pool.forgotten == [*range(GROUP)] and not pool.is_busy
    assert bench.worker.idle and not bench.sent.of(Sealed)


def test_a_ticket_that_waits_for_its_environments_is_not_charged_with_a_former_error_of_the_engine(new_bench) -> None:
    bench = new_bench(ENGINES["blocking"], Silent(answering))
    bench.ticket(0)
    bench.worker.step()
    assert bench.engine.load.running + bench.engine.load.waiting == 0

    # As after an error of a step in which the engine was asked about a version: one of these may have caused it.
    bench.stream._doubtful = FieldError("no such token")
    for _ in range(3):
        bench.worker.step()

    assert not bench.sent.of(Faulty) and not bench.worker.idle


def test_an_engine_at_work_does_not_wait_for_environments(new_bench) -> None:
    pool = Silent(answering)
    bench = new_bench(ENGINES["stream"], pool)
    bench.ticket(0)
    while not pool.is_busy:
        bench.worker.step()
    bench.ticket(1)
    bench.worker.step()

    assert pool.waits[-1] == 0.0


def test_time_in_which_a_worker_has_nothing_to_do_but_to_wait_for_environments_is_no_generation(new_bench) -> None:
    class Slow(InProcess):
        activities: tuple[tuple[str, float], ...] = ()

        def step(self, timeout_s: float) -> None:
            self.activities += ((bench.metrics.clock.activity, timeout_s),)
            super().step(timeout_s)

    pool = Slow(answering)
    bench = new_bench(ENGINES["stream"], pool)
    for number in range(3):
        bench.ticket(number)
    bench.run(lambda: bench.worker.idle)

    assert set(pool.activities) == {("environment", 0.25), ("generate", 0.0)}
    assert bench.metrics.clock.activity not in ("environment", "generate")
    assert bench.value("rlhfd_process_time_seconds_total", activity="environment") > 0


def test_turns_are_counted(new_bench) -> None:
    def failing(row: int, turn: int, response: str) -> Answer:
        if row == 0:
            return Answer(row, "timeout", "late", "late")
        answer = answering(row, turn, response)
        # A row of the second ticket goes on to the limit of turns, whatever it says.
        return msgspec.structs.replace(answer, done=answer.done and row != 2 * GROUP)

    results: list[str] = []

    class Counting(InProcess):
        def step(self, timeout_s: float) -> None:
            row, responses, callback = self._waiting.pop()
            answer = self._answer(row, len(responses), responses[-1])
            results.append(answer.problem or ("tool_failed" if answer.tool_failed else "ok"))
            bench.metrics.count("environment_answered", results[-1])
            callback(answer)

    pool = Counting(failing)
    bench = new_bench(ENGINES["blocking"], pool)
    for number in range(2):
        bench.ticket(number, prompts=2)

    bench.run(lambda: bench.worker.idle)

    experiences = [bench.experience(number) for number in range(2)]
    assert [len(experience.sequences) for experience in experiences] == [GROUP, 2 * GROUP], "a group is left out"
    turns = sum(int(experience.info["turns"].sum()) for experience in experiences)
    assert histogram(bench, "rlhfd_turns") == (3 * GROUP, turns)
    assert bench.value("rlhfd_stage_errors_total", stage="environment", reason="timeout") == 1
    failed = bench.value("rlhfd_environment_steps_total", result="tool_failed")
    assert failed == results.count("tool_failed") > 0
    assert bench.value("rlhfd_environment_steps_total", result="ok") == results.count("ok")
    assert bench.value("rlhfd_experiences_total", outcome="errored") == GROUP
    cut = sum(int(experience.info["cut"].sum()) for experience in experiences)
    assert bench.value("rlhfd_responses_total", finish_reason="length") == cut > 0
    prompts = [len(rendered.ids) for number in range(2) for _, rendered in bench.roller.begin(number, 2).kept]
    assert histogram(bench, "rlhfd_prompt_length_tokens") == (3, sum(prompts[1:])), "observations are no prompt"
    assert histogram(bench, "rlhfd_stage_duration_seconds", stage="environment")[0] == 2
    assert bench.value("rlhfd_tokens_total", kind="response") >= sum(
        int(experience.action_mask.sum()) for experience in experiences
    )


def test_a_later_turn_that_the_engine_refuses_ends_its_ticket_alone(new_bench) -> None:
    class Refusing(RowStream):
        refused = 0

        def submit(self, request: Any) -> None:
            if request.draws_alone and not self.refused:
                self.refused += 1
                raise FieldError("does not fit")
            super().submit(request)

    pool = InProcess(answering)
    bench = new_bench(Refusing, pool)
    for number in range(2):
        bench.ticket(number)

    bench.run(lambda: bench.worker.idle)

    (faulty,) = bench.sent.of(Faulty)
    assert faulty.detail == "does not fit" and bench.sealed() == [1 - faulty.ticket]
    assert not pool.is_busy and not bench.engine.load.running
