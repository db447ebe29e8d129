"""What the bytes of an extent mean: its header, and the place of each block.

    u32 header length, header (msgpack `ExtentHeader`), zeros up to a multiple of 64
    blocks, each aligned to 64 bytes, in the order in which `lay_out` places them:
        for each group of rows of similar length, for each field with a column a token:  (rows, width) values
        for each other field:                                                            (B, ...) values
    what `codec_vision` adds, if the experience is a vision-language one

Rows are right-aligned in their blocks. What lies before a row is anything: whoever copies it out zeroes it.

A header that was read is one that the rest may rely on: whatever bytes lie there, `read_header` returns one whose parts
account for each other, or raises DecodeError.
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
# numpy takes no array of more dimensions than 64, one of which is the rows'.
_MOST_DIMENSIONS = 32
_MOST_ELEMENTS = 1 << 32
_MASK_COLUMNS = {"attention_mask": "S", "action_mask": "A"}
_LENGTH = struct.Struct("<I")

Array = npt.NDArray[Any]
Columns = Literal["S", "A", ""]
Size = Annotated[int, msgspec.Meta(ge=0)]

# numpy knows no bfloat16; its bits travel as int16.
_ARRAY_DTYPES = {
    name: np.dtype("int16" if name == "bfloat16" else name)
    for name in (
        "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
    )
}  # fmt: skip


_DTYPE_NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in _ARRAY_DTYPES}


class FieldHeader(msgspec.Struct, frozen=True, array_like=True):
    """One stored field: its name (``info.`` before those of `info`), torch dtype and columns.

    `columns` is ``"S"`` (one a token), ``"A"`` (one an action) or ``""``; `tail` the shape of a row of the latter.
    """

    name: str
    dtype: str
    columns: Columns
    tail: tuple[Size, ...]


class GroupHeader(msgspec.Struct, frozen=True, array_like=True):
    """Rows stored together: their places in the append, and the widths of their blocks."""

    rows: list[Size]
    sequence_width: Size
    action_width: Size


class MediumHeader(msgspec.Struct, frozen=True, array_like=True):
    """The images, or the videos, of all rows: `counts` grids a row, `patches` rows of pixels in all."""

    pixels: FieldHeader
    grids: FieldHeader
    patches: Size
    counts: list[Size]


class VisionHeader(msgspec.Struct, frozen=True, array_like=True):
    """The vision fields; `raw_bytes` is the size of each row's raw images, None where no row has any."""

    media: list[MediumHeader]
    raw_bytes: list[Size] | None


class ExtentHeader(msgspec.Struct, frozen=True, array_like=True):
    """All that a reader needs to know of an extent; `vision` is None in one of plain text."""

    rows: Size
    fields: tuple[FieldHeader, ...]
    groups: list[GroupHeader]
    sequence_lengths: list[Size]
    action_lengths: list[Size]
    full_masks: tuple[str, ...]
    vision: VisionHeader | None = None


_header_decoder = msgspec.msgpack.Decoder(ExtentHeader)


class FieldRun(NamedTuple):
    """Fields of one dtype, with a column each token or each action, that are stored side by side.

    `stack`: which of the plan's stacks they are part of; `first`: the place of the first of them in it;
    `kind`: their dtype as arrays hold them.
    """

    fields: tuple[FieldHeader, ...]
    stack: int
    first: int
    is_token: bool
    kind: np.dtype[Any]


class Plan(NamedTuple):
    """What the fields of an extent, and the masks left out of it, say of every extent that has the same ones.

    `stacks`: fields with columns, neighbours of one kind together, as a batch holds them; `runs`: those of each that
    are stored side by side; `others`: fields without columns; `wrongs`: what no extent can have.
    """

    stacks: tuple[tuple[FieldHeader, ...], ...]
    runs: tuple[FieldRun, ...]
    others: tuple[FieldHeader, ...]
    wrongs: tuple[str, ...]


# Extents of one run have the same fields: what can be said of these alone is found out once.
@functools.lru_cache(maxsize=64)
def plan_of(fields: tuple[FieldHeader, ...], full_masks: tuple[str, ...]) -> Plan:
    """Return the plan of a header's fields and of the masks that it leaves out."""
    if wrongs := tuple(_wrongs_of_fields(fields, full_masks)):
        return Plan((), (), (), wrongs)
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
    return Plan(stacks, tuple(runs), others, ())


class Stack(NamedTuple):
    """The values of a run of fields, of the rows of one group: a block each, `stride` bytes apart."""

    run: FieldRun
    group: GroupHeader
    shape: tuple[int, int, int]
    start: int
    stride: int

    def array(self, memory: memoryview) -> Array:
        """Return the blocks as one array (fields, rows, columns) over the extent's own bytes."""
        kind = self.run.kind
        return np.ndarray(
            self.shape, kind, memory, self.start, (self.stride, self.shape[2] * kind.itemsize, kind.itemsize)
        )


class Block(NamedTuple):
    """The values of a field without columns, end to end."""

    field: FieldHeader
    shape: tuple[int, ...]
    start: int
    stop: int

    def array(self, memory: memoryview) -> Array:
        """Return the block as an array over the extent's own bytes."""
        return np.ndarray(self.shape, _ARRAY_DTYPES[self.field.dtype], memory, self.start)


def block_at(start: int, field: FieldHeader, shape: tuple[int, ...]) -> Block:
    """Place a block; the next one starts at `align` of its stop."""
    return Block(field, shape, start, start + math.prod(shape) * _ARRAY_DTYPES[field.dtype].itemsize)


def lay_out(header: ExtentHeader, plan: Plan, start: int) -> tuple[list[Stack], list[Block], int]:
    """Place the text fields.

    Args:
        header: The extent's.
        plan: Of its fields.
        start: Where the blocks start, as `header_bytes` says.

    Returns:
        Those with columns by group, those without, and where the last one stops.
    """
    stacks, blocks, stop = [], [], start
    for group in header.groups:
        rows, widths = len(group.rows), (group.action_width, group.sequence_width)
        for run in plan.runs:
            count, width = len(run.fields), widths[run.is_token]
            nbytes = rows * width * run.kind.itemsize
            stride = align(nbytes)
            stacks.append(Stack(run, group, (count, rows, width), start, stride))
            stop = start + (count - 1) * stride + nbytes
            start = align(stop)
    for field in plan.others:
        block = block_at(start, field, (header.rows, *field.tail))
        blocks.append(block)
        stop, start = block.stop, align(block.stop)
    return stacks, blocks, stop


def write_header(packed: bytes, memory: memoryview) -> None:
    """Write an encoded header, and the zeros behind it."""
    start, stop = _LENGTH.size + len(packed), header_bytes(packed)
    _LENGTH.pack_into(memory, 0, len(packed))
    memory[_LENGTH.size : start] = packed
    memory[start:stop] = bytes(stop - start)


def header_bytes(packed: bytes) -> int:
    """Return where the blocks behind an encoded header start."""
    return align(_LENGTH.size + len(packed))


def read_header(memory: memoryview) -> tuple[ExtentHeader, Plan, int]:
    """Return an extent's header, the plan of its fields, and where its blocks start.

    Raises:
        DecodeError: If there is no header, or its parts do not account for each other.
    """
    try:
        (length,) = _LENGTH.unpack_from(memory)
        header = _header_decoder.decode(memory[_LENGTH.size : _LENGTH.size + length])
    except (struct.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"extent of {len(memory):,} B has no readable header: {error}") from error
    plan = plan_of(header.fields, header.full_masks)
    if wrong := next(iter(plan.wrongs or _wrongs(header)), ""):
        raise DecodeError(f"extent of {len(memory):,} B: its header {wrong}")
    return header, plan, align(_LENGTH.size + length)


def _wrongs(header: ExtentHeader) -> Iterator[str]:
    """Say what in a header, but for its fields, would make a reader fail, or reserve without bound."""
    rows, tokens, actions = header.rows, header.sequence_lengths, header.action_lengths
    if not len(tokens) == len(actions) == rows:
        yield f"has lengths of other than its {rows} rows"
        return
    placed = sorted(itertools.chain.from_iterable(group.rows for group in header.groups))
    if placed != list(range(rows)) or not all(group.rows for group in header.groups):
        yield f"has groups that are not its {rows} rows"
        return
    for group in header.groups:
        if max(map(tokens.__getitem__, group.rows)) > group.sequence_width:
            yield "has a row that is longer than its group"
        if max(map(actions.__getitem__, group.rows)) > group.action_width:
            yield "has a row with more actions than its group"
    if not all(map(operator.le, actions, tokens)):
        yield "has a row with more actions than tokens"


def _wrongs_of_fields(fields: tuple[FieldHeader, ...], full_masks: tuple[str, ...]) -> Iterator[str]:
    columns = {field.name: field.columns for field in fields}
    for field in fields:
        yield from wrongs_of_field(field)
    if len(columns) < len(fields):
        yield "names a field twice"
    if columns.get("sequences") != "S" or "sequences" in full_masks:
        yield "has no sequences"
    for mask in full_masks:
        if mask not in _MASK_COLUMNS or columns.get(mask) != _MASK_COLUMNS[mask]:
            yield f"leaves out {mask} and does not say what it was"


def wrongs_of_field(field: FieldHeader) -> Iterator[str]:
    """Say what in a field's dtype or shape no array can have."""
    if field.dtype not in _ARRAY_DTYPES:
        yield f"has a {field.name} of dtype {field.dtype}"
    # A dimension of 0 hides the others from the size of the block, not from numpy.
    if len(field.tail) > _MOST_DIMENSIONS or math.prod(max(size, 1) for size in field.tail) > _MOST_ELEMENTS:
        yield f"has a {field.name} of shape {list(field.tail)}"


# Batches of one run have the same fields again and again.
@functools.lru_cache(maxsize=64)
def field_headers(fields: tuple[tuple[str, torch.dtype, Columns, tuple[int, ...]], ...]) -> tuple[FieldHeader, ...]:
    """Return the headers of fields, each its name, dtype, columns and tail, as `field_header` says."""
    return tuple(field_header(*field) for field in fields)


def field_header(name: str, kind: torch.dtype, columns: Columns, tail: tuple[int, ...]) -> FieldHeader:
    """Return a field's header.

    Raises:
        FieldError: If values of that dtype do not travel.
    """
    dtype = _DTYPE_NAMES.get(kind)
    if dtype is None:
        odd = str(kind).removeprefix("torch.")
        raise FieldError(f"{name}: {odd} does not travel, only {', '.join(_ARRAY_DTYPES)}")
    return FieldHeader(name, dtype, columns, tail)


def as_array(tensor: torch.Tensor) -> Array:
    """Return a CPU tensor's memory as an array; bfloat16 as int16."""
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def array_dtype(dtype: str) -> np.dtype[Any]:
    """Return the dtype of the array that holds values of a torch dtype, as headers name it."""
    return _ARRAY_DTYPES[dtype]


def as_tensor(array: Array, dtype: str) -> torch.Tensor:
    """Return the tensor over an array's memory; int16 as bfloat16 if that is its torch dtype."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def index_of(places: list[int]) -> slice | list[int]:
    """Return a slice where one serves, because slices copy several times faster than index lists."""
    first, count = places[0], len(places)
    # Ends that fit do not make a slice: rows may come in any order, and twice.
    return slice(first, first + count) if places == list(range(first, first + count)) else places


def align(nbytes: int) -> int:
    """Round up to where a block may start."""
    return (nbytes + _BLOCK_ALIGNMENT - 1) & -_BLOCK_ALIGNMENT
