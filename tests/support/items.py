"""Rows made by hand for tests of batches, how a maker pads them, and equality of all their fields."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from pipeline.experience.types import BufferItem, BufferItemVL


def item_of(prompt: int, actions: int, *, ppo: bool = True, base: int = 1) -> BufferItem:
    """An unpadded row whose token ids and floats all differ."""
    length = prompt + actions
    per_action = torch.arange(actions, dtype=torch.float32) + base
    return BufferItem(
        sequences=torch.arange(length) + base,
        action_log_probs=-per_action,
        values=per_action * 2 if ppo else torch.tensor(base / 2),
        reward=torch.tensor(float(base)),
        kl=per_action / 8 if ppo else torch.tensor(base / 8),
        advantages=per_action * 3 if ppo else torch.tensor(base / 4),
        attention_mask=torch.ones(length, dtype=torch.int64),
        action_mask=torch.ones(actions, dtype=torch.bool),
        base_action_log_probs=-per_action - 0.5,
        info={"score": torch.tensor(base * 1.5)},
    )


def pad(item: BufferItem, left: int, right: int) -> BufferItem:
    """The row as a maker leaves it: the prompt padded on the left, the response on the right."""

    def both(value: Tensor | None) -> Any:
        return None if value is None else torch.nn.functional.pad(value, (left, right))

    def response(value: Tensor | None) -> Any:
        return value if value is None or value.dim() == 0 else torch.nn.functional.pad(value, (0, right))

    names = ("action_log_probs", "base_action_log_probs", "action_mask", "values", "kl", "advantages")
    changes: dict[str, Any] = {name: response(getattr(item, name)) for name in names}
    changes.update(sequences=both(item.sequences), attention_mask=both(item.attention_mask))
    return dataclasses.replace(item, **changes)


def assert_same(first: object, second: object) -> None:
    """Every field of two experiences or items is equal, dtypes included."""
    assert type(first) is type(second)
    for field in dataclasses.fields(first):  # type: ignore[arg-type]
        assert_equal(field.name, getattr(first, field.name), getattr(second, field.name))


def assert_equal(name: str, one: object, other: object) -> None:
    if isinstance(one, Tensor):
        assert isinstance(other, Tensor), name
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), name
    elif isinstance(one, dict):
        assert isinstance(other, dict), name
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(f"{name}[{key}]", one[key], other[key])
    elif isinstance(one, list):
        assert isinstance(other, list), name
        assert len(one) == len(other), name
        for left, right in zip(one, other, strict=True):
            assert_equal(name, left, right)
    else:
        assert one == other, name


def vl_item(images: int, videos: int = 0, *, base: int = 1) -> BufferItemVL:
    """A row with images of 2 x 2 patches each and videos of 3 x 1 x 2."""
    item = item_of(2, 2, base=base)
    fields = {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
    return BufferItemVL(
        **fields,
        pixel_values=torch.arange(images * 4 * 3).reshape(-1, 3) + 100.0 * base if images else None,
        image_grid_thws=torch.tensor([[1, 2, 2]] * images) if images else None,
        pixel_values_videos=torch.arange(videos * 6 * 3).reshape(-1, 3) + 500.0 * base if videos else None,
        video_grid_thws=torch.tensor([[3, 1, 2]] * videos) if videos else None,
        raw_images=[f"image {base}.{number}" for number in range(images)] if images else None,
    )
