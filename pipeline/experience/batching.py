"""Split batches of experience into rows, and make batches of rows.

Between a rollout and a trainer a row passes `split_experience_batch`, `remove_padding_in_sequences` and
`make_experience_batch`, in this order. Rows of different lengths are padded with zeros on the LEFT, so that the action
columns of all rows end together and column j of A stays with sequence column S - A + j. No value is guessed: rows with
different fields, and rows whose fields disagree on their length, are refused; the error names the field. `info` may
hold anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pipeline.errors import FieldError, ShapeError
from pipeline.experience.checks import (
    check_alike,
    check_finite,
    check_item,
    check_kinds,
    check_one_kind,
    check_present,
    num_actions,
)
from pipeline.experience.types import (
    ACTION_FIELDS,
    OBJECT_FIELDS,
    SCORE_FIELDS,
    TOKEN_FIELDS,
    BufferItem,
    BufferItemVL,
    Experience,
    ExperienceVL,
)
from pipeline.experience.vision import batch_vision, grids_as_given, split_vision

Item = TypeVar("Item", bound=BufferItem)

_COUNTS = ("image_num", "video_num")
_FIELDS = (*TOKEN_FIELDS, *ACTION_FIELDS, *SCORE_FIELDS, *OBJECT_FIELDS)


def zero_pad_sequences(sequences: list[Tensor], side: str = "left") -> Tensor:
    """Stack 1-D tensors of different lengths, padded with zeros to the longest.

    Args:
        sequences: At least one tensor; each ``(length,)``, all of one dtype.
        side: Side of the zeros, "left" or "right".

    Returns:
        ``(len(sequences), longest)`` of the same dtype.

    Raises:
        AssertionError: If `side` is neither "left" nor "right".
        ShapeError: If there is no sequence, or a sequence is not 1-D.
        FieldError: If a sequence is not a tensor, or its dtype is not that of the first.

    Examples:
        >>> sequences = [torch.tensor([1, 2, 3]), torch.tensor([4, 5]), torch.tensor([6, 7, 8, 9])]
        >>> zero_pad_sequences(sequences, side="right")
        tensor([[1, 2, 3, 0],
                [4, 5, 0, 0],
                [6, 7, 8, 9]])
        >>> zero_pad_sequences(sequences, side="left")
        tensor([[0, 1, 2, 3],
                [0, 0, 4, 5],
                [6, 7, 8, 9]])
    """
    if side not in ("left", "right"):
        raise AssertionError(f'side must be "left" or "right", not {side!r}')
    if not sequences:
        raise ShapeError("no sequences to pad")
    for row, sequence in enumerate(sequences):
        if not isinstance(sequence, Tensor):
            raise FieldError(f"row {row} of sequences is a {type(sequence).__name__}, not a tensor")
        if sequence.dim() != 1:
            raise ShapeError(f"row {row}: a sequence of shape {tuple(sequence.shape)} is not 1-D")
        if sequence.dtype != sequences[0].dtype:
            raise FieldError(f"sequences is {sequence.dtype} in row {row}, {sequences[0].dtype} in row 0")
    return pad_sequence(sequences, batch_first=True, padding_side=side)


def split_experience_batch(experience: Experience) -> list[BufferItem]:
    """Split a batch into one item a row.

    The tensors of the items are views of the batch; pickling an item copies only the item's own bytes.

    Args:
        experience: A batch of B rows, padded or packed; an `ExperienceVL` is split into `BufferItemVL`.

    Returns:
        The rows in batch order; padding is kept (see `remove_padding_in_sequences`). Of a list of B elements and of a
        tensor of B rows in `info` each row has its element; any other value (a str, a number, a tensor without
        dimensions) goes to every row unchanged. Grids are ``(images, 3)``; ``(3,)`` if `info` has no count of them and
        each row has one; the elements of the list if they are a list.

    Raises:
        ShapeError: If the first dimension of a field, or of a tensor in `info`, is not the number of rows, or fields
            other than the masks disagree on their columns.
        FieldError: If a dtype is not allowed for its field, a number under the action mask is NaN or infinite, or
            pixels and grids of a vision-language batch do not match.

    Examples:
        >>> first = BufferItem(sequences=torch.tensor([5, 6, 7]), reward=torch.tensor(1.0))
        >>> second = BufferItem(sequences=torch.tensor([8, 9]), reward=torch.tensor(0.5))
        >>> batch_experience = make_experience_batch([first, second])
        >>> individual_items = split_experience_batch(batch_experience)
        >>> for item in individual_items:
        ...     print(item.sequences, item.reward)
        tensor([5, 6, 7]) tensor(1.)
        tensor([0, 8, 9]) tensor(0.5000)
        >>> sampled_items = individual_items[:1]
        >>> make_experience_batch(sampled_items).sequences
        tensor([[5, 6, 7]])

        `info` of any kind:

        >>> batch_experience.info = {"domain": ["math", "code"], "score": torch.tensor([1.0, 0.5]), "run": 7}
        >>> for item in split_experience_batch(batch_experience):
        ...     print(item.info)
        {'domain': 'math', 'score': tensor(1.), 'run': 7}
        {'domain': 'code', 'score': tensor(0.5000), 'run': 7}
    """
    if not isinstance(experience.sequences, Tensor | list):
        raise FieldError(f"sequences is a {type(experience.sequences).__name__}, not a tensor or a list of tensors")
    batch_size = len(experience.sequences)
    fields = {name: getattr(experience, name) for name in _FIELDS}
    columns = {name: _rows_of(name, value, batch_size) for name, value in fields.items()}
    columns["info"] = _split_info(experience.info, batch_size)
    item_type: type[BufferItem] = BufferItem
    if isinstance(experience, ExperienceVL):
        item_type = BufferItemVL
        columns.update(split_vision(experience, batch_size))
        columns.update(grids_as_given(experience))
    items = [item_type(**{name: rows[row] for name, rows in columns.items()}) for row in range(batch_size)]
    # The rows of a tensor share one shape; the tensors of a list may differ.
    packed = any(isinstance(value, list) for name, value in fields.items() if name not in OBJECT_FIELDS)
    for row, item in enumerate(items if packed else items[:1]):
        # To split needs no width of a mask; `make_experience_batch` and `remove_padding_in_sequences` check them.
        check_item(item, row, masks=False)
    check_finite(fields)
    return items


def make_experience_batch(items: Sequence[BufferItem], packing_samples: bool = False) -> Experience:
    """Make a batch of rows.

    Args:
        items: At least one item, all `BufferItem` or all `BufferItemVL`.
        packing_samples: False pads 1-D fields with zeros on the left and stacks 0-dim ones. True strips the outer
            padding of each row and keeps 1-D fields as lists of one tensor a row, with `cu_seqlens`, `max_seqlen` and
            `position_ids` for a forward pass over the concatenated rows.

    Returns:
        `Experience`, or `ExperienceVL` with the counts of images and videos in `info`. Labels and references become a
        tensor if all rows have tensors of one shape and dtype, else a list. The values of `info` under a name follow
        the same rule; numbers become a tensor too.

    Raises:
        ShapeError: If there are no items, or a row's fields disagree on its length.
        FieldError: If rows have different fields or `info` keys, or different dtypes of a field; if a dtype is not
            allowed for its field; if a number under the action mask is NaN or infinite.

    Examples:
        >>> def row(*tokens, reward):
        ...     return BufferItem(
        ...         sequences=torch.tensor(tokens),
        ...         attention_mask=torch.ones(len(tokens), dtype=torch.int64),
        ...         reward=torch.tensor(reward),
        ...     )
        >>> items = [row(1, 2, 3, reward=0.5), row(4, 5, reward=1.0)]
        >>> batch_exp = make_experience_batch(items, packing_samples=False)
        >>> batch_exp.sequences
        tensor([[1, 2, 3],
                [0, 4, 5]])
        >>> batch_exp.reward
        tensor([0.5000, 1.0000])

        Packed rows, and rows with pixels:

        >>> packed = make_experience_batch(split_experience_batch(batch_exp), packing_samples=True)
        >>> packed.sequences, packed.cu_seqlens, packed.position_ids
        ([tensor([1, 2, 3]), tensor([4, 5])], tensor([0, 3, 5], dtype=torch.int32), tensor([[0, 1, 2, 0, 1]]))
        >>> with_image = BufferItemVL(
        ...     sequences=torch.tensor([1, 2]),
        ...     attention_mask=torch.tensor([1, 1]),
        ...     pixel_values=torch.zeros(4, 3),
        ...     image_grid_thws=torch.tensor([[1, 2, 2]]),
        ... )
        >>> without = BufferItemVL(sequences=torch.tensor([3, 4]), attention_mask=torch.tensor([1, 1]))
        >>> vl_items = [with_image, without]
        >>> batch_vl_exp = make_experience_batch(vl_items, packing_samples=True)
        >>> batch_vl_exp.info
        {'image_num': tensor([1., 0.])}
    """
    if not items:
        raise ShapeError("no items to make a batch of")
    vision = check_kinds(items)
    if packing_samples and items[0].attention_mask is not None:
        check_present("attention_mask", [item.attention_mask for item in items])
        items = remove_padding_in_sequences(items)
    else:
        for row, item in enumerate(items):
            check_item(item, row)
    actions = [num_actions(item) for item in items]
    fields: dict[str, Any] = {}
    for name in _FIELDS:
        values = [getattr(item, name) for item in items]
        if name in SCORE_FIELDS:
            check_one_kind(name, values, actions)
        objects = name in OBJECT_FIELDS
        fields[name] = _batch_objects(name, values) if objects else _batch_field(name, values, packing_samples)
    check_finite(fields)
    fields["info"] = _batch_info([item.info for item in items])
    if packing_samples:
        fields.update(_packing([len(item.sequences) for item in items], items[0].sequences.device))
    if not vision:
        return Experience(**fields)
    vision_fields, counts = batch_vision(cast("list[BufferItemVL]", list(items)))
    if counts:
        fields["info"] = {**(fields["info"] or {}), **counts}
    return ExperienceVL(**fields, **vision_fields)


def remove_padding_in_sequences(items: Sequence[Item]) -> list[Item]:
    """Strip the padding at both ends of each row.

    A token is padding if it is in neither mask. Only the outer runs of padding are removed, so that masks with holes
    (tool output that the actor did not write) are kept. Action columns are removed with their tokens, and so are those
    left of the first action.

    Args:
        items: Rows of a padded batch, or rows already stripped, which are returned unchanged.

    Returns:
        New items in the same order; their tensors are views of the given ones. 0-dim fields, and fields with one
        number a row, are unchanged.

    Raises:
        ShapeError: If a row has no tokens, or its fields disagree on its length.
        FieldError: If a row has no attention mask: no other field distinguishes padding from a token. If a field is not
            a tensor, or its dtype is not allowed for the field.

    Examples:
        LightRFT's own example, whose code gives ``tensor([1])``: it counts every zero of the action mask, at
        any position.

        >>> real = torch.tensor([0, 0, 1, 1, 1, 0, 0])
        >>> padded_items = [
        ...     BufferItem(
        ...         sequences=torch.tensor([0, 0, 1, 2, 3, 0, 0]),
        ...         action_log_probs=real * -0.5,
        ...         attention_mask=real,
        ...         action_mask=real.bool(),
        ...     )
        ... ]
        >>> clean_items = remove_padding_in_sequences(padded_items)
        >>> clean_items[0].sequences
        tensor([1, 2, 3])
        >>> clean_items[0].action_log_probs
        tensor([-0.5000, -0.5000, -0.5000])
        >>> padded_vl_items = [
        ...     BufferItemVL(
        ...         sequences=torch.tensor([0, 0, 4, 5, 6, 0]), attention_mask=torch.tensor([0, 0, 1, 1, 1, 0])
        ...     )
        ... ]
        >>> clean_vl_items = remove_padding_in_sequences(padded_vl_items)
        >>> clean_vl_items[0].sequences
        tensor([4, 5, 6])
    """
    check_kinds(items)
    for row, item in enumerate(items):
        check_item(item, row)
        if item.attention_mask is None:
            raise FieldError(
                f"row {row}: attention_mask is None; without it padding cannot be distinguished from tokens"
            )
    return [_cut_item(item, *columns) for item, columns in zip(items, _kept_columns(items), strict=True)]


def _kept_columns(items: Sequence[BufferItem]) -> list[tuple[int, int, int, int]]:
    """Return for each row the first kept token and the one after the last, and the same of its actions."""
    if not items:
        return []
    no_actions = items[0].sequences.new_empty(0, dtype=torch.bool)
    # Padded on the left: action columns end with their tokens, in rows of every length.
    attended = zero_pad_sequences([cast("Tensor", item.attention_mask) != 0 for item in items])  # (B, S)
    acted = zero_pad_sequences(
        [no_actions if item.action_mask is None else item.action_mask != 0 for item in items]
    )  # (B, A)
    width, action_width = attended.shape[1], acted.shape[1]
    real = attended.clone()
    real[:, width - action_width :] |= acted
    # argmax returns the first of equal elements.
    starts, ends = real.byte().argmax(dim=1).tolist(), (width - real.flip(1).byte().argmax(dim=1)).tolist()
    # An action outside the attention mask is not a token either.
    any_real = attended.any(dim=1).tolist()
    firsts, any_action = [-1] * len(items), [False] * len(items)
    if action_width:
        firsts, any_action = acted.byte().argmax(dim=1).tolist(), acted.any(dim=1).tolist()
    kept = []
    for row, item in enumerate(items):
        length, actions = len(item.sequences), num_actions(item)
        if not any_real[row]:
            raise ShapeError(f"row {row}: attention_mask of {length} columns has no real token")
        start, end = starts[row] - (width - length), ends[row] - (width - length)
        first = firsts[row] - (action_width - actions) if any_action[row] else max(0, start - (length - actions))
        kept.append((start, end, first, max(first, actions - (length - end))))
    return kept


def _cut_item(item: Item, start: int, end: int, first: int, last: int) -> Item:
    actions = num_actions(item)
    changes: dict[str, Any] = {}
    for name in (*TOKEN_FIELDS, *ACTION_FIELDS, *SCORE_FIELDS):
        value = getattr(item, name)
        if name in TOKEN_FIELDS:
            changes[name] = value[start:end]
        elif value is not None and value.shape == (actions,):
            changes[name] = value[first:last]
    return dataclasses.replace(item, **changes)


def _rows_of(name: str, value: Any, batch_size: int) -> Sequence[Any]:
    if value is None:
        return [None] * batch_size
    if not isinstance(value, Tensor | list):
        raise FieldError(f"{name} is a {type(value).__name__}, not one element for each of {batch_size} rows")
    if isinstance(value, Tensor) and value.dim() == 0:
        raise ShapeError(f"{name} is 0-dim, the batch has {batch_size} rows")
    if len(value) != batch_size:
        raise ShapeError(f"{name} has {len(value)} rows, sequences has {batch_size}")
    return value.unbind(0) if isinstance(value, Tensor) else value


def _split_info(info: dict[str, Any] | None, batch_size: int) -> list[dict[str, Any] | None]:
    if info is None:
        return [None] * batch_size
    columns = {key: _info_rows(key, value, batch_size) for key, value in info.items()}
    return [{key: rows[row] for key, rows in columns.items()} for row in range(batch_size)]


def _info_rows(key: str, value: Any, batch_size: int) -> Sequence[Any]:
    """Return one element a row: of a tensor or of a list as long as the batch; any other value for each row."""
    if isinstance(value, Tensor) and value.dim():
        return _rows_of(f"info[{key!r}]", value, batch_size)
    if isinstance(value, list) and len(value) == batch_size:
        return value
    if key in _COUNTS and isinstance(value, tuple | np.ndarray) and len(value) == batch_size:
        return list(value)
    return [value] * batch_size


def _batch_field(name: str, values: list[Tensor | None], packing: bool) -> Tensor | list[Tensor] | None:
    if not check_present(name, values):
        return None
    tensors = cast("list[Tensor]", values)
    check_alike(name, tensors)
    if tensors[0].dim() == 0:
        return torch.stack(tensors)
    return tensors if packing else zero_pad_sequences(tensors, "left")


def _batch_objects(name: str, values: list[Any]) -> Tensor | list[Any] | None:
    if not check_present(name, values):
        return None
    if all(isinstance(value, Tensor) for value in values) and len({(v.shape, v.dtype) for v in values}) == 1:
        return torch.stack(values)
    return values


def _batch_info(rows: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    if not check_present("info", rows):
        return None
    infos = cast("list[dict[str, Any]]", rows)
    for row, info in enumerate(infos):
        # Keys may be of types that have no order.
        for key in sorted(info.keys() ^ infos[0].keys(), key=repr):
            present, missing = (row, 0) if key in info else (0, row)
            raise FieldError(f"info[{key!r}] is in row {present}, not in row {missing}")
    return {key: _gather_info([info[key] for info in infos]) for key in infos[0]}


def _gather_info(values: list[Any]) -> Tensor | list[Any]:
    """Return a tensor of numbers or of tensors of one shape and dtype; a list of any other values."""
    if not all(
        isinstance(value, Tensor | bool | int | float | np.integer | np.floating | np.bool_) for value in values
    ):
        return values
    try:
        if not any(isinstance(value, Tensor) for value in values):
            return torch.tensor(values)
        tensors = [value if isinstance(value, Tensor) else torch.tensor(value) for value in values]
    except (OverflowError, RuntimeError, TypeError, ValueError):
        # torch has no integer of more than 63 bits.
        return values
    first = tensors[0]
    if any((each.shape, each.dtype, each.device) != (first.shape, first.dtype, first.device) for each in tensors):
        return values
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
