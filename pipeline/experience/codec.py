"""Experience <-> the bytes of an extent: encoding drops the padding, decoding batches rows in one pass.

A row is stored right-aligned, in the width of its group's longest row. So the response columns end together in group,
extent and batch, and a group is copied with one slice. A mask without holes is not stored: the row lengths determine
it. `extent_format` defines the place of each block, `vision_codec` the part that a vision-language experience adds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash

from pipeline.errors import ArenaFullError, DecodeError, FieldError
from pipeline.experience.extent_format import (
    Array,
    Columns,
    ExtentHeader,
    FieldHeader,
    GroupHeader,
    Plan,
    Stack,
    align,
    header_bytes,
    index_of,
    lay_out,
    plan_of,
    read_header,
    write_header,
)
from pipeline.experience.field_arrays import TEXT_FIELDS, field_arrays
from pipeline.experience.row_blocks import (
    SHORT_ROW_BYTES,
    SHORT_ROW_TOKENS,
    BatchRows,
    Places,
    places_of,
    write_windows,
)
from pipeline.experience.row_spans import Spans
from pipeline.experience.tensor_pool import MEMORY
from pipeline.experience.types import TOKEN_FIELDS, Experience, ExperienceVL
from pipeline.experience.vision_codec import (
    VisionPart,
    VisionReader,
    gather_vision,
    vision_part,
    vision_stop,
)

_MAX_GROUPS = 8
# Less padding than this is not worth a group: copying the padding costs less than the calls for a group's blocks.
_LEAST_PADDING_TOKENS = 4096


class Encoded(NamedTuple):
    """Size and xxh3-64 checksum of an extent as written (checksum 0 if none was asked for)."""

    nbytes: int
    checksum: int


def encode(experience: Experience, memory: memoryview, *, checksum: bool = True) -> Encoded:
    """Write a batch into an extent, without its padding.

    Args:
        experience: Rows on the CPU, padded on either side or both; `action_mask` ends where the sequences end.
            An `ExperienceVL` is decoded as one, with its pixels, grids and raw images.
        memory: The extent; it may be longer than needed.
        checksum: Whether to compute the checksum.

    Returns:
        The number of bytes used, and their checksum.

    Raises:
        ShapeError: If a field's shape does not fit `sequences`, naming the field.
        FieldError: If token ids are not integers, a row has no tokens, a field or an element of `info` is not a tensor
            of B rows, or the vision fields are inconsistent.
        ArenaFullError: If the extent is too small.
    """
    stored, arrays, columns = field_arrays(experience)
    rows, width = experience.sequences.shape
    spans = Spans.of((rows, width), columns, arrays.get("attention_mask"), arrays.get("action_mask"))
    vision = vision_part(experience) if isinstance(experience, ExperienceVL) else None
    header = _header(stored, spans, vision)
    packed = msgspec.msgpack.encode(header)
    plan = plan_of(header.fields, header.full_masks)
    stacks, blocks, text_stop = lay_out(header, plan, header_bytes(packed))
    nbytes = text_stop if vision is None else vision_stop(vision.header, align(text_stop))
    if nbytes > len(memory):
        raise ArenaFullError(
            f"extent of {nbytes:,} B does not fit: {len(memory):,} B reserved for {len(spans.end)} rows; "
            "raise buffer.row_bytes"
        )
    write_header(packed, memory)
    group_now: GroupHeader | None = None
    for stack in stacks:
        if stack.group is not group_now:
            # A group's stacks are adjacent.
            group_now, places = stack.group, index_of(stack.group.rows)
        _write(stack.array(memory), stack, [arrays[field.name] for field in stack.run.fields], places, spans)
    for block in blocks:
        block.array(memory)[...] = arrays[block.field.name]
    if vision is not None:
        vision.write(memory, align(text_stop))
    return Encoded(nbytes, xxhash.xxh3_64_intdigest(memory[:nbytes]) if checksum else 0)


class ExtentReader:
    """A sealed extent, decoded in place."""

    def __init__(self, memory: memoryview, *, checksum: int = 0) -> None:
        """Decode an extent's header.

        Args:
            memory: The sealed extent, exactly its bytes.
            checksum: The expected xxh3-64 checksum of the bytes; 0 skips the verification.

        Raises:
            DecodeError: If the bytes are not an extent, or not the sealed ones.
        """
        if checksum and xxhash.xxh3_64_intdigest(memory) != checksum:
            raise DecodeError(f"extent of {len(memory):,} B: its checksum is not the one it was sealed with")
        self.header, self.plan, start = read_header(memory)
        self._memory = memory
        self._stacks, self._blocks, text_stop = lay_out(self.header, self.plan, start)
        if text_stop > len(memory):
            raise DecodeError(f"extent of {len(memory):,} B: its header describes {text_stop:,} B")
        vision = self.header.vision
        self.vision = None if vision is None else VisionReader(vision, self.header.rows, memory, align(text_stop))

    def leave_out(self, name: str) -> None:
        """Read the extent as one whose rows have no field of this name, to be gathered beside such rows."""
        fields = tuple(field for field in self.header.fields if field.name != name)
        if len(fields) == len(self.header.fields):
            return
        self.header = msgspec.structs.replace(self.header, fields=fields)
        self.plan = plan_of(fields, self.header.full_masks)
        self._stacks = [part for stack in self._stacks for part in stack.under(self.plan)]
        self._blocks = [block for block in self._blocks if block.field.name != name]

    def stacks(self) -> Iterator[tuple[Stack, Array]]:
        """Yield the fields with columns, as arrays (fields, rows of a group, columns) over the extent's memory."""
        for stack in self._stacks:
            yield stack, stack.array(self._memory)

    def blocks(self) -> Iterator[tuple[FieldHeader, Array]]:
        """Yield each field without columns as an array over the extent's memory."""
        for block in self._blocks:
            yield block.field, block.array(self._memory)


def gather(parts: Sequence[tuple[ExtentReader, Sequence[int]]], *, pin_memory: bool = False) -> Experience:
    """Copy rows of extents into one left-padded batch, each value once.

    Args:
        parts: Extents with the indices of their rows to copy, in batch order.
        pin_memory: Whether the batch's tensors are page-locked, for an asynchronous copy to a GPU.

    Returns:
        An `Experience` of all the rows, as wide as the longest row, or an `ExperienceVL`; it shares no memory with the
        extents.

    Raises:
        DecodeError: If a row index is out of an extent's range, or raw images are damaged.
        FieldError: If a field is present in only some of the extents, or only some of the extents are
            vision-language ones.
    """
    chosen_rows = [(reader, list(chosen)) for reader, chosen in parts]
    tokens, actions = _lengths(chosen_rows)
    vision = [(reader.vision, chosen) for reader, chosen in chosen_rows if reader.vision is not None]
    if 0 < len(vision) < len(parts):
        raise FieldError(f"{len(vision)} of {len(parts)} extents hold an ExperienceVL; a batch is of one kind")
    plan = _common_plan(parts)
    columns: dict[Columns, BatchRows] = {"S": BatchRows(tokens), "A": BatchRows(actions)}
    rows = len(tokens)
    tensors: dict[str, torch.Tensor] = {}
    arrays: dict[str, Array] = {}
    stacks: list[Array] = []
    for fields in plan.stacks:
        shape = (rows, columns[fields[0].columns].width)
        found, stack = MEMORY.empty(len(fields), shape, fields[0].dtype, pin_memory=pin_memory)
        stacks.append(stack)
        for field, tensor, array in zip(fields, found, stack, strict=True):
            tensors[field.name], arrays[field.name] = tensor, array
    for field in plan.others:
        (tensors[field.name],), (arrays[field.name],) = MEMORY.empty(
            1, (rows, *field.tail), field.dtype, pin_memory=pin_memory
        )
    _fill_masks(chosen_rows, arrays, columns)
    start = 0
    for reader, chosen in chosen_rows:
        _gather_part(reader, chosen, stacks, arrays, start, columns)
        start += len(chosen)
    for kind, batch_rows in columns.items():
        if batch_rows.has_padding:
            alike = [stack for stack, fields in zip(stacks, plan.stacks, strict=True) if fields[0].columns == kind]
            batch_rows.zero_padding(alike)
    info = {name.removeprefix("info."): tensors[name] for name in plan.info_names}
    # A damaged header may name other fields.
    values: dict[str, Any] = {name: tensors[name] for name in TEXT_FIELDS if name in tensors}
    if not vision:
        return Experience(**values, info=info or None)
    pixels, counts = gather_vision(vision, counted=info.keys(), pin_memory=pin_memory)
    return ExperienceVL(**values, **pixels, info={**info, **counts} or None)


# The header.


def _header(stored: tuple[FieldHeader, ...], spans: Spans, vision: VisionPart | None) -> ExtentHeader:
    tokens, actions = spans.tokens, spans.actions
    return ExtentHeader(
        len(tokens), stored, _groups(tokens, actions), tokens, actions, spans.full_masks,
        None if vision is None else vision.header,
    )  # fmt: skip


def _groups(tokens: list[int], actions: list[int]) -> list[GroupHeader]:
    longest = max(tokens)
    area = longest * len(tokens)
    if area - sum(tokens) < max(_most_padding(area, longest), _LEAST_PADDING_TOKENS):
        return [GroupHeader(list(range(len(tokens))), longest, max(actions))]
    return [
        GroupHeader(rows, max(map(tokens.__getitem__, rows)), max(map(actions.__getitem__, rows)))
        for rows in _similar(tokens)
    ]


def _similar(lengths: list[int]) -> list[list[int]]:
    """Divide rows into at most `_MAX_GROUPS` groups of similar length, each in append order.

    A group grows while its padding is below an eighth of its area, a third if its rows are short, or below
    `_LEAST_PADDING_TOKENS`.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    groups, start, tokens = [], 0, lengths[order[0]]
    for stop in range(1, len(order)):
        longest = lengths[order[stop]]
        tokens += longest
        area = longest * (stop + 1 - start)
        if area - tokens >= max(_most_padding(area, longest), _LEAST_PADDING_TOKENS):
            groups.append(sorted(order[start:stop]))
            start, tokens = stop, longest
            if len(groups) == _MAX_GROUPS - 1:
                break
    return [*groups, sorted(order[start:])]


def _most_padding(area: int, longest: int) -> int:
    return area // (3 if longest <= SHORT_ROW_TOKENS else 8)


# Blocks.


def _write(out: Array, stack: Stack, sources: list[Array], places: Places, spans: Spans) -> None:
    """Write the rows of a group, which are at `places` of each source, (B, columns), to one block of `out` a source.

    The padding before a row in its block is undefined; `gather` zeroes it.
    """
    is_token, width = stack.run.is_token, stack.shape[2]
    # Action columns end where the sequences' columns end.
    shift = 0 if is_token else spans.width - spans.action_columns
    if width * out.itemsize <= SHORT_ROW_BYTES:
        is_contiguous = all(source.flags.c_contiguous for source in sources)
        if spans.end_together and (isinstance(places, slice) or not is_contiguous):
            stop = spans.end[0] - shift
            for place, source in enumerate(sources):
                out[place] = source[places, stop - width : stop]
            return
        if is_contiguous:
            ends = spans.end[places] if isinstance(places, slice) else list(map(spans.end.__getitem__, places))
            write_windows(out, sources, stack.group.rows, np.array(ends) - shift)
            return
    lengths = spans.tokens if is_token else spans.actions
    for place, row in enumerate(stack.group.rows):
        stop, length = spans.end[row] - shift, lengths[row]
        for target, source in zip(out, sources, strict=True):
            target[place, width - length :] = source[row, stop - length : stop]


def _gather_part(
    reader: ExtentReader, chosen: list[int], stacks: list[Array], arrays: dict[str, Array], start: int,
    columns: dict[Columns, BatchRows],
) -> None:  # fmt: skip
    rows = index_of(chosen)
    for field, values in reader.blocks():
        arrays[field.name][start : start + len(chosen)] = values[rows]
    group_now: GroupHeader | None = None
    for stack, values in reader.stacks():
        if stack.group is not group_now:
            # A group's stacks are adjacent: its chosen rows are located once.
            group_now, places = stack.group, places_of(stack.group, chosen, start)
        if places is not None:
            run = stack.run
            out = stacks[run.stack][run.first : run.first + len(run.fields)]
            columns["S" if run.is_token else "A"].copy(values, places[0], out, places[1])


def _fill_masks(
    parts: Sequence[tuple[ExtentReader, list[int]]], arrays: dict[str, Array], columns: dict[Columns, BatchRows]
) -> None:
    """Fill the masks that are not stored, in all rows: rows of extents that store theirs are copied over them."""
    left_out = [reader.header.full_masks for reader, _ in parts]
    for name in {name for names in left_out for name in names}:
        is_final = all(name in names for names in left_out)
        columns["S" if name in TOKEN_FIELDS else "A"].fill_mask(arrays[name], is_final=is_final)


def _lengths(parts: Sequence[tuple[ExtentReader, list[int]]]) -> tuple[list[int], list[int]]:
    """Return the tokens and the actions of each row of the batch."""
    tokens: list[int] = []
    actions: list[int] = []
    for reader, chosen in parts:
        header = reader.header
        if chosen == list(range(header.rows)):
            tokens += header.sequence_lengths
            actions += header.action_lengths
            continue
        if min(chosen) < 0 or max(chosen) >= header.rows:
            row = next(row for row in chosen if not 0 <= row < header.rows)
            raise DecodeError(f"row {row} is requested from an extent of {header.rows} rows")
        tokens += map(header.sequence_lengths.__getitem__, chosen)
        actions += map(header.action_lengths.__getitem__, chosen)
    return tokens, actions


def _common_plan(parts: Sequence[tuple[ExtentReader, Sequence[int]]]) -> Plan:
    first = parts[0][0]
    for reader, _ in parts[1:]:
        if reader.plan is first.plan or reader.header.fields == first.header.fields:
            continue
        here, there = ({field.name: field for field in found.header.fields} for found in (first, reader))
        odd = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
        if odd:
            raise FieldError(f"{odd[0]}: present, or of one dtype and shape, in some of the batch's rows only")
        if reader.plan.stacks != first.plan.stacks:
            raise DecodeError("the fields of an extent are in an order that no encoder writes")
    return first.plan
