"""Operations of a token step, counted on a CPU: each is a launch on a GPU, where launches are the time of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import Qwen2Config, Qwen2ForCausalLM

from pipeline.rollout.generation.interface import Sampling
from pipeline.rollout.generation.transformers import TransformersGenerator
from tests.support.launches import launches

PROMPT_TOKENS = 16
FEW_TOKENS = 3
READS = "aten::_local_scalar_dense"


def model(window: int | None = None) -> Qwen2ForCausalLM:
    """A Qwen2; with a window its last layer slides it."""
    torch.manual_seed(0)
    slides = {} if window is None else {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, **slides,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).to(torch.bfloat16).eval()


def forbid_stops(_module: Any, _inputs: Any, output: Any) -> None:
    """No row ends by its token."""
    output.logits[..., 62:] = -torch.inf


def of_a_step(loops: Mapping[str, Callable[[int], Any]]) -> dict[str, Counter[str]]:
    """Return the innermost operations of a token step that compute, by the loop that takes it."""
    for loop in loops.values():
        loop(FEW_TOKENS)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        for name, loop in loops.items():
            for tokens in (FEW_TOKENS, FEW_TOKENS + 1):
                with record_function(f"{name} {tokens}"):
                    loop(tokens)
    found: dict[str, Counter[str]] = {}
    for event in launches(profiler):
        outermost = event
        while outermost.cpu_parent is not None:
            outermost = outermost.cpu_parent
        found.setdefault(outermost.name, Counter())[event.name] += 1
    for name in loops:
        found[f"{name} {FEW_TOKENS + 1}"].subtract(found[f"{name} {FEW_TOKENS}"])
    return {name: found[f"{name} {FEW_TOKENS + 1}"] for name in loops}


@pytest.mark.parametrize(("padded", "temperature", "window"), [(False, 1.0, None), (True, 0.7, None), (True, 0.7, 9)])
def test_a_step_is_of_no_more_launches_than_one_of_transformers_generate(
    padded: bool, temperature: float, window: int | None
) -> None:
    """Both loops of the engine; that of fixed shapes is also what a CUDA graph replays."""
    actor = model(window)
    ids = torch.randint(5, 60, (4, PROMPT_TOKENS))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :5] = 0

    def by_transformers(tokens: int) -> None:
        actor.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, temperature=temperature, max_new_tokens=tokens,
            eos_token_id=[62, 63], pad_token_id=0,
        )  # fmt: skip

    def by_engine(engine: TransformersGenerator, limits: list[int] | None, tokens: int) -> None:
        settings = Sampling(
            max_length=PROMPT_TOKENS + tokens, pad_token_id=0, eos_token_ids=(62, 63), temperature=temperature, seed=1
        )
        engine.generate(ids, mask, settings, row_limits=limits)

    actor.register_forward_hook(forbid_stops)
    growing, fixed = (TransformersGenerator(actor, fixed_shapes=shapes) for shapes in (False, True))
    ours = {"growing": partial(by_engine, growing, [90] * 4), "fixed": partial(by_engine, fixed, None)}

    steps = of_a_step({"generate": by_transformers, **ours})

    theirs = steps.pop("generate")
    assert theirs.total() > 100 and theirs[READS] > 0
    for name, step in steps.items():
        assert step.total() <= theirs.total(), (name, step - theirs)
        assert step[READS] <= theirs[READS], name


def test_in_steps_of_fixed_shapes_the_host_waits_for_the_device_once_in_eight() -> None:
    """A wait is a value that is read: until it is there, no further step is launched."""
    actor = model()
    actor.register_forward_hook(forbid_stops)
    engine = TransformersGenerator(actor, fixed_shapes=True)
    ids = torch.randint(5, 60, (4, PROMPT_TOKENS))

    def waits(tokens: int) -> int:
        settings = Sampling(max_length=PROMPT_TOKENS + tokens, pad_token_id=0, eos_token_ids=(62, 63), seed=1)
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            engine.generate(ids, torch.ones_like(ids), settings)
        return sum(event.name in (READS, "aten::nonzero") for event in profiler.events())

    # Within the room of the first 64 columns, that no larger buffer is made.
    assert waits(33) - waits(9) == 3


def test_rows_that_ended_between_two_looks_have_the_tokens_of_an_engine_that_always_looks() -> None:
    actor = model()
    ids = torch.randint(5, 60, (6, PROMPT_TOKENS))
    for tokens in (1, 7, 8, 9, 40):
        settings = Sampling(
            max_length=PROMPT_TOKENS + tokens, pad_token_id=0, eos_token_ids=tuple(range(40, 46)), seed=tokens
        )
        looking, seldom = (
            TransformersGenerator(actor, fixed_shapes=shapes).generate(ids, torch.ones_like(ids), settings)
            for shapes in (False, True)
        )

        assert torch.equal(seldom.sequences, looking.sequences) and torch.equal(seldom.lengths, looking.lengths)
        assert tokens < 9 or int(looking.lengths.min()) < tokens
