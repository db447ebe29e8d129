"""Mistakes of the originals in rows and batches: one test a mistake, which fails on the original's result.

`tests/rollout/test_original_mistakes.py` has the mistakes of the maker, and the behaviour that is kept.
"""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.errors import FieldError
from pipeline.experience.batching import make_experience_batch, remove_padding_in_sequences, split_experience_batch
from pipeline.experience.types import BufferItem, BufferItemVL
from tests.support.items import item_of, vl_item


def rows(value: Tensor | None) -> list[Any]:
    assert value is not None
    result: list[Any] = value.tolist()
    return result


def test_row_ragged_and_none_fields_cannot_be_batched_again() -> None:
    """torch.stack, which the original uses for fields it does not pad, refuses both."""
    items = [dataclasses.replace(item_of(1, actions), action_mask=None, attention_mask=None) for actions in (2, 3)]
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        torch.stack([item.sequences for item in items])

    batch = make_experience_batch(items)

    assert rows(batch.kl) == [[0.0, 0.125, 0.25], [0.125, 0.25, 0.375]]
    assert batch.sequences.tolist() == [[0, 1, 2, 3], [1, 2, 3, 4]]
    assert rows(batch.reward) == [1.0, 1.0]
    assert batch.action_mask is batch.attention_mask is None


def test_row_vision_items_lose_their_counts() -> None:
    """Without counts the original gives one image to each of the two rows."""
    batch = make_experience_batch([vl_item(2), vl_item(0, base=2)])

    again = make_experience_batch(split_experience_batch(batch))
    first, second = split_experience_batch(again)

    assert isinstance(first, BufferItemVL)
    assert isinstance(second, BufferItemVL)
    assert again.info is not None
    assert again.info["image_num"].dtype == torch.float32
    assert again.info["image_num"].tolist() == [2.0, 0.0] != [1.0, 1.0]
    assert first.pixel_values is not None
    assert (len(first.pixel_values), second.pixel_values) == (8, None)


def original_strip(item: BufferItem) -> list[int]:
    """LightRFT's arithmetic: as many tokens off the right end as the action mask has zeros."""
    assert item.action_mask is not None
    assert item.attention_mask is not None
    right_pad = int((1 - item.action_mask.long()).sum())
    left_pad = int(item.attention_mask.long().argmax())
    return item.sequences[left_pad : len(item.sequences) - right_pad].tolist()


def padded_item(tokens: list[int], attention: list[int], actions: list[int]) -> BufferItem:
    return BufferItem(
        sequences=torch.tensor(tokens), attention_mask=torch.tensor(attention), action_mask=torch.tensor(actions).bool()
    )


@pytest.mark.parametrize(
    ("item", "right", "original"),
    [
        (padded_item([0, 0, 1, 2, 3, 0, 0], [0, 0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0, 0]), [1, 2, 3], [1]),
        (padded_item([0, 0, 5, 6, 7], [0, 0, 1, 1, 1], [0, 1, 1]), [5, 6, 7], [5, 6]),
        (padded_item([5, 6, 7, 8, 9], [1, 1, 1, 1, 1], [1, 0, 1]), [5, 6, 7, 8, 9], [5, 6, 7, 8]),
    ],
    ids=["LightRFT's own example", "padded on the left", "tool output in the middle"],
)
def test_row_every_zero_of_the_action_mask_counts_as_padding(
    item: BufferItem, right: list[int], original: list[int]
) -> None:
    (clean,) = remove_padding_in_sequences([item])

    assert clean.sequences.tolist() == right
    assert original_strip(item) == original != right


def test_row_empty_masks_missing_masks_and_scalars() -> None:
    item = item_of(2, 2)
    scalars = dataclasses.replace(item, values=torch.tensor([0.5]), advantages=torch.tensor(2.0), action_mask=None)

    (clean,) = remove_padding_in_sequences([scalars])

    assert (rows(clean.values), rows(clean.advantages)) == ([0.5], 2.0)
    assert clean.action_mask is None
    with pytest.raises(ValueError, match="row 0: attention_mask of 3 columns has no real token"):
        remove_padding_in_sequences([padded_item([0, 0, 0], [0, 0, 0], [0, 0])])


@pytest.mark.parametrize("first", [0, 1])
def test_row_the_first_item_decides(first: int) -> None:
    """The original looks at item 0 alone: None there drops the field, or the info key, of all."""
    full, bare = item_of(2, 2), dataclasses.replace(item_of(2, 2), kl=None)
    other = dataclasses.replace(full, info={"score": torch.tensor(1.0), "turns": torch.tensor(2)})

    with pytest.raises(FieldError, match=f"kl is None in row {first}"):
        make_experience_batch([full, bare] if first else [bare, full])
    with pytest.raises(FieldError, match=rf"info\['turns'\] is in row {first}, not in row {1 - first}"):
        make_experience_batch([full, other] if first else [other, full])


def test_row_packing_still_pads_ragged_entropy() -> None:
    items = [dataclasses.replace(item_of(1, n), action_entropy=torch.ones(n)) for n in (2, 3)]

    entropy: Any = make_experience_batch(items, packing_samples=True).action_entropy

    assert isinstance(entropy, list)
    assert [row.tolist() for row in entropy] == [[1.0, 1.0], [1.0, 1.0, 1.0]]


def test_row_to_device_forgets_base_log_probs_kl_and_info() -> None:
    batch = make_experience_batch([dataclasses.replace(vl_item(1), returns=torch.tensor(1.0), labels=torch.tensor(1))])

    batch.to_device("meta")

    tensors = {
        name: value for name, value in {**batch.__dict__, **(batch.info or {})}.items() if torch.is_tensor(value)
    }
    assert {value.device.type for value in tensors.values()} == {"meta"}
    assert {"base_action_log_probs", "kl", "score", "labels", "pixel_values", "image_num"} <= tensors.keys()


def test_row_a_pickled_item_carries_all_64() -> None:
    """Pickling a view copies its storage: 64 rows of 500 ids of 8 bytes. The item itself has 500 of them."""
    batch = make_experience_batch([item_of(100, 400, base=row) for row in range(64)])
    item = split_experience_batch(batch)[0]
    original = len(pickle.dumps(item.sequences))

    own = len(pickle.dumps(item))

    assert original > 64 * 500 * 8
    assert own < original / 8
    assert item.sequences.untyped_storage().data_ptr() == batch.sequences.untyped_storage().data_ptr()


def test_row_pixels_beyond_or_without_grids_are_dropped() -> None:
    item = vl_item(1)

    with pytest.raises(ValueError, match="row 0: pixel_values has 9 rows, image_grid_thws accounts for 4"):
        make_experience_batch([dataclasses.replace(item, pixel_values=torch.zeros(9, 3))])
    with pytest.raises(ValueError, match="row 0: image_grid_thws is None, pixel_values is not"):
        make_experience_batch([dataclasses.replace(item, image_grid_thws=None)])
