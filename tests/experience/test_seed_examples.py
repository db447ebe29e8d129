"""The example calls of coati's and LightRFT's pages and docstrings, unchanged but for our names."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline import (
    BufferItemVL,
    Experience,
    ExperienceMaker,
    ExperienceVL,
    NaiveExperienceMaker,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
)
from pipeline.errors import FieldError
from tests.support import tiny
from tests.support.tiny import Tokenizer


def tensors_of(experience: Any) -> dict[str, Tensor]:
    return {name: value for name, value in vars(experience).items() if isinstance(value, Tensor)}


# --- coati: the maker


def test_a_maker_of_ones_own_is_a_subclass() -> None:
    class Maker(ExperienceMaker):
        def make_experience(self, input_ids: Tensor, attention_mask: Tensor, **generate_kwargs: Any) -> Experience:
            return Experience(sequences=input_ids, attention_mask=attention_mask)

    maker = Maker(actor="actor", critic="critic", reward_model="reward", initial_model="reference")

    assert (maker.actor, maker.critic, maker.reward_model, maker.initial_model) == (
        "actor", "critic", "reward", "reference",
    )  # fmt: skip
    with pytest.raises(TypeError, match="abstract"):
        ExperienceMaker(None, None, None, None)  # type: ignore[abstract]


def score(input_ids: Tensor, response_start: Tensor, response_end: Tensor, **_: Any) -> Tensor:
    return (response_end - response_start).float()


def zeros(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    return torch.zeros(input_ids.shape)


def test_a_maker_in_ppo_mode() -> None:
    tokenizer = Tokenizer()
    input_ids = torch.tensor([[tiny.PAD, 5, 6], [4, 5, 7]])

    experience_maker = NaiveExperienceMaker(
        actor=tiny.llama(),
        critic=zeros,
        reward_model=score,
        initial_model=tiny.llama(seed=1),
        tokenizer=tokenizer,
        kl_coef=0.01,
        gamma=1.0,
        lam=0.95,
        use_grpo=False,
    )
    experience = experience_maker.make_experience(
        input_ids=input_ids,
        attention_mask=(input_ids != tiny.PAD).long(),
        max_length=12,
        stop_token_ids=[[tokenizer.eos_token_id]],
    )

    assert experience.sequences.shape == (2, 12)
    assert experience.reward is not None and experience.action_mask is not None
    assert experience.reward.tolist() == experience.action_mask.sum(1).tolist()
    assert {value.device.type for value in tensors_of(experience).values()} == {"cpu"}


def test_a_maker_in_grpo_mode_has_no_critic() -> None:
    arguments: dict[str, Any] = {
        "actor": tiny.llama(), "reward_model": score, "initial_model": tiny.llama(seed=1), "tokenizer": Tokenizer(),
        "use_grpo": True, "num_generation": 8,
    }  # fmt: skip

    experience_maker_grpo = NaiveExperienceMaker(critic=None, **arguments)
    experience = experience_maker_grpo.make_experience(
        torch.tensor([[4, 5, 7]]), torch.ones(1, 3, dtype=torch.int64), max_length=12
    )

    assert experience.sequences.shape == (8, 12)
    assert experience.advantages is not None and experience.advantages.shape == (8,)
    with pytest.raises(FieldError, match="critic is a function with use_grpo=True"):
        NaiveExperienceMaker(critic=zeros, **arguments)


# --- LightRFT: rows with images


@pytest.mark.parametrize(
    "counts",
    [
        [2.0, 1.0], [2, 1], (2.0, 1.0), (2, 1), np.array([2.0, 1.0]), np.array([2, 1]), torch.tensor([2, 1]),
        torch.tensor([2.0, 1.0]), torch.tensor([2.0, 1.0], dtype=torch.bfloat16), torch.tensor([[2.0], [1.0]]),
        [torch.tensor(2.0), torch.tensor(1.0)], [torch.tensor([2]), torch.tensor([1])],
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("width", [None, 4, 10, 12])
def test_counts_of_any_form_split_beside_masks_of_any_width(counts: Any, width: int | None) -> None:
    batch_exp = ExperienceVL(
        sequences=torch.zeros(2, 10),
        attention_mask=None if width is None else torch.ones(2, width, dtype=torch.int64),
        action_mask=None if width is None else torch.ones(2, width, dtype=torch.bool),
        values=torch.zeros(2, 1),
        image_grid_thws=torch.tensor([[1, 10, 10], [1, 20, 20], [1, 15, 15]]),
        pixel_values=torch.zeros(100 + 400 + 225, 1152),
        info={"image_num": counts},
    )

    first, second = split_experience_batch(batch_exp)

    assert isinstance(first, BufferItemVL) and isinstance(second, BufferItemVL)
    assert first.image_grid_thws.tolist() == [[1, 10, 10], [1, 20, 20]]  # type: ignore[union-attr]
    assert len(first.pixel_values) == 500 and len(second.pixel_values) == 225  # type: ignore[arg-type]
    assert [float(item.info["image_num"]) for item in (first, second)] == [2.0, 1.0]  # type: ignore[index]
    bare = [dataclasses.replace(item, attention_mask=None, action_mask=None) for item in (first, second)]
    assert torch.equal(make_experience_batch(bare).info["image_num"], torch.tensor([2.0, 1.0]))  # type: ignore[index]
    masked = [dataclasses.replace(item, attention_mask=torch.ones(10).long()) for item in bare]
    assert remove_padding_in_sequences(masked)[0].sequences.tolist() == [0.0] * 10


def test_items_with_float_sequences_are_batched_with_their_counts() -> None:
    item1 = BufferItemVL(
        sequences=torch.zeros(5),
        image_grid_thws=torch.tensor([[1, 5, 5], [1, 8, 8]]),
        pixel_values=torch.randn(25 + 64, 1152),
    )
    item2 = BufferItemVL(
        sequences=torch.zeros(8), image_grid_thws=torch.tensor([[1, 10, 10]]), pixel_values=torch.randn(100, 1152)
    )

    for packing_samples in (False, True):
        batch: Any = make_experience_batch([item1, item2], packing_samples=packing_samples)

        assert batch.image_grid_thws.tolist() == [[1, 5, 5], [1, 8, 8], [1, 10, 10]]
        assert torch.equal(batch.pixel_values, torch.cat([item1.pixel_values, item2.pixel_values]))  # type: ignore[list-item]
        assert torch.equal(batch.info["image_num"], torch.tensor([2.0, 1.0]))
        if not packing_samples:
            assert torch.equal(batch.sequences, torch.zeros(2, 8))


def test_a_batch_without_info_and_with_one_image_a_row_is_split_one_to_one() -> None:
    batch_exp = ExperienceVL(
        sequences=torch.tensor([[1, 2, 3], [4, 5, 6]]),
        pixel_values=torch.randn(2, 3, 224, 224),
        image_grid_thws=torch.tensor([[1, 1, 1], [1, 1, 1]]),
    )

    items = split_experience_batch(batch_exp)

    for row, item in enumerate(items):
        assert isinstance(item, BufferItemVL)
        assert item.image_grid_thws is not None and item.image_grid_thws.shape == (3,)
        assert torch.equal(item.pixel_values, batch_exp.pixel_values[row : row + 1])  # type: ignore[arg-type, index]
    again: Any = make_experience_batch(items)
    assert torch.equal(again.image_grid_thws, batch_exp.image_grid_thws)
    assert again.info["image_num"].tolist() == [1.0, 1.0]


def test_items_with_a_grid_of_one_dimension_have_one_image_each() -> None:
    vl_items = [
        BufferItemVL(
            sequences=torch.tensor(tokens),
            pixel_values=torch.randn(1, 3, 224, 224),
            image_grid_thws=torch.tensor([1, 1, 1]),
            raw_images=[f"{tokens[0]}.png"],
        )
        for tokens in ([1, 2, 3], [4, 5, 6, 7])
    ]

    batch_vl_exp: Any = make_experience_batch(vl_items, packing_samples=False)
    back = split_experience_batch(batch_vl_exp)

    assert batch_vl_exp.image_grid_thws.tolist() == [[1, 1, 1], [1, 1, 1]]
    assert batch_vl_exp.info["image_num"].tolist() == [1.0, 1.0]
    assert [item.raw_images for item in back] == [["1.png"], ["4.png"]]  # type: ignore[attr-defined]
    assert torch.equal(back[1].pixel_values, vl_items[1].pixel_values)  # type: ignore[attr-defined, arg-type]
