"""Bad input at every public entry point: an error that names the field, the row, and both sizes or the value."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.errors import FieldError, ShapeError
from pipeline.experience.batching import (
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
    zero_pad_sequences,
)
from pipeline.experience.types import BufferItem, BufferItemVL, Experience, ExperienceVL
from tests.support.items import item_of, vl_item

NAN, INF = float("nan"), float("inf")


def packed(items: list[BufferItem]) -> Experience:
    return make_experience_batch(items, packing_samples=True)


def changed(change: dict[str, Any], *, vision: bool = False) -> list[Any]:
    """Two rows of 2 prompt tokens and 3 actions (2 with vision), the second with these fields in place of its own."""
    first: BufferItem = vl_item(1) if vision else item_of(2, 3)
    second: BufferItem = vl_item(1, base=2) if vision else item_of(2, 3, base=2)
    return [first, dataclasses.replace(second, **change)]


EACH_ROW: list[tuple[dict[str, Any], type[Exception], str]] = [
    # shapes that disagree
    ({"attention_mask": torch.ones(4).long()}, ShapeError, "row 1: attention_mask has 4 columns, sequences has 5"),
    (
        {"action_mask": torch.ones(6).bool()},
        ShapeError,
        "row 1: action_mask has 6 columns, more than the 5 of sequences",
    ),
    ({"action_log_probs": torch.zeros(2)}, ShapeError, "row 1: action_log_probs has shape (2,), the row has 3 actions"),
    ({"values": torch.zeros(4)}, ShapeError, "row 1: values has shape (4,), the row has 3 actions"),
    ({"behaviour_log_probs": torch.zeros(2)}, ShapeError, "row 1: behaviour_log_probs has shape (2,), the row has 3"),
    ({"kl": torch.zeros(3, 1)}, ShapeError, "row 1: kl has shape (3, 1), the row has 3 actions"),
    ({"sequences": torch.ones(1, 5).long()}, ShapeError, "row 1: sequences of shape (1, 5) is not 1-D"),
    ({"sequences": torch.ones(()).long()}, ShapeError, "row 1: sequences of shape () is not 1-D"),
    ({"action_mask": torch.ones(1, 3).bool()}, ShapeError, "row 1: action_mask of shape (1, 3) is not 1-D"),
    ({"sequences": torch.ones(0).long()}, ShapeError, "row 1: sequences has 0 tokens, a row has at least 1"),
    # dtypes that say the field holds something else
    ({"sequences": torch.ones(5).bool()}, FieldError, "row 1: sequences is torch.bool; it holds numbers"),
    (
        {"attention_mask": torch.ones(5)},
        FieldError,
        "row 1: attention_mask is torch.float32; it holds bool or integers",
    ),
    ({"action_mask": torch.ones(3)}, FieldError, "row 1: action_mask is torch.float32; it holds bool or integers"),
    (
        {"action_log_probs": torch.ones(3).long()},
        FieldError,
        "row 1: action_log_probs is torch.int64; it holds floating",
    ),
    ({"values": torch.ones(3).bool()}, FieldError, "row 1: values is torch.bool; it holds numbers"),
    ({"advantages": torch.ones(3) * 1j}, FieldError, "row 1: advantages is torch.complex64; it holds numbers"),
    ({"behaviour_log_probs": torch.ones(3).long()}, FieldError, "row 1: behaviour_log_probs is torch.int64; it holds"),
    ({"sequences": "five"}, FieldError, "row 1: sequences is a str, not a tensor"),
    ({"sequences": None}, FieldError, "row 1: sequences is None"),
    ({"reward": 1.0}, FieldError, "row 1: reward is a float, not a tensor"),
]
"""Inputs that both `make_experience_batch` and `remove_padding_in_sequences` refuse."""


@pytest.mark.parametrize("entry", [make_experience_batch, packed, remove_padding_in_sequences])
def test_a_row_that_is_wrong_in_itself(entry: Callable[[Any], Any], subtests: pytest.Subtests) -> None:
    for change, error, message in EACH_ROW:
        with subtests.test(message), pytest.raises(error, match=re.escape(message)):
            entry(changed(change))


BETWEEN_ROWS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"kl": None}, FieldError, "kl is None in row 1 and in 1 of 2 rows, not in all"),
    ({"action_mask": None}, FieldError, "action_mask is None in row 1 and in 1 of 2 rows"),
    ({"attention_mask": None}, FieldError, "attention_mask is None in row 1 and in 1 of 2 rows"),
    ({"labels": "math"}, FieldError, "labels is None in row 0 and in 1 of 2 rows"),
    ({"info": None}, FieldError, "info is None in row 1 and in 1 of 2 rows"),
    ({"info": {}}, FieldError, "info['score'] is in row 0, not in row 1"),
    ({"info": {"score": 1.0, "turns": 2}}, FieldError, "info['turns'] is in row 1, not in row 0"),
    ({"sequences": torch.ones(5).int()}, FieldError, "sequences is torch.int32 in row 1, torch.int64 in row 0"),
    ({"kl": torch.zeros(3).bfloat16()}, FieldError, "kl is torch.bfloat16 in row 1, torch.float32 in row 0"),
    ({"values": torch.zeros(())}, ShapeError, "values has shape () in row 1, (3,) in row 0"),
    ({"values": torch.zeros(1)}, ShapeError, "values has shape (3,) in row 0, (1,) in row 1 of 3 actions"),
    (
        {"action_log_probs": torch.tensor([0.0, NAN, 0.0])},
        FieldError,
        "row 1: action_log_probs is nan in column 1 of 3",
    ),
    ({"action_log_probs": torch.tensor([0.0, 0.0, -INF])}, FieldError, "row 1: action_log_probs is -inf in column 2"),
    ({"base_action_log_probs": torch.tensor([INF, 0.0, 0.0])}, FieldError, "row 1: base_action_log_probs is inf"),
    ({"advantages": torch.tensor([0.0, NAN, 0.0])}, FieldError, "row 1: advantages is nan in column 1 of 3"),
    ({"reward": torch.tensor(NAN)}, FieldError, "row 1: reward is nan; it must be finite"),
]
"""Errors that only batching can find, and numbers that are not finite."""


@pytest.mark.parametrize("entry", [make_experience_batch, packed])
def test_rows_that_do_not_go_together(entry: Callable[[Any], Any], subtests: pytest.Subtests) -> None:
    for change, error, message in BETWEEN_ROWS:
        with subtests.test(message), pytest.raises(error, match=re.escape(message)):
            entry(changed(change))


BATCHES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"reward": torch.ones(3)}, ShapeError, "reward has 3 rows, sequences has 2"),
    ({"reward": torch.tensor(1.0)}, ShapeError, "reward is 0-dim, the batch has 2 rows"),
    ({"reward": 1.0}, FieldError, "reward is a float, not one element for each of 2 rows"),
    ({"labels": "ab"}, FieldError, "labels is a str, not one element for each of 2 rows"),
    ({"labels": ["a"]}, ShapeError, "labels has 1 rows, sequences has 2"),
    ({"info": {"score": torch.ones(1)}}, ShapeError, "info['score'] has 1 rows, sequences has 2"),
    ({"sequences": None}, FieldError, "sequences is a NoneType"),
    ({"sequences": torch.ones(2).long()}, ShapeError, "row 0: sequences of shape () is not 1-D"),
    ({"sequences": torch.ones(2, 5).bool()}, FieldError, "row 0: sequences is torch.bool; it holds numbers"),
    (
        {"action_log_probs": torch.zeros(2, 2), "base_action_log_probs": torch.zeros(2, 3)},
        ShapeError,
        "row 0: base_action_log_probs has shape (3,), the row has 2 actions (action_log_probs)",
    ),
    ({"action_log_probs": torch.tensor([[0.0] * 3, [0.0, -INF, 0.0]])}, FieldError, "row 1: action_log_probs is -inf"),
    ({"values": torch.tensor([[0.0] * 3, [0.0, 0.0, NAN]])}, FieldError, "row 1: values is nan in column 2 of 3"),
    ({"reward": torch.tensor([0.0, NAN])}, FieldError, "row 1: reward is nan"),
]


def test_a_batch_that_cannot_be_taken_apart(subtests: pytest.Subtests) -> None:
    for change, error, message in BATCHES:
        batch = dataclasses.replace(make_experience_batch(changed({})), **change)
        with subtests.test(message), pytest.raises(error, match=re.escape(message)):
            split_experience_batch(batch)


def test_a_packed_batch_is_checked_row_by_row() -> None:
    batch = packed([item_of(2, 3), item_of(1, 2)])
    assert isinstance(batch.kl, list)

    with pytest.raises(ShapeError, match=r"row 1: kl has shape \(3,\), the row has 2 actions"):
        split_experience_batch(dataclasses.replace(batch, kl=[batch.kl[0], batch.kl[0]]))
    with pytest.raises(FieldError, match="row 1: kl is inf in column 0 of 2"):
        split_experience_batch(dataclasses.replace(batch, kl=[batch.kl[0], batch.kl[1] * INF]))


@pytest.mark.parametrize("packing", [False, True])
def test_what_is_not_finite_outside_the_action_mask_is_no_action(packing: bool) -> None:
    """A trainer may leave anything there: `action_log_probs` says so of its own result."""
    hole = {"action_mask": torch.tensor([True, False, True]), "action_log_probs": torch.tensor([-1.0, NAN, -2.0])}

    batch = make_experience_batch(changed(hole), packing_samples=packing)

    assert batch.action_log_probs is not None
    assert batch.action_log_probs[1].isnan().tolist() == [False, True, False]
    assert len(split_experience_batch(batch)) == 2


def test_large_finite_numbers_are_no_infinite_ones_though_their_sum_is() -> None:
    largest = torch.full((3,), torch.finfo(torch.float32).max)

    batch = make_experience_batch(changed({"kl": largest}))

    assert batch.kl is not None
    assert torch.equal(batch.kl[1], largest)


@pytest.mark.parametrize(
    ("sequences", "side", "error", "message"),
    [
        ([], "left", ShapeError, "no sequences to pad"),
        ([torch.ones(2), torch.ones(2, 2)], "left", ShapeError, "row 1: a sequence of shape (2, 2) is not 1-D"),
        ([torch.ones(2), torch.tensor(1.0)], "left", ShapeError, "row 1: a sequence of shape () is not 1-D"),
        ([torch.ones(2), torch.ones(2).long()], "right", FieldError, "torch.int64 in row 1, torch.float32 in row 0"),
        ([torch.ones(2), [1, 2]], "right", FieldError, "row 1 of sequences is a list, not a tensor"),
        ([torch.ones(2)], "middle", AssertionError, "not 'middle'"),
    ],
)
def test_sequences_that_cannot_be_padded(sequences: Any, side: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        zero_pad_sequences(sequences, side)


def test_nothing_makes_no_batch_and_has_no_padding() -> None:
    with pytest.raises(ValueError, match="no items to make a batch of"):
        make_experience_batch([])
    assert remove_padding_in_sequences([]) == []


def test_rows_without_anything_to_strip_by() -> None:
    with pytest.raises(ShapeError, match="row 1: attention_mask of 5 columns has no real token"):
        remove_padding_in_sequences(
            changed({"attention_mask": torch.zeros(5).long(), "action_mask": torch.zeros(3).bool()})
        )
    with pytest.raises(ShapeError, match="row 1: attention_mask of 5 columns has no real token"):
        remove_padding_in_sequences(changed({"attention_mask": torch.zeros(5).long()}))
    with pytest.raises(FieldError, match="row 1: attention_mask is None"):
        remove_padding_in_sequences(changed({"attention_mask": None}))


@pytest.mark.parametrize("entry", [make_experience_batch, packed, remove_padding_in_sequences])
def test_rows_of_two_kinds_or_of_none(entry: Callable[[Any], Any]) -> None:
    with pytest.raises(FieldError, match="1 of 2 items are BufferItemVL, row 1 the first, and row 0 is not"):
        entry([item_of(2, 2), vl_item(1)])
    with pytest.raises(FieldError, match="row 1 is a dict, not a BufferItem"):
        entry([item_of(2, 2), {"sequences": torch.ones(4).long()}])


# --- vision


VISION: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"pixel_values": torch.zeros(5, 3)}, FieldError, "row 1: pixel_values has 5 rows, image_grid_thws accounts for 4"),
    ({"image_grid_thws": None}, FieldError, "row 1: image_grid_thws is None, pixel_values is not"),
    ({"pixel_values": None}, FieldError, "row 1: pixel_values is None, image_grid_thws is not"),
    (
        {"image_grid_thws": torch.tensor([1, 2, 2, 1])},
        ShapeError,
        "row 1: image_grid_thws of shape (4,) is not (images, 3)",
    ),
    ({"image_grid_thws": [[1, 2, 2]]}, FieldError, "row 1: image_grid_thws is a list, not a tensor"),
    ({"pixel_values": [[0.0] * 3] * 4}, FieldError, "row 1: pixel_values is a list, not a tensor"),
    ({"image_grid_thws": torch.tensor([[-1, -2, 2]])}, FieldError, "row 1: image_grid_thws is [[-1, -2, 2]]"),
    ({"image_grid_thws": torch.tensor([[1.0, 2, 2]])}, FieldError, "row 1: image_grid_thws is [[1.0, 2.0, 2.0]]"),
    ({"raw_images": ["a", "b"]}, FieldError, "row 1: raw_images has 2 images, image_grid_thws has 1"),
    (
        {"pixel_values": torch.zeros(4, 2)},
        FieldError,
        "pixel_values is torch.float32 (2,) in row 1, torch.float32 (3,)",
    ),
    (
        {"pixel_values": torch.zeros(4, 3).half()},
        FieldError,
        "pixel_values is torch.float16 (3,) in row 1, torch.float32",
    ),
    (
        {"pixel_values_videos": torch.zeros(5, 3), "video_grid_thws": torch.tensor([[3, 1, 2]])},
        FieldError,
        "row 1: pixel_values_videos has 5 rows, video_grid_thws accounts for 6",
    ),
]


@pytest.mark.parametrize("entry", [make_experience_batch, packed])
def test_pixels_that_do_not_match_their_grids(entry: Callable[[Any], Any], subtests: pytest.Subtests) -> None:
    for change, error, message in VISION:
        with subtests.test(message), pytest.raises(error, match=re.escape(message)):
            entry(changed(change, vision=True))


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (2.0, "row 1: info['image_num'] is 2, image_grid_thws has 1"),
        (1.5, "row 1: info['image_num'] is 1.5, image_grid_thws has 1"),
        (torch.tensor(2.0), "row 1: info['image_num'] is 2, image_grid_thws has 1"),
        ("one", "row 1: info['image_num'] is 'one', not a number of grids"),
        ([1], "row 1: info['image_num'] is [1], not a number of grids"),
        (torch.ones(2), "row 1: info['image_num'] is tensor([1., 1.]), not a number of grids"),
    ],
)
def test_a_count_that_is_not_that_of_the_row(count: Any, message: str) -> None:
    items = [
        dataclasses.replace(vl_item(1, base=base), info={"image_num": number})
        for base, number in ((1, torch.tensor(1.0)), (2, count))
    ]

    with pytest.raises(FieldError, match=re.escape(message)):
        make_experience_batch(items)


@pytest.mark.parametrize(
    ("change", "counts", "error", "message"),
    [
        (
            {"pixel_values": torch.zeros(9, 3)},
            [1.0, 1.0],
            FieldError,
            "pixel_values has 9 rows, image_grid_thws accounts",
        ),
        ({"pixel_values": None}, [1.0, 1.0], FieldError, "pixel_values is None, image_grid_thws is not"),
        ({}, [2.0, 1.0], FieldError, "info['image_num'] counts 3 grids, the batch has 2"),
        ({}, [3.0, -1.0], FieldError, "row 1: info['image_num'] is -1.0, not a number of grids"),
        ({}, [0.5, 1.5], FieldError, "row 0: info['image_num'] is 0.5, not a number of grids"),
        ({}, [[1.0, 0.0], [1.0, 0.0]], ShapeError, "info['image_num'] has 4 counts, the batch has 2 rows"),
        ({}, [1.0], ShapeError, "info['image_num'] has 1 rows, sequences has 2"),
        (
            {"info": {"image_num": ["one", "two"]}},
            [],
            FieldError,
            "info['image_num'] is ['one', 'two'], not a number of",
        ),
        ({"info": {"image_num": 2}}, [], ShapeError, "info['image_num'] has 1 counts, the batch has 2 rows"),
        (
            {"image_grid_thws": [torch.tensor([1, 2, 2])]},
            [1.0, 1.0],
            ShapeError,
            "image_grid_thws has 1 elements, sequences has 2 rows",
        ),
        (
            {"image_grid_thws": [torch.tensor([1, 2, 2]), torch.tensor([2, 2])]},
            [1.0, 1.0],
            ShapeError,
            "row 1: image_grid_thws of shape (2,) is not (images, 3)",
        ),
        (
            {"image_grid_thws": [torch.tensor([1, 2, 2]), [1, 2, 2]]},
            [1.0, 1.0],
            FieldError,
            "row 1: image_grid_thws is a list, not a tensor",
        ),
        (
            {"image_grid_thws": [torch.tensor([[1, 2, 2], [1, 2, 2]]), None]},
            [1.0, 1.0],
            FieldError,
            "row 0: info['image_num'] is 1, the row has 2 grids",
        ),
        (
            {"image_grid_thws": [torch.tensor([1, 2, 2]), None]},
            [1.0, 0.0],
            FieldError,
            "pixel_values has 8 rows, image_grid_thws accounts for 4",
        ),
        ({"raw_images": ["a"]}, [1.0, 1.0], ShapeError, "raw_images has 1 elements: 2 rows, 2 images"),
        (
            {"raw_images": [["a"], ["b", "c"]]},
            [1.0, 1.0],
            FieldError,
            "row 1: raw_images has 2 images, image_grid_thws has 1",
        ),
    ],
)
def test_a_vision_batch_that_cannot_be_taken_apart(
    change: dict[str, Any], counts: list[Any], error: type[Exception], message: str
) -> None:
    batch = make_experience_batch([vl_item(1), vl_item(1, base=2)])
    assert isinstance(batch, ExperienceVL)
    batch = dataclasses.replace(batch, **{"info": {"image_num": torch.tensor(counts)}, **change})

    with pytest.raises(error, match=re.escape(message)):
        split_experience_batch(batch)


def test_a_grid_needs_its_count_where_the_rows_have_not_one_each() -> None:
    ids = torch.ones(2, 3).long()
    grids: Tensor = torch.tensor([[1, 2, 2]] * 3)

    with pytest.raises(FieldError, match=r"info\['image_num'\] is missing: 3 grids cannot be assigned to 2 rows"):
        split_experience_batch(ExperienceVL(sequences=ids, pixel_values=torch.zeros(12, 3), image_grid_thws=grids))


def test_a_row_made_by_hand_needs_only_its_tokens() -> None:
    """The least that is good input, so that the table above does not refuse everything."""
    for kind in (BufferItem, BufferItemVL):
        batch = make_experience_batch([kind(sequences=torch.tensor([1, 2])), kind(sequences=torch.tensor([3]))])
        assert batch.sequences.tolist() == [[1, 2], [0, 3]]
