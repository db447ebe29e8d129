"""The contract of the interface of a stream, for every engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from pipeline.errors import FieldError
from pipeline.rollout.generation.blocking import BlockingEngine
from pipeline.rollout.generation.hf_generate import ActorGenerator
from pipeline.rollout.generation.interface import Completed, Engine, Request, Response, Sampling, Span
from pipeline.rollout.generation.stop_strings import StopStrings
from pipeline.rollout.generation.transformers import TransformersGenerator
from pipeline.rollout.generation.vllm import wire
from pipeline.rollout.generation.vllm.engine import VllmEngine
from tests.support import tiny
from tests.support.daemon import wait_until
from tests.support.row_stream import RowStream
from tests.support.told import Told
from tests.support.vllm_engines import forked_engine
from tests.support.whole_rows import WholeRows

NewEngine = Callable[[Any], Engine]
Ended = dict[int, tuple[Response, ...]]


ENGINES: dict[str, NewEngine] = {
    "transformers": lambda actor: BlockingEngine(TransformersGenerator(actor)),
    "transformers in mini-batches": lambda actor: BlockingEngine(TransformersGenerator(actor), most_rows=3),
    "generate": lambda actor: BlockingEngine(ActorGenerator(actor)),
    "one's own, blocking": lambda actor: BlockingEngine(WholeRows(actor)),
    "one's own, a stream": lambda actor: RowStream(actor, room_rows=5),
}
"""Engines by name, each a function of the actor; another engine is one more entry."""
SILENT = {"generate", "one's own, blocking"}
"""Engines without log-probs."""
VLLM = pytest.param("vLLM", marks=[pytest.mark.vllm, pytest.mark.integration])

SYMBOLS = [f"{letter}{number}" for number in (1, 2) for letter in "abcdefghijkl"][: tiny.VOCABULARY_SIZE]
"""The text of each token: a letter and a number."""

PROMPTS = ((5, 9), (7, 3, 11, 2), (6, 6, 4))
ROOM = 9


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def model(seed: int = 0) -> Any:
    """A Llama with heads of 32: the least that vLLM's kernels on a CPU take."""
    return tiny.llama(seed, head_dim=32)


def tokenizer() -> Any:
    made = Tokenizer(models.WordLevel({symbol: token for token, symbol in enumerate(SYMBOLS)}, unk_token="a1"))
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=SYMBOLS[tiny.PAD], eos_token=SYMBOLS[tiny.EOS])


@pytest.fixture
def actor() -> Any:
    return model()


def vllm_engine(folder: Path, forkserver: Path) -> VllmEngine:
    """The real vLLM, in a process of its own."""
    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    settings = wire.Settings(
        str(folder), dtype="float32", on_cpu=True, max_length=128, max_rows=5, cache_bytes=32 << 20,
        log_level="warning", log_json=False, title="test vllm",
    )  # fmt: skip
    return forked_engine(settings, forkserver)


@pytest.fixture(scope="module", params=[*ENGINES, VLLM])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str | VllmEngine]:
    """The name of an engine; one whose start takes seconds is made once for all tests."""
    if request.param in ENGINES:
        yield request.param
        return
    made = vllm_engine(tmp_path_factory.mktemp("model"), request.getfixturevalue("forkserver"))
    yield made
    made.close()


@pytest.fixture
def engine(shared: str | VllmEngine, actor: Any) -> Iterator[Engine]:
    if isinstance(shared, str):
        made = ENGINES[shared](actor)
        yield made
        made.close()
        return
    shared.update_weights(actor.state_dict(), -1)
    yield shared
    shared.cancel(range(100))
    wait_until(lambda: (shared.step(), in_hand(shared) == 0)[1], 60.0, "nothing is in hand")


def in_hand(engine: Engine) -> int:
    return engine.load.running + engine.load.waiting


def ticket(
    seed: int, first_key: int, prompts: Sequence[Sequence[int]] = PROMPTS, *, room: int = ROOM, **sampling: Any
) -> list[Request]:
    options: dict[str, Any] = {"eos_token_ids": (tiny.EOS,), **sampling}
    return [
        Request(
            first_key + place, torch.tensor(prompt), 2, room,
            Sampling(max_length=99, pad_token_id=tiny.PAD, seed=seed, **options), first_row=2 * place,
        )
        for place, prompt in enumerate(prompts)
    ]  # fmt: skip


def submit(engine: Engine, requests: Sequence[Request]) -> None:
    for request in requests:
        engine.submit(request)


def to_the_end(engine: Engine, requests: Sequence[Request] = ()) -> Ended:
    """Submit requests, and step until the engine has none; return the responses by key."""
    submit(engine, requests)
    ended: Ended = {}
    for _ in range(1000):
        if not in_hand(engine):
            return ended
        for completed in engine.step():
            assert completed.key not in ended
            ended[completed.key] = completed.responses
    raise AssertionError(f"requests without an end: {engine.load}")


def tokens(ended: Ended) -> dict[int, list[list[int]]]:
    return {key: [response.token_ids.tolist() for response in responses] for key, responses in ended.items()}


def update(engine: Engine, actor: Any, model: Any, version: int) -> None:
    """As a worker does it: the new values are copied into the actor's tensors."""
    engine.pause()
    actor.load_state_dict(model.state_dict())
    engine.update_weights(actor.state_dict(), version)
    engine.resume()


def test_each_request_ends_once_with_its_group_and_fits_its_room(engine: Engine) -> None:
    ended = to_the_end(engine, [*ticket(1, 0), *ticket(2, 10)])

    assert sorted(ended) == [0, 1, 2, 10, 11, 12]
    for responses in ended.values():
        assert len(responses) == 2
        for response in responses:
            assert 1 <= len(response.token_ids) <= ROOM
            assert response.token_ids.dtype == torch.int64 and response.token_ids.device.type == "cpu"
    assert len({str(group) for group in tokens(ended).values()}) > 4, "they are samples of different prompts and seeds"


def test_a_ticket_gets_the_same_tokens_alone_and_beside_others(engine: Engine) -> None:
    # vLLM promises it for cards with batch invariance alone; in float32 it holds on a CPU as well.
    assert engine.deterministic or isinstance(engine, VllmEngine)
    alone = tokens(to_the_end(engine, ticket(4, 0)))

    beside = tokens(to_the_end(engine, [*ticket(3, 20), *ticket(4, 0), *ticket(5, 40)]))
    late = {}
    submit(engine, ticket(6, 60))
    for completed in [*engine.step()]:
        late[completed.key] = completed.responses
    late |= to_the_end(engine, ticket(4, 0))

    assert {key: beside[key] for key in alone} == alone
    assert {key: value for key, value in tokens(late).items() if key in alone} == alone


def test_samples_depend_on_the_seed_and_not_on_the_state_of_the_process(engine: Engine) -> None:
    torch.manual_seed(1)
    first = tokens(to_the_end(engine, ticket(4, 0)))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    again = tokens(to_the_end(engine, ticket(4, 0)))

    assert first == again != tokens(to_the_end(engine, ticket(5, 0)))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_responses_of_a_group_are_in_order_and_different(engine: Engine) -> None:
    """Response g has the stream of its own row: the order does not depend on which one ends first."""
    runs = [tokens(to_the_end(engine, ticket(seed, 0))) for seed in range(12)]

    assert any(group[0] != group[1] for run in runs for group in run.values())
    lengths = [len(group[0]) - len(group[1]) for run in runs for group in run.values()]
    assert min(lengths) < 0 < max(lengths), "in some groups the second response ends first"
    assert runs[2] == tokens(to_the_end(engine, ticket(2, 0)))


@pytest.mark.parametrize("ends", [(tiny.EOS,), (tiny.EOS, 5, 6)])
def test_a_finish_reason_tells_a_stop_from_used_up_room(engine: Engine, ends: tuple[int, ...]) -> None:
    """Also of several ends, as generation_config.json lists them."""
    # With these seeds no response ends with a sampled pad token, which a blocking engine cannot tell from padding.
    tickets = [request for seed in range(4, 8) for request in ticket(seed, 10 * seed, eos_token_ids=ends)]

    found = set()
    for responses in to_the_end(engine, tickets).values():
        for response in responses:
            *before, last = response.token_ids.tolist()
            found.add(last if last in ends else "length")
            assert (response.finish_reason == "stop") is (last in ends)
            assert last in ends or len(before) + 1 == ROOM
            assert not set(before) & set(ends)
    assert found - {*ends[1:]} == {tiny.EOS, "length"} and (len(found) > 2) is (len(ends) > 1)


def assert_stopped(ended: Ended, plain: Ended, is_end: Callable[[list[int]], bool]) -> None:
    """Each response is the plain one up to the first token with which it ends, and one of the middle prompt ends so."""
    for key, responses in ended.items():
        for response, whole in zip(responses, plain[key], strict=True):
            ids = whole.token_ids.tolist()
            end = next((number for number in range(1, len(ids) + 1) if is_end(ids[:number])), None)
            assert response.token_ids.tolist() == ids[:end]
            assert response.finish_reason == ("length" if end is None else "stop")
            assert response.spans == (Span(-1, 0, len(response.token_ids)),)
            if whole.log_probs is not None:
                torch.testing.assert_close(response.log_probs, whole.log_probs[:end], rtol=0, atol=1e-4)
    assert ended[1][0].finish_reason == "stop"


@pytest.mark.parametrize("room", [4, ROOM])
def test_a_stop_sequence_ends_a_response_and_belongs_to_it(engine: Engine, room: int) -> None:
    """Also one that ends with the last token that there is room for; the first of several counts."""
    plain = to_the_end(engine, ticket(5, 0, eos_token_ids=(), room=room))
    first, other = plain[1][0].token_ids.tolist(), plain[2][1].token_ids.tolist()
    # One of several tokens ends the first response of the middle prompt, one of a single token another response.
    stops = tuple(first[2:4]), (next(token for token in other if token not in first),)

    ended = to_the_end(engine, ticket(5, 0, eos_token_ids=(), room=room, stop_sequences=stops))

    assert_stopped(ended, plain, lambda ids: any(tuple(ids[-len(stop) :]) == stop for stop in stops))


@pytest.mark.parametrize("room", [4, ROOM])
def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(engine: Engine, room: int) -> None:
    """Also one that ends with the last token that there is room for, and one that begins inside of a token."""
    plain = to_the_end(engine, ticket(5, 0, eos_token_ids=(), room=room))
    # The first response of the middle prompt completes it with its fourth token, or before; none ends in padding.
    string = "".join(SYMBOLS[token] for token in plain[1][0].token_ids.tolist()[2:4])[1:]

    ended = to_the_end(
        engine, ticket(5, 0, eos_token_ids=(), room=room, stop_strings=StopStrings([string], tokenizer()))
    )

    assert_stopped(ended, plain, lambda ids: string in "".join(SYMBOLS[token] for token in ids))


def test_a_request_has_its_own_room(engine: Engine) -> None:
    mixed = [*ticket(4, 0, eos_token_ids=(), room=3), *ticket(5, 10, eos_token_ids=(), room=6)]

    lengths = {key: {len(group) for group in groups} for key, groups in tokens(to_the_end(engine, mixed)).items()}

    # Not all of them: some engines cannot tell a sampled pad token at the end from padding.
    assert [max(lengths[key]) for key in (0, 1, 2, 10, 11, 12)] == [3, 3, 3, 6, 6, 6]


def test_log_probs_are_those_of_the_sampled_tokens_at_the_temperature(engine: Engine, shared: str | VllmEngine) -> None:
    reference = model()
    ended = to_the_end(engine, ticket(4, 0, temperature=0.7))

    is_silent = isinstance(shared, str) and shared in SILENT
    assert {response.log_probs is None for group in ended.values() for response in group} == {is_silent}
    for key, responses in ended.items():
        for response in responses:
            if response.log_probs is None:
                continue
            ids = torch.cat([torch.tensor(PROMPTS[key]), response.token_ids])
            logits = reference(input_ids=ids[None]).logits[0, len(PROMPTS[key]) - 1 : -1].float() / 0.7
            expected = logits.log_softmax(dim=-1).gather(1, response.token_ids[:, None])[:, 0]
            torch.testing.assert_close(response.log_probs, expected, atol=1e-4, rtol=1e-4)


def test_a_cancelled_ticket_never_ends_and_changes_no_other_one(engine: Engine) -> None:
    alone = tokens(to_the_end(engine, ticket(4, 0)))
    submit(engine, [*ticket(3, 20), *ticket(4, 0), *ticket(5, 40)])

    engine.cancel([40, 41, 42, 99])
    first = {completed.key: completed.responses for completed in engine.step()}
    engine.cancel([20, 21, 22])
    ended = tokens(first | to_the_end(engine))

    assert {key: value for key, value in ended.items() if key < 20} == alone
    assert not ended.keys() & {40, 41, 42}
    assert in_hand(engine) == 0 and engine.load.free_cache == 1.0
    assert tokens(to_the_end(engine, ticket(4, 40))) == {key + 40: value for key, value in alone.items()}, "free again"


def test_one_cancelled_request_changes_no_other_one_of_its_ticket(engine: Engine) -> None:
    whole = tokens(to_the_end(engine, ticket(4, 0)))
    submit(engine, ticket(4, 0))

    engine.cancel([1])

    assert tokens(to_the_end(engine)) == {key: whole[key] for key in (0, 2)}


def test_the_load_counts_responses(engine: Engine) -> None:
    assert (engine.load.running, engine.load.waiting) == (0, 0)
    submit(engine, [*ticket(1, 0), *ticket(2, 10)])

    load = engine.load

    assert load.running + load.waiting == 12
    assert 0 <= load.free_cache <= 1 and (load.room_rows is None or load.room_rows >= 1)
    to_the_end(engine)
    assert (engine.load.running, engine.load.waiting) == (0, 0)


def test_a_key_in_hand_is_refused(engine: Engine) -> None:
    engine.submit(ticket(1, 0)[0])

    with pytest.raises(FieldError, match="request 0 is in hand"):
        engine.submit(ticket(2, 0)[0])


def test_without_requests_a_step_returns_nothing(engine: Engine) -> None:
    assert engine.step() == []


def test_updated_weights_are_those_of_the_next_tokens_and_their_spans(engine: Engine, actor: Any) -> None:
    before = to_the_end(engine, ticket(4, 0))
    update(engine, actor, model(9), 3)
    after = to_the_end(engine, ticket(4, 0))
    update(engine, actor, model(), 4)
    again = to_the_end(engine, ticket(4, 0))

    assert tokens(before) == tokens(again) != tokens(after)
    for version, ended in ((-1, before), (3, after), (4, again)):
        for responses in ended.values():
            assert all(response.spans == (Span(version, 0, len(response.token_ids)),) for response in responses)


def test_spans_of_a_request_in_hand_over_an_update_are_without_gaps(engine: Engine, actor: Any) -> None:
    update(engine, actor, model(), 1)
    # Long enough for an engine that steps by itself.
    options: dict[str, Any] = {"room": 60, "eos_token_ids": ()}
    submit(engine, [*ticket(1, 0, **options), *ticket(2, 10, **options)])
    first = engine.step()
    update(engine, actor, model(9), 2)
    ended = {completed.key: completed.responses for completed in first} | to_the_end(engine)

    versions = set()
    for responses in ended.values():
        for response in responses:
            versions |= {span.version for span in response.spans}
            assert [span.start for span in response.spans] == [0, *(span.end for span in response.spans[:-1])]
            assert response.spans[-1].end == len(response.token_ids)
            assert all(a.version < b.version for a, b in zip(response.spans, response.spans[1:], strict=False))
    assert versions == {1, 2}


def test_a_closed_engine_holds_nothing(shared: str | VllmEngine, actor: Any) -> None:
    """The last test of a shared engine."""
    engine = ENGINES[shared](actor) if isinstance(shared, str) else shared
    submit(engine, ticket(1, 0))

    engine.close()

    assert (engine.load.running, engine.load.waiting) == (0, 0)


def of_one_call(generator: Any, requests: Sequence[Request], **rows: Any) -> dict[int, list[list[int]]]:
    """The tokens of the blocking call of a ticket, padded on the left, without the adapter."""
    width = max(len(request.prompt_ids) for request in requests)
    ids = torch.stack([torch.nn.functional.pad(r.prompt_ids, (width - len(r.prompt_ids), 0)) for r in requests])
    mask = torch.stack([torch.arange(width) >= width - len(r.prompt_ids) for r in requests]).long()
    sampling = dataclasses.replace(requests[0].sampling, max_length=width + ROOM)
    made = generator.generate(ids, mask, sampling, group_size=2, **rows)
    responses = [row[width : width + int(n)].tolist() for row, n in zip(made.sequences, made.lengths, strict=True)]
    return {request.key: responses[2 * place : 2 * place + 2] for place, request in enumerate(requests)}


@pytest.mark.parametrize("generator", [TransformersGenerator, ActorGenerator, WholeRows])
def test_the_adapter_gives_the_tokens_of_one_blocking_call(generator: Any) -> None:
    engine = BlockingEngine(generator(tiny.llama()), most_rows=4)

    ended = to_the_end(engine, ticket(4, 0))

    assert tokens(ended) == of_one_call(generator(tiny.llama()), ticket(4, 0), batch_rows=4)


class Careless:
    """A generator with a token after the end of a response."""

    def __init__(self) -> None:
        self._generator = TransformersGenerator(tiny.llama())
        self.pause = self.resume = lambda: None

    def generate(self, *arguments: Any, **keywords: Any) -> Any:
        made = self._generator.generate(*arguments, **keywords)
        made.lengths[int((made.lengths > 1).nonzero()[0])] -= 1
        return made

    def update_weights(self, actor: Any) -> None:
        raise AssertionError("not called")


def test_a_token_after_the_end_is_refused_and_the_next_ticket_runs() -> None:
    engine = BlockingEngine(Careless())
    submit(engine, [*ticket(4, 0), *ticket(5, 10)])

    for _ in range(2):
        with pytest.raises(FieldError, match=r"row \d: the generator returned a token after the"):
            engine.step()

    assert engine.load.waiting == 0
    assert engine.step() == []


class Small:
    """A generator on a device with memory for few rows."""

    def __init__(self) -> None:
        self._generator = TransformersGenerator(tiny.llama())
        self.tried: list[int | None] = []

    def generate(self, *arguments: Any, batch_rows: int | None = None, **keywords: Any) -> Any:
        self.tried.append(batch_rows)
        if batch_rows is None or batch_rows > 2:
            raise torch.OutOfMemoryError
        return self._generator.generate(*arguments, batch_rows=batch_rows, **keywords)


def test_a_call_without_memory_is_repeated_with_half_the_rows_and_gives_the_same() -> None:
    small, told = Small(), Told()
    generator: Any = small
    engine = BlockingEngine(generator, most_rows=5, telemetry=told)

    ended = to_the_end(engine, [*ticket(4, 0), *ticket(5, 10)])

    assert (small.tried, told.counted["out_of_memory"]) == ([5, 2, 2], ["generate"])
    whole = BlockingEngine(TransformersGenerator(tiny.llama()))
    assert tokens(ended) == tokens(to_the_end(whole, [*ticket(4, 0), *ticket(5, 10)]))


def test_completed_requests_come_in_the_order_of_their_end() -> None:
    """A stream gives a short request before a long one that was submitted earlier; an adapter keeps tickets whole."""
    engine = RowStream(tiny.llama())
    long, short = ticket(1, 0, eos_token_ids=(), room=8)[:1], ticket(2, 10, eos_token_ids=(), room=2)[:1]

    ended: list[Completed] = []
    submit(engine, [*long, *short])
    while len(ended) < 2:
        ended += engine.step()

    assert [completed.key for completed in ended] == [10, 0]
