"""Rows of several turns: what is sampled, what is an action, where the rewards are; environments are functions here."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pipeline.config.schema import Config
from pipeline.errors import FieldError
from pipeline.experience.types import Experience
from pipeline.models.critic import Critic
from pipeline.prompts.types import Prompt
from pipeline.rollout.environment.turns import Turns, TurnSettings, sample_turns, turn_seed
from pipeline.rollout.environment.wire import Answer
from pipeline.rollout.generation.blocking import BlockingEngine
from pipeline.rollout.generation.interface import Completed, Sampling
from pipeline.rollout.generation.transformers import TransformersGenerator
from pipeline.rollout.insert_gate import find_fault
from pipeline.rollout.maker import NaiveExperienceMaker
from pipeline.rollout.prompt_batch import PromptBatch
from pipeline.rollout.shaping import Shaping
from pipeline.trainer.learner import Learner
from tests.support import tiny

GROUP = 3
PROMPTS = ((5, 6, 7), (8, 9))
OBSERVATION = (20, 21)

Step = Callable[[int, int, str], Answer]
"""From row, turn and response to an answer; the row is set by the pool."""


class Tokens:
    """A tokenizer whose text is the numbers of the tokens; those up to 8 are special."""

    pad_token_id, eos_token_id = tiny.PAD, tiny.EOS

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join(str(token) for token in ids if not skip_special_tokens or token > 8)

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [int(token) for token in text.split()]}


class InProcess:
    """A pool whose environments are one function; answers come in reverse order, one with each step."""

    def __init__(self, answer: Step) -> None:
        self.problem: Answer | None = None
        self.asked: list[tuple[int, list[str], bool]] = []
        self.forgotten: list[int] = []
        self._answer = answer
        self._new_row = itertools.count().__next__
        self._waiting: list[tuple[int, list[str], Any]] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting)

    def new_row(self) -> int:
        return self._new_row()

    def submit(self, row: int, row_json: str, responses: Any, callback: Any, *, is_last: bool) -> None:
        self.asked.append((row, list(responses), is_last))
        self._waiting.append((row, list(responses), callback))

    def forget(self, rows: Any) -> None:
        self.forgotten += rows
        self._waiting = [waiting for waiting in self._waiting if waiting[0] not in rows]

    def step(self, timeout_s: float) -> None:
        row, responses, callback = self._waiting.pop()
        callback(self._answer(row, len(responses), responses[-1]))

    def close(self) -> None:
        pass


def seeing(row: int, turn: int, response: str) -> Answer:
    """Two tokens after each response; the third ends the row."""
    return Answer(row, observation=" ".join(map(str, OBSERVATION)), reward=float(turn), done=turn == 3)


def batch_of(maker: NaiveExperienceMaker, *, max_length: int = 24, seed: int = 11) -> PromptBatch:
    sampling = Sampling(max_length=max_length, pad_token_id=tiny.PAD, eos_token_ids=(tiny.EOS,), seed=seed)
    return maker.begin([torch.tensor(prompt) for prompt in PROMPTS], max(map(len, PROMPTS)), sampling)


def maker_of(actor: Any, **options: Any) -> NaiveExperienceMaker:
    settings = {"use_grpo": True, "num_generation": GROUP, "drop_errored": True, "refuse_not_finite": False, **options}
    return NaiveExperienceMaker(actor, settings.pop("critic", None), None, tiny.llama(seed=3), Tokens(), **settings)


def turns_of(batch: PromptBatch, pool: Any, *, max_turns: int = 8, turn_tokens: int | None = 4) -> Turns:
    prompts = [Prompt(place, 0, place, "p", None) for place in range(len(PROMPTS))]
    return Turns(TurnSettings(pool, max_turns, turn_tokens), batch, prompts, Tokens(), itertools.count(100).__next__)


def sampled(
    answer: Step = seeing,
    *,
    generator: Any = None,
    max_length: int = 24,
    seed: int = 11,
    maker: Any = None,
    **limits: Any,
) -> tuple[list[Completed], InProcess]:
    actor = tiny.llama()
    batch = batch_of(maker or maker_of(actor), max_length=max_length, seed=seed)
    pool = InProcess(answer)
    engine = BlockingEngine(generator or TransformersGenerator(actor))
    return sample_turns(engine, turns_of(batch, pool, **limits), lambda tokens: None), pool


def rows_of(completed: list[Completed]) -> list[Any]:
    return [response for request in completed for response in request.responses]


def turns_in(row: Any) -> list[list[int]]:
    """Return the responses of a row, token by token."""
    parts = itertools.groupby(zip(row.token_ids.tolist(), row.observed.tolist(), strict=True), lambda pair: pair[1])
    return [[token for token, _ in part] for is_observed, part in parts if not is_observed]


def test_each_response_is_answered_until_the_row_is_done() -> None:
    completed, pool = sampled()

    rows = rows_of(completed)
    assert [len(request.responses) for request in completed] == [GROUP] * 2
    assert {row.turns for row in rows} == {3} and {row.finish_reason for row in rows} == {"stop"}
    for place, row in enumerate(rows):
        assert row.token_ids[row.observed].tolist() == [*OBSERVATION] * 2
        assert row.rewards[row.rewards != 0].tolist() == [1.0, 2.0, 3.0]
        ends = [at for at, reward in enumerate(row.rewards.tolist()) if reward]
        assert ends[-1] == len(row.token_ids) - 1 and [bool(row.observed[end + 1]) for end in ends[:-1]] == [True] * 2
        asked = [responses for number, responses, _ in pool.asked if number == place]
        # Special tokens are text, but end and padding.
        texts = [" ".join(str(token) for token in turn if token > tiny.EOS) for turn in turns_in(row)]
        assert asked == [texts[:1], texts[:2], texts]
        assert all(len(turn) <= 4 for turn in turns_in(row))
        sampled_at = {at for span in row.spans for at in range(span.start, span.end)}
        assert sampled_at == {at for at, is_observed in enumerate(row.observed.tolist()) if not is_observed}


def test_the_log_probs_of_actions_are_those_of_the_whole_row_and_of_observations_none() -> None:
    actor = tiny.llama()
    completed, _ = sampled()
    maker = maker_of(actor)
    batch = batch_of(maker)

    experience = finished(maker, batch, completed)

    rows = rows_of(completed)
    for row, response in enumerate(rows):
        length = len(response.token_ids)
        assert experience.action_mask[row, :length].tolist() == (~response.observed).tolist()
        assert not experience.action_mask[row, length:].any()
        assert experience.attention_mask[row, 3 : 3 + length].all()
        assert not experience.action_log_probs[row, :length][response.observed].any()
        torch.testing.assert_close(
            experience.action_log_probs[row, :length], response.log_probs, rtol=0.0, atol=2e-5
        )  # the engine saw each turn as a request of its own
    assert experience.info["score"].tolist() == [6.0] * len(rows)
    assert experience.info["turns"].tolist() == [3] * len(rows) and not experience.info["cut"].any()


def test_a_rows_turns_do_not_depend_on_the_other_rows() -> None:
    def some_end(row: int, turn: int, response: str) -> Answer:
        if row in (0, 4):
            return Answer(row, "exception", "gone", "gone")
        return seeing(row, turn, response)

    whole, _ = sampled()
    without, _ = sampled(some_end)

    for row, (one, other) in enumerate(zip(rows_of(whole), rows_of(without), strict=True)):
        if row in (0, 4):
            assert turns_in(other) == turns_in(one)[:1] and math.isnan(float(other.rewards[-1]))
        else:
            assert one.token_ids.tolist() == other.token_ids.tolist()


def test_each_turn_draws_by_a_seed_of_the_ticket_and_its_number() -> None:
    maker, pool = maker_of(tiny.llama()), InProcess(seeing)
    turns, engine = turns_of(batch_of(maker, seed=5), pool), BlockingEngine(TransformersGenerator(tiny.llama()))
    seeds = []
    while not turns.has_ended:
        requests = turns.take_requests()
        seeds += sorted({request.sampling.seed for request in requests})
        for request in requests:
            engine.submit(request)
        for done in engine.step():
            turns.responded(done)
        turns.wait(0.0)

    assert seeds == [5, turn_seed(5, 1), turn_seed(5, 2)]


def test_turns_rows_and_tickets_draw_by_seeds_of_their_own() -> None:
    seen: set[tuple[int, ...]] = set()
    for seed in range(3):
        completed, _ = sampled(seed=seed, turn_tokens=6, max_length=40)
        for row in rows_of(completed):
            seen |= {tuple(turn) for turn in turns_in(row) if len(turn) > 2}

    assert len({turn_seed(seed, turn) for seed in range(50) for turn in range(1, 20)}) == 950
    assert len(seen) > 20


def test_an_engine_that_cannot_draw_by_row_gives_each_row_the_same_tokens() -> None:
    class Plain:
        """A generator of the user's: it takes no seeds of rows."""

        def __init__(self) -> None:
            self._generator = TransformersGenerator(tiny.llama())
            self.calls: list[int] = []

        def generate(self, input_ids: Any, attention_mask: Any, sampling: Any, *, group_size=1, batch_rows=None) -> Any:
            self.calls.append(len(input_ids) * group_size)
            return self._generator.generate(
                input_ids, attention_mask, sampling, group_size=group_size, batch_rows=batch_rows
            )

    plain = Plain()
    apart, _ = sampled(generator=plain)
    together, _ = sampled()

    assert plain.calls == [6] + [1] * 12
    assert [row.token_ids.tolist() for row in rows_of(apart)] == [row.token_ids.tolist() for row in rows_of(together)]


def test_a_row_has_no_more_turns_than_the_limit() -> None:
    completed, pool = sampled(max_turns=2)

    assert {(row.turns, row.finish_reason, len(turns_in(row))) for row in rows_of(completed)} == {(2, "length", 2)}
    assert [is_last for _, responses, is_last in pool.asked if len(responses) == 2] == [True] * 6
    assert pool.forgotten == [], "the environments dropped them themselves"


@pytest.mark.parametrize("max_length", [8, 9, 10, 12, 14])
def test_a_row_keeps_to_its_room_and_ends_with_a_response(max_length: int) -> None:
    completed, pool = sampled(lambda row, turn, _: Answer(row, observation="20 21", reward=1.0), max_length=max_length)

    for row in rows_of(completed):
        assert len(row.token_ids) <= max_length - 3 and not row.observed[-1]
        assert row.finish_reason == "length" and row.rewards.sum() == row.turns
    answered_last = {number for number, responses, is_last in pool.asked if is_last}
    assert sorted(pool.forgotten) == sorted({*range(6)} - answered_last), "each environment is dropped once"
    experience_of(completed, max_length)


def finished(maker: NaiveExperienceMaker, batch: PromptBatch, completed: list[Completed]) -> Experience:
    rows = maker.finish(batch, batch.joined(completed))
    assert find_fault(rows, vocabulary=23, has_observations=True) is None
    if "action_mask" in rows.columns and not rows.columns["action_mask"].all():
        assert find_fault(rows, vocabulary=23).reason == "mask"
    return rows.in_columns(batch.prompt_columns, batch.num_actions, tiny.PAD)


def experience_of(completed: list[Completed], max_length: int) -> Experience:
    maker = maker_of(tiny.llama())
    batch = batch_of(maker, max_length=max_length)
    experience = finished(maker, batch, completed)
    assert experience.info["cut"].all()
    return experience


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_no_row_of_a_later_turn_is_sampled_past_its_own_room(fixed_shapes: bool) -> None:
    """A GPT-2 has no position for a token beyond; and what is thrown away counts as a token of a response."""
    made: list[int] = []

    class Watched(TransformersGenerator):
        def generate(self, *arguments: Any, **options: Any) -> Any:
            responses = super().generate(*arguments, **options)
            made.append(int(responses.lengths.sum()))
            return responses

    def uneven(row: int, turn: int, response: str) -> Answer:
        # After the first turn some rows have nearly no room left, others much.
        return Answer(row, observation=" ".join(["20"] * (12 if row % 2 and turn == 1 else 1)), reward=1.0)

    actor = tiny.gpt2(positions=24)
    batch = batch_of(maker_of(actor))
    batch = dataclasses.replace(batch, sampling=dataclasses.replace(batch.sampling, eos_token_ids=()))
    engine = BlockingEngine(Watched(actor, fixed_shapes=fixed_shapes))

    rows = rows_of(sample_turns(engine, turns_of(batch, InProcess(uneven), turn_tokens=6), lambda tokens: None))

    assert [len(row.token_ids) for row in rows] == [20, 21] * 3
    assert sum(made) == sum(int((~row.observed).sum()) for row in rows)


def test_a_row_without_an_answer_is_left_out_with_its_group_and_never_scores_0() -> None:
    completed, _ = sampled(
        lambda row, turn, text: Answer(row, "timeout", "late", "late") if row == 1 else seeing(row, turn, text)
    )
    maker = maker_of(tiny.llama())
    batch = batch_of(maker)

    experience = finished(maker, batch, completed)

    assert len(experience.sequences) == GROUP and experience.info["score"].tolist() == [6.0] * GROUP
    assert experience.sequences[0, :3].tolist() == [tiny.PAD, 8, 9]
    assert maker.scores(batch, batch.joined(completed)).isnan().tolist() == [False, True, *[False] * 4]


def test_rewards_of_functions_are_added_to_those_of_the_turns() -> None:
    completed, _ = sampled()

    def length(*, response_start: Any, response_end: Any, **_: Any) -> torch.Tensor:
        return (response_end - response_start).float() / 10

    maker = maker_of(tiny.llama())
    maker.reward_model = length
    batch = batch_of(maker)

    experience = finished(maker, batch, completed)

    assert experience.info["score"].tolist() == pytest.approx(
        [6.0 + len(row.token_ids) / 10 for row in rows_of(completed)]
    )


def test_the_penalty_of_length_counts_what_the_model_wrote() -> None:
    completed, _ = sampled()
    maker = maker_of(tiny.llama(), shaping=Shaping(overlong_buffer_tokens=4, longest=14))
    batch = batch_of(maker)

    experience = finished(maker, batch, completed)

    written = [int((~row.observed).sum()) for row in rows_of(completed)]
    over = [max(0, tokens - 10) / 4 for tokens in written]
    scores = experience.info["score"].tolist()
    assert any(over) and scores == [6.0] * len(over)
    shaped = (experience.reward - experience.kl).tolist()
    assert shaped == pytest.approx([score - one for score, one in zip(scores, over, strict=True)])


@pytest.mark.parametrize("clip", [None, 2.5])
def test_with_ppo_each_reward_is_at_the_end_of_its_turn_and_advantages_skip_the_observations(
    clip: float | None,
) -> None:
    """The reward of a turn is clipped where it is: the third turn's 3, and not the row's sum of 6."""
    actor = tiny.llama()
    options = {"use_grpo": False, "critic": Critic.from_actor(actor), "kl_coef": 0.1, "gamma": 0.9, "lam": 0.8}
    maker = maker_of(actor, **options, shaping=Shaping(reward_clip=clip))
    completed, _ = sampled(maker=maker)
    batch = batch_of(maker)

    experience = finished(maker, batch, completed)

    for row, response in enumerate(rows_of(completed)):
        actions = ~response.observed
        log_ratios = (experience.action_log_probs - experience.base_action_log_probs)[row, : len(actions)][actions]
        rewards = (response.rewards[actions].clamp(max=clip or math.inf) - 0.1 * log_ratios).tolist()
        values = experience.values[row, : len(actions)][actions].tolist()
        advantage, expected = 0.0, []
        for reward, value, following in reversed([*zip(rewards, values, [*values[1:], 0.0], strict=True)]):
            advantage = reward + 0.9 * following - value + 0.9 * 0.8 * advantage
            expected.append(advantage)
        assert experience.advantages[row, : len(actions)][actions].tolist() == pytest.approx(expected[::-1], abs=1e-5)
        assert not experience.advantages[row, : len(actions)][response.observed].any()


@pytest.mark.parametrize("packing", [False, True])
def test_a_step_does_not_depend_on_what_stands_at_observations(packing: bool) -> None:
    """Neither their log-probs nor those of the reference, and the packed step is the padded one."""
    config = Config().trainer.model_copy(
        update={"packing": packing, "warmup_steps": 0, "activation_checkpointing": False}
    )
    completed, _ = sampled(lambda row, turn, text: Answer(row, observation="20 21", reward=row + turn, done=turn == 2))
    weights = []
    for garbage in (0.0, -50.0):
        actor = tiny.llama()
        maker = maker_of(actor)
        batch = batch_of(maker)
        experience = finished(maker, batch, completed)
        for name in ("action_log_probs", "base_action_log_probs"):
            getattr(experience, name)[~experience.action_mask] = garbage
        stats = Learner(config, "grpo", actor, kl_coef=0.1).update([experience])
        assert stats.importance_ratio == pytest.approx(1.0, abs=1e-5)
        assert stats.tokens_trained == int(experience.action_mask.sum())
        weights.append(torch.cat([parameter.detach().flatten() for parameter in actor.parameters()]))

    assert torch.equal(*weights)
    assert not torch.equal(weights[0], torch.cat([p.detach().flatten() for p in tiny.llama().parameters()]))


def test_a_dropped_ticket_is_forgotten_by_its_environments() -> None:
    maker = maker_of(tiny.llama())
    pool = InProcess(seeing)
    turns = turns_of(batch_of(maker), pool)
    engine = BlockingEngine(TransformersGenerator(tiny.llama()))
    for request in turns.take_requests():
        engine.submit(request)
    for done in engine.step():
        turns.responded(done)

    turns.drop()

    assert pool.forgotten == [*range(6)] and not pool.is_busy and not turns.has_ended


def test_the_rows_of_a_batch_are_those_of_one_response_without_an_environment() -> None:
    maker = maker_of(tiny.llama())
    batch = batch_of(maker)
    engine = BlockingEngine(TransformersGenerator(tiny.llama()))
    for request in batch.requests(itertools.count().__next__):
        engine.submit(request)

    assert batch.joined(engine.step()).turns is None


def test_an_engine_that_refuses_a_later_turn_leaves_neither_requests_nor_rows_behind() -> None:
    actor = tiny.llama()
    pool = InProcess(seeing)

    class Refusing(BlockingEngine):
        submitted = 0

        def submit(self, request: Any) -> None:
            self.submitted += 1
            if self.submitted == 2 + len(PROMPTS):
                raise FieldError("no more")
            super().submit(request)

    engine = Refusing(TransformersGenerator(actor))
    with pytest.raises(FieldError, match="no more"):
        sample_turns(engine, turns_of(batch_of(maker_of(actor)), pool), lambda tokens: None)

    assert (engine.load.running, engine.load.waiting) == (0, 0), "nor the later turn that it had taken"
    assert engine.step() == [] and len(pool.forgotten) == len(set(pool.forgotten)) > 0
