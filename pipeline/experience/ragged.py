"""RaggedRows: rows laid end to end, without padding; the form of experience from the maker to the trainer's batch.

    sequences         | row 0 . . . . . . | row 1 . . . . | row 2 . . . . . . . |    (T,)  one value a token
    action_log_probs  |       row 0 . . . |     row 1 . . |   row 2 . . . . . . |    (N,)  one value an action
    reward            | 0 | 1 | 2 |                                                  (B,)  one value a row

The actions of a row are its last columns, up to its last token. A mask that is 1 in all columns of its rows has no
values: the lengths determine it. A mask with holes, such as an action mask over a tool's tokens, has them.

Padding exists at two doors: `RaggedRows.of` takes a padded `Experience`, `in_columns`, `padded` and `pad` make one.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import FieldError, ShapeError
from pipeline.experience.extent_format import (
    Array,
    Columns,
    FieldHeader,
    Fields,
    array_dtype,
    as_array,
    as_tensor,
    field_headers,
    lay_out,
)
from pipeline.experience.field_arrays import TEXT_FIELDS, field_arrays
from pipeline.experience.row_spans import Spans
from pipeline.experience.tensor_pool import MEMORY
from pipeline.experience.types import Experience, ExperienceVL
from pipeline.experience.vision_rows import PIXELS, VisionRows

# Up to this width a mask over all columns costs less than one slice a row.
_SHORT_COLUMNS = 48


@dataclass(frozen=True, eq=False)
class RaggedRows:
    """B rows with T tokens, of which N are actions, end to end; the form of `Connection.experiences(ragged=True)`.

    `tensors` has the values. The tokens of row i are ``tensors["sequences"][starts("S")[i] : starts("S")[i + 1]]``. Its
    last ``counts[i]`` tokens are its actions; ``starts("A")`` has the first value of each row in a field with a number
    an action. ``starts("S")``, as an int32 tensor, is `cu_seqlens` of a variable-length kernel. `padded` returns the
    rows as an `Experience`.

    Attributes:
        fields: The fields by the names of `Experience`, ``info.`` before those of `info`.
        lengths: Tokens of each row.
        counts: Actions of each row.
        full_masks: The masks of the experience that have no values.
        stacks: The values of neighbouring fields of one kind, ``(fields, T)``, ``(fields, N)`` or ``(fields, B, ...)``.
        vision: Images and videos of the rows; those of one prompt share their pixels. None for text alone.
        block: The memory of stacks, uint8, from which one copy moves them to a card; None if they lie elsewhere.
        moved: The values of the fields on a card, by name; None if they were not moved.
        moved_vision: `vision` with the pixels on a card; None if they were not moved.

    Examples:
        >>> rows = RaggedRows.of(
        ...     Experience(
        ...         sequences=torch.tensor([[5, 6, 7], [0, 8, 9]]),
        ...         attention_mask=torch.tensor([[1, 1, 1], [0, 1, 1]]),
        ...         action_mask=torch.tensor([[True, True], [False, True]]),
        ...         action_log_probs=torch.tensor([[-0.5, -0.25], [0.0, -1.0]]),
        ...         reward=torch.tensor([1.0, 0.0]),
        ...     )
        ... )
        >>> len(rows), rows.lengths, rows.counts, rows.starts("S"), rows.starts("A")
        (2, [3, 2], [2, 1], [0, 3, 5], [0, 2, 3])
        >>> {name: values.tolist() for name, values in rows.tensors.items()}
        {'sequences': [5, 6, 7, 8, 9], 'action_log_probs': [-0.5, -0.25, -1.0], 'reward': [1.0, 0.0]}
        >>> rows.padded().action_log_probs
        tensor([[-0.5000, -0.2500],
                [ 0.0000, -1.0000]])
    """

    fields: Fields
    lengths: list[int]
    counts: list[int]
    full_masks: tuple[str, ...]
    stacks: Mapping[Fields, Array]
    vision: VisionRows | None = None
    block: Tensor | None = None
    moved: Mapping[str, Tensor] | None = None
    moved_vision: VisionRows | None = None

    @classmethod
    def of(cls, experience: Experience) -> Self:
        """Return the rows of a padded batch on the CPU.

        Args:
            experience: The batch, padded on either side or both.

        Returns:
            Its rows; they share no memory with it, but for pixels and grids.

        Raises:
            ShapeError: If a field's shape does not fit `sequences`, naming the field.
            FieldError: If token ids are not integers, a row has no tokens, a field or an element of `info` is not a
                tensor of B rows, or the vision fields are inconsistent.
        """
        if not isinstance(experience.sequences, Tensor):
            raise FieldError("sequences is a list, a packed batch: rows come from a padded one")
        padded = PaddedRows(experience)
        rows = cls.empty(padded.fields, padded.lengths, padded.counts, padded.full_masks)
        for fields, stack in rows.stacks.items():
            padded.write(fields, stack)
        if not isinstance(experience, ExperienceVL):
            return rows
        return replace(rows, vision=VisionRows.of(experience))

    @classmethod
    def of_columns(
        cls,
        tokens: Tensor,
        *,
        lengths: list[int],
        counts: list[int],
        actions: Mapping[str, Tensor],
        rows: Mapping[str, Tensor],
        info: Mapping[str, Tensor],
        vision: VisionRows | None = None,
    ) -> Self:
        """Return rows over the memory of their columns, which lie on the CPU.

        Args:
            tokens: ``(T,)``, the tokens of all rows.
            lengths: Tokens of each row.
            counts: Actions of each row, its last tokens.
            actions: Fields of an experience with a value an action, ``(N,)``; `action_mask` only if it has holes.
            rows: Fields of an experience with a value a row, ``(B, ...)``.
            info: The entries of `info`, ``(B, ...)``.
            vision: As the attribute.

        Returns:
            The rows.

        Raises:
            ShapeError: If a column has another length, naming the field.
            FieldError: If a column cannot be stored.
        """
        given = {"sequences": tokens, **actions, **rows, **{f"info.{name}": values for name, values in info.items()}}
        kinds: dict[str, Columns] = {
            "sequences": "S",
            "attention_mask": "S",
            **dict.fromkeys((*actions, "action_mask"), "A"),
        }
        sizes = {"S": sum(lengths), "A": sum(counts), "": len(lengths)}
        for name, values in given.items():
            kind = kinds.get(name, "")
            if not values.dim() or len(values) != sizes[kind] or (kind and values.dim() > 1):
                raise ShapeError(f"{name} has shape {tuple(values.shape)}, expected {sizes[kind]} values")
        full_masks = tuple(name for name in ("attention_mask", "action_mask") if name not in given)
        dtypes = {"attention_mask": torch.int64, "action_mask": torch.bool}
        dtypes |= {name: values.dtype for name, values in given.items()}
        names = [
            *(name for name in TEXT_FIELDS if name in dtypes),
            *(name for name in given if name.startswith("info.")),
        ]
        fields = field_headers(
            tuple(
                (name, dtypes[name], kinds.get(name, ""), tuple(given[name].shape[1:]) if name in given else ())
                for name in names
            )
        )
        stacks: dict[Fields, Array] = {
            (field,): as_array(given[field.name])[None] for field in fields if field.name in given
        }
        return cls(fields, lengths, counts, full_masks, stacks, vision)

    @classmethod
    def empty(
        cls,
        fields: Fields,
        lengths: list[int],
        counts: list[int],
        full_masks: tuple[str, ...],
        *,
        pin_memory: bool = False,
    ) -> Self:
        """Return rows whose values are undefined, in one block.

        Args:
            fields: As the attribute.
            lengths: As the attribute.
            counts: As the attribute.
            full_masks: As the attribute.
            pin_memory: Whether the block is page-locked.

        Returns:
            The rows.
        """
        sizes = {"S": sum(lengths), "A": sum(counts), "": len(lengths)}
        runs, nbytes = lay_out(fields, full_masks, sizes, 0)
        (block,), (memory,) = MEMORY.empty(1, (nbytes,), "uint8", pin_memory=pin_memory)
        return cls(fields, lengths, counts, full_masks, {run.fields: run.array(memory) for run in runs}, None, block)

    def __len__(self) -> int:
        """Return the number of rows, B."""
        return len(self.lengths)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes alone: views that were made of them would be sent as copies."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @functools.cached_property
    def columns(self) -> dict[str, Array]:
        """The values of each field; those of bfloat16 as int16."""
        return {
            field.name: values
            for fields, stack in self.stacks.items()
            for field, values in zip(fields, stack, strict=True)
        }

    @functools.cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """The values by name, on the card if the rows were moved to one; they share the rows' memory.

        A field that is ``(B, S)`` in `Experience` is ``(T,)``, one that is ``(B, A)`` is ``(N,)``, of the same dtype.
        Any other, and ``info.NAME`` for an entry of `info`, is ``(B, ...)`` as there. A mask without holes is missing:
        all tokens are real, and the last `counts` tokens of each row are its actions. Pixels and grids are in `vision`.
        """
        if self.moved is not None:
            return self.moved
        return {name: as_tensor(values, self.named[name].dtype) for name, values in self.columns.items()}

    @functools.cached_property
    def named(self) -> dict[str, FieldHeader]:
        """The fields by name."""
        return {field.name: field for field in self.fields}

    def tensor(self, name: str) -> Tensor | None:
        """Return the values of a field on the CPU, as `tensors` has them.

        Args:
            name: The field.

        Returns:
            A tensor over the rows' memory; None without the field, and for a mask without holes.
        """
        values = self.columns.get(name)
        return None if values is None else as_tensor(values, self.named[name].dtype)

    def columns_of(self, name: str, row: int) -> Array:
        """Return the values of one row.

        Args:
            name: A field with a column a token or an action.
            row: Number of the row.

        Returns:
            The values, which share the rows' memory.
        """
        starts = self.starts(self.named[name].columns)
        return self.columns[name][starts[row] : starts[row + 1]]

    def starts(self, kind: str) -> list[int]:
        """Return the place of each row in the fields of a kind.

        Args:
            kind: "S" for fields with a column a token, "A" for an action, "" for a row.

        Returns:
            The first column of each row, and the number of columns; B + 1 numbers.
        """
        return self._starts[kind]

    @functools.cached_property
    def _starts(self) -> dict[str, list[int]]:
        return {
            "S": list(itertools.accumulate(self.lengths, initial=0)),
            "A": list(itertools.accumulate(self.counts, initial=0)),
            "": list(range(len(self.lengths) + 1)),
        }

    def actions_of_rows(self) -> list[int]:
        """Return the number of actions of each row, holes left out."""
        mask = self.columns.get("action_mask")
        if mask is None:
            return self.counts
        return [int(np.count_nonzero(mask[start:end])) for start, end in itertools.pairwise(self.starts("A"))]

    def stack(self, fields: Fields) -> Array:
        """Return the values of neighbouring fields of one kind.

        Args:
            fields: The fields.

        Returns:
            ``(fields, ...)``; ones for a full mask.
        """
        found = self.stacks.get(fields)
        if found is not None:
            return found
        if len(fields) == 1 and fields[0].name in self.full_masks:
            return np.ones((1, self.starts(fields[0].columns)[-1]), array_dtype(fields[0].dtype))
        if len(fields) == 1:
            return self.columns[fields[0].name][None]
        return np.stack([self.columns[field.name] for field in fields])

    def write(self, fields: Fields, out: Array) -> None:
        """Write the values of neighbouring fields of one kind.

        Args:
            fields: The fields.
            out: ``(fields, ...)``.
        """
        found = self.stacks.get(fields)
        if found is not None:
            out[...] = found
            return
        for field, values in zip(fields, out, strict=True):
            values[...] = self.columns[field.name]

    def without(self, name: str) -> Self:
        """Return the rows as if they had no field of a name.

        Args:
            name: The field.

        Returns:
            The rows; the memory is shared.
        """
        if name not in self.named:
            return self
        kept = tuple(field for field in self.fields if field.name != name)
        stacks: dict[Fields, Array] = {
            (field,): self.columns[field.name][None] for field in kept if field.name in self.columns
        }
        masks = tuple(mask for mask in self.full_masks if mask != name)
        return replace(self, fields=kept, full_masks=masks, stacks=stacks, moved=None, moved_vision=None)

    def with_info(self, name: str, values: Array) -> Self:
        """Return the rows with an entry of `info`, in place of one of this name.

        Args:
            name: Name of the entry.
            values: ``(B, ...)``.

        Returns:
            The rows; the memory is shared.
        """
        rows = self.without(f"info.{name}")
        field = FieldHeader(f"info.{name}", values.dtype.name, "", values.shape[1:])
        stacks = {**rows.stacks, (field,): values[None]}
        return replace(rows, fields=(*rows.fields, field), stacks=stacks, moved=None, moved_vision=None)

    def to_device(self, device: torch.device, *, non_blocking: bool = False) -> Self:
        """Return the rows with their values on a device besides: the block by one copy, other values one by one.

        Args:
            device: The device.
            non_blocking: Whether copies from page-locked memory are asynchronous, on the current stream.

        Returns:
            The rows; their `tensors` are on the device.
        """
        block = None if self.block is None else self.block.to(device, non_blocking=non_blocking)
        moved: dict[str, Tensor] = {}
        for name in self.columns:
            tensor = self.tensor(name)
            assert tensor is not None
            offset = -1 if self.block is None else tensor.data_ptr() - self.block.data_ptr()
            if block is not None and 0 <= offset <= len(block) - tensor.nbytes:
                moved[name] = block[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            else:
                moved[name] = tensor.to(device, non_blocking=non_blocking)
        vision = None if self.vision is None else self.vision.on(device, non_blocking=non_blocking)
        return replace(self, moved=moved, moved_vision=vision)

    def on(self, device: torch.device) -> Self:
        """Return the rows with their values on a device, as `to_device`, unless they are there already.

        Args:
            device: The device.

        Returns:
            The rows.
        """
        is_there = self.moved is not None and self.moved["sequences"].device == device
        return self if is_there else self.to_device(device)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory of the values on a card until the work of a stream that reads it is done.

        Args:
            stream: The stream.
        """
        vision = self.moved_vision
        pixels = [] if vision is None else [each for name in PIXELS for each in vision.own(name)]
        for tensor in (*(self.moved or {}).values(), *pixels):
            tensor.record_stream(stream)

    def vision_experience(self) -> ExperienceVL:
        """Return pixels, grids, raw images and counts of the rows, without their tokens; on a card if they are there.

        Raises:
            FieldError: If they are of text alone.
        """
        if self.vision is None:
            raise FieldError("rows of text alone have no images")
        counts = {name: self.tensor(f"info.{name}") for name in ("image_num", "video_num")}
        info = {name: count for name, count in counts.items() if count is not None}
        vision, device = self.moved_vision or self.vision, self.tensors["sequences"].device
        values = vision.fields()
        values |= {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
        return ExperienceVL(sequences=torch.empty((len(self), 0)), info=info or None, **values)

    def in_columns(self, prompt_columns: int, num_actions: int, pad_token_id: int) -> Experience:
        """Return the rows as a maker returns them: prompts end, and responses begin, at one column.

        Args:
            prompt_columns: Columns before the responses, P.
            num_actions: Columns of responses, A.
            pad_token_id: The token in padding.

        Returns:
            A batch of P + A columns; fields with a value a row share their memory with these rows.
        """
        counts = np.array(self.counts)[:, None]
        columns = np.arange(num_actions) < counts
        prompts = np.arange(prompt_columns) >= prompt_columns - (np.array(self.lengths)[:, None] - counts)
        places = {"A": torch.from_numpy(columns), "S": torch.from_numpy(np.hstack([prompts, columns]))}
        tensors: dict[str, Tensor] = {}
        for field in self.fields:
            values = self.tensor(field.name)
            if values is None:
                tensors[field.name] = places[field.columns].to(getattr(torch, field.dtype))
            elif not field.columns:
                tensors[field.name] = values
            else:
                padding = pad_token_id if field.name == "sequences" else 0
                whole = torch.full(places[field.columns].shape, padding, dtype=values.dtype)
                tensors[field.name] = whole.masked_scatter_(places[field.columns], values)
        return experience_of(tensors, None if self.vision is None else self.vision.fields())

    def padded(self) -> Experience:
        """Return the rows as one batch on the CPU, padded with zeros on the left; it shares no memory with them."""
        tensors = pad([(self, range(len(self)))])
        if self.vision is None:
            return experience_of(tensors)
        vision = self.vision.fields()
        vision |= {name: value.clone() for name, value in vision.items() if isinstance(value, Tensor)}
        return experience_of(tensors, vision)


def ragged_rows(batch: RaggedRows | Experience) -> RaggedRows:
    """Return rows as they are, and those of a padded batch on the CPU or a card without their padding.

    Errors are those of `RaggedRows.of`.
    """
    if isinstance(batch, RaggedRows):
        return batch
    if isinstance(batch.sequences, Tensor) and batch.sequences.device.type != "cpu":
        batch = copy.copy(batch)
        batch.to_device("cpu")
    return RaggedRows.of(batch)


Parts = Sequence[tuple[RaggedRows, Sequence[int]]]
"""Rows, with the indices of those of them that are meant, in order."""


class PaddedRows:
    """The text fields of a padded batch, to be written without their padding.

    Attributes:
        fields: As those of `RaggedRows`, like the further ones.
        lengths: Tokens of each row.
        counts: Actions of each row.
        full_masks: Masks without values.
    """

    def __init__(self, experience: Experience) -> None:
        self.fields, self._arrays, columns = field_arrays(experience)
        rows, width = experience.sequences.shape
        masks = self._arrays.get("attention_mask"), self._arrays.get("action_mask")
        spans = Spans.of((rows, width), columns, *masks)
        self.lengths, self.counts, self.full_masks = spans.tokens, spans.actions, spans.full_masks
        # Action columns end where the sequences' columns end.
        ends = {"S": spans.end, "A": [end - width + columns for end in spans.end]}
        self._places = {
            kind: _Places(lengths, ends[kind], size)
            for kind, lengths, size in (("S", self.lengths, width), ("A", self.counts, columns))
        }

    def write(self, fields: Fields, out: Array) -> None:
        """Write the values of neighbouring fields of one kind into ``(fields, ...)``, row after row."""
        for field, values in zip(fields, out, strict=True):
            array = self._arrays[field.name]
            if not field.columns:
                values[...] = array
            else:
                self._places[field.columns].take(array, values)


class _Places:
    """The columns of rows in a padded batch: `lengths` of them before `ends`, of `width`."""

    def __init__(self, lengths: list[int], ends: list[int], width: int) -> None:
        self._lengths, self._ends, self._width = lengths, ends, width

    @functools.cached_property
    def _is_whole(self) -> bool:
        return self._lengths.count(self._width) == len(self._lengths)

    @functools.cached_property
    def _mask(self) -> Array:
        columns, ends = np.arange(self._width), np.array(self._ends)[:, None]
        found: Array = (columns < ends) & (columns >= ends - np.array(self._lengths)[:, None])
        return found

    def take(self, array: Array, out: Array) -> None:
        """Write the rows of a padded array (B, width) end to end."""
        if self._is_whole:
            out.reshape(array.shape)[...] = array
        elif self._width <= _SHORT_COLUMNS:
            out[...] = array[self._mask]
        else:
            flat = array.reshape(-1)
            np.concatenate([flat[row] for row in self._slices], out=out)

    @functools.cached_property
    def _slices(self) -> list[slice]:
        """The columns of each row, in the flat array; made once for all fields."""
        starts = range(0, len(self._lengths) * self._width, self._width)
        places = zip(starts, self._lengths, self._ends, strict=True)
        return [slice(start + end - length, start + end) for start, length, end in places]


def join(parts: Parts, *, pin_memory: bool = False) -> RaggedRows:
    """Return rows end to end in one block, each value copied once; without their vision fields.

    Args:
        parts: The rows.
        pin_memory: Whether the block is page-locked, for an asynchronous copy to a GPU.

    Raises:
        FieldError: If a field is present in only some of the parts.
    """
    fields, full_masks = _common(parts)
    spans = _spans(parts)
    joined = RaggedRows.empty(fields, *_sizes(spans), full_masks, pin_memory=pin_memory)
    for together, out in joined.stacks.items():
        alike = [(together, out)]
        if not all(together in part.stacks for part, _ in parts):
            alike = [((field,), values[None]) for field, values in zip(together, out, strict=True)]
        for some, values in alike:
            np.concatenate([*_slices(spans, some)], axis=1, out=values)
    return joined


def pad(parts: Parts, *, pin_memory: bool = False) -> dict[str, Tensor]:
    """Return the fields of rows as tensors, padded with zeros on the left to the longest row, each value copied once.

    Args:
        parts: The rows.
        pin_memory: Whether the tensors are page-locked.

    Raises:
        FieldError: If a field is present in only some of the parts.
    """
    fields, full_masks = _common(parts)
    spans = _spans(parts)
    lengths, counts = _sizes(spans)
    rows_of = {"S": _PaddedOutput(lengths), "A": _PaddedOutput(counts)}
    tensors: dict[str, Tensor] = {}
    first = parts[0][0]
    is_alike = all(part.stacks.keys() == first.stacks.keys() for part, _ in parts)
    stored = first.stacks if is_alike else [(field,) for field in fields if field.name not in full_masks]
    for together in [*stored, *((field,) for field in fields if field.name in full_masks)]:
        kind, count = together[0].columns, len(together)
        shape = (len(lengths), rows_of[kind].width) if kind else (len(lengths), *together[0].tail)
        found, out = MEMORY.empty(count, shape, together[0].dtype, pin_memory=pin_memory)
        tensors.update(zip((field.name for field in together), found, strict=True))
        if not kind:
            np.concatenate([*_slices(spans, together)], axis=1, out=out)
        elif together[0].name in full_masks:
            np.copyto(out[0], rows_of[kind].mask)
        else:
            rows_of[kind].fill(spans, together, out)
    return tensors


def experience_of(tensors: Mapping[str, Tensor], vision: Mapping[str, Any] | None = None) -> Experience:
    """Return the experience of fields by their names in `RaggedRows`, an `ExperienceVL` with vision fields."""
    info = {name.removeprefix("info."): value for name, value in tensors.items() if name.startswith("info.")}
    # A damaged header may name other fields.
    values: dict[str, Any] = {name: tensors[name] for name in TEXT_FIELDS if name in tensors}
    if vision is None:
        return Experience(**values, info=info or None)
    return ExperienceVL(**values, **vision, info=info or None)


class _PaddedOutput:
    """Rows of a left-padded batch in its columns of tokens, or in those of actions."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths
        self.width = max(lengths, default=0)

    @functools.cached_property
    def mask(self) -> Array:
        """(B, width) bool, where the rows are."""
        # Numbers of 32 bits are compared at twice the speed of 64.
        first = self.width - np.array(self._lengths, np.int32)
        found: Array = np.arange(self.width, dtype=np.int32) >= first[:, None]
        return found

    def fill(self, spans: _Spans, fields: Fields, out: Array) -> None:
        """Write the values of fields into (fields, B, width), and zeros before those of each row."""
        flat = out.reshape(len(out), -1)
        if self._lengths.count(self.width) == len(self._lengths):
            np.concatenate([*_slices(spans, fields)], axis=1, out=flat)
        elif self.width <= _SHORT_COLUMNS:
            out[...] = 0
            for values, columns in zip(out, np.concatenate([*_slices(spans, fields)], axis=1), strict=True):
                values[self.mask] = columns
        else:
            zeros = np.zeros((len(out), self.width), out.dtype)
            pieces: list[Array] = []
            for part, first, stop in spans:
                stack, starts = part.stack(fields), part.starts(fields[0].columns)
                for start, end in itertools.pairwise(starts[first : stop + 1]):
                    pieces += (zeros[:, end - start :], stack[:, start:end])
            np.concatenate(pieces, axis=1, out=flat)


_Spans = list[tuple[RaggedRows, int, int]]
"""Rows from a first to a last one, which is excluded, of each part."""


def _spans(parts: Parts) -> _Spans:
    spans: _Spans = []
    for part, chosen in parts:
        if isinstance(chosen, range) and chosen.step == 1:
            spans.append((part, chosen.start, chosen.stop))
            continue
        first = 0
        for place, row in enumerate(chosen, 1):
            if place == len(chosen) or chosen[place] != row + 1:
                spans.append((part, chosen[first], row + 1))
                first = place
    return spans


def _slices(spans: _Spans, fields: Fields) -> Iterator[Array]:
    """Yield the values of fields, one slice for each span."""
    for part, first, stop in spans:
        starts = part.starts(fields[0].columns)
        yield part.stack(fields)[:, starts[first] : starts[stop]]


def _sizes(spans: _Spans) -> tuple[list[int], list[int]]:
    """Return the tokens and the actions of each row."""
    lengths = [length for part, first, stop in spans for length in part.lengths[first:stop]]
    return lengths, [count for part, first, stop in spans for count in part.counts[first:stop]]


def _common(parts: Parts) -> tuple[Fields, tuple[str, ...]]:
    """Return the fields of the parts, and the masks that have no values in any."""
    first = parts[0][0]
    masks = first.full_masks
    for part, _ in parts[1:]:
        masks = tuple(mask for mask in masks if mask in part.full_masks)
        if part.fields == first.fields:
            continue
        odd = sorted(name for name in first.named.keys() | part.named.keys()
                     if first.named.get(name) != part.named.get(name))  # fmt: skip
        if odd:
            raise FieldError(f"{odd[0]}: present, or of one dtype and shape, in some of the batch's rows only")
    return first.fields, masks
