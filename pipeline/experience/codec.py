"""Experience <-> the bytes of an extent: encoding drops the padding, decoding batches rows in one pass.

A row is stored right-aligned, in the width of its group's longest row. So the response columns end together in group,
extent and batch, and a group is copied with one slice. A mask without holes is not stored: the row lengths determine
it. `extent_format` defines the place of each block, `vision_codec` the part that a vision-language experience adds.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from pipeline.errors import ArenaFullError, DecodeError, FieldError, ShapeError
from pipeline.experience.checks import check_travels
from pipeline.experience.extent_format import (
    Array,
    Columns,
    ExtentHeader,
    FieldHeader,
    GroupHeader,
    Plan,
    Stack,
    align,
    as_array,
    field_headers,
    header_bytes,
    index_of,
    lay_out,
    plan_of,
    read_header,
    write_header,
)
from pipeline.experience.row_spans import Spans, action_columns
from pipeline.experience.tensor_pool import MEMORY
from pipeline.experience.types import OBJECT_FIELDS, SCORE_FIELDS, TOKEN_FIELDS, Experience, ExperienceVL
from pipeline.experience.vision_codec import (
    VisionPart,
    VisionReader,
    gather_vision,
    vision_part,
    vision_stop,
)

# In stored order: `ACTION_FIELDS`, and those of `SCORE_FIELDS` that may be (B, A). `reward` is always one number a row.
_PER_ACTION_FIELDS = (
    "action_log_probs", "base_action_log_probs", "values", "returns", "kl", "advantages", "action_mask",
    "action_entropy",
)  # fmt: skip
_TEXT_FIELDS = (*TOKEN_FIELDS, *_PER_ACTION_FIELDS, "reward", *OBJECT_FIELDS)
_MAX_GROUPS = 8
# Less padding than this is not worth a group: copying the padding costs less than the calls for a group's blocks.
_LEAST_PADDING_TOKENS = 4096
# A row of at most this many bytes is copied in a block with the others of its group, padding included: one numpy call a
# field. A longer one is copied alone, without padding: one call a field and row.
_SHORT_ROW_BYTES = 1 << 14
_SHORT_ROW_TOKENS = _SHORT_ROW_BYTES // 8
# Wider batches are zeroed row by row; narrower ones by one operation on all values, of up to this number with a
# comparison a value, else with a mask of bits, which has more fixed cost.
_FEW_COLUMNS = 1 << 10
_FEW_VALUES = 1 << 13


@dataclasses.dataclass(frozen=True)
class Encoded:
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
    rows, width = experience.sequences.shape
    arrays, kinds = _arrays_of(experience, rows)
    columns = action_columns(arrays)
    described = [
        (name, kinds[name], *_columns_and_tail(name, array.shape, width, columns)) for name, array in arrays.items()
    ]
    stored = field_headers(tuple(described))
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
    for stack in stacks:
        _write(stack.array(memory), stack, [arrays[field.name] for field in stack.run.fields], header, spans)
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
    _refuse_missing_rows(parts)
    vision = [(reader.vision, chosen) for reader, chosen in parts if reader.vision is not None]
    if 0 < len(vision) < len(parts):
        raise FieldError(f"{len(vision)} of {len(parts)} extents hold an ExperienceVL; a batch is of one kind")
    plan = _common_plan(parts)
    rows = sum(len(chosen) for _, chosen in parts)
    lengths: dict[Columns, list[int]] = {
        "S": [reader.header.sequence_lengths[row] for reader, chosen in parts for row in chosen],
        "A": [reader.header.action_lengths[row] for reader, chosen in parts for row in chosen],
    }
    tensors: dict[str, torch.Tensor] = {}
    arrays: dict[str, Array] = {}
    stacks: list[Array] = []
    for fields in plan.stacks:
        shape = (rows, max(lengths[fields[0].columns]))
        found, stack = MEMORY.empty(len(fields), shape, fields[0].dtype, pin_memory=pin_memory)
        stacks.append(stack)
        for field, tensor, array in zip(fields, found, stack, strict=True):
            tensors[field.name], arrays[field.name] = tensor, array
    for field in plan.others:
        (tensors[field.name],), (arrays[field.name],) = MEMORY.empty(
            1, (rows, *field.tail), field.dtype, pin_memory=pin_memory
        )
    start = 0
    for reader, chosen in parts:
        _gather_part(reader, list(chosen), stacks, arrays, start)
        start += len(chosen)
    _fill_masks(parts, arrays)
    for columns, each in lengths.items():
        alike = [stack for stack, fields in zip(stacks, plan.stacks, strict=True) if fields[0].columns == columns]
        _zero_padding(alike, each)
    plain, info = _by_field(tensors)
    if not vision:
        return Experience(**plain, info=info or None)
    pixels, counts = gather_vision(vision, counted=info.keys(), pin_memory=pin_memory)
    return ExperienceVL(**plain, **pixels, info={**info, **counts} or None)


# Reading an Experience.


def _arrays_of(experience: Experience, rows: int) -> tuple[dict[str, Array], dict[str, torch.dtype]]:
    """Return the text fields that are not None, as arrays over the tensors' memory, and their torch dtypes."""
    check_travels(experience)
    values = vars(experience)
    found = {name: value for name in _TEXT_FIELDS if (value := values[name]) is not None}
    found |= {f"info.{key}": value for key, value in (experience.info or {}).items()}
    for name, value in found.items():
        if not isinstance(value, torch.Tensor):
            raise FieldError(f"{_display_name(name)}: only tensors are stored, got {type(value).__name__}")
    arrays = {name: as_array(value.detach() if value.requires_grad else value) for name, value in found.items()}
    for name, array in arrays.items():
        if array.shape[:1] != (rows,):
            raise ShapeError(f"{_display_name(name)}: {array.shape} for {rows} rows")
    return arrays, {name: value.dtype for name, value in found.items()}


def _display_name(name: str) -> str:
    return f"info[{name.removeprefix('info.')!r}]" if name.startswith("info.") else name


def _columns_and_tail(
    name: str, shape: tuple[int, ...], width: int, action_columns: int
) -> tuple[Columns, tuple[int, ...]]:
    is_token = name in TOKEN_FIELDS
    if not is_token and not (name in _PER_ACTION_FIELDS and len(shape) == 2):
        return "", shape[1:]
    expected = width if is_token else action_columns
    if len(shape) == 2 and shape[1] == expected:
        return "S" if is_token else "A", ()
    if name in SCORE_FIELDS and shape[1] == 1:
        # One number a row as (B, 1), the form in LightRFT.
        return "", shape[1:]
    raise ShapeError(f"{name}: {shape}, expected ({shape[0]}, {expected})")


def _header(stored: tuple[FieldHeader, ...], spans: Spans, vision: VisionPart | None) -> ExtentHeader:
    tokens = list(map(operator.sub, spans.end, spans.start))
    actions = spans.actions
    groups = [
        GroupHeader(rows, max(map(tokens.__getitem__, rows)), max(map(actions.__getitem__, rows)))
        for rows in _similar(tokens)
    ]
    return ExtentHeader(
        len(tokens), stored, groups, tokens, actions, tuple(spans.full_masks),
        None if vision is None else vision.header,
    )  # fmt: skip


def _similar(lengths: list[int]) -> list[list[int]]:
    """Divide rows into at most `_MAX_GROUPS` groups of similar length, each in append order.

    A group grows while its padding is below an eighth of its area, a third if its rows are short, or below
    `_LEAST_PADDING_TOKENS`.
    """
    area = max(lengths) * len(lengths)
    if area - sum(lengths) < max(_most_padding(area, max(lengths)), _LEAST_PADDING_TOKENS):
        return [list(range(len(lengths)))]
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
    return area // (3 if longest <= _SHORT_ROW_TOKENS else 8)


# Blocks.


def _write(out: Array, stack: Stack, sources: list[Array], header: ExtentHeader, spans: Spans) -> None:
    """Write the rows of a group: the rows of each source, (B, columns), to one block of `out`.

    The padding before a row in its block is undefined; `gather` zeroes it.
    """
    is_token, rows, width = stack.run.is_token, stack.group.rows, stack.shape[2]
    # Action columns end where the sequences' columns end.
    shift = 0 if is_token else spans.width - spans.action_columns
    if spans.end_together and width * out.itemsize <= _SHORT_ROW_BYTES:
        stop, chosen = spans.end[0] - shift, index_of(rows)
        for target, source in zip(out, sources, strict=True):
            target[...] = source[chosen, stop - width : stop]
        return
    lengths = header.sequence_lengths if is_token else header.action_lengths
    for place, row in enumerate(rows):
        stop, length = spans.end[row] - shift, lengths[row]
        for target, source in zip(out, sources, strict=True):
            target[place, width - length :] = source[row, stop - length : stop]


def _gather_part(
    reader: ExtentReader, chosen: list[int], stacks: list[Array], arrays: dict[str, Array], start: int
) -> None:
    rows = index_of(chosen)
    for field, values in reader.blocks():
        arrays[field.name][start : start + len(chosen)] = values[rows]
    group_now: GroupHeader | None = None
    for stack, values in reader.stacks():
        if stack.group is not group_now:
            # A group's stacks are adjacent: its chosen rows are located once.
            group_now, (sources, targets) = stack.group, _places_of(stack.group, chosen, start)
        if sources is not None:
            run, (count, _, stored) = stack.run, stack.shape
            out = stacks[run.stack][run.first : run.first + count]
            # A group may be wider than this batch: columns beyond the batch's width are its padding.
            width = min(stored, out.shape[2])
            out[:, targets, out.shape[2] - width :] = values[:, sources, stored - width :]


_Places = slice | list[int] | None


def _places_of(group: GroupHeader, chosen: list[int], start: int) -> tuple[_Places, _Places]:
    """Return the places of the chosen rows in their group and in the batch; None if the group has none of them."""
    if group.rows == chosen:
        return slice(None), slice(start, start + len(chosen))
    place_of = {row: place for place, row in enumerate(group.rows)}
    found = [(place_of[row], start + place) for place, row in enumerate(chosen) if row in place_of]
    if not found:
        return None, None
    return index_of([source for source, _ in found]), index_of([target for _, target in found])


def _fill_masks(parts: Sequence[tuple[ExtentReader, Sequence[int]]], arrays: dict[str, Array]) -> None:
    """Fill the masks that are not stored with ones."""
    start = 0
    for reader, chosen in parts:
        stop = start + len(chosen)
        for name in reader.header.full_masks:
            arrays[name][start:stop] = 1
        start = stop


def _zero_padding(stacks: list[Array], lengths: list[int]) -> None:
    """Zero the padding before each row, in stacks (fields, rows, columns) of one width."""
    if not stacks:
        return
    rows, width = stacks[0].shape[1:]
    padding = [width - length for length in lengths]
    if width > _FEW_COLUMNS:
        for row, columns in enumerate(padding):
            if columns:
                for stack in stacks:
                    stack[:, row, :columns] = 0
        return
    # int16: more values a vector instruction than int64.
    is_padding = np.arange(width, dtype=np.int16) < np.array(padding, np.int16)[:, None]
    if rows * width <= _FEW_VALUES:
        for stack in stacks:
            np.copyto(stack, 0, casting="unsafe", where=is_padding)
        return
    for stack in stacks:
        # All bits of a token, none of padding, whose values may be NaN.
        kept = is_padding.astype(f"i{stack.itemsize}")
        np.subtract(kept, 1, out=kept)
        words = stack.view(kept.dtype)
        np.bitwise_and(words, kept, out=words)


def _refuse_missing_rows(parts: Sequence[tuple[ExtentReader, Sequence[int]]]) -> None:
    for reader, chosen in parts:
        if min(chosen) < 0 or max(chosen) >= reader.header.rows:
            row = next(row for row in chosen if not 0 <= row < reader.header.rows)
            raise DecodeError(f"row {row} is requested from an extent of {reader.header.rows} rows")


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


def _by_field(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    plain = {name: tensors[name] for name in _TEXT_FIELDS if name in tensors}
    info = {name.removeprefix("info."): value for name, value in tensors.items() if name.startswith("info.")}
    return plain, info
