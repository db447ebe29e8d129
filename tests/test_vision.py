"""Pixels, grids, counts and raw images: each row keeps its own, and what does not add up is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from pipeline.batching import (
    make_experience_batch,
    split_experience_batch,
)
from pipeline.errors import FieldError
from pipeline.experience import (
    BufferItemVL,
    ExperienceVL,
)
from tests.items import assert_equal, assert_same, item_of, vl_item


def test_images_come_back_on_the_rows_they_belong_to() -> None:
    items = [vl_item(2, 1, base=1), vl_item(0, base=2), vl_item(1, 2, base=3)]

    batch = make_experience_batch(items)
    back = split_experience_batch(batch)

    assert isinstance(batch, ExperienceVL)
    assert batch.info is not None
    assert batch.info["image_num"].tolist() == [2.0, 0.0, 1.0]
    assert batch.info["image_num"].dtype == torch.float32
    assert batch.info["video_num"].tolist() == [1.0, 0.0, 2.0]
    for item, row in zip(items, back, strict=True):
        assert isinstance(row, BufferItemVL)
        assert_equal("pixel_values", item.pixel_values, row.pixel_values)
        assert_equal("image_grid_thws", item.image_grid_thws, row.image_grid_thws)
        assert_equal("pixel_values_videos", item.pixel_values_videos, row.pixel_values_videos)
        assert item.raw_images == row.raw_images
    assert_same(make_experience_batch(back), batch)


def test_two_images_on_the_first_of_two_rows_stay_there() -> None:
    batch = make_experience_batch([vl_item(2), vl_item(0, base=2)])

    first, second = split_experience_batch(batch)

    assert isinstance(first, BufferItemVL)
    assert isinstance(second, BufferItemVL)
    assert first.pixel_values is not None
    assert len(first.pixel_values) == 8
    assert second.pixel_values is None


def test_without_counts_there_must_be_one_image_a_row() -> None:
    batch = make_experience_batch([vl_item(1), vl_item(1, base=2)])
    assert isinstance(batch, ExperienceVL)
    assert batch.info is not None
    del batch.info["image_num"]

    rows = split_experience_batch(batch)

    assert [len(row.pixel_values) for row in rows] == [4, 4]  # type: ignore[attr-defined]
    assert batch.image_grid_thws is not None
    batch.image_grid_thws = torch.tensor([[1, 2, 2], [1, 1, 2], [1, 1, 2]])
    with pytest.raises(FieldError, match=r"image_num.*3 grids.*2 rows"):
        split_experience_batch(batch)


def test_grids_without_counts_are_three_numbers_a_row() -> None:
    batch = make_experience_batch([vl_item(1, 1), vl_item(1, 1, base=2)])
    assert isinstance(batch, ExperienceVL) and batch.info is not None
    counts = {name: batch.info.pop(name) for name in ("image_num", "video_num")}
    batch.info["video_num"] = counts["video_num"]

    rows = split_experience_batch(batch)

    # Videos have their counts, images have not.
    assert [row.image_grid_thws.tolist() for row in rows] == [[1, 2, 2], [1, 2, 2]]  # type: ignore[attr-defined]
    assert [row.video_grid_thws.tolist() for row in rows] == [[[3, 1, 2]], [[3, 1, 2]]]  # type: ignore[attr-defined]
    batch.info |= counts
    assert_same(make_experience_batch(rows), batch)


def test_grids_as_a_list_of_one_tensor_a_row() -> None:
    """LightRFT's maker has split them already: of a row without images None, or no row of a tensor."""
    whole = make_experience_batch([vl_item(2, base=1), vl_item(0, base=2), vl_item(1, base=3), vl_item(0, base=4)])
    assert isinstance(whole, ExperienceVL) and whole.info is not None
    grid = torch.tensor([1, 2, 2])
    no_grids = torch.zeros(0, 3, dtype=torch.int64)
    listed: Any = [grid.repeat(2, 1), None, grid, no_grids]

    for info in (whole.info, {"score": whole.info["score"]}):
        rows: Any = split_experience_batch(dataclasses.replace(whole, image_grid_thws=listed, info=info))

        assert rows[0].image_grid_thws is listed[0]
        assert rows[2].image_grid_thws is grid
        assert [row.image_grid_thws for row in rows[1::2]] == [None, None]
        assert [0 if row.pixel_values is None else len(row.pixel_values) for row in rows] == [8, 0, 4, 0]
        assert [row.raw_images for row in rows] == whole.raw_images
        assert_same(make_experience_batch(rows), whole)

    # The grids of no row at all.
    empty: Any = ExperienceVL(sequences=torch.ones(2, 3).long(), image_grid_thws=[None, no_grids])  # type: ignore[arg-type]
    assert [row.image_grid_thws for row in split_experience_batch(empty)] == [None, None]  # type: ignore[attr-defined]


def test_pixels_beyond_or_without_grids_are_refused() -> None:
    item = vl_item(1)
    assert item.pixel_values is not None
    beyond = dataclasses.replace(item, pixel_values=torch.cat([item.pixel_values, item.pixel_values[:1]]))

    with pytest.raises(ValueError, match="row 1: pixel_values has 5 rows, image_grid_thws accounts for 4"):
        make_experience_batch([item, beyond])
    with pytest.raises(ValueError, match="image_grid_thws is None"):
        make_experience_batch([item, dataclasses.replace(item, image_grid_thws=None)])
    batch = make_experience_batch([item])
    assert isinstance(batch, ExperienceVL)
    batch.pixel_values = beyond.pixel_values
    with pytest.raises(ValueError, match="pixel_values has 5 rows"):
        split_experience_batch(batch)


def test_a_count_that_contradicts_the_grids_is_refused() -> None:
    item = dataclasses.replace(vl_item(1), info={"image_num": torch.tensor(2.0)})

    with pytest.raises(FieldError, match=r"image_num.* is 2, image_grid_thws has 1"):
        make_experience_batch([item])


def test_rows_with_and_without_vision_fields_do_not_mix() -> None:
    with pytest.raises(FieldError, match="1 of 2 items are BufferItemVL"):
        make_experience_batch([item_of(2, 2), vl_item(1)])
