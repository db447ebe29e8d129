"""Sampling: the cached loop, other actors behind the same interface, and the end of a response."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.cache_utils import DynamicLayer

from pipeline.config.model_files import processors_of
from pipeline.errors import FieldError, ShapeError
from pipeline.models.inputs import cache_keyword
from pipeline.models.log_probs import action_log_probs
from pipeline.rollout.generation import hf_generate
from pipeline.rollout.generation.hf_generate import ActorGenerator
from pipeline.rollout.generation.interface import Sampling
from pipeline.rollout.generation.kv_cache import PreallocatedLayer
from pipeline.rollout.generation.stop_strings import StopStrings
from pipeline.rollout.generation.stops import parse_stop_token_ids, response_lengths
from pipeline.rollout.generation.token_sampler import sample_tokens
from pipeline.rollout.generation.transformers import TransformersGenerator, can_replace_generate
from tests.rollout.generation.test_engine_contract import SYMBOLS, tokenizer
from tests.support import tiny, tiny_vision

PROMPTS = torch.tensor([[0, 0, 5, 9], [7, 3, 11, 2], [0, 6, 6, 4]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])


def sampling(**changes: Any) -> Sampling:
    """Six new tokens for the prompts above."""
    return Sampling(**{"max_length": 10, "pad_token_id": tiny.PAD, "eos_token_ids": (tiny.EOS,), "seed": 11, **changes})


def shapes_of_passes(model: LlamaForCausalLM) -> list[tuple[int, ...]]:
    """Return a list that gets the shape of the token ids of each pass of the model from now on."""
    shapes: list[tuple[int, ...]] = []
    forward = model.forward

    @functools.wraps(forward)
    def recorded(**keywords: Any) -> Any:
        shapes.append(tuple(keywords["input_ids"].shape))
        return forward(**keywords)

    model.forward = recorded  # type: ignore[method-assign, assignment]
    return shapes


def slow_greedy(model: LlamaForCausalLM, prompt: list[int], steps: int) -> list[int]:
    """The most probable token, one whole forward pass a token, nothing cached and nothing padded."""
    row = list(prompt)
    for _ in range(steps):
        row.append(int(model(input_ids=torch.tensor([row])).logits[0, -1].argmax()))
        if row[-1] == tiny.EOS:
            break
    return row[len(prompt) :]


# --- the cached loop


@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2])
@torch.no_grad()
def test_greedy_responses_equal_one_forward_a_token(build: type[LlamaForCausalLM]) -> None:
    """A left-padded GPT-2 without position ids from the mask goes wrong at the first token."""
    model = build()

    responses = TransformersGenerator(model).generate(PROMPTS, MASK, sampling(do_sample=False), group_size=2)

    for row in range(6):
        prompt = PROMPTS[row // 2][MASK[row // 2] == 1].tolist()
        expected = slow_greedy(model, prompt, 6)
        assert responses.lengths[row] == len(expected)
        assert responses.sequences[row].tolist() == PROMPTS[row // 2].tolist() + expected + [0] * (6 - len(expected))


@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2])
@torch.no_grad()
def test_reported_log_probs_are_the_actors(build: type[LlamaForCausalLM]) -> None:
    from pipeline.models.log_probs import action_log_probs

    model = build()

    responses = TransformersGenerator(model).generate(PROMPTS, MASK, sampling(temperature=0.7), group_size=4)

    valid = torch.arange(6) < responses.lengths.unsqueeze(1)
    mask = torch.cat([MASK.repeat_interleave(4, dim=0), valid.long()], dim=1)
    expected = action_log_probs(model, responses.sequences, mask, 6, temperature=0.7)
    assert responses.log_probs is not None
    torch.testing.assert_close(responses.log_probs, expected.masked_fill(~valid, 0.0), atol=1e-5, rtol=0)


@pytest.mark.parametrize("batch_rows", [1, 2, 3, 4, 7, 12])
def test_tokens_do_not_depend_on_the_mini_batch(batch_rows: int) -> None:
    generator = TransformersGenerator(tiny.llama())
    whole = generator.generate(PROMPTS, MASK, sampling(), group_size=4)

    parts = generator.generate(PROMPTS, MASK, sampling(), group_size=4, batch_rows=batch_rows)

    assert torch.equal(parts.sequences, whole.sequences)
    assert torch.equal(parts.lengths, whole.lengths)


def test_with_seeds_of_rows_a_row_depends_on_its_own_alone_and_not_on_the_room() -> None:
    generator = TransformersGenerator(tiny.llama())
    seeds = [31, 32, 33]

    together = generator.generate(PROMPTS, MASK, sampling(max_length=24), row_seeds=seeds)
    assert len(set(map(tuple, together.sequences[:, 4:].tolist()))) == 3
    for row in range(3):
        part = slice(row, row + 1)
        alone = generator.generate(PROMPTS[part], MASK[part], sampling(seed=99), row_seeds=seeds[part])
        assert alone.sequences[0].tolist() == together.sequences[row, :10].tolist()


@torch.no_grad()
def test_first_tokens_follow_the_models_distribution() -> None:
    """20,000 draws of the first token against its softmax: within five standard deviations, every token."""
    model = tiny.llama()
    probs = torch.softmax(model(input_ids=PROMPTS[1:2]).logits[0, -1].double() / 1.3, dim=-1)
    draws = 20_000

    responses = TransformersGenerator(model).generate(
        PROMPTS[1:2], MASK[1:2], sampling(max_length=5, temperature=1.3), group_size=draws
    )

    counts = Counter(responses.sequences[:, 4].tolist())
    for token, prob in enumerate(probs.tolist()):
        assert abs(counts[token] / draws - prob) < 5 * (prob * (1 - prob) / draws) ** 0.5 + 1e-9


def test_finished_rows_leave_the_batch_and_change_nothing() -> None:
    model = tiny.llama()
    everything_ends = sampling(max_length=24, eos_token_ids=tuple(range(1, 12)))
    expected = TransformersGenerator(model).generate(PROMPTS, MASK, everything_ends, group_size=8, batch_rows=1)
    shapes = shapes_of_passes(model)

    responses = TransformersGenerator(model).generate(PROMPTS, MASK, everything_ends, group_size=8)

    widths = [rows for rows, _ in shapes]
    assert widths[0] == 3
    assert widths[1] <= 24
    assert widths[-1] < 12
    assert torch.equal(responses.sequences, expected.sequences)
    assert torch.equal(responses.lengths, expected.lengths)


def test_each_prompt_is_encoded_once_for_its_group() -> None:
    model = tiny.llama()
    encoded = shapes_of_passes(model)

    TransformersGenerator(model).generate(PROMPTS, MASK, sampling(eos_token_ids=()), group_size=5)

    assert encoded == [(3, 4)] + [(15, 1)] * 5


def test_prompts_of_similar_length_share_a_mini_batch() -> None:
    model = tiny.llama()
    lengths = torch.tensor([8, 2, 7, 1])
    mask = (torch.arange(8) >= 8 - lengths.unsqueeze(1)).long()
    prompts = torch.randint(3, 12, (4, 8), generator=torch.Generator().manual_seed(0)) * mask
    settings = sampling(max_length=12, eos_token_ids=())
    expected = TransformersGenerator(model).generate(prompts, mask, settings, group_size=2)
    encoded = shapes_of_passes(model)

    responses = TransformersGenerator(model).generate(prompts, mask, settings, group_size=2, batch_rows=4)

    assert [shape for shape in encoded if shape[1] > 1] == [(2, 2), (2, 8)]
    assert torch.equal(responses.sequences, expected.sequences)


def test_the_cache_holds_what_transformers_own_would_hold() -> None:
    """Random appends, repeats and choices of rows, against the layer that joins tensors at every token."""
    generator = torch.Generator().manual_seed(3)
    mine, its, rows = PreallocatedLayer(), DynamicLayer(), 3
    for step in range(120):
        if step % 40 == 7:
            mine.batch_repeat_interleave(2)
            its.batch_repeat_interleave(2)
            rows *= 2
        elif step % 10 == 5:
            kept = torch.randperm(rows, generator=generator)[: max(1, rows - 1)]
            mine.batch_select_indices(kept)
            its.batch_select_indices(kept)
            rows = len(kept)
        states = torch.randn(2, rows, 2, 1 + 4 * (step == 0), 6, generator=generator)
        mine.update(*states)
        its.update(*states)
        assert torch.equal(mine.keys, its.keys)
        assert torch.equal(mine.values, its.values)
        assert mine.get_seq_length() == its.get_seq_length()
        assert mine.get_mask_sizes(1) == its.get_mask_sizes(1)


def test_a_token_is_written_where_there_is_room_and_nothing_is_copied() -> None:
    layer = PreallocatedLayer()
    layer.update(torch.zeros(2, 2, 100, 4), torch.zeros(2, 2, 100, 4))
    places = set()
    for _ in range(50):
        layer.update(torch.ones(2, 2, 1, 4), torch.ones(2, 2, 1, 4))
        places.add((layer.keys.data_ptr(), layer.values.data_ptr()))

    assert len(places) == 1
    assert layer.keys.shape == (2, 2, 150, 4)


@pytest.mark.parametrize(
    "model",
    [tiny.llama(), tiny.gpt2(), tiny.mistral(window=7).double(), tiny.mistral(window=70).double(), tiny.gemma3()],
    ids=["llama", "gpt2", "mistral", "mistral, a window above the first room", "gemma3"],
)
@pytest.mark.parametrize("stops", [(tiny.EOS,), tuple(range(1, 12))], ids=["some end", "most end"])
def test_steps_of_fixed_shapes_give_the_tokens_of_the_others(model: Any, stops: tuple[int, ...]) -> None:
    """Over 90 tokens, so that the room for them grows; where most rows end, they leave at halves."""
    settings = sampling(max_length=94, eos_token_ids=stops)
    expected = TransformersGenerator(model).generate(PROMPTS, MASK, settings, group_size=8)

    fixed = TransformersGenerator(model, fixed_shapes=True).generate(PROMPTS, MASK, settings, group_size=8)

    assert torch.equal(fixed.sequences, expected.sequences)
    assert torch.equal(fixed.lengths, expected.lengths)
    assert fixed.log_probs is not None
    torch.testing.assert_close(fixed.log_probs, expected.log_probs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [2, 5, 11, 64])
@pytest.mark.parametrize("build", [tiny.mistral, tiny.gemma3])
def test_a_window_slides_over_prompts_and_responses_as_in_a_pass_over_the_whole_row(build: Any, window: int) -> None:
    """Prompts shorter and longer than it, padded on the left; mini-batches, limits of rows and a stop string."""
    model = build(window=window).double()
    prompts = torch.randint(5, 20, (4, 12), generator=torch.Generator().manual_seed(1))
    for row, padding in enumerate((0, 3, 8, 10)):
        prompts[row, :padding] = tiny.PAD
    mask = prompts != tiny.PAD
    stops = StopStrings([SYMBOLS[7] + SYMBOLS[3][:1]], tokenizer())
    settings = sampling(max_length=99, eos_token_ids=(), stop_strings=stops)
    batches: dict[str, Any] = {"batch_rows": 6, "row_limits": [87, 80, 5, 61, 2, 87, 33, 9], "group_size": 2}
    expected = TransformersGenerator(model, fixed_shapes=False).generate(prompts, mask, settings, **batches)

    made = TransformersGenerator(model, fixed_shapes=True).generate(prompts, mask, settings, **batches)

    assert torch.equal(made.sequences, expected.sequences) and torch.equal(made.lengths, expected.lengths)
    assert int(made.lengths.max()) > 64 and made.log_probs is not None
    with torch.no_grad():
        whole = torch.cat([mask.repeat_interleave(2, dim=0), torch.arange(87) < made.lengths.unsqueeze(1)], dim=1)
        passed = action_log_probs(model, made.sequences, whole, 87).float()
    torch.testing.assert_close(made.log_probs, passed.masked_fill(~whole[:, 12:], 0), atol=1e-5, rtol=0)


def test_in_steps_of_fixed_shapes_nothing_changes_its_place_but_when_room_or_rows_do() -> None:
    """A CUDA graph requires that the tensors of a step are those of the step before."""
    model = tiny.llama()
    places: list[tuple[int, ...]] = []
    forward, cache = model.forward, cache_keyword(model)

    @functools.wraps(forward)
    def recorded(**keywords: Any) -> Any:
        output = forward(**keywords)
        layer = keywords[cache].layers[0]
        given = (keywords["input_ids"], keywords["attention_mask"], keywords["position_ids"], layer.keys, layer.values)
        places.append((*(tensor.data_ptr() for tensor in given), layer.keys.shape[2]))
        return output

    model.forward = recorded  # type: ignore[method-assign, assignment]
    TransformersGenerator(model, fixed_shapes=True).generate(PROMPTS, MASK, sampling(max_length=204, eos_token_ids=()))

    rooms = [place[-1] for place in places[1:]]
    assert [rooms.count(room) for room in (64, 128, 204)] == [60, 64, 75]
    assert len(set(places[1:])) == 3


def test_columns_that_are_padding_in_every_row_are_not_run() -> None:
    model = tiny.llama()
    expected = TransformersGenerator(model).generate(PROMPTS, MASK, sampling(), group_size=2)
    wide_prompts = torch.nn.functional.pad(PROMPTS, (7, 0))
    wide_mask = torch.nn.functional.pad(MASK, (7, 0))

    responses = TransformersGenerator(model).generate(wide_prompts, wide_mask, sampling(max_length=17), group_size=2)

    assert torch.equal(responses.sequences[:, 7:], expected.sequences)


def test_no_inference_tensor_escapes() -> None:
    responses = TransformersGenerator(tiny.llama()).generate(PROMPTS, MASK, sampling())

    assert responses.log_probs is not None
    for tensor in (responses.sequences, responses.lengths, responses.log_probs):
        assert not tensor.is_inference()


# --- sampling one token


def test_top_k_top_p_and_min_p_keep_the_most_probable_tokens_only() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().repeat(1000, 1)
    noise = torch.linspace(0, 1, 1001, dtype=torch.float64)[:1000]

    for keywords, expected in (
        ({"top_k": 2}, [571, 429]),
        ({"top_p": 0.65}, [571, 429]),
        ({"top_p": 0.71}, [444, 333, 222]),
        ({"top_p": 1e-9}, [1000]),
        ({"top_k": 0}, [400, 300, 200, 100]),
        ({"min_p": 0.6}, [571, 429]),
        ({"min_p": 0.4}, [444, 333, 222]),
        ({"min_p": 0.2}, [400, 300, 200, 100]),
        ({"min_p": 0.4, "top_p": 0.65}, [571, 429]),
        ({"min_p": 0.6, "top_p": 0.95}, [571, 429]),
        ({"min_p": 0.4, "top_k": 2}, [571, 429]),
    ):
        counts = torch.bincount(sample_tokens(logits, noise, **keywords))  # type: ignore[arg-type]
        assert counts.tolist() == pytest.approx(expected, abs=2), keywords


@pytest.mark.parametrize("engine", ["plain", "fixed shapes", "generate"])
def test_min_p_bounds_the_tokens_of_each_engine_and_no_log_prob(engine: str) -> None:
    """Many responses of one step: the share of each token is that of the tokens that are left."""
    model, least = tiny.llama(), 0.25
    made = (
        ActorGenerator(model) if engine == "generate" else TransformersGenerator(model, fixed_shapes=engine != "plain")
    )
    prompts, mask, rows = PROMPTS[:1], MASK[:1], 4000
    wanted = dataclasses.replace(sampling(), max_length=prompts.shape[1] + 1, min_p=least, temperature=0.5)

    responses = made.generate(prompts, mask, wanted, group_size=rows)

    with torch.no_grad():
        logits = model(input_ids=prompts, attention_mask=mask).logits[0, -1] / 0.5
    probs = logits.softmax(-1)
    kept = probs.where(probs >= least * probs.max(), torch.zeros(()))
    assert 1 < int((kept > 0).sum()) < len(probs), "some tokens are left out"
    tokens = responses.sequences[:, -1]
    shares = torch.bincount(tokens, minlength=len(probs)) / rows
    torch.testing.assert_close(shares, kept / kept.sum(), atol=0.04, rtol=0)
    assert bool((shares[kept == 0] == 0).all())
    if responses.log_probs is not None:
        torch.testing.assert_close(responses.log_probs[:, 0], probs.log()[tokens], atol=1e-5, rtol=0)


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).repeat(3, 1)
    noise = torch.tensor([0.0, 0.5, 1.0 - 2**-53], dtype=torch.float64)

    tokens = sample_tokens(logits, noise)

    assert tokens.tolist() == [1, 3, 3]


def test_large_vocabularies_are_sampled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(9, 6, generator=torch.Generator().manual_seed(0))
    noise = torch.rand(9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = sample_tokens(logits, noise)

    monkeypatch.setattr("pipeline.rollout.generation.token_sampler._SAMPLE_ELEMENTS", 12)

    assert torch.equal(sample_tokens(logits, noise), whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"min_p": 1.0}, "min_p is 1.0"),
    ],
)
def test_impossible_sampling_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError, match=message):
        sampling(**changes)


# --- other actors


class Scripted:
    """An actor that continues every prompt with the same tokens, cut to `width` columns."""

    def __init__(self, continuation: list[int]) -> None:
        self.continuation = continuation
        self.calls: list[dict[str, Any]] = []

    def generate(self, input_ids: Tensor, attention_mask: Tensor, **keywords: Any) -> Tensor:
        self.calls.append({"input_ids": input_ids, "attention_mask": attention_mask, **keywords})
        return torch.cat([input_ids, torch.tensor([self.continuation] * len(input_ids))], dim=1)


def test_a_foreign_actor_gets_rows_in_batch_order_at_full_width_with_explicit_sampling() -> None:
    actor = Scripted([8, 8, tiny.EOS])

    responses = ActorGenerator(actor, {"use_cache": True}).generate(PROMPTS, MASK, sampling(), group_size=2)

    (call,) = actor.calls
    assert torch.equal(call["input_ids"], PROMPTS.repeat_interleave(2, dim=0))
    assert torch.equal(call["attention_mask"], MASK.repeat_interleave(2, dim=0))
    assert (call["top_k"], call["top_p"], call["temperature"], call["do_sample"]) == (0, 1.0, 1.0, True)
    assert (call["pad_token_id"], call["eos_token_id"], call["max_length"]) == (tiny.PAD, [tiny.EOS], 10)
    assert call["use_cache"] is True
    assert responses.sequences[5].tolist() == [0, 6, 6, 4, 8, 8, tiny.EOS, 0, 0, 0]
    assert responses.lengths.tolist() == [3] * 6


def test_a_foreign_actor_is_called_with_what_it_takes() -> None:
    class Narrow:
        def generate(self, input_ids: Tensor, attention_mask: Tensor, max_length: int) -> Tensor:
            return torch.nn.functional.pad(input_ids, (0, max_length - input_ids.shape[1]), value=9)

    responses = ActorGenerator(Narrow()).generate(PROMPTS, MASK, sampling())

    assert responses.lengths.tolist() == [6, 6, 6]


def test_mini_batches_of_a_foreign_actor_come_in_order() -> None:
    actor = Scripted([8])

    responses = ActorGenerator(actor).generate(PROMPTS, MASK, sampling(), group_size=2, batch_rows=4)

    assert [len(call["input_ids"]) for call in actor.calls] == [4, 2]
    assert torch.equal(responses.sequences[:, :4], PROMPTS.repeat_interleave(2, dim=0))


def test_an_actor_on_the_host_leaves_the_random_states_of_all_cards_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    before = torch.get_rng_state()

    ActorGenerator(Scripted([8])).generate(PROMPTS, MASK, sampling())

    assert seeded == []
    assert torch.equal(torch.get_rng_state(), before)


def test_an_actor_on_a_card_has_the_generators_of_host_and_card_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[Any] = [0]
    seeded: list[tuple[Any, int]] = []

    @contextlib.contextmanager
    def device(card: Any) -> Iterator[None]:
        current.append(card)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: seeded.append((current[-1], seed)))

    with torch.random.fork_rng(devices=[]):
        hf_generate._seed("cuda:1", 7)

        assert torch.initial_seed() == 7
    assert seeded == [(torch.device("cuda:1"), 7)]


@pytest.mark.parametrize("stops", [(), "two tokens"])
def test_the_cached_loop_agrees_with_transformers_own_generate(stops: Any) -> None:
    model = tiny.llama()
    if stops:
        free = TransformersGenerator(model).generate(PROMPTS, MASK, sampling(do_sample=False, eos_token_ids=()))
        stops = (tuple(free.sequences[1, 5:7].tolist()), (77, 78))
    greedy = sampling(do_sample=False, stop_sequences=stops, max_length=20)

    cached = TransformersGenerator(model).generate(PROMPTS, MASK, greedy)
    own = ActorGenerator(model).generate(PROMPTS, MASK, greedy)

    assert torch.equal(cached.sequences, own.sequences)
    assert torch.equal(cached.lengths, own.lengths)


def test_log_probs_behind_a_sampled_image_token_are_those_of_generates_own_passes() -> None:
    model = tiny_vision.model()
    made = tiny_vision.prompts([10, (1, 4, 4), 11], [12, 13, 14, 15, 16, 17, 18, 19, 20])
    vision, width = tiny_vision.vision_of(made), made["input_ids"].shape[1]
    logits: list[Tensor] = []
    wild = sampling(max_length=width + 40, temperature=5.0, eos_token_ids=(), pad_token_id=tiny_vision.PAD, seed=3)

    with model.lm_head.register_forward_hook(lambda _, __, made: logits.append(made[:, -1])):
        sequences = (
            ActorGenerator(model).generate(made["input_ids"], made["attention_mask"], wild, vision=vision).sequences
        )

    responses = sequences[:, width:]
    assert (responses[:, :-1] == tiny_vision.IMAGE).any(), "one was sampled"
    mask = torch.cat([made["attention_mask"], torch.ones_like(responses)], dim=1)
    with torch.no_grad():
        read = action_log_probs(model, sequences, mask, responses.shape[1], vision=vision)
    own = torch.stack(logits, dim=1).log_softmax(dim=-1).gather(-1, responses.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(own, read, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.zeros(3, 4, dtype=torch.int64), r"returned \(3, 4\) for prompts \(3, 4\)"),
        (torch.zeros(3, 11, dtype=torch.int64), r"\(3, 11\).*max_length 10"),
        (torch.zeros(2, 8, dtype=torch.int64), r"\(2, 8\)"),
        (torch.ones(3, 8, dtype=torch.int64), "row 0: actor.generate changed the prompt"),
    ],
)
def test_ids_that_do_not_continue_the_prompts_are_refused(result: Tensor, message: str) -> None:
    class Wrong:
        def generate(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return result

    with pytest.raises(ShapeError, match=message):
        ActorGenerator(Wrong()).generate(PROMPTS, MASK, sampling())


def test_a_changed_prompt_has_its_row_of_the_call_whatever_the_mini_batches() -> None:
    class OfThird:
        def generate(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            ids = torch.ones_like(input_ids) if input_ids.equal(PROMPTS[2:]) else input_ids
            return torch.cat([ids, ids[:, -1:]], dim=1)

    with pytest.raises(ShapeError, match=r"row 2: actor\.generate changed the prompt"):
        ActorGenerator(OfThird()).generate(PROMPTS, MASK, sampling(), batch_rows=1)


def test_only_an_actor_with_the_librarys_generate_runs_in_the_cached_loop() -> None:
    class Own(LlamaForCausalLM):
        def generate(self, *arguments: Any, **keywords: Any) -> Any:
            return super().generate(*arguments, **keywords)

    patched = tiny.llama()
    patched.generate = lambda **keywords: None

    assert can_replace_generate(tiny.llama())
    assert can_replace_generate(tiny.gpt2())
    assert not can_replace_generate(Own(tiny.llama().config))
    assert not can_replace_generate(patched)
    assert not can_replace_generate(Scripted([8]))


# --- the end of a response


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ()),
        ([], ()),
        (7, ((7,),)),
        ([7], ((7,),)),
        ([7, 8], ((7, 8),)),
        ([[7, 8], [9]], ((7, 8), (9,))),
    ],
)
def test_stop_token_ids_have_three_forms(given: Any, expected: Any) -> None:
    assert parse_stop_token_ids(given) == expected


@pytest.mark.parametrize("given", [[[7], []], [7, [8]], [["7"]], "77", 1.5, torch.tensor(7), [None]])
def test_other_stop_token_ids_are_refused(given: Any) -> None:
    with pytest.raises(FieldError, match="stop_token_ids is"):
        parse_stop_token_ids(given)


@pytest.mark.parametrize(
    ("response", "stops", "length"),
    [
        ([5, 7, 8, 5, 0, 0], ((7, 8),), 3),  # the stop belongs to the response
        ([5, 1, 7, 8, 0, 0], ((7, 8),), 4),  # a stop goes before an eos, even a later one
        ([5, 9, 7, 8, 0, 0], ((7, 8), (9,)), 2),  # the first of the alternatives
        ([5, 1, 6, 1, 0, 0], ((7, 8),), 2),  # else the first eos
        ([5, 6, 6, 0, 0, 0], ((7, 8),), 3),  # else the padding goes
        ([5, 1, 0, 0, 0, 0], ((0,),), 2),  # padding behind an eos is no stop
        ([5, 6, 0, 0, 0, 0], ((0,),), 3),  # and without one its first token is
        ([5, 0, 6, 0, 0, 0], (), 3),  # but not inside
        ([5, 6, 5, 6, 5, 6], ((7, 8),), 6),  # cut off at the limit: all of it
        ([7, 7, 8, 7, 8, 8], ((7, 7, 8, 7, 8, 8, 8),), 6),  # a stop longer than the response
    ],
)
def test_a_response_ends_at_its_stop_else_eos_else_padding(
    response: list[int], stops: tuple[tuple[int, ...], ...], length: int
) -> None:
    assert response_lengths(torch.tensor([response]), stops, (tiny.EOS,), tiny.PAD).tolist() == [length]


def test_a_response_of_pad_tokens_alone_is_the_first_of_them() -> None:
    assert response_lengths(torch.tensor([[5, 0], [0, 0]]), (), (tiny.EOS,), tiny.PAD).tolist() == [1, 1]
    with pytest.raises(ShapeError, match="no response token in 0 columns"):
        response_lengths(torch.empty((2, 0), dtype=torch.int64), (), (tiny.EOS,), tiny.PAD)


def test_an_actor_may_sample_pad_tokens_alone() -> None:
    class Actor:
        def generate(self, input_ids: torch.Tensor, max_length: int, **_: object) -> torch.Tensor:
            return torch.nn.functional.pad(input_ids, (0, max_length - input_ids.shape[1]), value=tiny.PAD)

    made = ActorGenerator(Actor()).generate(PROMPTS, MASK, sampling(max_length=PROMPTS.shape[1] + 3))

    assert made.lengths.tolist() == [1] * len(PROMPTS)


def test_rows_whose_seeds_differ_in_their_upper_bits_alone_draw_other_tokens() -> None:
    seeds = [5 + (high << 32) for high in range(4)]
    ids, mask = PROMPTS[:1].repeat(4, 1), MASK[:1].repeat(4, 1)

    together = TransformersGenerator(tiny.llama()).generate(ids, mask, sampling(max_length=24), row_seeds=seeds)

    assert len({tuple(row) for row in together.sequences.tolist()}) == 4
    for seed in (5, 5 + (1 << 32)):
        both = [
            engine(tiny.llama()).generate(ids, mask, sampling(max_length=24, seed=seed)).sequences
            for engine in (TransformersGenerator, ActorGenerator)
        ]
        if seed == 5:
            first = both
    assert not any(torch.equal(one, other) for one, other in zip(first, both, strict=True))


PROCESSORS = {
    "repetition_penalty": 5.0, "sequence_bias": [[[3], 9.0]], "suppress_tokens": [5, 9, 11], "min_new_tokens": 12,
    "bad_words_ids": [[3]], "no_repeat_ngram_size": 1, "forced_eos_token_id": 1, "begin_suppress_tokens": [7],
    "exponential_decay_length_penalty": (2, 9.0), "top_k": 1, "min_p": 0.9, "num_beams": 2, "typical_p": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("engine", [TransformersGenerator, ActorGenerator])
@pytest.mark.parametrize("name", PROCESSORS)
def test_generation_settings_of_a_model_change_no_sample(engine: Any, name: str) -> None:
    plain, changed = tiny.llama(), tiny.llama()
    setattr(changed.generation_config, name, PROCESSORS[name])
    kept = changed.generation_config

    one, other = (engine(actor).generate(PROMPTS, MASK, sampling(max_length=24)) for actor in (plain, changed))

    assert torch.equal(one.sequences, other.sequences)
    assert changed.generation_config is kept


def test_the_settings_that_would_change_samples_are_named_with_their_values(tmp_path: Path) -> None:
    settings = {"repetition_penalty": 1.2, "suppress_tokens": [1], "min_length": 0, "temperature": 0.6, "top_p": 0.9}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"no_repeat_ngram_size": 3, "num_beams": 1}))

    found = processors_of(tmp_path)

    assert found == ["no_repeat_ngram_size = 3", "repetition_penalty = 1.2", "suppress_tokens = [1]"]
