"""Experience <-> the bytes of an extent: rows without padding on the way in, batched in one pass on the way out.

A row is stored right-aligned, as long as its group's longest row; so columns of the response end together in group,
extent and batch, and a group is copied with one slice. Masks without holes are not stored: lengths say all there is.
`codec_layout` tells what lies where; what a vision-language experience has besides is `codec_vision`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash

from pipeline.codec_layout import (
    Array,
    Block,
    ExtentHeader,
    FieldHeader,
    GroupHeader,
    align,
    array_dtype,
    as_array,
    as_tensor,
    blocks_of,
    dtype_name,
    header_bytes,
    index_of,
    read_header,
    write_header,
)
from pipeline.codec_vision import (
    VisionPart,
    VisionReader,
    gather_vision,
    vision_part,
    vision_stop,
)
from pipeline.errors import ArenaFullError, DecodeError, FieldError, ShapeError
from pipeline.experience import SCORE_FIELDS, Experience, ExperienceVL

SEQUENCE_FIELDS = ("sequences", "attention_mask")
ACTION_FIELDS = (
    "action_log_probs", "base_action_log_probs", "values", "returns", "kl", "advantages", "action_mask",
    "action_entropy",
)  # fmt: skip
OTHER_FIELDS = ("reward", "labels", "references")
_MAX_GROUPS = 8
# A group of fewer tokens is not worth its blocks: they cost more calls than its padding costs copying.
_LEAST_GROUP_TOKENS = 8192
# Below, a block is copied whole and its padding zeroed after: fewer calls of numpy than one a row.
_SMALL_BLOCK_BYTES = 1 << 15


@dataclasses.dataclass(frozen=True)
class Encoded:
    """Size and xxh3-64 checksum of an extent as written (checksum 0 if none was asked for)."""

    nbytes: int
    checksum: int


def encode(experience: Experience, memory: memoryview, *, checksum: bool = True) -> Encoded:
    """Write a batch into an extent, without its padding.

    Args:
        experience: Rows on the CPU, padded on either side or both; `action_mask` ends where the sequences end.
            An `ExperienceVL` comes back as one, with its pixels, grids and raw images.
        memory: The extent; longer than needed is fine.
        checksum: Whether to take the checksum.

    Returns:
        The bytes used, and their checksum.

    Raises:
        ShapeError: If a field's shape does not fit `sequences`, naming the field.
        FieldError: If a row has no tokens, `info` holds what is no tensor of B rows, or vision fields do not account
            for each other.
        ArenaFullError: If the extent is too small.
    """
    fields = dict(_fields(experience))
    arrays = {name: as_array(value) for name, value in fields.items()}
    spans = _spans(experience, arrays)
    vision = vision_part(experience) if isinstance(experience, ExperienceVL) else None
    header = _header(fields, spans, vision)
    packed = msgspec.msgpack.encode(header)
    blocks = list(blocks_of(header, header_bytes(packed)))
    text_stop = blocks[-1].stop if blocks else header_bytes(packed)
    nbytes = text_stop if vision is None else vision_stop(vision.header, align(text_stop))
    if nbytes > len(memory):
        raise ArenaFullError(
            f"extent of {nbytes:,} B does not fit: {len(memory):,} B reserved for {len(spans.end)} rows; "
            "raise buffer.row_bytes"
        )
    write_header(packed, memory)
    copies: dict[tuple[int, str, bool], _Rectangle | list[_Copy]] = {}
    for block in blocks:
        out, source = block.array(memory), arrays[block.field.name]
        if block.group is None:
            out[...] = source
            continue
        # Fields of the same columns have their rows in the same places: found out once a group.
        is_small = spans.end_together and out.nbytes < _SMALL_BLOCK_BYTES and len(header.groups) == 1
        key = (id(block.group), block.field.columns, is_small)
        if (places := copies.get(key)) is None:
            places = copies[key] = _rectangle(block, spans) if is_small else _copies(block, header, spans)
        if isinstance(places, _Rectangle):
            places.copy(source, out)
        else:
            _fill(out, source, places)
    if vision is not None:
        vision.write(memory, align(text_stop))
    return Encoded(nbytes, xxhash.xxh3_64_intdigest(memory[:nbytes]) if checksum else 0)


class ExtentReader:
    """A sealed extent, read in place."""

    def __init__(self, memory: memoryview, *, checksum: int = 0) -> None:
        """Read an extent's header.

        Args:
            memory: The sealed extent, exactly its bytes.
            checksum: What the bytes must add up to; 0 skips the look.

        Raises:
            DecodeError: If the bytes are no extent, or not those that were sealed.
        """
        if checksum and xxhash.xxh3_64_intdigest(memory) != checksum:
            raise DecodeError(f"extent of {len(memory):,} B: its checksum is not the one it was sealed with")
        self.header, start = read_header(memory)
        self._memory = memory
        self._blocks = list(blocks_of(self.header, start))
        text_stop = self._blocks[-1].stop if self._blocks else start
        if text_stop > len(memory):
            raise DecodeError(f"extent of {len(memory):,} B, its header speaks of {text_stop:,} B")
        vision = self.header.vision
        self.vision = None if vision is None else VisionReader(vision, self.header.rows, memory, align(text_stop))
        self.sequence_lengths = np.array(self.header.sequence_lengths, np.int64)
        self.action_lengths = np.array(self.header.action_lengths, np.int64)

    def blocks(self) -> Iterator[tuple[FieldHeader, GroupHeader | None, Array]]:
        """Yield each block as an array over the extent's own bytes."""
        for block in self._blocks:
            yield block.field, block.group, block.array(self._memory)


def gather(parts: Sequence[tuple[ExtentReader, Sequence[int]]], *, pin_memory: bool = False) -> Experience:
    """Copy rows of extents into one left-padded batch, each value once.

    Args:
        parts: Extents, and which of their rows, in batch order.
        pin_memory: Whether the batch's tensors are page-locked, for an asynchronous copy to a GPU.

    Returns:
        An `Experience` of all the rows, as wide as its longest, or an `ExperienceVL`; it shares no memory with the
        extents.

    Raises:
        DecodeError: If an extent has fewer rows than are wanted of it, or its raw images are damaged.
        FieldError: If a field is there in one extent and missing in another, or some extents only are
            vision-language ones.
    """
    _refuse_missing_rows(parts)
    vision = [(reader.vision, chosen) for reader, chosen in parts if reader.vision is not None]
    if 0 < len(vision) < len(parts):
        raise FieldError(f"{len(vision)} of {len(parts)} extents hold an ExperienceVL; a batch is of one kind")
    names = _common_fields(parts)
    rows = sum(len(chosen) for _, chosen in parts)
    sequence_lengths = np.concatenate([reader.sequence_lengths[list(chosen)] for reader, chosen in parts])
    action_lengths = np.concatenate([reader.action_lengths[list(chosen)] for reader, chosen in parts])
    widths = {"S": int(sequence_lengths.max()), "A": int(action_lengths.max())}
    tensors: dict[str, torch.Tensor] = {}
    arrays: dict[str, Array] = {}
    for field in names.values():
        shape = (rows, widths[field.columns]) if field.columns else (rows, *field.tail)
        tensors[field.name] = _zeros(shape, field, pin_memory)
        arrays[field.name] = as_array(tensors[field.name])
    start = 0
    for reader, chosen in parts:
        _gather_part(reader, list(chosen), arrays, start)
        start += len(chosen)
    _fill_masks(parts, arrays, widths, sequence_lengths, action_lengths)
    plain, info = _by_field(tensors)
    if not vision:
        return Experience(**plain, info=info or None)
    fields, counts = gather_vision(vision, counted=info.keys(), pin_memory=pin_memory)
    return ExperienceVL(**plain, **fields, info={**info, **counts} or None)


# Reading an Experience.


@dataclasses.dataclass(frozen=True)
class _Spans:
    """Where each row's tokens lie: columns ``start:end`` of the sequences, ``end - actions:end`` of them actions.

    `end_together`: all rows end in one column. `full_masks`: those that are one on exactly each row's span.
    """

    start: Array
    end: Array
    actions: Array
    width: int
    action_columns: int
    end_together: bool
    full_masks: list[str]


def _fields(experience: Experience) -> Iterator[tuple[str, torch.Tensor]]:
    rows = experience.sequences.shape[0]
    for name in SEQUENCE_FIELDS + ACTION_FIELDS + OTHER_FIELDS:
        value = getattr(experience, name)
        if value is not None:
            yield name, _checked(name, value, rows)
    for key, value in (experience.info or {}).items():
        yield f"info.{key}", _checked(f"info[{key!r}]", value, rows)


def _zeros(shape: tuple[int, ...], field: FieldHeader, pin_memory: bool) -> torch.Tensor:
    if pin_memory:
        return torch.zeros(shape, dtype=getattr(torch, field.dtype), pin_memory=True)
    # numpy's own, in this thread: torch would wake all of its threads for each tensor, and wait for the slowest.
    return as_tensor(np.zeros(shape, array_dtype(field.dtype)), field.dtype)


def _checked(name: str, value: object, rows: int) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise FieldError(f"{name}: only tensors travel, got {type(value).__name__}")
    if value.ndim == 0 or value.shape[0] != rows:
        raise ShapeError(f"{name}: {tuple(value.shape)} for {rows} rows")
    return value.detach() if value.requires_grad else value


def _spans(experience: Experience, arrays: dict[str, Array]) -> _Spans:
    rows, width = experience.sequences.shape
    mask = arrays.get("attention_mask")
    start, end, count = _ones(np.ones((rows, width), bool) if mask is None else mask)
    if not count.all():
        raise FieldError(f"attention_mask: row {int(np.flatnonzero(count == 0)[0])} has no token")
    full_masks = []
    if mask is not None and _is_plain(mask) and (count == end - start).all():
        full_masks.append("attention_mask")
    action_columns = _action_columns(experience)
    if experience.action_mask is None:
        actions = np.maximum(end - np.maximum(start, width - action_columns), 0)
    else:
        start_of, end_of, taken = _ones(arrays["action_mask"])
        first, last = np.where(taken, start_of, action_columns), np.where(taken, end_of, 0)
        beyond = np.flatnonzero(last > end - (width - action_columns))
        if beyond.size:
            raise FieldError(f"action_mask: row {int(beyond[0])} masks in an action behind its last token")
        actions = np.maximum(end - np.maximum(start, width - action_columns + first), 0)
        if _is_plain(arrays["action_mask"]) and (taken == actions).all():
            full_masks.append("action_mask")
    return _Spans(start, end, actions, width, action_columns, bool((end == end[0]).all()), full_masks)


def _is_plain(mask: Array) -> bool:
    """Whether a mask holds zeros and ones alone."""
    if mask.dtype == bool or not mask.size:
        return True
    if mask.dtype.kind in "iu":
        return bool(mask.min() >= 0 and mask.max() <= 1)
    return bool((mask == (mask != 0)).all())


def _ones(mask: Array) -> tuple[Array, Array, Array]:
    """Return of each row the column of the first value that is not 0, the one behind the last, and how many there are.

    Of a row without any only the last means something.
    """
    present = mask if mask.dtype == bool else mask != 0
    columns = present.shape[1]
    if columns == 0:
        none = np.zeros(len(present), np.int64)
        return none, none, none
    right_aligned = present[:, -1].all()
    end = np.full(len(present), columns) if right_aligned else columns - present[:, ::-1].argmax(axis=1)
    return present.argmax(axis=1), end, np.count_nonzero(present, axis=1)


def _action_columns(experience: Experience) -> int:
    """Return A, as `pipeline.row_checks` counts it for a row: 0 where no field says that there are actions."""
    for name in ("action_mask", "action_log_probs", "base_action_log_probs", "action_entropy"):
        value = getattr(experience, name)
        if value is not None:
            if value.ndim != 2:
                raise ShapeError(f"{name}: {tuple(value.shape)}, expected (B, A)")
            return int(value.shape[1])
    scores = [getattr(experience, name) for name in SCORE_FIELDS]
    return max((value.shape[1] for value in scores if value is not None and value.ndim == 2), default=0)


def _header(fields: dict[str, torch.Tensor], spans: _Spans, vision: VisionPart | None) -> ExtentHeader:
    stored = []
    for name, value in fields.items():
        columns = _columns_of(name, value, spans)
        stored.append(FieldHeader(name, dtype_name(name, value), columns, [] if columns else list(value.shape[1:])))
    lengths = spans.end - spans.start
    tokens, actions = lengths.tolist(), spans.actions.tolist()
    groups = [
        GroupHeader(rows, max(tokens[row] for row in rows), max(actions[row] for row in rows))
        for rows in _similar(tokens)
    ]
    return ExtentHeader(
        len(tokens), stored, groups, tokens, actions, spans.full_masks,
        None if vision is None else vision.header,
    )  # fmt: skip


def _columns_of(name: str, value: torch.Tensor, spans: _Spans) -> Literal["S", "A", ""]:
    expected = spans.width if name in SEQUENCE_FIELDS else spans.action_columns
    if name not in SEQUENCE_FIELDS and not (name in ACTION_FIELDS and value.ndim == 2):
        return ""
    if name in SCORE_FIELDS and value.shape[1] == 1 != expected:
        # One number a row, with a dimension of its own, as LightRFT has it.
        return ""
    if value.ndim != 2 or value.shape[1] != expected:
        raise ShapeError(f"{name}: {tuple(value.shape)}, expected ({len(value)}, {expected})")
    return "S" if name in SEQUENCE_FIELDS else "A"


def _similar(lengths: list[int]) -> list[list[int]]:
    """Cut rows into at most `_MAX_GROUPS` groups of similar length, each in append order.

    One group serves as long as its padding stays below an eighth of its tokens.
    """
    if max(lengths) * (len(lengths) - 1) < _LEAST_GROUP_TOKENS:
        return [list(range(len(lengths)))]
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    groups, start, tokens = [], 0, lengths[order[0]]
    for stop in range(1, len(order)):
        longest = lengths[order[stop]]
        tokens += longest
        padding = longest * (stop + 1 - start) - tokens
        if padding * 8 > longest * (stop + 1 - start) and longest * (stop - start) >= _LEAST_GROUP_TOKENS:
            groups.append(sorted(order[start:stop]))
            start, tokens = stop, longest
            if len(groups) == _MAX_GROUPS - 1:
                break
    return [*groups, sorted(order[start:])]


# Blocks.


class _Copy(NamedTuple):
    """Where a row's values lie: ``source[row, start:stop]`` goes to ``out[place, at:]``."""

    place: int
    at: int
    row: int
    start: int
    stop: int


class _Rectangle(NamedTuple):
    """Where the values of all rows, which end together, lie: ``source[:, columns]`` but for what is `padding`."""

    columns: slice
    padding: Array | None

    def copy(self, source: Array, out: Array) -> None:
        out[...] = source[:, self.columns]
        if self.padding is not None:
            out[self.padding] = 0


def _rectangle(block: Block, spans: _Spans) -> _Rectangle:
    is_token = block.field.columns == "S"
    stop = int(spans.end[0]) - (0 if is_token else spans.width - spans.action_columns)
    width = block.shape[1]
    first = width - (spans.end - spans.start if is_token else spans.actions)
    padding = np.arange(width) < first[:, None] if first.any() else None
    return _Rectangle(slice(stop - width, stop), padding)


def _copies(block: Block, header: ExtentHeader, spans: _Spans) -> list[_Copy]:
    assert block.group is not None
    is_token = block.field.columns == "S"
    lengths = header.sequence_lengths if is_token else header.action_lengths
    # Action columns end where the sequences' columns end.
    shift = 0 if is_token else spans.width - spans.action_columns
    width, ends = block.shape[1], spans.end.tolist()
    return [
        _Copy(place, width - lengths[row], row, ends[row] - shift - lengths[row], ends[row] - shift)
        for place, row in enumerate(block.group.rows)
    ]


def _fill(out: Array, source: Array, copies: list[_Copy]) -> None:
    for place, at, row, start, stop in copies:
        # Each byte is written once.
        if at:
            out[place, :at] = 0
        out[place, at:] = source[row, start:stop]


def _gather_part(reader: ExtentReader, chosen: list[int], arrays: dict[str, Array], start: int) -> None:
    rows = index_of(chosen)
    group_now: GroupHeader | None = None
    for field, group, block in reader.blocks():
        out = arrays[field.name]
        if group is None:
            out[start : start + len(chosen)] = block[rows]
            continue
        if group is not group_now:
            # A group's blocks lie together: which of its rows are wanted is found out once.
            group_now, (sources, targets) = group, _places_of(group, chosen, start)
        if sources is not None:
            # A group may be wider than this batch: columns beyond the batch's width are its padding.
            width = min(block.shape[1], out.shape[1])
            out[targets, out.shape[1] - width :] = block[sources, block.shape[1] - width :]


_Places = slice | list[int] | None


def _places_of(group: GroupHeader, chosen: list[int], start: int) -> tuple[_Places, _Places]:
    """Return where the chosen rows lie in their group, and where they go in the batch; None if it has none of them."""
    if group.rows == chosen:
        return slice(None), slice(start, start + len(chosen))
    place_of = {row: place for place, row in enumerate(group.rows)}
    found = [(place_of[row], start + place) for place, row in enumerate(chosen) if row in place_of]
    if not found:
        return None, None
    return index_of([source for source, _ in found]), index_of([target for _, target in found])


def _fill_masks(
    parts: Sequence[tuple[ExtentReader, Sequence[int]]],
    arrays: dict[str, Array],
    widths: dict[str, int],
    sequence_lengths: Array,
    action_lengths: Array,
) -> None:
    for name, columns, lengths in (
        ("attention_mask", "S", sequence_lengths),
        ("action_mask", "A", action_lengths),
    ):
        left_out = [name in reader.header.full_masks for reader, _ in parts]
        first = widths[columns] - lengths[:, None]
        if all(left_out):
            np.greater_equal(np.arange(widths[columns]), first, out=arrays[name], casting="unsafe")
            continue
        start = 0
        for (_, chosen), is_left_out in zip(parts, left_out, strict=True):
            stop = start + len(chosen)
            if is_left_out:
                arrays[name][start:stop] = np.arange(widths[columns]) >= first[start:stop]
            start = stop


def _refuse_missing_rows(parts: Sequence[tuple[ExtentReader, Sequence[int]]]) -> None:
    for reader, chosen in parts:
        if min(chosen) < 0 or max(chosen) >= reader.header.rows:
            row = next(row for row in chosen if not 0 <= row < reader.header.rows)
            raise DecodeError(f"row {row} is wanted of an extent of {reader.header.rows} rows")


def _common_fields(parts: Sequence[tuple[ExtentReader, Sequence[int]]]) -> dict[str, FieldHeader]:
    first = {field.name: field for field in parts[0][0].header.fields}
    for reader, _ in parts[1:]:
        if reader.header.fields == parts[0][0].header.fields:
            continue
        other = {field.name: field for field in reader.header.fields}
        if first != other:
            odd = sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
            raise FieldError(f"{odd[0]}: present, or of one dtype and shape, in some of the batch's rows only")
    return first


def _by_field(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    plain = {name: tensors.get(name) for name in SEQUENCE_FIELDS + ACTION_FIELDS + OTHER_FIELDS}
    info = {name.removeprefix("info."): value for name, value in tensors.items() if name.startswith("info.")}
    return plain, info
