"""`info` of any kind through batches; tests/experience/test_batching_properties.py has all other fields."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.experience.batching import make_experience_batch, split_experience_batch
from pipeline.experience.types import BufferItem
from tests.support.items import item_of


def two_rows(info: dict[str, Any]) -> list[BufferItem]:
    """Two rows whose `info` has, by name, the two elements of each pair."""
    return [
        dataclasses.replace(item_of(2, 2), info={name: pair[row] for name, pair in info.items()}) for row in range(2)
    ]


@pytest.mark.parametrize(
    ("value", "rows"),
    [
        (["math", "code"], ["math", "code"]),
        ([{"turns": 2}, {"turns": 3}], [{"turns": 2}, {"turns": 3}]),
        ([1, 2], [1, 2]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([None, "code"], [None, "code"]),
        # What has not an element for each row is of the batch.
        ("math", ["math", "math"]),
        (0.5, [0.5, 0.5]),
        (None, [None, None]),
        ({"turns": 2}, [{"turns": 2}, {"turns": 2}]),
        ([1, 2, 3], [[1, 2, 3], [1, 2, 3]]),
        ((1, 2), [(1, 2), (1, 2)]),
    ],
)
def test_info_is_split_a_list_one_a_row_and_anything_else_as_it_is(value: Any, rows: list[Any]) -> None:
    batch = make_experience_batch([item_of(2, 2), item_of(2, 2)])
    batch.info = {"it": value}

    assert [item.info for item in split_experience_batch(batch)] == [{"it": row} for row in rows]


def test_a_tensor_in_info_is_split_by_its_rows_and_a_scalar_is_of_each() -> None:
    batch = make_experience_batch([item_of(2, 2), item_of(2, 2)])
    batch.info = {"score": torch.tensor([1.0, 2.0]), "hidden": torch.arange(6).reshape(2, 3), "loss": torch.tensor(0.5)}

    first, second = (item.info or {} for item in split_experience_batch(batch))

    assert (first["score"].item(), second["score"].item()) == (1.0, 2.0)
    assert (first["hidden"].tolist(), second["hidden"].tolist()) == ([0, 1, 2], [3, 4, 5])
    assert first["loss"] is second["loss"] is batch.info["loss"]


@pytest.mark.parametrize(
    ("pair", "gathered"),
    [
        ((1, 2), torch.tensor([1, 2])),
        ((1, 2.5), torch.tensor([1.0, 2.5])),
        ((True, False), torch.tensor([True, False])),
        ((np.float32(1.5), np.float32(2.5)), torch.tensor([1.5, 2.5])),
        ((np.int64(1), 2), torch.tensor([1, 2])),
        ((torch.tensor(1.5), torch.tensor(2.5)), torch.tensor([1.5, 2.5])),
        # A tensor without dimensions is a number.
        ((torch.tensor(1.5), 2.5), torch.tensor([1.5, 2.5])),
        ((torch.tensor([1, 2]), torch.tensor([3, 4])), torch.tensor([[1, 2], [3, 4]])),
    ],
)
def test_numbers_and_tensors_of_one_shape_are_gathered_into_a_tensor(pair: Any, gathered: Tensor) -> None:
    info = make_experience_batch(two_rows({"it": pair})).info

    assert info is not None
    assert info["it"].dtype == gathered.dtype
    assert torch.equal(info["it"], gathered)


@pytest.mark.parametrize(
    "pair",
    [
        ("math", "code"),
        ({"turns": 2}, {"turns": 3}),
        ([1, 2], [3, 4]),
        (None, None),
        (1.5, "none"),
        (None, 2),
        (torch.tensor(1.5), "none"),
        (torch.tensor([1, 2]), torch.tensor([3])),
        (torch.tensor([1, 2]), 3),
        (torch.tensor(1), torch.tensor(1.5)),
        (2**80, 1),
        (1 + 2j, 3),
    ],
)
@pytest.mark.parametrize("packing", [False, True])
def test_anything_else_and_a_mixture_is_gathered_into_a_list_and_split_again(pair: Any, packing: bool) -> None:
    batch = make_experience_batch(two_rows({"it": pair}), packing_samples=packing)
    back = split_experience_batch(batch)

    assert batch.info is not None
    assert isinstance(batch.info["it"], list)
    for element, item, own in zip(batch.info["it"], back, pair, strict=True):
        assert element is own
        assert item.info is not None and item.info["it"] is own


def test_info_without_names_stays_so() -> None:
    batch = make_experience_batch([dataclasses.replace(item_of(2, 2), info={}) for _ in range(2)])

    assert batch.info == {}
    assert [item.info for item in split_experience_batch(batch)] == [{}, {}]


def test_info_of_any_kind_survives_a_device_and_a_pickle() -> None:
    batch = make_experience_batch(two_rows({"text": ("a", "b"), "table": ({"x": torch.ones(2)}, {"x": torch.ones(3)})}))

    batch.to_device("meta")
    item = pickle.loads(pickle.dumps(two_rows({"text": ("a", "b"), "table": ({"x": [torch.ones(2)]}, 3)})[0]))

    assert batch.info is not None
    assert batch.info["text"] == ["a", "b"]
    assert [table["x"].device.type for table in batch.info["table"]] == ["meta", "meta"]
    assert item.info["text"] == "a"
    assert item.info["table"]["x"][0].tolist() == [1.0, 1.0]
