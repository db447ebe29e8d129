"""The probe of an engine: one that computes with other weights than its worker's is found within a version."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import FieldError, ShapeError, WeightsMismatchError
from pipeline.models.weights.probe import answer
from pipeline.models.weights.store import WeightsReader
from pipeline.rollout.generation.blocking import BlockingEngine
from pipeline.rollout.generation.engine_probe import PROBE_TOKENS, ModelProbe, PublishedProbe
from pipeline.rollout.generation.hf_generate import ActorGenerator
from pipeline.rollout.generation.interface import Engine, Response, Span
from pipeline.rollout.generation.transformers import TransformersGenerator
from pipeline.rollout.prompt_batch import sample_all
from pipeline.rollout.remote import _proven
from pipeline.runtime.messages import Faulty, Sealed
from pipeline.storage.weights_header import Probe, WeightsVersion
from pipeline.telemetry.reader import HistogramReading, MetricsReader
from tests.rollout.test_ticket_stream import Bench
from tests.support import tiny, tiny_vision
from tests.support.row_stream import RowStream
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
def new_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []
    monkeypatch.chdir(tmp_path)

    def make(
        new_engine: Callable[[Any], Engine], action: Any = "resync", limit: float = LIMIT, **options: Any
    ) -> Bench:
        folder = tmp_path / str(len(benches))
        folder.mkdir()
        bench = Bench(folder, new_engine, **options)
        probe = ModelProbe(
            bench.actor, TOKENS, CPU, row_tokens=14, limit_nats=limit, action=action,
            on_judged=bench.metrics.engine_judged,
        )  # fmt: skip
        bench.roller.weights = dataclasses.replace(bench.roller.weights, probe=probe)
        benches.append(bench)
        return bench

    yield make
    for bench in benches:
        bench.close()


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


@pytest.mark.parametrize("at_once", [True, False])
def test_a_node_whose_engine_refuses_the_probe_goes_on_with_a_warning(new_bench, tmp_path, caplog, at_once) -> None:
    bench = new_bench(NeverGreedy)
    bench.engine.at_once = at_once
    bench.publish(1, moved(0.05))
    reader = WeightsReader(tmp_path / "0" / "weights")

    with caplog.at_level(logging.WARNING):
        fetched = _proven(bench.roller, reader.copy())
    reader.close()

    assert fetched.version == 1
    assert "the engine is not compared with the trainer: version=1 reason=this engine samples" in caplog.text
    assert not bench.engine.load.running, "the request of the probe is not in hand"


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
    return ModelProbe(
        model, tokens, CPU, row_tokens=row_tokens, limit_nats=limit, action="warn",
        on_judged=lambda verdict, gaps: judged.append((verdict, gaps)),
    )  # fmt: skip


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


def published_probe(judged: list[Any], limit: float = LIMIT, action: Any = "warn") -> PublishedProbe:
    return PublishedProbe(
        TOKENS, limit_nats=limit, action=action, on_judged=lambda verdict, gaps: judged.append((verdict, gaps))
    )


def answered(
    probe: PublishedProbe, version: int, engines: Any, trainers: Any, noise: Sequence[float] = (0.0, 0.0)
) -> bool:
    """Judge the answer of an engine with one model, published with another one."""
    found = answer(trainers, TOKENS, CPU)
    probe.published = WeightsVersion(version, 0, probe=Probe(found.log_prob + noise[0], found.tokens))
    request = probe.request(7)
    assert request.prompt_log_probs and request.prompt_ids.tolist() == TOKENS
    logits = engines(input_ids=request.prompt_ids[None]).logits[0, :-1].detach().log_softmax(dim=-1)
    each = logits.gather(1, request.prompt_ids[1:, None])[:, 0] + noise[1] / (len(TOKENS) - 1)
    response = Response(torch.tensor([3]), "length", (Span(version, 0, 1),), None, each)
    return probe.judge(response, version)


def test_an_engine_is_compared_with_the_answer_that_the_trainer_published() -> None:
    judged: list[Any] = []
    probe = published_probe(judged)

    answered(probe, 0, tiny.llama(), tiny.llama())
    answered(probe, 1, moved(1e-2), moved(1e-2))
    answered(probe, 2, tiny.llama(), tiny.llama(), (0.0, 0.05))

    assert [verdict for verdict, _ in judged] == ["ok", "ok", "gap"]
    assert judged[1][1] == pytest.approx([0.0], abs=1e-6)
    assert judged[2][1] == pytest.approx([0.025], abs=1e-6), "a token, of the two that have one before them"


@pytest.mark.parametrize("by", [1e-2, 1e-5], ids=["beyond the limit", "by less, and more with each version"])
def test_an_engine_left_behind_is_found_by_the_trainers_answer(by: float) -> None:
    judged: list[Any] = []
    probe = published_probe(judged, action="stop")
    answered(probe, 0, tiny.llama(), tiny.llama())

    answers = (answered(probe, version, tiny.llama(), moved(by * version)) for version in range(1, 100))
    with pytest.raises(WeightsMismatchError, match="the engine computes with old weights: version="):
        assert not any(answers)

    assert [verdict for verdict, _ in judged[:-1]] == ["ok"] * (len(judged) - 1)
    assert judged[-1][0] == "stale" and (by == 1e-2) == (judged[-1][1][0] > LIMIT)


def test_rounding_of_16_bits_in_one_number_is_no_sign_of_old_weights() -> None:
    model, judged = tiny.llama(), list[Any]()
    probe = published_probe(judged, limit=0.25)
    noise = torch.Generator().manual_seed(0)
    for version in range(200):
        answered(probe, version, model, model, (0.01 * torch.randn(2, generator=noise)).tolist())

    assert {verdict for verdict, _ in judged} == {"ok"}


def test_a_version_without_an_answer_is_not_judged_and_one_of_other_tokens_is_refused() -> None:
    probe = published_probe([])
    with pytest.raises(FieldError, match="the trainer has published no answer to the probe with this version"):
        probe.request(1)
    probe.published = WeightsVersion(3, 0, probe=Probe(-4.0, 9))
    response = Response(torch.tensor([3]), "length", (Span(3, 0, 1),), None, torch.zeros(2))
    with pytest.raises(WeightsMismatchError, match=r"is of 9 tokens, this worker's of 3: version=3"):
        probe.judge(response, 3)
