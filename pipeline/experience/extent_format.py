"""The format of an extent: its header, and the place of each block.

    u32 header length, header (msgpack `ExtentHeader`), zeros up to a multiple of 64
    blocks, each aligned to 64 bytes, in the order in which `lay_out` places them:
        for each group of rows of similar length, for each field with a column a token:  (rows, width) values
        for each other field:                                                            (B, ...) values
    the vision part (`vision_codec`), if the experience is a vision-language one

Rows are right-aligned in their blocks. The padding before a row is undefined: the reader zeroes its own copy.

A decoded header is consistent: for any bytes, `read_header` either returns a header whose parts agree with each other
or raises DecodeError. The other functions rely on it.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import struct
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from pipeline.errors import DecodeError, FieldError

_BLOCK_ALIGNMENT = 64
# numpy allows 64 dimensions, one of which is the rows'.
_MOST_DIMENSIONS = 32
_MOST_ELEMENTS = 1 << 32
_MASK_COLUMNS = {"attention_mask": "S", "action_mask": "A"}
_LENGTH = struct.Struct("<I")

Array = npt.NDArray[Any]
Columns = Literal["S", "A", ""]
Size = Annotated[int, msgspec.Meta(ge=0)]

# numpy has no bfloat16; its bits are stored as int16.
_ARRAY_DTYPES = {
    name: np.dtype("int16" if name == "bfloat16" else name)
    for name in (
        "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
    )
}  # fmt: skip


_DTYPE_NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in _ARRAY_DTYPES}


class FieldHeader(msgspec.Struct, frozen=True, array_like=True):
    """One stored field: its name (``info.`` before those of `info`), torch dtype and columns.

    `columns` is ``"S"`` (one a token), ``"A"`` (one an action) or ``""`` (none); `tail` is the shape of a row of a
    field without columns.
    """

    name: str
    dtype: str
    columns: Columns
    tail: tuple[Size, ...]


class GroupHeader(msgspec.Struct, frozen=True, array_like=True):
    """Rows stored together: their indices in the append, and the widths of their blocks."""

    rows: list[Size]
    sequence_width: Size
    action_width: Size


class MediumHeader(msgspec.Struct, frozen=True, array_like=True):
    """The images, or the videos, of all rows: `counts` grids in each row, `patches` rows of pixels in total."""

    pixels: FieldHeader
    grids: FieldHeader
    patches: Size
    counts: list[Size]


class VisionHeader(msgspec.Struct, frozen=True, array_like=True):
    """The vision fields; `raw_bytes` is the size of each row's raw images, None if no row has raw images."""

    media: list[MediumHeader]
    raw_bytes: list[Size] | None


class ExtentHeader(msgspec.Struct, frozen=True, array_like=True):
    """The header of an extent; `vision` is None in an extent of text alone."""

    rows: Size
    fields: tuple[FieldHeader, ...]
    groups: list[GroupHeader]
    sequence_lengths: list[Size]
    action_lengths: list[Size]
    full_masks: tuple[str, ...]
    vision: VisionHeader | None = None


class _HeaderOnWire(msgspec.Struct, frozen=True, array_like=True):
    """An `ExtentHeader` whose fields are not decoded."""

    rows: Size
    fields: msgspec.Raw
    groups: list[GroupHeader]
    sequence_lengths: list[Size]
    action_lengths: list[Size]
    full_masks: tuple[str, ...]
    vision: VisionHeader | None = None


_header_decoder = msgspec.msgpack.Decoder(_HeaderOnWire)
_fields_decoder = msgspec.msgpack.Decoder(tuple[FieldHeader, ...])


class FieldRun(NamedTuple):
    """Fields of one dtype, all with a column a token or all with a column an action, whose blocks are adjacent.

    `stack`: index of the plan's stack that contains them; `first`: index of the first of them in the stack;
    `kind`: the dtype of their arrays.
    """

    fields: tuple[FieldHeader, ...]
    stack: int
    first: int
    is_token: bool
    kind: np.dtype[Any]


class Plan(NamedTuple):
    """The part of the layout that depends only on an extent's fields and on its masks that are not stored.

    `stacks`: fields with columns, neighbours of one kind together, as in a batch; `runs`: the field runs of each stack;
    `others`: fields without columns; `info_names`: names of the fields of `info`; `errors`: the reasons why no extent
    can have these fields.
    """

    stacks: tuple[tuple[FieldHeader, ...], ...]
    runs: tuple[FieldRun, ...]
    others: tuple[FieldHeader, ...]
    info_names: tuple[str, ...]
    errors: tuple[str, ...]


# All extents of a training run have the same fields: their plan is computed once.
@functools.lru_cache(maxsize=64)
def plan_of(fields: tuple[FieldHeader, ...], full_masks: tuple[str, ...]) -> Plan:
    """Return the plan of a header's fields and of its masks that are not stored."""
    if errors := tuple(_errors_of_fields(fields, full_masks)):
        return Plan((), (), (), (), errors)
    with_columns = (field for field in fields if field.columns)
    kinds = itertools.groupby(with_columns, lambda field: (field.columns, field.dtype))
    stacks = tuple(tuple(kind) for _, kind in kinds)
    runs = [
        FieldRun(
            tuple(field for _, field in part),
            index,
            part[0][0],
            part[0][1].columns == "S",
            _ARRAY_DTYPES[part[0][1].dtype],
        )
        for index, stack in enumerate(stacks)
        for is_left_out, found in itertools.groupby(enumerate(stack), lambda place: place[1].name in full_masks)
        if not is_left_out and (part := list(found))
    ]
    others = tuple(field for field in fields if not field.columns)
    info_names = tuple(field.name for field in fields if field.name.startswith("info."))
    return Plan(stacks, tuple(runs), others, info_names, ())


class Stack(NamedTuple):
    """The values of a field run in the rows of one group: one block a field, `stride` bytes apart."""

    run: FieldRun
    group: GroupHeader
    shape: tuple[int, int, int]
    start: int
    stride: int

    def array(self, memory: memoryview) -> Array:
        """Return the blocks as one array (fields, rows, columns) over the extent's memory."""
        kind = self.run.kind
        return np.ndarray(
            self.shape, kind, memory, self.start, (self.stride, self.shape[2] * kind.itemsize, kind.itemsize)
        )

    def under(self, plan: Plan) -> Iterator[Stack]:
        """Yield the blocks of those fields that a plan of fewer fields has, one by one, with their places there."""
        places = {
            field: (number, first) for number, fields in enumerate(plan.stacks) for first, field in enumerate(fields)
        }
        for number, field in enumerate(self.run.fields):
            if field in places:
                stack, first = places[field]
                run = self.run._replace(fields=(field,), stack=stack, first=first)
                shape = (1, self.shape[1], self.shape[2])
                yield self._replace(run=run, shape=shape, start=self.start + number * self.stride)


class Block(NamedTuple):
    """The values of a field without columns, contiguous."""

    field: FieldHeader
    shape: tuple[int, ...]
    start: int
    stop: int

    def array(self, memory: memoryview) -> Array:
        """Return the block as an array over the extent's memory."""
        return np.ndarray(self.shape, _ARRAY_DTYPES[self.field.dtype], memory, self.start)


def block_at(start: int, field: FieldHeader, shape: tuple[int, ...]) -> Block:
    """Return a field's block at `start`; the next block starts at `align(block.stop)`."""
    return Block(field, shape, start, start + math.prod(shape) * _ARRAY_DTYPES[field.dtype].itemsize)


def lay_out(header: ExtentHeader, plan: Plan, start: int) -> tuple[list[Stack], list[Block], int]:
    """Return the places of the text fields.

    Args:
        header: The extent's header.
        plan: The plan of its fields.
        start: Offset of the first block, from `header_bytes`.

    Returns:
        The stacks of the fields with columns, a group at a time; the blocks of the other fields; the end of the last.
    """
    stacks, blocks, stop = [], [], start
    for group in header.groups:
        rows, widths = len(group.rows), (group.action_width, group.sequence_width)
        for run in plan.runs:
            count, width = len(run.fields), widths[run.is_token]
            nbytes = rows * width * run.kind.itemsize
            stride = (nbytes + _BLOCK_ALIGNMENT - 1) & -_BLOCK_ALIGNMENT
            stacks.append(Stack(run, group, (count, rows, width), start, stride))
            stop = start + (count - 1) * stride + nbytes
            start += count * stride
    for field in plan.others:
        block = block_at(start, field, (header.rows, *field.tail))
        blocks.append(block)
        stop, start = block.stop, align(block.stop)
    return stacks, blocks, stop


def write_header(packed: bytes, memory: memoryview) -> None:
    """Write an encoded header, and zeros up to the first block."""
    start, stop = _LENGTH.size + len(packed), header_bytes(packed)
    _LENGTH.pack_into(memory, 0, len(packed))
    memory[_LENGTH.size : start] = packed
    memory[start:stop] = bytes(stop - start)


def header_bytes(packed: bytes) -> int:
    """Return the offset of the first block behind an encoded header."""
    return align(_LENGTH.size + len(packed))


def read_header(memory: memoryview) -> tuple[ExtentHeader, Plan, int]:
    """Return an extent's header, the plan of its fields, and the offset of its first block.

    Raises:
        DecodeError: If there is no readable header, or its parts are inconsistent.
    """
    try:
        (length,) = _LENGTH.unpack_from(memory)
        found = _header_decoder.decode(memory[_LENGTH.size : _LENGTH.size + length])
        fields, plan = _fields_and_plan(bytes(found.fields), found.full_masks)
    except (struct.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"extent of {len(memory):,} B has no readable header: {error}") from error
    header = ExtentHeader(
        found.rows, fields, found.groups, found.sequence_lengths, found.action_lengths, found.full_masks, found.vision
    )
    if reason := next(iter(plan.errors or _errors(header)), ""):
        raise DecodeError(f"extent of {len(memory):,} B: its header {reason}")
    return header, plan, align(_LENGTH.size + length)


# All extents of a training run have the same fields: they are decoded once.
@functools.lru_cache(maxsize=64)
def _fields_and_plan(packed: bytes, full_masks: tuple[str, ...]) -> tuple[tuple[FieldHeader, ...], Plan]:
    fields = _fields_decoder.decode(packed)
    return fields, plan_of(fields, full_masks)


def _errors(header: ExtentHeader) -> Iterator[str]:
    """Yield the errors of a header beyond its fields: each would make a reader fail or allocate without bound."""
    rows, tokens, actions = header.rows, header.sequence_lengths, header.action_lengths
    if not len(tokens) == len(actions) == rows:
        yield f"has lengths of other than its {rows} rows"
        return
    every, groups = list(range(rows)), header.groups
    # Usually one group has all rows, in order.
    is_one_group = len(groups) == 1 and rows > 0 and groups[0].rows == every
    if not is_one_group:
        placed = sorted(itertools.chain.from_iterable(group.rows for group in groups))
        if placed != every or not all(group.rows for group in groups):
            yield f"has groups that are not its {rows} rows"
            return
    for group in groups:
        if max(tokens if is_one_group else map(tokens.__getitem__, group.rows)) > group.sequence_width:
            yield "has a row that is longer than its group"
        if max(actions if is_one_group else map(actions.__getitem__, group.rows)) > group.action_width:
            yield "has a row with more actions than its group"
    if not all(map(operator.le, actions, tokens)):
        yield "has a row with more actions than tokens"


def _errors_of_fields(fields: tuple[FieldHeader, ...], full_masks: tuple[str, ...]) -> Iterator[str]:
    columns = {field.name: field.columns for field in fields}
    for field in fields:
        yield from field_errors(field)
    if len(columns) < len(fields):
        yield "names a field twice"
    if columns.get("sequences") != "S" or "sequences" in full_masks:
        yield "has no sequences"
    for mask in full_masks:
        if mask not in _MASK_COLUMNS or columns.get(mask) != _MASK_COLUMNS[mask]:
            yield f"omits {mask} without declaring it as a field"


def field_errors(field: FieldHeader) -> Iterator[str]:
    """Yield the errors of a field's dtype and shape: those that no array can have."""
    if field.dtype not in _ARRAY_DTYPES:
        yield f"has a {field.name} of dtype {field.dtype}"
    # With a dimension of 0 the block has 0 bytes, whatever the other dimensions are; numpy still refuses large ones.
    if len(field.tail) > _MOST_DIMENSIONS or math.prod(max(size, 1) for size in field.tail) > _MOST_ELEMENTS:
        yield f"has a {field.name} of shape {list(field.tail)}"


# All batches of a training run have the same fields.
@functools.lru_cache(maxsize=64)
def field_headers(fields: tuple[tuple[str, torch.dtype, Columns, tuple[int, ...]], ...]) -> tuple[FieldHeader, ...]:
    """Return the headers of fields, each given as the arguments of `field_header`."""
    return tuple(field_header(*field) for field in fields)


def field_header(name: str, kind: torch.dtype, columns: Columns, tail: tuple[int, ...]) -> FieldHeader:
    """Return a field's header.

    Raises:
        FieldError: If values of that dtype cannot be stored.
    """
    dtype = _DTYPE_NAMES.get(kind)
    if dtype is None:
        odd = str(kind).removeprefix("torch.")
        raise FieldError(f"{name}: {odd} cannot be stored, only {', '.join(_ARRAY_DTYPES)}")
    return FieldHeader(name, dtype, columns, tail)


def as_array(tensor: torch.Tensor) -> Array:
    """Return a CPU tensor's memory as an array; a bfloat16 tensor as int16."""
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def array_dtype(dtype: str) -> np.dtype[Any]:
    """Return the array dtype for a torch dtype, given by its name in headers."""
    return _ARRAY_DTYPES[dtype]


def as_tensor(array: Array, dtype: str) -> torch.Tensor:
    """Return a tensor over an array's memory; int16 becomes bfloat16 if that is `dtype`."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def index_of(places: list[int]) -> slice | list[int]:
    """Return a slice if the places are consecutive, because slices copy several times faster than index lists."""
    first, count = places[0], len(places)
    # Comparing the ends is not enough: rows may come in any order, and more than once.
    return slice(first, first + count) if places == list(range(first, first + count)) else places


def align(nbytes: int) -> int:
    """Return `nbytes` rounded up to the alignment of a block."""
    return (nbytes + _BLOCK_ALIGNMENT - 1) & -_BLOCK_ALIGNMENT
