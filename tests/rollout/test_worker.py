"""A rollout worker's decisions, with a fast maker; the test plays the buffer."""

import contextlib
import json
import math

import numpy as np
import pytest
import torch

from pipeline.config.lengths import Lengths, row_bytes_bound
from pipeline.errors import ConfigError, FieldError, RewardError, ShapeError, TokenError
from pipeline.experience import codec
from pipeline.experience.ragged import RaggedRows
from pipeline.models.weights.store import WeightsPublisher
from pipeline.progress import Telemetry
from pipeline.prompts.source import PromptSource
from pipeline.rollout.first_rollouts import refuse_broken_reward
from pipeline.rollout.generation.blocking import BlockingEngine
from pipeline.rollout.generation.interface import Responses, Sampling
from pipeline.rollout.generation.weights import ModelWeights
from pipeline.rollout.metrics import RolloutMetrics
from pipeline.rollout.prompt_batch import PromptBatch
from pipeline.rollout.roller import LocalRoller, Rolled, seed_of
from pipeline.rollout.worker import RolloutWorker, flat_groups
from pipeline.runtime.messages import (
    EVALUATION_TICKETS,
    Drain,
    Evaluated,
    Failed,
    Faulty,
    Hello,
    Sealed,
    Settled,
    Ticket,
    Wait,
    WantTickets,
    Welcome,
)
from pipeline.storage.arena import Arena
from pipeline.storage.weights_header import WeightsVersion
from pipeline.telemetry.evaluations import PromptResult
from pipeline.telemetry.metrics import SlotName
from pipeline.telemetry.reader import MetricsReader
from pipeline.telemetry.slab import MetricsSlab
from tests.support.experiences import made_up
from tests.support.roll_stream import RollStream
from tests.support.tiny import Letters

MAX_LENGTH = 11
VOCABULARY = 99


class Maker:
    """Makes synthetic experience from the seed; records its arguments."""

    reward_model = None

    def __init__(self):
        self.calls = []
        self.error = None
        self.change = lambda experience: None

    def begin(self, prompts, prompt_columns, sampling, gt_answer, *, columns, vision, group_size):
        self.calls.append(PromptBatch(prompts, prompt_columns, 1, gt_answer, vision, sampling, columns))
        return self.calls[-1]

    def finish(self, batch, rows, *, on_kept=None):
        if self.error is not None:
            raise self.error
        experience = made_up(rows=len(rows), prompt=5, actions=6, seed=batch.sampling.seed % 1000)
        self.change(experience)
        return RaggedRows.of(experience).with_info("cut", np.zeros(len(rows), bool))


class Threes:
    """A generator of responses that are one token each."""

    def generate(self, input_ids, attention_mask, sampling, **_):
        tokens = torch.zeros((len(input_ids), sampling.max_length - input_ids.shape[1]), dtype=torch.int64)
        tokens[:, 0] = 3
        return Responses(torch.cat([input_ids, tokens], dim=1), torch.ones(len(input_ids), dtype=torch.int64))

    def update_weights(self, actor):
        pass

    pause = resume = lambda self: None


SAMPLING = Sampling(max_length=MAX_LENGTH, pad_token_id=0, eos_token_ids=(1,))


class Sent(list):
    """A sender that keeps what it sends."""

    def send(self, message):
        self.append(message)

    def of(self, kind):
        return [message for message in self if isinstance(message, kind)]


class Around:
    """What a worker has around it; a subclass has a publisher and lets it work."""

    def __init__(self, folder, prompts):
        path = folder / "prompts.jsonl"
        path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
        Arena.create(folder / "arena", payload_bytes=1 << 16, ledger_bytes=4096, layout=1)
        self.arena, self.weights = Arena(folder / "arena"), folder / "weights"
        self.slab = MetricsSlab.create(folder / "metrics", [SlotName("supervisor"), SlotName("rollout", 0)])
        self.slab.begin("rollout", 0)
        self.metrics = RolloutMetrics(self.slab.writer("rollout", 0), reward_source="function")
        self.sent, self.now_s = Sent(), 0.0
        self.source = PromptSource(path, 0)

    def work(self, stream, **options):
        self.worker = RolloutWorker(
            stream, self.arena, self.weights, self.sent, self.metrics, index=0, clock=lambda: self.now_s, **options
        )
        self.worker.handle(Welcome(1))
        self.incarnation = self.sent.of(Hello)[0].incarnation

    def value(self, name, **labels):
        return MetricsReader(self.slab).read().value(name, **labels)

    def close(self):
        self.worker.close()
        self.publisher.close()
        self.source.close()
        self.slab.close()
        self.arena.close()


class Bench(Around):
    """A worker with everything around it."""

    def __init__(self, folder, prompts=("AB", "ABCD", "ABCDEFGHIJKLM"), max_length=MAX_LENGTH):
        super().__init__(folder, [{"prompt": prompt, "answer": prompt.lower()} for prompt in prompts])
        self.maker, self.held_out = Maker(), HeldOut()
        self.model = {"actor.w": torch.zeros(2)}
        self.publisher = WeightsPublisher(self.weights, self.model)
        self.publisher.publish(0, {"actor.w": torch.zeros(2)})
        self.roller = LocalRoller(
            self.maker, self.source, Letters(), ModelWeights(self.model, BlockingEngine(Threes())), seed=7,
            lengths=Lengths(max_length, max_length - 1, None),
            template="none", sampling=SAMPLING, vocabulary=VOCABULARY, evaluations=[self.held_out],
        )  # fmt: skip
        self.work(RollStream(self.roller))

    def ticket(self, number=0, *, prompts=2, version=0, deadline_s=100.0):
        self.worker.handle(
            Ticket(self.incarnation, number, number * prompts, prompts, 1, 0, 1 << 15, version, deadline_s)
        )


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def short_positions(bench, count):
    """Positions from which `count` prompts in a row fit."""
    fits = [len(bench.source.at(position).prompt) < MAX_LENGTH for position in range(30)]
    return next(start for start in range(30) if all(fits[start : start + count]))


def test_a_worker_says_as_which_attempt_it_has_each_ticket(bench):
    """A buffer that was killed while it issued a ticket again learns the attempt that the worker has."""
    for number, attempt in ((0, 3), (1, 1)):
        bench.worker.handle(Ticket(bench.incarnation, number, number * 2, 2, attempt, 0, 1 << 15, 0, 100.0))
    bench.worker.step()
    bench.sent.clear()

    bench.worker.handle(Welcome(2))

    hello, said = bench.sent.of(Hello)[0], [word for word in bench.sent if isinstance(word, Sealed | Failed)]
    assert (hello.held, hello.attempts) == ([0, 1], [3, 1])
    assert [(word.ticket, word.attempt) for word in said] == [(0, 3)]


@pytest.mark.parametrize("change", ["failed", "faulty"])
def test_what_came_to_nothing_tells_its_attempt(bench, change):
    if change == "failed":
        bench.maker.error = RewardError("no")
    else:
        bench.maker.change = lambda experience: experience.action_log_probs.fill_(math.nan)
    bench.worker.handle(Ticket(bench.incarnation, 0, 0, 2, 2, 0, 1 << 15, 0, 100.0))

    bench.worker.step()

    (word,) = bench.sent.of(Failed if change == "failed" else Faulty)
    assert word.attempt == 2


def test_a_worker_asks_for_tickets_once_it_was_welcomed(bench):
    assert len(bench.sent.of(WantTickets)) == 1


def test_a_ticket_is_rolled_out_and_sealed_into_its_extent(bench):
    bench.ticket()
    bench.worker.step()

    (sealed,) = bench.sent.of(Sealed)
    reader = codec.ExtentReader(bench.arena.extent(0, sealed.nbytes), checksum=sealed.checksum)
    seed = bench.maker.calls[0].sampling.seed
    expected = made_up(rows=sealed.rows, prompt=5, actions=6, seed=seed % 1000)
    assert torch.equal(codec.gather_padded([(reader, range(sealed.rows))]).reward, expected.reward)
    assert sealed.policy_version == 0


def test_prompts_go_with_their_answers(bench):
    start = short_positions(bench, 2)
    bench.worker.handle(Ticket(bench.incarnation, 0, start, 2, 1, 0, 1 << 15, 0, 100.0))
    bench.worker.step()

    batch = bench.maker.calls[0]
    texts = [bench.source.at(position).prompt for position in (start, start + 1)]
    assert batch.answers == [text.lower() for text in texts]
    assert [ids.tolist() for ids in batch.prompts] == [Letters()(text)["input_ids"] for text in texts]
    assert batch.prompt_columns == max(map(len, texts))


def test_a_prompt_that_fills_max_length_is_set_aside_and_counted(bench, caplog):
    bench.ticket(prompts=3)
    bench.worker.step()

    (sealed,) = bench.sent.of(Sealed)
    assert (sealed.rows, sealed.prompts_failed) == (2, 1)
    assert bench.value("rlhfd_experiences_total", outcome="failed") == 1
    assert bench.value("rlhfd_experiences_total", outcome="accepted") == 2
    (line,) = caplog.messages
    assert " line=3 reason=13 tokens leave no room for a response: rollout.max_length is 11" in line


def test_a_ticket_of_nothing_but_such_prompts_fails_for_good(tmp_path):
    bench = Bench(tmp_path, prompts=("ABCDEFGHIJKLM",))
    bench.ticket()
    bench.worker.step()

    (failed,) = bench.sent.of(Failed)
    assert not failed.retry
    assert bench.value("rlhfd_experiences_total", outcome="failed") == 2
    bench.close()


class Chatty(Letters):
    """Letters with a chat template that refuses a system message, and quotes it."""

    chat_template = "{{ messages }}"

    def apply_chat_template(self, messages, **_):
        if messages[0]["role"] == "system":
            raise ValueError(f"no system role: {messages[0]['content']}")
        return self(messages[0]["content"])


def test_a_rollout_that_is_not_finite_is_never_sealed_and_lies_in_its_extent_for_the_quarantine(bench):
    bench.maker.change = lambda experience: experience.action_log_probs.__setitem__((0, 0), math.nan)
    bench.ticket()
    bench.worker.step()

    assert bench.sent.of(Sealed) == []
    (faulty,) = bench.sent.of(Faulty)
    assert (faulty.reason, faulty.ticket, faulty.policy_version) == ("not_finite", 0, 0)
    assert faulty.detail.startswith("row 0: action_log_probs is nan in column 0 of 6")
    reader = codec.ExtentReader(bench.arena.extent(0, faulty.nbytes), checksum=faulty.checksum)
    assert math.isnan(codec.gather_padded([(reader, range(faulty.rows))]).action_log_probs[0, 0])
    assert bench.value("rlhfd_experiences_total", outcome="failed") == 2
    assert bench.value("rlhfd_experiences_total", outcome="accepted") == 0

    bench.maker.change = lambda experience: None
    bench.worker.handle(Settled(bench.incarnation, 0))
    bench.ticket()
    bench.worker.step()
    assert len(bench.sent.of(Sealed)) == 1, "the next attempt at the same ticket"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ShapeError("row 1: a response of 0 tokens"), "lengths"),
        (TokenError("row 1: token 99"), "vocabulary"),
        (FieldError("row 1: 3 image tokens more"), "malformed"),
    ],
)
def test_what_its_maker_refuses_is_told_by_reason_without_a_copy(bench, error, reason):
    bench.maker.error = error
    bench.ticket()
    bench.worker.step()

    (faulty,) = bench.sent.of(Faulty)
    assert (faulty.reason, faulty.detail, faulty.rows, faulty.nbytes) == (reason, str(error), 0, 0)


def test_rows_that_have_no_place_in_an_extent_are_told_without_a_copy(bench):
    bench.maker.change = lambda experience: setattr(experience, "reward", experience.reward[:1].repeat(7))
    bench.ticket()
    bench.worker.step()

    (faulty,) = bench.sent.of(Faulty)
    assert (faulty.reason, faulty.rows, faulty.nbytes) == ("lengths", 0, 0)


def test_a_start_ends_where_the_first_rollouts_do_not_pass_the_gate(bench):
    bench.maker.change = lambda experience: experience.advantages.fill_(math.inf)

    with pytest.raises(FieldError, match="a rollout before the first ticket is refused: row 0: advantages is inf"):
        refuse_broken_reward(bench.roller, 4096)

    changes = iter([bench.maker.change, bench.maker.change])
    bench.maker.change = lambda experience: next(changes, lambda experience: None)(experience)
    refuse_broken_reward(bench.roller, 4096)


def test_a_start_tries_responses_of_16_tokens_at_most_and_their_room_at_full_length(tmp_path):
    bench = Bench(tmp_path, max_length=500)
    refuse_broken_reward(bench.roller, row_bytes_bound(500))
    bench.roller.roll(0, 1)

    tried = [batch.num_actions for batch in bench.maker.calls]
    assert tried[0] == 16 and len(tried) == 2
    assert tried[1] > 16, "a ticket's responses are not cut"

    with pytest.raises(
        ConfigError, match=r"buffer\.row_bytes: extent of .* rows of a prompt at rollout\.max_length 500"
    ):
        refuse_broken_reward(bench.roller, row_bytes_bound(100))
    bench.close()


@pytest.mark.parametrize("log_texts", [False, True])
def test_a_prompt_that_the_chat_template_refuses_costs_that_prompt_alone(tmp_path, caplog, log_texts):
    user, system = {"role": "user", "content": "AB"}, {"role": "system", "content": "SECRET"}
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": messages}) + "\n" for messages in ([user], [system], [user])))
    maker = Maker()
    with contextlib.closing(PromptSource(path, 0)) as source:
        roller = LocalRoller(
            maker, source, Chatty(), ModelWeights({}, BlockingEngine(Threes())), seed=7,
            lengths=Lengths(MAX_LENGTH, MAX_LENGTH - 1, None), template="auto",
            sampling=SAMPLING, vocabulary=VOCABULARY, telemetry=Telemetry(log_texts=log_texts),
        )  # fmt: skip
        rolled = roller.roll(0, 3)

    assert (rolled.prompts_failed, len(maker.calls[0].prompts)) == (1, 2)
    (line,) = caplog.messages
    assert (
        f"line=2 reason={path}:2: the prompt does not suit the tokenizer's chat template, which raised ValueError"
        in line
    )
    assert ("SECRET" in line) is log_texts


def test_a_prompt_of_no_tokens_costs_that_prompt_alone(tmp_path):
    bench = Bench(tmp_path, prompts=("AB", "BA", "~"))
    bench.ticket(prompts=3)
    bench.worker.step()

    (sealed,) = bench.sent.of(Sealed)
    assert (sealed.rows, sealed.prompts_failed) == (2, 1)
    bench.close()


def test_a_broken_reward_fails_the_ticket_and_not_the_worker(bench):
    bench.maker.error = RewardError("row 1: reward is nan")
    bench.ticket()
    bench.worker.step()

    (failed,) = bench.sent.of(Failed)
    assert (failed.reason, failed.retry) == ("row 1: reward is nan", False)
    bench.maker.error = None
    bench.ticket(1)
    bench.worker.step()
    assert len(bench.sent.of(Sealed)) == 1


def test_a_rollout_that_took_too_long_is_given_back(bench):
    def take_6_s(experience):
        bench.now_s += 6.0

    bench.maker.change = take_6_s
    bench.ticket(deadline_s=5.0)
    bench.worker.step()

    (failed,) = bench.sent.of(Failed)
    assert failed.retry
    assert bench.sent.of(Sealed) == []


def test_new_weights_are_fetched_before_the_rollout_that_asks_for_them(bench):
    bench.publisher.publish(3, {"actor.w": torch.full((2,), 3.0)})
    bench.ticket(version=3)
    bench.worker.step()

    (sealed,) = bench.sent.of(Sealed)
    assert sealed.policy_version == bench.value("rlhfd_policy_version") == 3
    assert bench.value("rlhfd_weight_syncs_total", result="ok") == 1
    assert bench.model["actor.w"].tolist() == [3.0, 3.0]
    assert sealed.fingerprint == bench.worker.held.fingerprint != 0


def test_a_restarted_buffer_hears_again_what_was_not_settled(bench):
    bench.ticket(0)
    bench.ticket(1)
    bench.worker.step()
    bench.worker.step()
    bench.worker.handle(Settled(bench.incarnation, 0))
    bench.sent.clear()

    bench.worker.handle(Welcome(2))

    assert [sealed.ticket for sealed in bench.sent.of(Sealed)] == [1]
    assert bench.sent.of(Hello)[0].held == [1]


def test_a_dead_buffers_ticket_that_was_not_read_yet_is_void(bench):
    """The next buffer does not know the ticket, and gives its room to another worker."""
    bench.ticket(0)
    bench.sent.clear()
    bench.worker.handle(Welcome(2))

    bench.ticket(1)

    (hello,) = bench.sent.of(Hello)
    assert hello.held == [0] and hello.incarnation != bench.incarnation
    assert bench.sent.of(WantTickets)[0].incarnation == hello.incarnation
    bench.worker.step()
    assert [sealed.ticket for sealed in bench.sent.of(Sealed)] == [0]
    assert bench.worker.idle


def test_a_ticket_is_worked_on_once_however_often_it_comes(bench):
    bench.ticket()
    bench.ticket()
    bench.worker.step()
    bench.ticket()

    assert bench.worker.idle


def test_draining_ends_only_when_everything_is_settled(bench):
    bench.ticket()
    bench.worker.handle(Drain())
    assert not bench.worker.finished
    bench.worker.step()
    assert not bench.worker.finished

    bench.worker.handle(Settled(bench.incarnation, 0))

    assert bench.worker.finished


def test_sampling_depends_on_the_position_and_the_run_alone():
    assert seed_of(1, 5) == seed_of(1, 5)
    assert len({seed_of(run, position) for run in range(20) for position in range(20)}) == 400


def test_waiting_is_accounted_for_by_its_reason(bench):
    bench.worker.handle(Wait(bench.incarnation, "staleness"))
    with bench.worker._metrics.waiting():
        assert bench.worker._metrics.clock.activity == "wait_ticket_staleness"


def test_a_rollout_that_does_not_fit_its_extent_fails_for_good_and_says_what_to_raise(bench):
    start = short_positions(bench, 2)
    bench.worker.handle(Ticket(bench.incarnation, 0, start, 2, 1, 0, 64, 0, 100.0))
    bench.worker.step()

    (failed,) = bench.sent.of(Failed)
    assert not failed.retry
    assert failed.reason.endswith("does not fit: 64 B reserved for 2 rows; raise buffer.row_bytes")


def test_weights_of_the_same_number_are_fetched_again_after_a_rollback(bench):
    def publish(version, value, **options):
        return bench.publisher.publish(version, {"actor.w": torch.full((2,), value)}, **options)

    publish(1, 1.0)
    bench.ticket(version=1)
    bench.worker.step()
    publish(0, 2.0, rollback=True)
    again = publish(1, 3.0)
    publish(2, 4.0)

    bench.ticket(1, version=1)
    bench.worker.step()

    assert bench.worker.held.history == again.history == 1
    assert torch.equal(bench.model["actor.w"], torch.full((2,), 4.0))


class HeldOut:
    """The roller of a held-out file."""

    versions = ()
    error = None

    def on_roll(self):
        pass

    def roll(self, position, prompts):
        self.on_roll()
        if self.error is not None:
            raise self.error
        results = tuple(PromptResult(place, 1, 1, 1.0, 3.0, 0) for place in range(position, position + prompts))
        return Rolled(None, 0, versions=self.versions, results=results)

    def close(self):
        pass


def held_out_ticket(bench, number=3, *, deadline_s=100.0):
    ticket = Ticket(bench.incarnation, EVALUATION_TICKETS + number, 4, 2, 1, 0, 0, 0, deadline_s, 0)
    bench.worker.handle(ticket)
    return ticket


def test_held_out_prompts_give_results_of_the_weights_in_hand_and_no_experience(bench):
    ticket = held_out_ticket(bench)

    bench.worker.step()

    (found,) = bench.sent.of(Evaluated)
    newest = bench.worker.held
    assert (found.ticket, found.policy_version, found.fingerprint) == (ticket.ticket, 0, newest.fingerprint)
    assert newest.fingerprint and [result.position for result in found.results] == [4, 5]
    assert bench.maker.calls == [] and bench.sent.of(Sealed) == []
    for name in ("rlhfd_prompts_total", "rlhfd_experiences_total"):
        assert not bench.value(name), "rollouts alone are counted"
    bench.worker.handle(Drain())
    assert not bench.worker.finished
    bench.worker.handle(Settled(bench.incarnation, ticket.ticket))
    assert bench.worker.finished


@pytest.mark.parametrize("case", ["late", "reward", "field", "weights"])
def test_held_out_prompts_without_results_fail_and_count_no_rollout(bench, case):
    held_out_ticket(bench, deadline_s=-1.0 if case == "late" else 100.0)
    held_out = bench.roller.evaluations[0]
    held_out.error = {"reward": RewardError("no reward"), "field": FieldError("no field")}.get(case)
    if case == "weights":
        # As if they had been updated in flight.
        held_out.on_roll = lambda: bench.worker._tickets[EVALUATION_TICKETS + 3].weights.append(WeightsVersion(1, 5))
        held_out.versions = (0, 1)

    bench.worker.step()

    (failed,) = bench.sent.of(Failed)
    assert failed.retry == (case in ("late", "weights"))
    assert bench.sent.of(Evaluated) == bench.sent.of(Faulty) == []
    assert not bench.value("rlhfd_experiences_total")


def test_a_new_buffer_is_not_told_of_evaluation_tickets_which_it_issues_anew(bench):
    held_out_ticket(bench, 3)
    bench.worker.step()
    held_out_ticket(bench, 4)
    bench.ticket(0)
    bench.sent.clear()

    bench.worker.handle(Welcome(2))

    assert bench.sent.of(Hello)[0].held == [0]
    assert bench.sent.of(Evaluated) == []
    bench.worker.step()
    assert bench.sent.of(Evaluated) == [] and len([*bench.sent.of(Sealed), *bench.sent.of(Failed)]) == 1


def test_groups_without_signal_are_told_by_their_number():
    def groups(mixed):
        rows = len(mixed.get("group_mixed", [0, 0]))
        return flat_groups(
            RaggedRows.of_columns(
                torch.ones(2 * rows, dtype=torch.int64), lengths=[2] * rows, counts=[1] * rows, actions={}, rows={},
                info=mixed,
            ), 2,
        )  # fmt: skip

    assert groups({"group_mixed": torch.tensor([True, True, False, False, True, True, False, False])}) == [1, 3]
    assert groups({"group_mixed": torch.tensor([1.0, 1.0])}) == []
    assert groups({}) == []
