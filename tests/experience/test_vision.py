"""Pixels, grids, counts and raw images: each row keeps its own, and what does not add up is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from pipeline.errors import FieldError
from pipeline.experience.batching import (
    make_experience_batch,
    split_experience_batch,
)
from pipeline.experience.types import (
    ExperienceVL,
)
from pipeline.experience.vision_rows import VisionRows
from tests.support.items import assert_same, vl_item


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


def test_rows_of_images_are_chosen_by_number_and_not_by_a_mask() -> None:
    batch = make_experience_batch([vl_item(2, base=1), vl_item(0, base=2), vl_item(1, base=3)])
    assert isinstance(batch, ExperienceVL)
    rows = VisionRows.of(batch)

    assert [len(grids) for grids in rows.rows(torch.tensor([2, 0])).image_grid_thws if grids is not None] == [1, 2]
    for mask in (torch.tensor([True, False, True]), [True, False, True]):
        with pytest.raises(FieldError, match="index is a mask; it has the numbers of rows"):
            rows.rows(mask)


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
    for info in (None, {"image_num": torch.zeros(2)}):
        one = dataclasses.replace(empty, image_grid_thws=no_grids, pixel_values=torch.zeros(0, 8), info=info)
        assert [row.image_grid_thws for row in split_experience_batch(one)] == [None, None]  # type: ignore[attr-defined]
