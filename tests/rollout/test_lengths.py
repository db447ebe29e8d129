"""The lengths of a configuration in a rollout: longest prompt, and room for each response."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pipeline.config.lengths import Lengths
from pipeline.prompts.source import PromptSource
from pipeline.rollout.generation.blocking import BlockingEngine
from pipeline.rollout.generation.interface import Sampling
from pipeline.rollout.generation.transformers import TransformersGenerator
from pipeline.rollout.generation.weights import ModelWeights
from pipeline.rollout.maker import NaiveExperienceMaker
from pipeline.rollout.roller import LocalRoller, rendered
from tests.support import tiny

PROMPTS = ("AB", "CDEFGHIJ")
WIDTH = 8


class Letters(tiny.Letters):
    eos_token_id = None


def ones(*, response_start: torch.Tensor, **_row: object) -> torch.Tensor:
    return torch.ones(len(response_start))


@contextlib.contextmanager
def new_roller(folder: Path, lengths: Lengths, *, cuts_prompts: bool = False) -> Iterator[LocalRoller]:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    tokenizer = SimpleNamespace(pad_token_id=tiny.PAD, eos_token_id=None)
    actor = tiny.llama()
    maker = NaiveExperienceMaker(actor, None, ones, None, tokenizer, kl_coef=0, use_grpo=True, num_generation=2)
    with contextlib.closing(PromptSource(path, 0)) as source:
        yield LocalRoller(
            maker, source, Letters(), ModelWeights({}, BlockingEngine(TransformersGenerator(actor))), seed=7,
            lengths=lengths, template="none", vocabulary=tiny.VOCABULARY_SIZE,
            # Without an end token each response takes all of its room.
            sampling=Sampling(max_length=lengths.row, pad_token_id=tiny.PAD), cuts_prompts=cuts_prompts,
        )  # fmt: skip


@pytest.mark.parametrize("place", [0, 1])
def test_each_response_gets_the_same_room_whatever_the_length_of_its_prompt(tmp_path: Path, place: int) -> None:
    with new_roller(tmp_path, Lengths(13, 8, 5)) as roller:
        rolled = roller.roll(place, 1)

    assert rolled.rows is not None
    assert rolled.rows.counts == [5, 5]


def test_prompts_of_one_ticket_share_the_room_of_responses(tmp_path: Path) -> None:
    with new_roller(tmp_path, Lengths(13, 8, 5)) as roller:
        rolled = roller.roll(0, 2)

    assert rolled.rows is not None
    assert rolled.rows.counts == [5, 5, 5, 5]
    assert max(rolled.rows.lengths) <= 13


def test_with_one_length_the_longest_prompt_leaves_the_room_as_before(tmp_path: Path) -> None:
    with new_roller(tmp_path, Lengths(13, 12, None)) as roller:
        rolled = roller.roll(0, 2)

    assert rolled.rows is not None
    assert rolled.rows.counts == [13 - WIDTH] * 4


def test_a_prompt_above_its_length_is_set_aside_with_the_key(tmp_path: Path) -> None:
    with new_roller(tmp_path, Lengths(13, 7, 6)) as roller:
        rolled = roller.roll(0, 2)

    assert rolled.prompts_failed == 1
    assert str(rolled.refused) == "8 tokens are too many: prompts have at most 7 (rollout.max_prompt_length)"
    assert rolled.rows is not None and len(rolled.rows) == 2


def test_a_prompt_above_its_length_loses_its_first_tokens_is_counted_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with new_roller(tmp_path, Lengths(11, 5, 6), cuts_prompts=True) as roller:
        rolled, again = roller.roll(0, 2), roller.roll(0, 2)
        expected = [rendered(roller.source.at(place), Letters(), "none", Lengths(99, 98, 1), None).ids
                    for place in range(2)]  # fmt: skip

    assert rolled.prompts_failed == 0
    assert rolled.prompts_cut == sum(len(ids) > 5 for ids in expected) > 0
    assert rolled.rows is not None
    prompts = rolled.rows.padded().sequences[::2, :-6]
    for prompt, ids in zip(prompts, expected, strict=True):
        kept = ids[-5:]
        assert prompt[len(prompt) - len(kept) :].tolist() == kept
    assert torch.equal(rolled.rows.padded().sequences, again.rows.padded().sequences)  # type: ignore[union-attr]
    told = [record.getMessage() for record in caplog.records if "cut from the left" in record.getMessage()]
    assert len(told) == 1 and "tokens=5 of 8" in told[0]
