"""Experience and its rows as data: fields, device moves, pickling."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.experience.batching import (
    make_experience_batch,
    split_experience_batch,
)
from pipeline.experience.types import (
    BufferItem,
    BufferItemVL,
    Experience,
    ExperienceVL,
    is_vl_experience,
)
from tests.support.items import assert_same, item_of


def test_coatis_eight_fields_come_first_and_in_its_order() -> None:
    eight = ["sequences", "action_log_probs", "values", "reward", "kl", "advantages", "attention_mask", "action_mask"]

    for kind in (Experience, ExperienceVL, BufferItem, BufferItemVL):
        assert [field.name for field in dataclasses.fields(kind)][:8] == eight


@pytest.mark.parametrize("kind", [Experience, BufferItem, ExperienceVL, BufferItemVL])
def test_coatis_positional_call_puts_each_value_in_its_field(kind: type[Any]) -> None:
    values = [torch.tensor([[number]]) for number in range(8)]

    filled = kind(*values)

    names = ("sequences", "action_log_probs", "values", "reward", "kl", "advantages", "attention_mask", "action_mask")
    assert all(getattr(filled, name) is value for name, value in zip(names, values, strict=True))
    rest = [getattr(filled, field.name) for field in dataclasses.fields(filled)[8:]]
    assert set(rest) == {None}


def test_lightrfts_vision_call_names_every_field_of_its_page() -> None:
    names = [
        "sequences", "pixel_values", "image_grid_thws", "pixel_values_videos", "video_grid_thws", "raw_images",
        "action_log_probs", "base_action_log_probs", "values", "returns", "advantages", "attention_mask",
        "action_mask", "info", "action_entropy",
    ]  # fmt: skip
    given = {name: object() for name in names}

    item = BufferItemVL(**given)  # type: ignore[arg-type]

    assert {name: getattr(item, name) for name in names} == given
    assert BufferItemVL(sequences=torch.ones(1)).action_log_probs is None


def test_lightrfts_keyword_call_needs_neither_reward_nor_kl() -> None:
    row = torch.zeros(3)

    item = BufferItem(
        sequences=torch.tensor([5, 6, 7, 8]),
        action_log_probs=row,
        base_action_log_probs=row,
        values=torch.zeros(1),
        returns=torch.zeros(1),
        advantages=torch.zeros(1),
        attention_mask=torch.ones(4, dtype=torch.int64),
        action_mask=torch.ones(3, dtype=torch.bool),
        info={"reward": 1.0},
        action_entropy=row,
    )

    assert item.reward is None
    assert item.kl is None
    batch = make_experience_batch([item, item])
    assert batch.values is not None
    assert batch.values.shape == (2, 1)
    assert batch.info is not None
    assert batch.info["reward"].tolist() == [1.0, 1.0]


def test_to_device_moves_every_tensor_in_info_and_in_lists_too() -> None:
    batch = make_experience_batch([item_of(2, 3), item_of(3, 2)])
    packed = make_experience_batch([item_of(2, 3), item_of(3, 2)], packing_samples=True)

    batch.to_device(torch.device("meta"))
    packed.to_device("meta")

    assert batch.base_action_log_probs is not None
    assert batch.kl is not None
    assert batch.info is not None
    assert batch.base_action_log_probs.device.type == batch.kl.device.type == "meta"
    assert batch.info["score"].device.type == "meta"
    assert {tensor.device.type for tensor in packed.sequences} == {"meta"}


def test_pin_memory_pins_every_tensor_in_info_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []

    def pin(tensor: Tensor) -> Tensor:
        pinned.append(id(tensor))
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    batch = make_experience_batch([item_of(2, 3)])

    returned = batch.pin_memory()

    assert returned is batch
    assert batch.info is not None
    for tensor in (batch.sequences, batch.base_action_log_probs, batch.kl, batch.info["score"]):
        assert id(tensor) in pinned


@pytest.mark.skipif(torch.accelerator.is_available(), reason="pages are locked where there is an accelerator")
def test_without_an_accelerator_pin_memory_leaves_the_tensors_alone() -> None:
    batch = make_experience_batch([item_of(2, 3)], packing_samples=True)
    before = dict(batch.__dict__)

    batch.pin_memory()

    assert batch.kl is not None
    assert batch.reward is before["reward"]
    assert batch.sequences[0] is before["sequences"][0]
    assert not batch.kl[0].is_pinned()


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "meta", torch.device("meta")])
def test_to_device_takes_a_name_or_a_device(device: torch.device | str) -> None:
    batch = make_experience_batch([item_of(2, 3)])

    assert batch.to_device(device) is None  # type: ignore[func-returns-value]
    assert batch.sequences.device == torch.device(device)


def test_pickling_an_item_carries_its_own_row_and_not_the_batch() -> None:
    batch = make_experience_batch([item_of(100, 400, base=row) for row in range(64)])
    item = split_experience_batch(batch)[3]

    size_bytes = len(pickle.dumps(item))
    back = pickle.loads(pickle.dumps(item))

    assert size_bytes < 2 * (500 * 16 + 400 * 21) + 4096
    assert_same(back, item)


def test_only_the_vl_classes_are_vl_experience() -> None:
    ids = torch.ones(1, 2, dtype=torch.int64)

    assert is_vl_experience(ExperienceVL(sequences=ids))
    assert is_vl_experience(BufferItemVL(sequences=ids[0]))
    assert not is_vl_experience(Experience(sequences=ids))
