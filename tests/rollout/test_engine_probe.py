"""The probe of an engine: one that computes with other weights than its worker's is found within a version."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config.schema import Config
from pipeline.errors import FieldError, ShapeError, WeightsError, WeightsMismatchError
from pipeline.models.weights.probe import answer
from pipeline.models.weights.store import WeightsReader, flatten
from pipeline.rollout.generation.blocking import BlockingEngine
from pipeline.rollout.generation.engine_probe import PROBE_TOKENS, Judging, ModelProbe, PublishedProbe
from pipeline.rollout.generation.hf_generate import ActorGenerator
from pipeline.rollout.generation.interface import Completed, Engine, Response, Span
from pipeline.rollout.generation.transformers import TransformersGenerator
from pipeline.rollout.generation.weights import EngineWeights
from pipeline.rollout.loader import judging_of
from pipeline.rollout.prompt_batch import sample_all
from pipeline.runtime.messages import Faulty, Sealed
from pipeline.storage.weights_header import Probe, WeightsVersion
from pipeline.telemetry.reader import HistogramReading, MetricsReader
from tests.rollout.test_ticket_stream import Bench
from tests.rollout.test_ticket_stream import new_bench as new_stream  # noqa: F401 - a fixture
from tests.support import tiny, tiny_vision
from tests.support.proving import prove
from tests.support.row_stream import RowStream
from tests.support.told import Told
from tests.support.whole_rows import WholeRows

CPU = torch.device("cpu")
TOKENS = [5, 9, 3]
LIMIT = 1e-3
PROBLEM = r"the engine (computes with old weights|does not compute with the weights that it was given): version=1 "


def moved(by: float, seed: int = 0) -> Any:
    """The first model after a step: each weight differs by some `by`."""
    model = tiny.llama()
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by * torch.randn(parameter.shape, generator=noise)
    return model


class LyingStream(RowStream):
    """A stream that ignores updates while it `lies`, and reports their versions."""

    lies = True

    def update_weights(self, actor: Any, version: int) -> None:
        if self.lies:
            self._version = version
        else:
            super().update_weights(actor, version)


def frozen(generator: Callable[[Any], Any]) -> Callable[[Any], Engine]:
    """An engine over a copy of the actor that no update reaches."""
    return lambda actor: BlockingEngine(generator(copy.deepcopy(actor)))


class WithoutUpdates(WholeRows):
    """A blocking engine with weights of its own that ignores updates; it returns no log-probs."""

    def update_weights(self, actor: Any) -> None:
        pass

    def generate(self, *arguments: Any, **keywords: Any) -> Any:
        return dataclasses.replace(super().generate(*arguments, **keywords), log_probs=None)


STALE: dict[str, Callable[[Any], Engine]] = {
    "transformers": frozen(TransformersGenerator),
    "generate": frozen(ActorGenerator),
    "one's own, blocking, without log-probs": lambda actor: BlockingEngine(WithoutUpdates(actor)),
    "one's own, a stream": LyingStream,
}
HONEST: dict[str, Callable[[Any], Engine]] = {
    "transformers": lambda actor: BlockingEngine(TransformersGenerator(actor)),
    "generate": lambda actor: BlockingEngine(ActorGenerator(actor)),
    "one's own, blocking": lambda actor: BlockingEngine(WholeRows(actor)),
    "one's own, a stream": RowStream,
}


@pytest.fixture
def new_bench(
    new_stream: Callable[..., Bench],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Bench]:
    monkeypatch.chdir(tmp_path)

    def make(
        new_engine: Callable[[Any], Engine], action: Any = "resync", limit: float = LIMIT, **options: Any
    ) -> Bench:
        bench = new_stream(new_engine, **options)
        judging = Judging(limit, action, bench.metrics)
        probe = ModelProbe(bench.actor, TOKENS, CPU, row_tokens=14, judging=judging)
        bench.roller.weights = dataclasses.replace(bench.roller.weights, probe=probe)
        return bench

    return make


def verdicts(bench: Bench) -> dict[str, int]:
    found = {verdict: bench.value("rlhfd_engine_probes_total", verdict=verdict) for verdict in ("ok", "gap", "stale")}
    return {verdict: int(count) for verdict, count in found.items() if count}


def gaps(bench: Bench) -> HistogramReading:
    found = MetricsReader(bench.slab).read().families["rlhfd_engine_gap_nats"][("probe",)]
    assert isinstance(found, HistogramReading)
    return found


def roll(bench: Bench, number: int, version: int) -> None:
    bench.ticket(number, version=version)
    bench.run(lambda: bench.worker.idle)


@pytest.mark.parametrize("new_engine", HONEST.values(), ids=HONEST.keys())
def test_an_engine_that_takes_its_updates_passes_at_each_version(new_bench, new_engine) -> None:
    bench = new_bench(new_engine)
    for version, model in enumerate([tiny.llama(), moved(1e-4), tiny.llama(seed=9), moved(1e-6), tiny.llama()]):
        if version:
            bench.publish(version, model)
        roll(bench, version, version)

    assert bench.sealed() == [0, 1, 2, 3, 4]
    assert verdicts(bench) == {"ok": 5}
    # Some engines cannot tell a sampled pad token at the end from padding.
    assert 4 * PROBE_TOKENS <= gaps(bench).count <= 5 * PROBE_TOKENS, "each version adds its tokens"
    assert 0 <= bench.value("rlhfd_engine_gap_mean_nats") < 1e-5


@pytest.mark.parametrize(
    ("new_engine", "by"),
    [
        # Without log-probs it is found by its tokens, once these have changed.
        *((name, 0.5) for name in STALE),
        ("transformers", 1e-5),
        ("one's own, a stream", 1e-5),
    ],
)
def test_an_engine_that_ignores_an_update_is_found_before_a_row_of_that_version_is_sealed(
    new_bench, new_engine, by
) -> None:
    """Also one whose weights have changed by far less than the limit."""
    bench = new_bench(STALE[new_engine])
    roll(bench, 0, 0)
    bench.publish(1, moved(by))
    bench.ticket(1, version=1)

    with pytest.raises(WeightsMismatchError, match=PROBLEM):
        bench.run(lambda: bench.worker.idle)

    assert [message.policy_version for message in bench.sent.of(Sealed)] == [0]
    assert bench.value("rlhfd_weight_syncs_total", result="mismatch") == 1
    found = verdicts(bench)
    assert found.pop("ok") == 1
    assert sum(found.values()) == 2, "it got the weights once more, and ignored them again"


def test_old_weights_are_named_with_the_versions_and_the_moves(new_bench) -> None:
    bench = new_bench(LyingStream, action="stop")
    roll(bench, 0, 0)
    bench.publish(1, moved(1e-5))
    bench.ticket(1, version=1)

    with pytest.raises(WeightsMismatchError) as raised:
        bench.run(lambda: bench.worker.idle)

    assert str(raised.value).startswith("the engine computes with old weights: version=1 moved_nats=0 of its log-probs")
    assert verdicts(bench) == {"ok": 1, "stale": 1}, "it is stopped at once"


def test_an_engine_that_takes_the_weights_at_the_second_time_goes_on(new_bench, caplog) -> None:
    bench = new_bench(LyingStream)
    roll(bench, 0, 0)
    bench.publish(1, moved(0.05))
    bench.ticket(1, version=1)
    update, updates = bench.engine.update_weights, []

    def second_time(actor: Any, version: int) -> None:
        updates.append(version)
        bench.engine.lies = len(updates) < 2
        update(actor, version)

    bench.engine.update_weights = second_time
    with caplog.at_level(logging.WARNING):
        bench.run(lambda: bench.worker.idle)

    assert (updates, bench.sealed()) == ([1, 1], [0, 1])
    assert verdicts(bench)["ok"] == 2
    assert "it gets them again" in caplog.text


def test_with_a_warning_the_run_goes_on_and_each_version_is_counted(new_bench, caplog) -> None:
    bench = new_bench(LyingStream, action="warn")
    roll(bench, 0, 0)
    with caplog.at_level(logging.WARNING):
        for version in (1, 2):
            bench.publish(version, moved(0.05 * version))
            roll(bench, version, version)

    assert bench.sealed() == [0, 1, 2]
    found = verdicts(bench)
    assert found.pop("ok") == 1 and sum(found.values()) == 2
    assert len(caplog.records) == 2
    assert bench.value("rlhfd_engine_gap_mean_nats") > LIMIT


def test_rows_that_ended_before_the_engine_has_answered_wait_for_it(new_bench) -> None:
    """Updates in flight: the rows in hand are of the version before, and go on beside the probe."""
    bench = new_bench(lambda actor: RowStream(actor, slow_tokens=[TOKENS[0]], slowness=20), in_flight=True)
    bench.ticket(0)
    for _ in range(100):
        bench.worker.step()
    assert bench.sealed() == []

    bench.run(lambda: bench.worker.idle)

    assert bench.sealed() == [0]


def test_a_newer_version_ends_the_probe_of_the_one_before(new_bench) -> None:
    bench = new_bench(lambda actor: RowStream(actor, slow_tokens=[TOKENS[0]], slowness=5), in_flight=True)
    bench.ticket(0)
    bench.worker.step()
    bench.publish(1, moved(0.05))
    bench.run(lambda: bench.worker.idle)

    assert bench.sealed() == [0]
    assert verdicts(bench) == {"ok": 1}
    assert not bench.engine.load.running


class NeverGreedy(RowStream):
    """An engine that lacks an option of the probe; it says so at once, or with its next step."""

    at_once = True

    def submit(self, request: Any) -> None:
        if self.at_once and not request.sampling.do_sample:
            raise FieldError("this engine samples")
        super().submit(request)

    def step(self) -> list[Any]:
        if any(not rows[0].request.sampling.do_sample for rows in self._rows.values()):
            raise FieldError("this engine samples")
        return super().step()


@pytest.mark.parametrize("at_once", [True, False])
def test_an_engine_that_refuses_the_probe_goes_on_with_a_warning(new_bench, caplog, at_once) -> None:
    bench = new_bench(NeverGreedy)
    bench.engine.at_once = at_once
    for number in range(3):
        bench.ticket(number)

    with caplog.at_level(logging.WARNING):
        bench.run(lambda: bench.worker.idle)

    assert sorted(bench.sealed()) == [0, 1, 2]
    assert "the engine is not compared with the trainer: version=0 reason=this engine samples" in caplog.text
    assert verdicts(bench) == {}


def test_after_an_error_no_request_is_in_hand_and_its_key_is_free(new_bench) -> None:
    bench = new_bench(NeverGreedy)
    bench.engine.at_once = False
    probe = bench.roller.weights.probe
    greedy = probe.request(1)
    sampled = dataclasses.replace(greedy, key=0, sampling=dataclasses.replace(greedy.sampling, do_sample=True))

    with pytest.raises(FieldError):
        sample_all(bench.engine, [sampled, greedy])

    assert not bench.engine.load.running
    assert [completed.key for completed in sample_all(bench.engine, [sampled])] == [0]


class RefusingRows(TransformersGenerator):
    """A blocking engine with a gap at its first probe; it refuses the rows of some tickets."""

    probes = 0

    def generate(self, input_ids: Any, attention_mask: Any, sampling: Any, **keywords: Any) -> Any:
        if sampling.do_sample and input_ids.shape[1] < 3:
            raise ShapeError("rows of two tokens")
        responses = super().generate(input_ids, attention_mask, sampling, **keywords)
        if not sampling.do_sample:
            self.probes += 1
            off = responses.log_probs - float(self.probes == 1)
            responses = dataclasses.replace(responses, log_probs=off)
        return responses


def test_an_error_of_a_ticket_beside_the_probe_ends_the_ticket(new_bench) -> None:
    """A blocking engine has dropped the ticket with the error, which may as well be the probe's."""
    bench = new_bench(lambda actor: BlockingEngine(RefusingRows(actor)))
    short = next(number for number in range(20) if len(bench.source.at(number).prompt) == 2)
    bench.ticket(short)

    steps = bench.run(lambda: bench.sent.of(Faulty))

    assert steps < 10
    assert [message.ticket for message in bench.sent.of(Faulty)] == [short]
    assert verdicts(bench) == {"gap": 1}
    long = next(number for number in range(short + 1, 20) if len(bench.source.at(number).prompt) > 2)
    bench.ticket(long)
    bench.run(lambda: bench.worker.idle)
    assert bench.sealed() == [long]


# The judgement itself.


def respond(engine_model: Any, probe: ModelProbe, version: int = 0) -> Response:
    """The response of an engine with this model."""
    engine = BlockingEngine(TransformersGenerator(engine_model))
    response = sample_all(engine, [probe.request(0)])[0].responses[0]
    return dataclasses.replace(response, spans=(Span(version, 0, PROBE_TOKENS),))


def probe_of(
    model: Any, judged: list[Any], limit: float = LIMIT, row_tokens: int = 14, tokens: Sequence[int] = TOKENS
) -> ModelProbe:
    judging = Judging(limit, "warn", Told(judged))
    return ModelProbe(model, tokens, CPU, row_tokens=row_tokens, judging=judging)


def test_the_gap_is_the_difference_of_the_log_probs_of_each_token() -> None:
    judged: list[tuple[str, Sequence[float]]] = []
    probe = probe_of(tiny.llama(), judged)
    response = respond(tiny.llama(), probe)
    assert response.log_probs is not None
    off = response.log_probs + torch.linspace(-0.4, 0.3, PROBE_TOKENS)

    probe.judge(dataclasses.replace(response, log_probs=off), 0)

    ((verdict, found),) = judged
    assert verdict == "gap"
    assert found == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.0, 0.1, 0.2, 0.3], abs=1e-5)


def test_without_log_probs_the_gap_is_that_of_the_most_probable_token() -> None:
    judged: list[Any] = []
    probe = probe_of(tiny.llama(), judged)
    right = dataclasses.replace(respond(tiny.llama(), probe), log_probs=None)
    wrong = dataclasses.replace(right, token_ids=(right.token_ids + 1) % tiny.VOCABULARY_SIZE)

    probe.judge(right, 0)
    probe.judge(wrong, 1)

    assert [verdict for verdict, _ in judged] == ["ok", "gap"]
    assert judged[0][1] == (0.0,) * PROBE_TOKENS
    prompt = probe.request(0).prompt_ids
    ids = torch.cat([prompt, wrong.token_ids])[None]
    every = tiny.llama()(input_ids=ids).logits[0, len(prompt) - 1 : -1].double().log_softmax(dim=-1)
    of_wrong = every.gather(1, wrong.token_ids[:, None])[:, 0]
    assert judged[1][1] == pytest.approx((every.amax(dim=1) - of_wrong).tolist(), abs=1e-9)
    assert max(judged[1][1]) > LIMIT


def test_noise_of_the_size_of_the_update_is_no_sign_of_old_weights() -> None:
    """bfloat16: the log-probs of engine and model differ from version to version by more than the weights change."""
    model, judged = moved(0.0), list[Any]()
    probe = probe_of(model, judged, limit=0.5)
    noise = torch.Generator().manual_seed(0)
    for version in range(50):
        response = respond(model, probe)
        assert response.log_probs is not None
        off = response.log_probs + 0.02 * torch.randn(PROBE_TOKENS, generator=noise)
        probe.judge(dataclasses.replace(response, log_probs=off), version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 1e-5 * torch.randn(parameter.shape, generator=noise)

    assert {verdict for verdict, _ in judged} == {"ok"}


@torch.no_grad()
def test_a_change_that_the_rounding_of_one_pass_in_16_bits_hides_is_no_sign_of_old_weights_and_a_larger_one_is() -> (
    None
):
    """By weights of bfloat16 of which few change; the engine's log-probs stay, and the model's move."""
    model, judged = tiny.llama().bfloat16(), list[Any]()
    probe = probe_of(model, judged, limit=0.25)
    response = respond(model, probe)
    probe.judge(response, 0)
    moves, version = [0.0], 0

    while len(judged) < 100 and judged[-1][0] == "ok":
        version += 1
        model.model.norm.weight.mul_(1.01)
        moved_by = probe._moved(probe._answer(response, version))
        moves.append(0.0 if moved_by is None else moved_by)
        probe.judge(response, version)

    assert 0 < moves[1] < 0.03 and judged[-1][0] == "stale" and moves[-1] > 0.03


def test_weights_that_have_not_changed_are_not_old() -> None:
    model, judged = tiny.llama(), list[Any]()
    probe = probe_of(model, judged)

    for version in range(3):
        probe.judge(respond(model, probe), version)

    assert [verdict for verdict, _ in judged] == ["ok"] * 3


@pytest.mark.parametrize(("row_tokens", "prompt", "room"), [(2, 1, 1), (9, 1, 8), (10, 2, 8), (64, 3, 8)])
def test_the_probe_fits_a_row(row_tokens: int, prompt: int, room: int) -> None:
    request = probe_of(tiny.llama(), [], row_tokens=row_tokens).request(7)

    assert (request.key, len(request.prompt_ids), request.max_new_tokens) == (7, prompt, room)
    assert not request.sampling.do_sample and request.sampling.temperature == 1


def test_sampled_tokens_of_images_are_read_alike_by_engine_and_model() -> None:
    """They belong to no image: each pass over them reads token 0."""
    sampled, judged = set[int](), list[Any]()
    for seed in range(16):
        model = tiny_vision.model(seed)
        probe = probe_of(model, judged, tokens=[10, 17, 12])
        response = respond(model, probe)
        sampled |= set(response.token_ids.tolist())

        probe.judge(response, seed)

    assert sampled & {tiny_vision.IMAGE, tiny_vision.VIDEO}
    assert {verdict for verdict, _ in judged} == {"ok"}
    assert max(max(gaps) for _, gaps in judged) < 1e-4


def test_a_prompt_with_an_image_is_asked_without_it() -> None:
    model, judged = tiny_vision.model(), list[Any]()
    probe = probe_of(model, judged, tokens=[tiny_vision.START, tiny_vision.IMAGE, tiny_vision.END, 10])

    probe.judge(respond(model, probe), 0)

    ((verdict, gaps),) = judged
    assert verdict == "ok" and max(gaps) < 1e-4
    assert tiny_vision.IMAGE not in probe.request(0).prompt_ids


# A worker whose engine alone holds the actor: the trainer's answer stands for the model.


def of_prompt(model: Any) -> torch.Tensor:
    """The model's log-probs of the probe's tokens but the first."""
    ids = torch.tensor([TOKENS])
    return model(input_ids=ids).logits[0, :-1].detach().log_softmax(dim=-1).gather(1, ids[0, 1:, None])[:, 0]


class OwnActor(RowStream):
    """Takes versions out of shared memory, unless it `lies`, and returns log-probs of prompts."""

    lies = False

    def fetch_weights(self, path: Path, age: Any) -> Any:
        assert self.paused
        targets = {} if self.lies else flatten(actor=self._model.state_dict())
        with contextlib.closing(WeightsReader(path)) as reader:
            fetched = reader.fetch(targets, age=age, partial=True)
        self._version = fetched.version
        return fetched.age

    def step(self) -> list[Completed]:
        asked = {key for key, rows in self._rows.items() if rows[0].request.prompt_log_probs}
        return [
            Completed(done.key, (dataclasses.replace(done.responses[0], prompt_log_probs=of_prompt(self._model)),))
            if done.key in asked
            else done
            for done in super().step()
        ]


@pytest.fixture
def alone(new_bench) -> Callable[..., Bench]:
    def make(action: Any = "resync", **options: Any) -> Bench:
        bench = new_bench(lambda actor: OwnActor(actor, **options), in_flight=True)
        probe = PublishedProbe(TOKENS, torch.float32, Judging(LIMIT, action, bench.metrics))
        bench.roller.weights = EngineWeights(bench.engine, probe, {})
        return bench

    return make


def publish(bench: Bench, version: int, model: Any) -> None:
    bench.publish(version, model, probe=answer(model, TOKENS, CPU))


def ignoring_version_2(bench: Bench) -> Bench:
    """A bench that has sealed a row of version 1, and holds a ticket of version 2, which its engine will not take."""
    publish(bench, 1, tiny.llama())
    roll(bench, 0, 1)
    bench.engine.lies = True
    publish(bench, 2, moved(1e-4))
    bench.ticket(1, version=2)
    return bench


def test_an_engine_that_alone_holds_the_actor_is_asked_about_each_version_that_has_an_answer(alone, caplog) -> None:
    bench = alone()
    with caplog.at_level(logging.WARNING):
        roll(bench, 0, 0)
    for version in (1, 2, 3):
        publish(bench, version, moved(0.01 * version))
        roll(bench, version, version)

    assert bench.sealed() == [0, 1, 2, 3]
    assert [message.policy_version for message in bench.sent.of(Sealed)] == [0, 1, 2, 3]
    assert verdicts(bench) == {"ok": 3}
    assert "version=0 reason=the trainer has published no answer to the probe with this version" in caplog.text
    assert gaps(bench).count == 3, "one number a version"


def test_such_an_engine_takes_a_copy_that_was_sent_and_gets_it_again_from_there(alone, tmp_path) -> None:
    """On another machine: there is no file of weights, and each version comes as its bytes."""
    bench = alone()
    publish(bench, 1, moved(0.01))
    with contextlib.closing(WeightsReader(tmp_path / "0" / "weights")) as reader:
        copies = [pickle.loads(pickle.dumps(reader.copy()))]
        publish(bench, 2, moved(0.02))
        copies.append(reader.copy())
    weights, data = bench.roller.weights, copies[1].data.copy()
    data[100] ^= 1

    assert weights.fetch(copies[0]).version == 1
    prove(weights, 1)
    bench.engine._model.load_state_dict(tiny.llama().state_dict())
    weights.hand_over_again(1)
    prove(weights, 1)
    with pytest.raises(WeightsError, match="came damaged"):
        weights.fetch(dataclasses.replace(copies[1], data=data))
    assert torch.equal(of_prompt(bench.engine._model), of_prompt(moved(0.01))), "it has nothing of the damaged one"
    assert weights.fetch(copies[1]).version == 2
    prove(weights, 2)

    assert verdicts(bench) == {"ok": 3}
    assert torch.equal(of_prompt(bench.engine._model), of_prompt(moved(0.02)))


def test_no_row_of_a_version_is_sealed_that_such_an_engine_has_ignored(alone) -> None:
    bench = ignoring_version_2(alone())

    with pytest.raises(WeightsMismatchError, match=r"the engine computes with old weights: version=2 moved_nats=0"):
        bench.run(lambda: bench.worker.idle)

    assert [message.policy_version for message in bench.sent.of(Sealed)] == [1]
    assert verdicts(bench) == {"ok": 1, "stale": 2}, "it got the weights once more, and ignored them again"
    assert bench.value("rlhfd_weight_syncs_total", result="mismatch") == 1


def test_a_version_in_flight_ends_the_question_about_the_one_before(alone) -> None:
    bench = alone(slow_tokens=[TOKENS[0]], slowness=20)
    publish(bench, 1, moved(0.05))
    bench.ticket(0, version=1)
    bench.worker.step()
    publish(bench, 2, moved(0.02))
    bench.run(lambda: bench.worker.idle)

    assert bench.sealed() == [0]
    assert verdicts(bench) == {"ok": 1}
    assert not bench.engine.load.running


def test_a_resync_of_a_version_that_is_overwritten_ends_the_worker_in_one_line(alone) -> None:
    bench = ignoring_version_2(alone())
    step = bench.engine.step

    def late() -> Any:
        for version in (3, 4, 5):
            publish(bench, version, moved(1e-4))
        bench.engine.step = step
        return step()

    bench.engine.step = late
    with pytest.raises(WeightsError, match="the engine must have version 2 again, and shared memory holds it no more"):
        bench.run(lambda: bench.worker.idle)
    assert bench.sealed() == [0]


def published_probe(
    judged: list[Any], limit: float = LIMIT, action: Any = "warn", tokens: Sequence[int] = TOKENS,
    dtype: torch.dtype = torch.float32,
) -> PublishedProbe:  # fmt: skip
    return PublishedProbe(tokens, dtype, Judging(limit, action, Told(judged)))


def tell(probe: PublishedProbe, version: int, engines: torch.Tensor, trainers: torch.Tensor | float) -> bool:
    """Judge the log-probs of an engine, ``(n,)``, with those that the trainer published, or their sum."""
    total = float(trainers) if isinstance(trainers, float) else float(trainers.double().sum())
    probe.published = WeightsVersion(version, 0, probe=Probe(total, len(engines) + 1))
    request = probe.request(7)
    assert request.prompt_log_probs and len(request.prompt_ids) == len(engines) + 1
    return probe.judge(Response(torch.tensor([3]), "length", (Span(version, 0, 1),), None, engines), version)


def test_an_engine_is_compared_with_the_answer_that_the_trainer_published() -> None:
    judged: list[Any] = []
    probe = published_probe(judged)

    for version, model in enumerate((tiny.llama(), moved(1e-2))):
        tell(probe, version, of_prompt(model), answer(model, TOKENS, CPU).log_prob)
    tell(probe, 2, of_prompt(tiny.llama()) + torch.tensor([0.01, 0.04]), answer(tiny.llama(), TOKENS, CPU).log_prob)

    assert [verdict for verdict, _ in judged] == ["ok", "ok", "gap"]
    assert judged[1][1] == pytest.approx([0.0], abs=1e-6)
    assert judged[2][1] == pytest.approx([0.025], abs=1e-6), "a token, of the two that have one before them"


@pytest.mark.parametrize("by", [1e-2, 1e-6], ids=["beyond the limit", "by less, and more with each version"])
def test_an_engine_left_behind_is_found_by_the_trainers_answer(by: float) -> None:
    judged: list[Any] = []
    probe = published_probe(judged, action="stop")
    first = of_prompt(tiny.llama())
    tell(probe, 0, first, answer(tiny.llama(), TOKENS, CPU).log_prob)

    answers = (tell(probe, n, first, answer(moved(by * n), TOKENS, CPU).log_prob) for n in range(1, 100))
    with pytest.raises(WeightsMismatchError, match="the engine computes with old weights: version="):
        assert not any(answers)

    assert [verdict for verdict, _ in judged[:-1]] == ["ok"] * (len(judged) - 1)
    assert judged[-1][0] == "stale" and (by == 1e-2) == (judged[-1][1][0] > LIMIT)


@pytest.mark.parametrize("columns", [3, 8, 9, 64])
@pytest.mark.parametrize("spread", [0.02, 0.05])
@pytest.mark.parametrize("drift", [0.0, 0.005])
def test_rounding_of_16_bits_is_no_sign_of_old_weights(columns: int, spread: float, drift: float) -> None:
    """Log-probs of engine and trainer with errors of their own at each version; the weights change by less, or not."""
    judged: list[Any] = []
    probe = published_probe(judged, limit=0.25, tokens=range(columns), dtype=torch.bfloat16)
    noise = torch.Generator().manual_seed(columns)
    each, step = torch.full((columns - 1,), -2.0), drift * torch.randn(columns - 1, generator=noise)
    for version in range(500):
        each = each + step * torch.randn(1, generator=noise)
        engines, trainers = (each + spread * torch.randn(columns - 1, generator=noise) for _ in range(2))
        tell(probe, version, engines, trainers)

    assert {verdict for verdict, _ in judged} == {"ok"}


def test_in_16_bits_an_engine_left_behind_is_found_too() -> None:
    judged: list[Any] = []
    probe = published_probe(judged, limit=0.25, tokens=range(20), dtype=torch.bfloat16)
    first = torch.full((19,), -2.0)

    for version in range(10):
        tell(probe, version, first, first + 1e-3 * version)

    assert [verdict for verdict, _ in judged] == ["ok", *["stale"] * 9]


def test_nan_of_both_is_no_gap_and_leaves_the_next_versions_to_be_judged() -> None:
    judged: list[Any] = []
    probe = published_probe(judged)
    first, nan = of_prompt(tiny.llama()), torch.full((2,), torch.nan)

    for version, (engines, trainers) in enumerate(((first, first), (nan, nan), (first, nan), (first, first))):
        tell(probe, version, engines, trainers)
    tell(probe, 4, first, first + 1e-4)

    assert [verdict for verdict, _ in judged] == ["ok", "ok", "gap", "ok", "stale"]


def test_a_rollback_to_the_weights_of_before_is_judged_by_these() -> None:
    judged: list[Any] = []
    probe = published_probe(judged)
    first = of_prompt(tiny.llama())
    for version, engines, trainers in ((4, first, first), (5, first - 0.1, first - 0.1), (4, first, first)):
        tell(probe, version, engines, trainers)
    tell(probe, 5, first, first - 0.1)

    assert [verdict for verdict, _ in judged] == ["ok", "ok", "ok", "stale"]


def test_a_version_without_an_answer_is_not_judged_and_one_of_other_tokens_is_refused() -> None:
    probe = published_probe([])
    with pytest.raises(FieldError, match="the trainer has published no answer to the probe with this version"):
        probe.request(1)
    probe.published = WeightsVersion(3, 0, probe=Probe(-4.0, 9))
    response = Response(torch.tensor([3]), "length", (Span(3, 0, 1),), None, torch.zeros(2))
    with pytest.raises(WeightsMismatchError, match=r"is of 9 tokens, this worker's of 3: version=3"):
        probe.judge(response, 3)


@pytest.mark.parametrize(
    ("model", "rollout", "limit_nats", "least_move_nats"),
    [
        ({}, {}, 0.001, 1e-5),
        ({"dtype": "bfloat16"}, {}, 0.25, 1e-5),
        ({"dtype": "bfloat16"}, {"engine_gap_nats": 0.1}, 0.1, 1e-5),
        ({"dtype": "bfloat16"}, {"engine": "vllm", "quantization": "fp8"}, 0.5, 0.03),
        ({"dtype": "bfloat16"}, {"engine": "vllm", "quantization": "fp8", "engine_gap_nats": 0.1}, 0.1, 0.03),
    ],
)
def test_an_engine_is_judged_by_the_bounds_of_the_dtype_or_of_weights_of_8_bits(
    model, rollout, limit_nats, least_move_nats
) -> None:
    config = Config.model_validate({"model": model, "rollout": {**rollout, "engine_gap_action": "stop"}})
    actor, told = tiny.llama().to(getattr(torch, config.model.dtype)), Told()

    judging = judging_of(config, actor, told)

    assert judging == Judging(limit_nats, "stop", told, least_move_nats)
    of_model = 0.03 if model else least_move_nats
    assert ModelProbe(actor, TOKENS, CPU, row_tokens=20, judging=judging)._least_move_nats == of_model
