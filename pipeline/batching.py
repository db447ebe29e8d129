"""Batches of experience taken apart into rows, and rows put together into batches.

`split_experience_batch` -> `remove_padding_in_sequences` -> `make_experience_batch` is what happens to a row between a
rollout and a trainer. Rows of different lengths are padded with zeros on the LEFT, so that the action columns of all
rows end together and column j of A stays with sequence column S - A + j. Nothing is guessed: rows that disagree on
which fields they have, or whose fields disagree on their length, are refused by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.errors import FieldError, ShapeError
from pipeline.experience import (
    ACTION_FIELDS,
    OBJECT_FIELDS,
    SCORE_FIELDS,
    TOKEN_FIELDS,
    BufferItem,
    BufferItemVL,
    Experience,
    ExperienceVL,
)
from pipeline.vision import batch_vision, split_vision

Item = TypeVar("Item", bound=BufferItem)


def zero_pad_sequences(sequences: list[Tensor], side: str = "left") -> Tensor:
    """Stack 1-D tensors of different lengths, padded with zeros to the longest.

    Args:
        sequences: At least one tensor; each ``(length,)``, all of one dtype.
        side: Where the zeros go, "left" or "right".

    Returns:
        ``(len(sequences), longest)`` of the same dtype.

    Raises:
        AssertionError: If `side` is neither "left" nor "right".
        ShapeError: If there is no sequence, or one is not 1-D.
    """
    if side not in ("left", "right"):
        raise AssertionError(f'side must be "left" or "right", not {side!r}')
    if not sequences:
        raise ShapeError("no sequences to pad")
    for row, sequence in enumerate(sequences):
        if sequence.dim() != 1:
            raise ShapeError(f"row {row}: a sequence of shape {tuple(sequence.shape)} is not 1-D")
    longest = max(len(sequence) for sequence in sequences)
    if all(len(sequence) == longest for sequence in sequences):
        return torch.stack(sequences)
    if side == "left":
        return torch.stack([functional.pad(sequence, (longest - len(sequence), 0)) for sequence in sequences])
    return torch.stack([functional.pad(sequence, (0, longest - len(sequence))) for sequence in sequences])


def split_experience_batch(experience: Experience) -> list[BufferItem]:
    """Take a batch apart into one item a row.

    The tensors of the items are views of the batch; pickling an item copies its own bytes only.

    Args:
        experience: A batch, padded or packed; `ExperienceVL` gives `BufferItemVL`.

    Returns:
        The rows in batch order; padding stays where it is (see `remove_padding_in_sequences`).

    Raises:
        ShapeError: If the first dimension of a field is not the number of rows.
        FieldError: If pixels and grids of a vision-language batch do not belong together.
    """
    batch_size = len(experience.sequences)
    columns = {
        name: _rows_of(name, getattr(experience, name), batch_size)
        for name in (*TOKEN_FIELDS, *ACTION_FIELDS, *SCORE_FIELDS, *OBJECT_FIELDS)
    }
    columns["info"] = _split_info(experience.info, batch_size)
    item_type: type[BufferItem] = BufferItem
    if isinstance(experience, ExperienceVL):
        item_type = BufferItemVL
        columns.update(split_vision(experience, batch_size))
    return [item_type(**{name: rows[row] for name, rows in columns.items()}) for row in range(batch_size)]


def make_experience_batch(items: Sequence[BufferItem], packing_samples: bool = False) -> Experience:
    """Put rows together into a batch.

    Args:
        items: At least one item, all `BufferItem` or all `BufferItemVL`.
        packing_samples: False pads 1-D fields with zeros on the left and stacks 0-dim ones. True strips the outer
            padding of each row and keeps 1-D fields as lists of one tensor a row, with `cu_seqlens`, `max_seqlen` and
            `position_ids` for a forward pass over the rows laid end to end.

    Returns:
        `Experience`, or `ExperienceVL` with the counts of images and videos in `info`.

    Raises:
        ShapeError: If there are no items, or a row's fields disagree on its length.
        FieldError: If rows disagree on which fields or `info` keys they have, or on a field's dtype.
    """
    if not items:
        raise ShapeError("no items to make a batch of")
    vision_rows = [item for item in items if isinstance(item, BufferItemVL)]
    if vision_rows and len(vision_rows) != len(items):
        raise FieldError(f"{len(vision_rows)} of {len(items)} items are BufferItemVL; a batch is of one kind")
    if packing_samples:
        items = [item if item.attention_mask is None else _strip(item, row) for row, item in enumerate(items)]
    for row, item in enumerate(items):
        _check_lengths(item, row)
    for name in SCORE_FIELDS:
        _check_one_kind(name, items)
    fields: dict[str, Any] = {
        name: _batch_field(name, [getattr(item, name) for item in items], packing_samples)
        for name in (*TOKEN_FIELDS, *ACTION_FIELDS, *SCORE_FIELDS)
    }
    for name in OBJECT_FIELDS:
        fields[name] = _batch_objects(name, [getattr(item, name) for item in items], packing_samples)
    fields["info"] = _batch_info([item.info for item in items])
    if packing_samples:
        fields.update(_packing([len(item.sequences) for item in items], items[0].sequences.device))
    if not vision_rows:
        return Experience(**fields)
    vision, counts = batch_vision(vision_rows)
    if counts:
        fields["info"] = {**(fields["info"] or {}), **counts}
    return ExperienceVL(**fields, **vision)


def remove_padding_in_sequences(items: Sequence[Item]) -> list[Item]:
    """Strip the padding at both ends of each row.

    A token is padding where neither mask has it; only the outer runs go, so that masks with holes (tool output that
    the actor did not write) survive. Action columns go with their tokens, and so do those left of the first action.

    Args:
        items: Rows of a padded batch, or rows already stripped, which come back as they are.

    Returns:
        New items in the same order; their tensors are views of the given ones. 0-dim fields, and fields with one
        number a row, are kept.

    Raises:
        ShapeError: If a row has no tokens, or its fields disagree on its length.
        FieldError: If a row has no attention mask: nothing else tells padding from a token.
    """
    stripped = []
    for row, item in enumerate(items):
        _check_lengths(item, row)
        stripped.append(_strip(item, row))
    return stripped


def _strip(item: Item, row: int) -> Item:
    if item.attention_mask is None:
        raise FieldError(f"row {row}: attention_mask is None; without it padding cannot be told from tokens")
    length, num_actions = len(item.sequences), _num_actions(item)
    real = item.attention_mask != 0
    if item.action_mask is not None:
        real = real.clone()
        real[length - num_actions :] |= item.action_mask != 0
    columns = real.nonzero()
    if len(columns) == 0:
        raise ShapeError(f"row {row}: attention_mask of {length} columns has no real token")
    start, end = int(columns[0]), int(columns[-1]) + 1
    # The first action column that stays, and the one after the last, counted within the A action columns.
    first = max(0, start - (length - num_actions))
    last = num_actions - (length - end)
    if item.action_mask is not None and bool(item.action_mask.any()):
        first = int(item.action_mask.nonzero()[0])
    changes: dict[str, Any] = {name: _cut(getattr(item, name), start, end) for name in TOKEN_FIELDS}
    for name in (*ACTION_FIELDS, *SCORE_FIELDS):
        value = getattr(item, name)
        if value is not None and value.dim() == 1 and len(value) == num_actions:
            changes[name] = _cut(value, first, max(first, last))
    return dataclasses.replace(item, **changes)


def _cut(value: Tensor | None, start: int, end: int) -> Tensor | None:
    return None if value is None else value[start:end]


def _num_actions(item: BufferItem) -> int:
    for name in ("action_mask", "action_log_probs", "base_action_log_probs", "action_entropy"):
        value = getattr(item, name)
        if value is not None:
            return len(value)
    # Without any per-action field the longest score says how many columns there are.
    scores = [getattr(item, name) for name in SCORE_FIELDS]
    return max([len(value) for value in scores if value is not None and value.dim() == 1], default=0)


def _check_lengths(item: BufferItem, row: int) -> None:
    for name in (*TOKEN_FIELDS, *ACTION_FIELDS):
        value = getattr(item, name)
        if value is not None and value.dim() != 1:
            raise ShapeError(f"row {row}: {name} of shape {tuple(value.shape)} is not 1-D")
    length, num_actions = len(item.sequences), _num_actions(item)
    if length == 0:
        raise ShapeError(f"row {row}: sequences has no tokens")
    if num_actions > length:
        raise ShapeError(f"row {row}: {num_actions} action columns do not fit into sequences of {length} tokens")
    if item.attention_mask is not None and len(item.attention_mask) != length:
        raise ShapeError(f"row {row}: attention_mask has {len(item.attention_mask)} columns, sequences has {length}")
    for name in (*ACTION_FIELDS, *SCORE_FIELDS):
        value = getattr(item, name)
        if value is None or (name in SCORE_FIELDS and (value.dim() == 0 or value.shape == (1,))):
            continue
        if value.shape != (num_actions,):
            raise ShapeError(f"row {row}: {name} has shape {tuple(value.shape)}, the row has {num_actions} actions")


def _check_one_kind(name: str, items: Sequence[BufferItem]) -> None:
    """Refuse a field that is one number in some rows and one an action in others; padding would hide the mistake."""
    counts = {
        row: _num_actions(item)
        for row, item in enumerate(items)
        if (value := getattr(item, name)) is not None and value.dim() == 1 and len(value) != _num_actions(item)
    }
    for row, item in enumerate(items):
        value = getattr(item, name)
        if counts and value is not None and value.shape != (1,):
            raise ShapeError(
                f"{name} has shape {tuple(value.shape)} in row {row}, (1,) in row {min(counts)} "
                f"of {counts[min(counts)]} actions"
            )


def _rows_of(name: str, value: Tensor | list[Any] | None, batch_size: int) -> Sequence[Any]:
    if value is None:
        return [None] * batch_size
    if isinstance(value, Tensor) and value.dim() == 0:
        raise ShapeError(f"{name} is 0-dim, the batch has {batch_size} rows")
    if len(value) != batch_size:
        raise ShapeError(f"{name} has {len(value)} rows, sequences has {batch_size}")
    return value.unbind(0) if isinstance(value, Tensor) else value


def _split_info(info: dict[str, Tensor] | None, batch_size: int) -> list[dict[str, Any] | None]:
    if info is None:
        return [None] * batch_size
    columns = {key: _rows_of(f"info[{key!r}]", value, batch_size) for key, value in info.items()}
    return [{key: rows[row] for key, rows in columns.items()} for row in range(batch_size)]


def _present(name: str, values: Sequence[Any]) -> bool:
    """Tell whether the rows have this field; refuse rows that disagree."""
    missing = [row for row, value in enumerate(values) if value is None]
    if missing and len(missing) != len(values):
        raise FieldError(f"{name} is None in row {missing[0]} and in {len(missing)} of {len(values)} rows, not in all")
    return not missing


def _batch_field(name: str, values: list[Tensor | None], packing: bool) -> Tensor | list[Tensor] | None:
    if not _present(name, values):
        return None
    tensors = [value for value in values if value is not None]
    first = tensors[0]
    for row, tensor in enumerate(tensors):
        if tensor.dtype != first.dtype:
            raise FieldError(f"{name} is {tensor.dtype} in row {row}, {first.dtype} in row 0")
        if tensor.dim() != first.dim():
            raise ShapeError(f"{name} has shape {tuple(tensor.shape)} in row {row}, {tuple(first.shape)} in row 0")
    if first.dim() == 0:
        return torch.stack(tensors)
    return tensors if packing else zero_pad_sequences(tensors, "left")


def _batch_objects(name: str, values: list[Any], packing: bool) -> Tensor | list[Any] | None:
    if not _present(name, values):
        return None
    if all(isinstance(value, Tensor) and value.dim() <= 1 for value in values):
        return _batch_field(name, values, packing)
    return values


def _batch_info(rows: list[dict[str, Any] | None]) -> dict[str, Tensor] | None:
    if not _present("info", rows):
        return None
    infos = [row for row in rows if row is not None]
    keys = list(infos[0])
    for row, info in enumerate(infos):
        if info.keys() != infos[0].keys():
            differing = sorted(info.keys() ^ infos[0].keys())
            raise FieldError(f"info[{differing[0]!r}] is in row 0 or in row {row}, not in both")
    return {key: _stack_info(f"info[{key!r}]", [info[key] for info in infos]) for key in keys}


def _stack_info(name: str, values: list[Any]) -> Tensor:
    if not any(isinstance(value, Tensor) for value in values):
        return torch.tensor(values)
    tensors = [value if isinstance(value, Tensor) else torch.tensor(value) for value in values]
    if tensors[0].dim() == 1:
        batched = _batch_field(name, list(tensors), packing=False)
        assert isinstance(batched, Tensor)
        return batched
    for row, tensor in enumerate(tensors):
        if tensor.dtype != tensors[0].dtype:
            raise FieldError(f"{name} is {tensor.dtype} in row {row}, {tensors[0].dtype} in row 0")
        if tensor.shape != tensors[0].shape:
            raise ShapeError(f"{name} has shape {tuple(tensor.shape)} in row {row}, {tuple(tensors[0].shape)} in row 0")
    return torch.stack(tensors)


def _packing(lengths: list[int], device: torch.device) -> dict[str, Any]:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    starts = ends[:-1].repeat_interleave(torch.tensor(lengths))
    position_ids = torch.arange(int(ends[-1])) - starts
    return {
        "cu_seqlens": ends.to(torch.int32).to(device),
        "max_seqlen": max(lengths),
        "position_ids": position_ids.unsqueeze(0).to(device),
    }
