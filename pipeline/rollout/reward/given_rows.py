"""The rows of a call of rewards, as reward functions and models get them, and as bytes for another process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import torch
from torch import Tensor

from pipeline.experience.vision_rows import MODEL_KEYWORDS, VisionRows

_TENSORS: Final = ("input_ids", "attention_mask", "response_start", "response_end")


class GivenRows(NamedTuple):
    """The rows of a call; see `pipeline.rollout.reward.row_rewards.RowRewards.__call__`."""

    input_ids: Tensor
    attention_mask: Tensor
    response_start: Tensor
    response_end: Tensor
    gt_answer: Sequence[Any]
    vision: VisionRows | None = None
    columns: Sequence[Mapping[str, Any]] | None = None

    def part(self, rows: slice) -> GivenRows:
        """Return some of the rows, sharing their memory."""
        tensors: dict[str, Any] = {name: getattr(self, name)[rows] for name in _TENSORS}
        return GivenRows(
            **tensors,
            gt_answer=self.gt_answer[rows],
            vision=None if self.vision is None else self.vision.rows(rows),
            columns=None if self.columns is None else self.columns[rows],
        )


class PackedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor as bytes."""

    dtype: str
    shape: list[int]
    data: bytes


class PackedRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows for another process: their tensors by name, and the other values as JSON."""

    tensors: dict[str, PackedTensor]
    values: str


def packed(rows: GivenRows) -> PackedRows:
    """Return rows for another process."""
    tensors = {name: _packed_tensor(getattr(rows, name)) for name in _TENSORS}
    raw_images = None
    if rows.vision is not None:
        raw_images = rows.vision.raw_images
        for name in MODEL_KEYWORDS:
            pixels = enumerate(getattr(rows.vision, name))
            tensors |= {f"{name}.{row}": _packed_tensor(tensor) for row, tensor in pixels if tensor is not None}
    return PackedRows(tensors, json.dumps([list(rows.gt_answer), rows.columns, raw_images]))


def unpacked(given: PackedRows) -> GivenRows:
    """Return the rows that another process has packed."""
    tensors = {
        name: torch.frombuffer(bytearray(one.data), dtype=getattr(torch, one.dtype)).reshape(one.shape)
        for name, one in given.tensors.items()
    }
    gt_answer, columns, raw_images = json.loads(given.values)
    vision = None
    if raw_images is not None:
        rows = range(len(gt_answer))
        fields: dict[str, Any] = {name: [tensors.get(f"{name}.{row}") for row in rows] for name in MODEL_KEYWORDS}
        vision = VisionRows(**fields, raw_images=raw_images)
    of_tokens: dict[str, Any] = {name: tensors[name] for name in _TENSORS}
    return GivenRows(**of_tokens, gt_answer=gt_answer, vision=vision, columns=columns)


def _packed_tensor(tensor: Tensor) -> PackedTensor:
    data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return PackedTensor(str(tensor.dtype).removeprefix("torch."), list(tensor.shape), data)
