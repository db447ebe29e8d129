"""Split, strip, pad and pack against a slow reference of Python lists: values, dtypes and None, by the thousand."""

from __future__ import annotations

import random
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.experience.batching import make_experience_batch, remove_padding_in_sequences, split_experience_batch
from pipeline.experience.types import BufferItem, Experience, ExperienceVL
from tests.support import slow_rows
from tests.support.items import assert_same
from tests.support.slow_rows import ACTIONS, SCORES, TOKENS, Kind, Row, expect

OPTIONAL = ("attention_mask", *ACTIONS, *SCORES, "labels", "references")
INFO = (
    "scalar", "mixed", "number", "count", "single", "vector", "ragged", "matrix", "text", "tokens", "table", "either",
)  # fmt: skip
TEXT = (*TOKENS, *ACTIONS, *SCORES, "labels", "references")
VISION = ("pixel_values", "image_grid_thws", "pixel_values_videos", "video_grid_thws", "raw_images")

kinds = st.builds(
    Kind,
    floats=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    tokens=st.sampled_from([torch.int64, torch.int32]),
    attention=st.sampled_from([torch.int64, torch.bool]),
    actions=st.sampled_from([torch.bool, torch.int64]),
    scores=st.sampled_from(["action", "row", "single"]),
    missing=st.frozensets(st.sampled_from(OPTIONAL), max_size=4),
    info=st.none() | st.frozensets(st.sampled_from(INFO)),
    objects=st.sampled_from(["text", "number", "equal", "ragged", "matrix"]),
)
sizes = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, 5), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=5
)
"""For each row: prompt tokens, response tokens, columns of padding on the left and on the right."""

seeds = st.integers(0, 2**32 - 1)


def made_up(kind: Kind, sizes: list[tuple[int, int, int, int]], seed: int) -> list[Row]:
    rng = random.Random(seed)
    # In a row of one action, one number a row and one number an action are indistinguishable.
    least = 2 if kind.scores == "single" else 0
    return [slow_rows.made_up_row(kind, p, max(a, least), left, right, rng) for p, a, left, right in sizes]


def expect_rows(items: list[BufferItem], rows: list[Row]) -> None:
    """The items are the rows, every field of them."""
    assert len(items) == len(rows)
    for item, row in zip(items, rows, strict=True):
        for name in (*TEXT, *(VISION if isinstance(item, slow_rows.BufferItemVL) else ())):
            expect(name, getattr(item, name), row.get(name))
        assert (item.info is None) == ("info" not in row)
        for key, value in (item.info or {}).items():
            expect(key, value, row["info"][key])


def expect_batch(batch: Experience, rows: list[Row], *, packed: bool) -> None:
    """The batch is the rows: a tensor with one row more dimension, or a list of them where that was asked for."""
    for name in TEXT:
        column: Any = getattr(batch, name)
        expected = [row.get(name) for row in rows]
        if expected[0] is None:
            assert column is None, name
            continue
        stacks = isinstance(expected[0], tuple) and (
            not (packed and isinstance(expected[0][1], list))
            if name not in ("labels", "references")
            else len({str(torch.tensor(value[1]).shape) for value in expected}) == 1
        )
        if stacks:
            assert isinstance(column, torch.Tensor), name
            expect(name, column, (expected[0][0], [value[1] for value in expected]))
        else:
            assert isinstance(column, list), name
            for value, other in zip(column, expected, strict=True):
                expect(name, value, other)
    expected_info = None if "info" not in rows[0] else rows[0]["info"].keys()
    assert (None if batch.info is None else batch.info.keys()) == expected_info
    for key, value in (batch.info or {}).items():
        column = [row["info"][key] for row in rows]
        if slow_rows.is_one_tensor(column):
            expect(key, value, (column[0][0], [numbers for _, numbers in column]))
        else:
            assert isinstance(value, list), key
            for element, expected_element in zip(value, column, strict=True):
                expect(key, element, expected_element)


@settings(max_examples=4 * settings.default.max_examples)
@given(kind=kinds, sizes=sizes, seed=seeds)
def test_rows_are_padded_and_taken_apart_as_the_reference_does(
    kind: Kind, sizes: list[tuple[int, int, int, int]], seed: int
) -> None:
    rows = made_up(kind, sizes, seed)
    padded = slow_rows.pad(rows)

    batch = make_experience_batch([slow_rows.item_of(row, kind) for row in rows])
    items = split_experience_batch(batch)

    expect_batch(batch, padded, packed=False)
    expect_rows(items, padded)
    assert_same(make_experience_batch(items), batch)


@settings(max_examples=4 * settings.default.max_examples)
@given(kind=kinds, sizes=sizes, seed=seeds)
def test_rows_are_stripped_and_packed_as_the_reference_does(
    kind: Kind, sizes: list[tuple[int, int, int, int]], seed: int
) -> None:
    rows = [row for row in made_up(kind, sizes, seed) if "attention_mask" in row]
    if not rows:
        return
    items = [slow_rows.item_of(row, kind) for row in rows]
    stripped = [slow_rows.strip(row) for row in rows]

    clean = remove_padding_in_sequences(items)
    packed = make_experience_batch(items, packing_samples=True)

    expect_rows(clean, stripped)
    expect_rows(items, rows)
    expect_rows(remove_padding_in_sequences(clean), stripped)
    expect_batch(packed, slow_rows.gather_info(stripped), packed=True)
    expect_packing(packed, [len(row["sequences"][1]) for row in stripped])
    expect_rows(split_experience_batch(packed), slow_rows.gather_info(stripped))
    assert_same(make_experience_batch(split_experience_batch(packed), packing_samples=True), packed)


def expect_packing(packed: Experience, lengths: list[int]) -> None:
    starts = [sum(lengths[:row]) for row in range(len(lengths) + 1)]
    positions = [position for length in lengths for position in range(length)]
    expect("cu_seqlens", packed.cu_seqlens, (torch.int32, starts))
    expect("position_ids", packed.position_ids, (torch.int64, [positions]))
    assert packed.max_seqlen == max(lengths)


@given(kind=kinds, sizes=sizes, seed=seeds, packing=st.booleans(), flat=st.booleans())
def test_pixels_stay_with_their_rows_as_in_the_reference(
    kind: Kind, sizes: list[tuple[int, int, int, int]], seed: int, packing: bool, flat: bool
) -> None:
    kind = Kind(**{**kind.__dict__, "vision": True, "missing": kind.missing - {"attention_mask"}})
    rows = made_up(kind, sizes, seed)

    batch = make_experience_batch([slow_rows.item_of(row, kind) for row in rows], packing_samples=packing)

    assert isinstance(batch, ExperienceVL)
    for pixels, grids, count in ((*VISION[:2], "image_num"), (*VISION[2:4], "video_num")):
        counts = [float(len(row[grids][1])) if grids in row else 0.0 for row in rows]
        for name, dtype in ((pixels, kind.floats), (grids, torch.int64)):
            laid_out = [patch for row in rows if name in row for patch in row[name][1]]
            expect(name, getattr(batch, name), (dtype, laid_out) if laid_out else None)
        expect(count, (batch.info or {}).get(count), (torch.float32, counts) if any(counts) else None)
        for row, number in zip(rows, counts, strict=True):
            if any(counts):
                row["info"] = {**row.get("info", {}), count: (torch.float32, number)}
    if flat and batch.raw_images is not None:
        # As a processor gives them: the images of all rows in one list. A list for each row says the same.
        batch.raw_images = [image for images in batch.raw_images for image in images or []]
    expected = slow_rows.gather_info([slow_rows.strip(row) for row in rows]) if packing else slow_rows.pad(rows)
    items = split_experience_batch(batch)
    expect_rows(items, expected)
    again = make_experience_batch(items, packing_samples=packing)
    batch.raw_images = again.raw_images if flat else batch.raw_images
    assert_same(again, batch)
