"""Batches taken apart, stripped, padded and packed; tests/test_batching_properties.py has the cases by thousands."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipeline.batching import (
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
    zero_pad_sequences,
)
from pipeline.errors import FieldError, ShapeError
from pipeline.experience import (
    BufferItem,
)
from tests.items import assert_same, item_of, pad

# --- zero_pad_sequences


def test_zero_pad_sequences_pads_on_the_side_asked_for() -> None:
    rows = [torch.tensor([1, 2, 3]), torch.tensor([4, 5]), torch.tensor([6, 7, 8, 9])]

    assert zero_pad_sequences(rows, side="right").tolist() == [[1, 2, 3, 0], [4, 5, 0, 0], [6, 7, 8, 9]]
    assert zero_pad_sequences(rows, side="left").tolist() == [[0, 1, 2, 3], [0, 0, 4, 5], [6, 7, 8, 9]]
    assert torch.equal(zero_pad_sequences(rows), zero_pad_sequences(rows, side="left"))


def test_zero_pad_sequences_refuses_another_side_and_other_shapes() -> None:
    with pytest.raises(AssertionError, match="middle"):
        zero_pad_sequences([torch.ones(2)], side="middle")
    with pytest.raises(ShapeError, match=r"row 1.*\(2, 2\)"):
        zero_pad_sequences([torch.ones(2), torch.ones(2, 2)])
    with pytest.raises(ValueError, match="no sequences"):
        zero_pad_sequences([])


# --- split and make


rows_strategy = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(rows=rows_strategy, ppo=st.booleans())
def test_a_batch_taken_apart_and_made_again_is_the_same(rows: list[tuple[int, int]], ppo: bool) -> None:
    batch = make_experience_batch([item_of(p, a, ppo=ppo, base=i + 1) for i, (p, a) in enumerate(rows)])

    assert_same(make_experience_batch(split_experience_batch(batch)), batch)


@settings(deadline=None, max_examples=60)
@given(rows=rows_strategy, ppo=st.booleans(), left=st.integers(0, 4), right=st.integers(0, 4))
def test_stripping_gives_back_the_row_that_was_padded(
    rows: list[tuple[int, int]], ppo: bool, left: int, right: int
) -> None:
    items = [item_of(p, a, ppo=ppo, base=i + 1) for i, (p, a) in enumerate(rows)]

    stripped = remove_padding_in_sequences([pad(item, left, right) for item in items])

    for item, back in zip(items, stripped, strict=True):
        assert_same(back, item)
    for item, back in zip(items, remove_padding_in_sequences(stripped), strict=True):
        assert_same(back, item)


@settings(deadline=None, max_examples=60)
@given(rows=rows_strategy, ppo=st.booleans())
def test_rows_of_a_left_padded_batch_come_back_stripped(rows: list[tuple[int, int]], ppo: bool) -> None:
    items = [item_of(p, a, ppo=ppo, base=i + 1) for i, (p, a) in enumerate(rows)]

    back = remove_padding_in_sequences(split_experience_batch(make_experience_batch(items)))

    for item, stripped in zip(items, back, strict=True):
        assert_same(stripped, item)


def test_ragged_rows_are_padded_on_the_left_in_every_field() -> None:
    batch = make_experience_batch([item_of(1, 3, base=1), item_of(3, 2, base=5)])

    assert batch.sequences.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    expected = {
        "action_log_probs": [[-1.0, -2.0, -3.0], [0.0, -5.0, -6.0]],
        "values": [[2.0, 4.0, 6.0], [0.0, 10.0, 12.0]],
        "kl": [[0.125, 0.25, 0.375], [0.0, 0.625, 0.75]],
        "advantages": [[3.0, 6.0, 9.0], [0.0, 15.0, 18.0]],
        "action_mask": [[True, True, True], [False, True, True]],
        "attention_mask": [[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]],
        "reward": [1.0, 5.0],
    }
    for name, rows in expected.items():
        assert getattr(batch, name).tolist() == rows, name


def test_a_field_that_no_row_has_stays_none() -> None:
    items = [dataclasses.replace(item_of(2, n), attention_mask=None, action_mask=None, info=None) for n in (2, 3)]

    batch = make_experience_batch(items)

    assert batch.attention_mask is None
    assert batch.action_mask is None
    assert batch.info is None
    assert_same(make_experience_batch(split_experience_batch(batch)), batch)


@pytest.mark.parametrize("name", ["values", "kl", "attention_mask", "info", "labels"])
def test_a_field_that_only_some_rows_have_is_refused_by_name(name: str) -> None:
    items = [item_of(2, 2), item_of(2, 2)]
    items = [dataclasses.replace(item, labels="math") for item in items]
    absent: dict[str, Any] = {name: None}
    with_hole = [items[0], dataclasses.replace(items[1], **absent)]

    with pytest.raises(FieldError, match=f"{name} is None in row 1"):
        make_experience_batch(with_hole)
    with pytest.raises(FieldError, match=f"{name} is None in row 0"):
        make_experience_batch(with_hole[::-1])


def test_an_info_key_that_only_some_rows_have_is_refused_by_name() -> None:
    other = dataclasses.replace(item_of(2, 2), info={"score": torch.tensor(1.0), "turns": torch.tensor(2)})

    with pytest.raises(FieldError, match="turns"):
        make_experience_batch([item_of(2, 2), other])


def test_fields_of_one_row_that_disagree_on_its_length_are_refused() -> None:
    item = item_of(2, 3)

    with pytest.raises(ShapeError, match=r"row 1: kl has shape \(2,\).* 3 actions"):
        make_experience_batch([item, dataclasses.replace(item, kl=torch.zeros(2))])
    with pytest.raises(ShapeError, match="row 1: attention_mask has 4 columns, sequences has 5"):
        make_experience_batch([item, dataclasses.replace(item, attention_mask=torch.ones(4).long())])
    with pytest.raises(ShapeError, match=r"values.*row 0"):
        make_experience_batch([item, dataclasses.replace(item, values=torch.zeros(1))])
    with pytest.raises(FieldError, match=r"sequences is torch\.int32 in row 1"):
        make_experience_batch([item, dataclasses.replace(item, sequences=item.sequences.int())])


def test_no_items_make_no_batch() -> None:
    with pytest.raises(ValueError, match="no items"):
        make_experience_batch([])


def test_a_field_with_another_number_of_rows_cannot_be_split() -> None:
    batch = make_experience_batch([item_of(2, 2), item_of(2, 2)])
    batch.reward = torch.ones(3)

    with pytest.raises(ShapeError, match="reward has 3 rows, sequences has 2"):
        split_experience_batch(batch)


def test_labels_and_references_travel_as_objects() -> None:
    items = [dataclasses.replace(item_of(2, 2), labels=label, references=[label]) for label in ("math", "code")]

    batch = make_experience_batch(items)

    assert batch.labels == ["math", "code"]
    assert [item.references for item in split_experience_batch(batch)] == [["math"], ["code"]]


# --- info


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


# --- remove_padding_in_sequences


def test_lightrfts_own_example_keeps_all_three_tokens() -> None:
    real = torch.tensor([0, 0, 1, 1, 1, 0, 0])
    item = BufferItem(
        sequences=torch.tensor([0, 0, 1, 2, 3, 0, 0]),
        action_log_probs=real * 0.5,
        attention_mask=real,
        action_mask=real.bool(),
    )

    (clean,) = remove_padding_in_sequences([item])

    assert clean.sequences.tolist() == [1, 2, 3]
    assert clean.action_log_probs is not None
    assert clean.action_log_probs.tolist() == [0.5, 0.5, 0.5]
    assert item.sequences.tolist() == [0, 0, 1, 2, 3, 0, 0]


def test_a_mask_with_holes_loses_only_its_outer_padding() -> None:
    item = BufferItem(
        sequences=torch.tensor([0, 7, 1, 2, 3, 4, 0]),
        action_log_probs=torch.tensor([-1.0, -2.0, -3.0, -4.0, 0.0]),
        attention_mask=torch.tensor([0, 1, 1, 1, 1, 1, 0]),
        action_mask=torch.tensor([True, False, True, True, False]),
    )

    (clean,) = remove_padding_in_sequences([item])

    assert clean.sequences.tolist() == [7, 1, 2, 3, 4]
    assert clean.action_mask is not None
    assert clean.action_mask.tolist() == [True, False, True, True]
    assert clean.action_log_probs is not None
    assert clean.action_log_probs.tolist() == [-1.0, -2.0, -3.0, -4.0]


def test_masked_tokens_at_the_end_keep_their_columns_aligned() -> None:
    """Tool output that ends a row is attended but no action: the columns stay with their tokens."""
    item = BufferItem(
        sequences=torch.tensor([7, 1, 2, 3]),
        action_log_probs=torch.tensor([-1.0, -2.0, 0.0]),
        attention_mask=torch.ones(4, dtype=torch.int64),
        action_mask=torch.tensor([True, True, False]),
    )

    (clean,) = remove_padding_in_sequences([item])

    assert_same(clean, item)


def test_a_row_masked_from_the_loss_keeps_its_tokens() -> None:
    item = dataclasses.replace(item_of(2, 3), action_mask=torch.zeros(3, dtype=torch.bool))

    (clean,) = remove_padding_in_sequences([pad(item, 1, 2)])

    assert_same(clean, item)


def test_without_an_action_mask_the_attention_mask_tells_the_padding() -> None:
    item = dataclasses.replace(pad(item_of(2, 3), 2, 1), action_mask=None)

    (clean,) = remove_padding_in_sequences([item])

    assert clean.sequences.tolist() == [1, 2, 3, 4, 5]
    assert clean.action_log_probs is not None
    assert clean.action_log_probs.tolist() == [-1.0, -2.0, -3.0]


def test_scalar_values_survive_stripping() -> None:
    item = dataclasses.replace(
        pad(item_of(2, 3), 1, 2), values=torch.tensor([0.5]), advantages=torch.tensor(2.0), kl=None
    )

    (clean,) = remove_padding_in_sequences([item])

    assert clean.values is not None
    assert clean.values.tolist() == [0.5]
    assert clean.advantages is not None
    assert clean.advantages.item() == 2.0


def test_a_row_without_real_tokens_is_refused() -> None:
    item = dataclasses.replace(
        item_of(2, 2), attention_mask=torch.zeros(4, dtype=torch.int64), action_mask=torch.zeros(2, dtype=torch.bool)
    )

    with pytest.raises(ValueError, match="row 1: attention_mask of 4 columns has no real token"):
        remove_padding_in_sequences([item_of(2, 2), item])


def test_a_row_without_an_attention_mask_cannot_be_stripped() -> None:
    with pytest.raises(FieldError, match="row 0: attention_mask is None"):
        remove_padding_in_sequences([dataclasses.replace(item_of(2, 2), attention_mask=None)])


# --- packing


def test_a_packed_batch_keeps_rows_apart_and_tells_where_they_lie() -> None:
    items = [dataclasses.replace(item_of(2, n), action_entropy=torch.ones(n)) for n in (3, 1)]

    batch = make_experience_batch([pad_entropy(item, 2) for item in items], packing_samples=True)

    for name in ("sequences", "attention_mask", "action_log_probs", "action_mask", "values", "kl", "action_entropy"):
        assert [len(row) for row in getattr(batch, name)] == ([5, 3] if name[:3] in ("seq", "att") else [3, 1]), name
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.tolist() == [0, 5, 8]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.max_seqlen == 5
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert batch.reward is not None
    assert batch.reward.tolist() == [1.0, 1.0]
    for item, back in zip(items, split_experience_batch(batch), strict=True):
        assert_same(back, item)


def pad_entropy(item: BufferItem, right: int) -> BufferItem:
    """`pad` on the right only, the entropy included."""
    assert item.action_entropy is not None
    return dataclasses.replace(
        pad(item, 0, right), action_entropy=torch.nn.functional.pad(item.action_entropy, (0, right))
    )
