"""Experience <-> the bytes of an extent: rows without padding on the way in, batched in one pass on the way out.

A row is stored right-aligned, as long as its group's longest row; so columns of the response end together in group,
extent and batch, and a group is copied with one slice. Masks without holes are not stored: lengths say all there is.
`codec_layout` tells what lies where; what a vision-language experience has besides is `codec_vision`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

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
    as_array,
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
    spans = _spans(experience)
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
    for block in blocks:
        _fill(block, fields[block.field.name], header, spans, memory)
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
        tensors[field.name] = torch.zeros(shape, dtype=getattr(torch, field.dtype), pin_memory=pin_memory)
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
    """Where each row's tokens lie: columns ``start:end`` of the sequences, ``end - actions:end`` of them actions."""

    start: Array
    end: Array
    actions: Array
    width: int
    action_columns: int


def _fields(experience: Experience) -> Iterator[tuple[str, torch.Tensor]]:
    for name in SEQUENCE_FIELDS + ACTION_FIELDS + OTHER_FIELDS:
        value = getattr(experience, name)
        if value is not None:
            yield name, _checked(name, value, len(experience.sequences))
    for key, value in (experience.info or {}).items():
        yield f"info.{key}", _checked(f"info[{key!r}]", value, len(experience.sequences))


def _checked(name: str, value: object, rows: int) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise FieldError(f"{name}: only tensors travel, got {type(value).__name__}")
    if value.ndim == 0 or len(value) != rows:
        raise ShapeError(f"{name}: {tuple(value.shape)} for {rows} rows")
    return value.detach()


def _spans(experience: Experience) -> _Spans:
    rows, width = experience.sequences.shape
    mask = experience.attention_mask
    present = np.ones((rows, width), bool) if mask is None else as_array(mask) != 0
    if not present.any(axis=1).all():
        row = int(np.flatnonzero(~present.any(axis=1))[0])
        raise FieldError(f"attention_mask: row {row} has no token")
    start, end = present.argmax(axis=1), width - present[:, ::-1].argmax(axis=1)
    action_columns = _action_columns(experience)
    first = np.zeros(rows, np.int64)
    if experience.action_mask is not None:
        taken = as_array(experience.action_mask) != 0
        first = np.where(taken.any(axis=1), taken.argmax(axis=1), action_columns)
        last = np.where(taken.any(axis=1), action_columns - taken[:, ::-1].argmax(axis=1), 0)
        beyond = np.flatnonzero(last > end - (width - action_columns))
        if beyond.size:
            raise FieldError(f"action_mask: row {int(beyond[0])} masks in an action behind its last token")
    actions = np.maximum(end - np.maximum(start, width - action_columns + first), 0)
    return _Spans(start, end, actions, width, action_columns)


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
    stored, full_masks = [], []
    for name, value in fields.items():
        columns = _columns_of(name, value, spans)
        if name in ("attention_mask", "action_mask") and _is_full(name, value, spans):
            full_masks.append(name)
        stored.append(FieldHeader(name, dtype_name(name, value), columns, [] if columns else list(value.shape[1:])))
    lengths = spans.end - spans.start
    groups = [
        GroupHeader(rows.tolist(), int(lengths[rows].max()), int(spans.actions[rows].max()))
        for rows in _similar(lengths)
    ]
    return ExtentHeader(
        len(lengths), stored, groups, lengths.tolist(), spans.actions.tolist(), full_masks,
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


def _is_full(name: str, value: torch.Tensor, spans: _Spans) -> bool:
    """Whether the mask is one on exactly the row's span, so that its lengths say everything."""
    counts = as_array(value).astype(np.int64)
    if counts.min(initial=0) < 0 or counts.max(initial=0) > 1:
        return False
    expected = spans.end - spans.start if name == "attention_mask" else spans.actions
    return bool((counts.sum(axis=1) == expected).all())


def _similar(lengths: Array) -> list[Array]:
    """Cut rows into at most `_MAX_GROUPS` groups of similar length, each in append order.

    One group serves as long as its padding stays below an eighth of its tokens.
    """
    order = np.argsort(lengths, kind="stable")
    groups, start = [], 0
    for stop in range(1, len(order) + 1):
        if stop == len(order):
            groups.append(np.sort(order[start:]))
        elif len(groups) < _MAX_GROUPS - 1:
            longest = lengths[order[stop]]
            padding = longest * (stop + 1 - start) - lengths[order[start : stop + 1]].sum()
            # A group of few short rows is not worth its blocks.
            if padding * 8 > longest * (stop + 1 - start) and longest * (stop - start) >= 1024:
                groups.append(np.sort(order[start:stop]))
                start = stop
    return groups


# Blocks.


def _fill(block: Block, value: torch.Tensor, header: ExtentHeader, spans: _Spans, memory: memoryview) -> None:
    out, source = block.array(memory), as_array(value)
    if block.group is None:
        out[...] = source
        return
    out[...] = 0
    lengths = header.sequence_lengths if block.field.columns == "S" else header.action_lengths
    # Action columns end where the sequences' columns end.
    shift = 0 if block.field.columns == "S" else spans.width - spans.action_columns
    width = out.shape[1]
    for place, row in enumerate(block.group.rows):
        length, stop = lengths[row], int(spans.end[row]) - shift
        out[place, width - length :] = source[row, stop - length : stop]


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
        if targets:
            # A group may be wider than this batch: columns beyond the batch's width are its padding.
            width = min(block.shape[1], out.shape[1])
            out[index_of(targets), out.shape[1] - width :] = block[index_of(sources), block.shape[1] - width :]


def _places_of(group: GroupHeader, chosen: list[int], start: int) -> tuple[list[int], list[int]]:
    """Return where the chosen rows lie in their group, and where they go in the batch."""
    place_of = {row: place for place, row in enumerate(group.rows)}
    found = [(place_of[row], start + place) for place, row in enumerate(chosen) if row in place_of]
    return [source for source, _ in found], [target for _, target in found]


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
        start = 0
        for reader, chosen in parts:
            stop = start + len(chosen)
            if name in reader.header.full_masks:
                width = widths[columns]
                arrays[name][start:stop] = np.arange(width) >= width - lengths[start:stop, None]
            start = stop


def _refuse_missing_rows(parts: Sequence[tuple[ExtentReader, Sequence[int]]]) -> None:
    for reader, chosen in parts:
        for row in chosen:
            if not 0 <= row < reader.header.rows:
                raise DecodeError(f"row {row} is wanted of an extent of {reader.header.rows} rows")


def _common_fields(parts: Sequence[tuple[ExtentReader, Sequence[int]]]) -> dict[str, FieldHeader]:
    first = {field.name: field for field in parts[0][0].header.fields}
    for reader, _ in parts[1:]:
        other = {field.name: field for field in reader.header.fields}
        if first != other:
            odd = sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
            raise FieldError(f"{odd[0]}: present, or of one dtype and shape, in some of the batch's rows only")
    return first


def _by_field(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    plain = {name: tensors.get(name) for name in SEQUENCE_FIELDS + ACTION_FIELDS + OTHER_FIELDS}
    info = {name.removeprefix("info."): value for name, value in tensors.items() if name.startswith("info.")}
    return plain, info
