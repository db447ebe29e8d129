"""A worker with several tickets in hand, over a real maker and a streaming engine; the test plays the buffer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from pipeline.config.lengths import Lengths
from pipeline.config.schema import Config
from pipeline.errors import FieldError, WeightsMismatchError
from pipeline.experience import codec
from pipeline.experience.types import Experience
from pipeline.models.weights.store import WeightsPublisher, flatten
from pipeline.progress import Telemetry
from pipeline.rollout.generation.blocking import BlockingEngine
from pipeline.rollout.generation.interface import Engine, EngineLoad, Sampling
from pipeline.rollout.generation.transformers import TransformersGenerator
from pipeline.rollout.generation.weights import ModelWeights
from pipeline.rollout.maker import NaiveExperienceMaker
from pipeline.rollout.roller import LocalRoller
from pipeline.rollout.shaping import Shaping
from pipeline.rollout.ticket_stream import EngineStream, new_stream, tickets_ahead
from pipeline.runtime.messages import Failed, Faulty, Hello, Sealed, Settled, Ticket, WantTickets, Welcome
from tests.rollout.test_worker import Around
from tests.support import tiny
from tests.support.row_stream import RowStream
from tests.support.tiny import Letters

GROUP = 4
PROMPTS = ("AB", "CDEF", "BCD", "EA", "FFD", "QAB", "DA", "BEEF")
SLOW = ord("Q") - 60
EXTENT = 1 << 12


def share_of_even_tokens(*, input_ids: Any, response_start: Any, response_end: Any, **_row: Any) -> torch.Tensor:
    rows = zip(input_ids, response_start.tolist(), response_end.tolist(), strict=True)
    return torch.stack([(ids[start:end] % 2 == 0).float().mean() for ids, start, end in rows])


class Bench(Around):
    """A worker over a tiny model, with everything around it."""

    def __init__(
        self,
        folder: Path,
        new_engine: Callable[[Any], Engine],
        *,
        ahead: int = 16,
        in_flight: bool = False,
        reward: Any = share_of_even_tokens,
    ) -> None:
        super().__init__(folder, [{"prompt": prompt} for prompt in PROMPTS])
        self.actor = tiny.llama()
        self.tensors = flatten(actor=self.actor.state_dict())
        self.publisher = WeightsPublisher(self.weights, self.tensors)
        self.publish(0, tiny.llama())
        self.engine: Any = new_engine(self.actor)
        maker = NaiveExperienceMaker(
            self.actor, None, reward, tiny.llama(seed=3), tiny.Tokenizer(),
            use_grpo=True, num_generation=GROUP, reuse_sampling_log_probs=True, drop_errored=True,
            refuse_not_finite=False, shaping=Shaping(marks_cut=True),
        )  # fmt: skip
        self.roller = LocalRoller(
            maker, self.source, Letters(), ModelWeights(self.tensors, self.engine), seed=7,
            lengths=Lengths(14, 13, None), template="none", vocabulary=tiny.VOCABULARY_SIZE,
            sampling=Sampling(max_length=14, pad_token_id=tiny.PAD, eos_token_ids=(tiny.EOS,)),
        )  # fmt: skip
        self.stream = EngineStream(self.roller, self.metrics, ahead, updates_in_flight=in_flight)
        self.work(self.stream, group_size=GROUP)

    def publish(self, version: int, model: Any, **options: Any) -> Any:
        return self.publisher.publish(version, flatten(actor=model.state_dict()), **options)

    def ticket(self, number: int, *, version: int = 0, prompts: int = 1, attempt: int = 1, deadline_s: float = 100.0):
        at = number * EXTENT
        self.worker.handle(Ticket(self.incarnation, number, number, prompts, attempt, at, EXTENT, version, deadline_s))

    def slow_ticket(self) -> int:
        """The number of the ticket whose prompt is a straggler's."""
        return next(n for n in itertools.count() if self.source.at(n).prompt.startswith("Q"))

    def run(self, until: Callable[[], bool]) -> int:
        """Step until a condition is true; return the number of steps."""
        for steps in range(2000):
            if until():
                return steps
            self.worker.step()
        raise AssertionError(self.sent)

    def sealed(self) -> list[int]:
        return [message.ticket for message in self.sent.of(Sealed)]

    def experience(self, number: int) -> Experience:
        (sealed,) = [message for message in self.sent.of(Sealed) if message.ticket == number]
        reader = codec.ExtentReader(self.arena.extent(number * EXTENT, sealed.nbytes), checksum=sealed.checksum)
        return codec.gather_padded([(reader, list(range(sealed.rows)))])


@pytest.fixture
def new_bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(new_engine: Callable[[Any], Engine] = RowStream, **options: Any) -> Bench:
        folder = tmp_path / str(len(benches))
        folder.mkdir()
        benches.append(Bench(folder, new_engine, **options))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()


def straggling(actor: Any) -> RowStream:
    return RowStream(actor, slow_tokens=[SLOW], slowness=20)


def same(one: Experience, other: Experience) -> bool:
    names = [name for name, value in vars(one).items() if isinstance(value, torch.Tensor)]
    assert "action_log_probs" in names and "advantages" in names
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


def test_each_ticket_is_sealed_as_soon_as_it_ends_and_a_straggler_delays_itself_alone(new_bench) -> None:
    quick, slowed = new_bench(), new_bench(straggling)
    straggler = quick.slow_ticket()
    for bench in (quick, slowed):
        for number in range(8):
            bench.ticket(number)

    quick_steps = quick.run(lambda: len(quick.sealed()) == 8)
    steps = slowed.run(lambda: len(slowed.sealed()) == 7)

    assert straggler not in slowed.sealed()
    assert steps <= quick_steps
    assert slowed.run(lambda: straggler in slowed.sealed()) > 20
    assert quick.sealed() != sorted(quick.sealed()), "tickets end out of order"
    assert slowed.worker.idle and not slowed.engine.load.running


def test_a_ticket_among_others_has_the_experience_of_one_alone(new_bench) -> None:
    many, alone = new_bench(lambda actor: RowStream(actor, room_rows=10)), new_bench()
    for number in range(8):
        many.ticket(number)

    many.run(lambda: many.worker.idle)
    for number in reversed(range(8)):
        alone.ticket(number)
        alone.run(lambda: alone.worker.idle)

    assert alone.sealed() == [*reversed(range(8))]
    assert all(same(many.experience(number), alone.experience(number)) for number in range(8))
    scores = torch.cat([many.experience(number).info["score"] for number in range(8)])
    assert len(set(scores.tolist())) > 4, "the scores are of the responses"


def test_a_blocking_engine_gives_the_experience_of_the_makers_own_call(new_bench) -> None:
    """One ticket runs at a time, in order; padding, batch and seed are those of `make_experience`."""
    bench = new_bench(lambda actor: BlockingEngine(TransformersGenerator(actor)))
    for number, prompts in ((0, 3), (4, 2)):
        bench.ticket(number, prompts=prompts)

    bench.worker.step()
    assert (bench.sealed(), bench.engine.load.waiting) == ([0], 0)
    bench.worker.step()

    assert bench.sealed() == [0, 4]
    maker: Any = bench.roller.maker
    for number, prompts in ((0, 3), (4, 2)):
        batch = bench.roller.batch_of(bench.roller.begin(number, prompts))
        expected = memoryview(bytearray(EXTENT))
        ids = pad_sequence(list(batch.prompts), batch_first=True, padding_side="left")
        made = maker.make_experience(
            ids, (ids != 0).long(), max_length=batch.sampling.max_length, seed=batch.sampling.seed
        )
        encoded = codec.encode(made, expected)
        rows = list(range(prompts * GROUP))
        assert same(
            bench.experience(number), codec.gather_padded([(codec.ExtentReader(expected[: encoded.nbytes]), rows)])
        )


def test_an_engine_gets_no_more_tickets_than_it_has_room_for(new_bench) -> None:
    bench = new_bench(lambda actor: RowStream(actor, room_rows=2 * GROUP))
    for number in range(5):
        bench.ticket(number)

    bench.worker.step()
    load = bench.engine.load
    assert (load.running, load.waiting) == (2 * GROUP, 0)
    highest = 0
    while not bench.worker.idle:
        bench.worker.step()
        highest = max(highest, bench.engine.load.running + bench.engine.load.waiting)

    assert sorted(bench.sealed()) == list(range(5))
    assert highest <= 3 * GROUP, "one more ticket where a row is free"


def test_a_ticket_of_newer_weights_begins_when_those_in_hand_are_sealed(new_bench) -> None:
    bench = new_bench()
    for number in range(3):
        bench.ticket(number)
    bench.worker.step()
    bench.publish(1, tiny.llama(seed=9))
    bench.ticket(3)
    bench.ticket(4, version=1)
    bench.ticket(5, version=1)

    bench.run(lambda: len(bench.sealed()) == 4)
    assert bench.engine._version == 0 and bench.worker.held.version == 0
    bench.run(lambda: bench.worker.idle)

    versions = {message.ticket: message.policy_version for message in bench.sent.of(Sealed)}
    assert versions == {0: 0, 1: 0, 2: 0, 3: 0, 4: 1, 5: 1}
    assert len({message.fingerprint for message in bench.sent.of(Sealed)}) == 2
    fresh = new_bench()
    fresh.publish(1, tiny.llama(seed=9))
    fresh.ticket(4, version=1)
    fresh.run(lambda: fresh.worker.idle)
    assert same(bench.experience(4), fresh.experience(4))


def test_weights_in_flight_are_taken_at_once_and_the_oldest_ones_are_sealed(new_bench) -> None:
    bench = new_bench(straggling, in_flight=True)
    straggler = bench.slow_ticket()
    for number in range(4):
        bench.ticket(number)
    bench.ticket(straggler)
    for _ in range(3):
        bench.worker.step()
    first = bench.publish(1, tiny.llama(seed=9))
    bench.ticket(straggler + 1, version=1)
    bench.worker.step()

    assert bench.engine._version == 1 and bench.engine.load.running > GROUP
    bench.run(lambda: bench.worker.idle)

    sealed = {message.ticket: message for message in bench.sent.of(Sealed)}
    assert len(sealed) == 6, "no rollout is thrown away"
    assert {number: sealed[number].policy_version for number in (0, 1, 2, 3)} == dict.fromkeys(range(4), 0)
    assert (sealed[straggler + 1].policy_version, sealed[straggler + 1].fingerprint) == (1, first.fingerprint)
    assert sealed[straggler].policy_version == 1, "it had no token before the update"


class Counting(RowStream):
    """Counts the tokens that it samples."""

    tokens = 0

    def _advance(self, row: Any) -> None:
        super()._advance(row)
        self.tokens += 1


def test_updates_in_flight_throw_no_sampled_token_away(new_bench) -> None:
    bench = new_bench(Counting, in_flight=True)
    for number in range(8):
        bench.ticket(number)
    for version in range(1, 5):
        bench.worker.step()
        bench.publish(version, tiny.llama(seed=version))

    bench.run(lambda: bench.worker.idle)

    assert bench.engine._version == 4
    assert sum(int(bench.experience(number).action_mask.sum()) for number in range(8)) == bench.engine.tokens


def test_after_a_rollback_tickets_in_hand_begin_again_with_the_weights_of_the_new_history(new_bench) -> None:
    bench = new_bench()
    bench.publish(1, tiny.llama(seed=9))
    for number in range(3):
        bench.ticket(number, version=1)
    for _ in range(2):
        bench.worker.step()
    bench.publish(0, tiny.llama(), rollback=True)
    again = bench.publish(1, tiny.llama(seed=5))

    bench.run(lambda: bench.worker.idle)

    assert {message.fingerprint for message in bench.sent.of(Sealed)} == {again.fingerprint}
    fresh = new_bench()
    fresh.publish(1, tiny.llama(seed=5))
    for number in range(3):
        fresh.ticket(number, version=1)
    fresh.run(lambda: fresh.worker.idle)
    assert all(same(bench.experience(number), fresh.experience(number)) for number in range(3))


class Deaf(RowStream):
    """An engine that keeps its weights."""

    def update_weights(self, actor: Any, version: int) -> None:
        assert self.paused


def test_responses_of_weights_that_the_worker_did_not_hold_are_never_sealed(new_bench) -> None:
    bench = new_bench(Deaf)
    bench.ticket(0)

    with pytest.raises(
        WeightsMismatchError, match=r"sampled ticket 0 with weights of version -1; the worker held \[0]"
    ):
        bench.run(lambda: bench.worker.idle)

    assert bench.sealed() == []
    assert bench.value("rlhfd_weight_syncs_total", result="mismatch") == 1


def test_a_ticket_beyond_its_deadline_is_given_back_alone(new_bench) -> None:
    bench = new_bench(straggling)
    straggler = bench.slow_ticket()
    bench.ticket(straggler, deadline_s=5.0)
    bench.ticket(straggler + 1, deadline_s=5.0)
    bench.run(lambda: bench.sealed() == [straggler + 1])

    bench.now_s = 5.5
    bench.worker.step()

    (failed,) = bench.sent.of(Failed)
    assert (failed.ticket, failed.retry) == (straggler, True)
    assert bench.worker.idle and bench.engine.load.running == 0


def test_a_deadline_counts_from_the_begin_of_its_ticket(new_bench) -> None:
    """Tickets that wait for those before them do not become late by that."""
    bench = new_bench(lambda actor: RowStream(actor, room_rows=GROUP))
    bench.ticket(0, deadline_s=5.0)
    bench.ticket(1, deadline_s=5.0)
    bench.run(lambda: bench.sealed() == [0])
    bench.now_s = 7.0

    bench.run(lambda: bench.worker.idle)

    assert (bench.sealed(), bench.sent.of(Failed)) == ([0, 1], [])


def test_a_ticket_at_its_second_attempt_is_rolled_out_alone(new_bench) -> None:
    bench = new_bench()
    bench.ticket(0)
    bench.ticket(1, attempt=2)
    bench.ticket(2)
    bench.worker.step()
    assert bench.engine.load.running == GROUP

    bench.run(lambda: bench.sealed() == [0])
    bench.worker.step()
    assert bench.engine.load.running <= GROUP
    bench.run(lambda: bench.sealed() == [0, 1])

    bench.run(lambda: bench.worker.idle)
    assert bench.sealed() == [0, 1, 2]


def test_a_restarted_buffer_learns_every_ticket_in_hand_and_each_is_sealed_once(new_bench) -> None:
    bench = new_bench(straggling, ahead=12)
    straggler = bench.slow_ticket()
    for number in range(8):
        bench.ticket(number)
    bench.run(lambda: len(bench.sealed()) == 7)
    settled = bench.sealed()[:3]
    for number in settled:
        bench.worker.handle(Settled(bench.incarnation, number))
    unsettled = bench.sealed()[3:]
    bench.sent.clear()

    bench.worker.handle(Welcome(2))
    bench.run(lambda: bench.worker.idle)

    (hello,) = bench.sent.of(Hello)
    assert hello.held == [*unsettled, straggler] and hello.attempts == [1] * 5
    assert bench.sent.of(WantTickets)[0].tickets == 12
    assert bench.sealed() == [*unsettled, straggler]


def test_the_oldest_ticket_is_the_one_at_work_and_all_are_in_flight(new_bench) -> None:
    bench = new_bench(straggling)
    straggler = bench.slow_ticket()
    bench.ticket(straggler, deadline_s=50.0)
    for number in range(3):
        bench.ticket(number, deadline_s=60.0)
    bench.worker.step()

    progress = bench.slab.progress("rollout", 0)
    assert (progress.working_on, progress.deadline_s, progress.activity) == (straggler, 50.0, "generate")
    assert bench.value("rlhfd_rollouts_in_flight") == 4
    bench.run(lambda: len(bench.sealed()) == 3)
    assert bench.value("rlhfd_rollouts_in_flight") == 1
    bench.worker.step()
    assert bench.value("rlhfd_ticket_rows", state="all") == GROUP
    bench.run(lambda: bench.worker.idle)
    progress = bench.slab.progress("rollout", 0)
    assert (progress.working_on, progress.activity) == (-1, "other")


def test_tokens_count_while_a_blocking_engine_samples_and_add_up_to_those_of_the_rows(new_bench) -> None:
    shown: list[float] = []

    class Shown(Telemetry):
        def progress(self, **numbers: Any) -> None:
            bench.metrics.progress(**numbers)
            shown.append(bench.value("rlhfd_tokens_total", kind="response") or 0.0)

    bench = new_bench(lambda actor: BlockingEngine(TransformersGenerator(actor, Shown())))
    bench.ticket(0, prompts=3)
    bench.run(lambda: bench.worker.idle)
    first = int(bench.experience(0).action_mask.sum())
    bench.ticket(4, prompts=2)
    bench.run(lambda: bench.worker.idle)
    both = first + int(bench.experience(4).action_mask.sum())

    assert shown == sorted(shown)
    assert len({tokens for tokens in shown if 0 < tokens < first}) > 3, "within the first call"
    assert len({tokens for tokens in shown if first < tokens < both}) > 3, "within the second call"
    assert bench.value("rlhfd_tokens_total", kind="response") == both
    assert bench.value("rlhfd_ticket_tokens") == 0


def test_tokens_of_an_engine_that_reports_none_count_with_their_request(new_bench) -> None:
    bench = new_bench(straggling)
    straggler = bench.slow_ticket()
    for number in range(4):
        bench.ticket(number)
    bench.run(lambda: len(bench.sealed()) == 3)
    ended = sum(int(bench.experience(number).action_mask.sum()) for number in bench.sealed())

    assert straggler not in bench.sealed()
    assert bench.value("rlhfd_tokens_total", kind="response") == ended
    bench.run(lambda: bench.worker.idle)
    every = sum(int(bench.experience(number).action_mask.sum()) for number in bench.sealed())
    assert bench.value("rlhfd_tokens_total", kind="response") == every > ended


def test_the_engines_load_and_tokens_are_shown(new_bench) -> None:
    bench = new_bench(lambda actor: RowStream(actor, room_rows=2 * GROUP))
    for number in range(5):
        bench.ticket(number)
    bench.worker.step()

    shown = {state: bench.value("rlhfd_engine_responses", state=state) for state in ("running", "waiting", "room")}
    assert shown == {"running": 2 * GROUP, "waiting": 0, "room": 2 * GROUP}
    bench.run(lambda: bench.worker.idle)

    responses = [bench.experience(number).action_mask.sum() for number in range(5)]
    assert bench.value("rlhfd_engine_tokens_total", direction="out") == sum(responses)
    prompts = sum(len(bench.source.at(number).prompt) for number in range(5))
    assert bench.value("rlhfd_engine_tokens_total", direction="in") == prompts
    assert bench.value("rlhfd_engine_responses", state="running") == 0
    assert bench.value("rlhfd_engine_cache_ratio") == 0


def test_a_blocking_engine_runs_the_oldest_of_its_tickets(new_bench) -> None:
    bench = new_bench(lambda actor: BlockingEngine(TransformersGenerator(actor)))
    seen = []
    step = bench.engine.step

    def looking() -> Any:
        seen.append([bench.value("rlhfd_engine_responses", state=state) for state in ("running", "waiting", "room")])
        return step()

    bench.engine.step = looking
    bench.ticket(0, prompts=3)
    bench.worker.step()

    assert seen == [[3 * GROUP, 0, 3 * GROUP]]


class Stuck(RowStream):
    """An engine whose steps return and do nothing."""

    def step(self) -> list[Any]:
        return []


def test_steps_without_progress_are_no_heartbeat(new_bench) -> None:
    bench = new_bench(Stuck)
    bench.ticket(0)
    bench.worker.step()
    beat_s = bench.slab.progress("rollout", 0).beat_s

    for _ in range(100):
        bench.worker.step()

    assert bench.slab.progress("rollout", 0).beat_s == beat_s


class Picky(RowStream):
    """An engine that refuses long prompts."""

    def submit(self, request: Any) -> None:
        if len(request.prompt_ids) > 3:
            raise FieldError(f"a prompt of {len(request.prompt_ids)} tokens does not fit into the cache")
        super().submit(request)


def test_a_ticket_that_the_engine_refuses_is_faulty_and_the_others_go_on(new_bench) -> None:
    bench = new_bench(Picky)
    for number in range(8):
        bench.ticket(number)

    bench.run(lambda: bench.worker.idle)

    long = [number for number in range(8) if len(bench.source.at(number).prompt) > 3]
    assert sorted(message.ticket for message in bench.sent.of(Faulty)) == long
    assert {message.reason for message in bench.sent.of(Faulty)} == {"malformed"}
    assert sorted(bench.sealed()) == [number for number in range(8) if number not in long]


def test_the_configuration_decides_on_tickets_and_updates(new_bench) -> None:
    """Ten prompts of four rows fill the room of 40 rows, and one more waits; a given number goes first."""
    bench = new_bench(lambda actor: RowStream(actor, room_rows=40))
    sets = {"num_generations": GROUP, "batch_size": 1}

    def stream_of(**rollout: Any) -> Any:
        return new_stream(bench.roller, Config.model_validate({"rollout": {**sets, **rollout}}), bench.metrics)

    assert (stream_of().tickets_ahead, stream_of().updates_in_flight) == (11, False)
    given = stream_of(tickets_ahead=3, weight_updates="in_flight")
    assert (given.tickets_ahead, given.updates_in_flight) == (3, True)
    assert stream_of(batch_size=20).tickets_ahead == 2


@pytest.mark.parametrize(
    ("load", "ticket_rows", "tickets"),
    [
        (EngineLoad(0, 0, room_rows=256), 8, 33),
        (EngineLoad(0, 0, room_rows=256), 100, 4),
        (EngineLoad(0, 0, room_rows=1), 64, 2),
        (EngineLoad(0, 0, room_rows=10**6), 8, 1024),
        (EngineLoad(0, 0), 8, 8),
    ],
)
def test_the_tickets_in_hand_follow_from_the_engines_room(load: EngineLoad, ticket_rows: int, tickets: int) -> None:
    assert tickets_ahead(load, ticket_rows) == tickets
    assert tickets_ahead(BlockingEngine(TransformersGenerator(tiny.llama())).load, ticket_rows) == 2
