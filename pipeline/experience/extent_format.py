"""The format of an extent: its header, and the place of each column.

    u32 header length, header (msgpack `ExtentHeader`), zeros up to a multiple of 64
    columns, each aligned to 64 bytes, in the order of the header's fields, row after row, without padding:
        (T,) values of a field with a column a token, (N,) of one with a column an action, (B, ...) of any other
    the vision part (`vision_codec`), if the experience is a vision-language one

T is the sum of the rows' tokens, N that of their actions. A mask without holes has no column: the lengths determine it.

A decoded header is consistent: for any bytes, `read_header` either returns a header whose parts agree with each other
or raises DecodeError. The other functions rely on it.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import struct
import warnings
from collections.abc import Iterator, Mapping
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


Fields = tuple[FieldHeader, ...]


class MediumHeader(msgspec.Struct, frozen=True, array_like=True):
    """The images, or the videos, of all rows: `counts` grids in each row, `patches` rows of pixels in total.

    `firsts` is the first row with the same images, for each row: only its grids and pixels are stored. None where each
    row has its own.
    """

    pixels: FieldHeader
    grids: FieldHeader
    patches: Size
    counts: list[Size]
    firsts: list[Size] | None = None


class VisionHeader(msgspec.Struct, frozen=True, array_like=True):
    """The vision fields; `raw_bytes` is the size of each row's raw images, None if no row has raw images."""

    media: list[MediumHeader]
    raw_bytes: list[Size] | None


class ExtentHeader(msgspec.Struct, frozen=True, array_like=True):
    """The header of an extent; `vision` is None in an extent of text alone."""

    rows: Size
    fields: Fields
    sequence_lengths: list[Size]
    action_lengths: list[Size]
    full_masks: tuple[str, ...]
    vision: VisionHeader | None = None


class _HeaderOnWire(msgspec.Struct, frozen=True, array_like=True):
    """An `ExtentHeader` whose fields are not decoded."""

    rows: Size
    fields: msgspec.Raw
    sequence_lengths: list[Size]
    action_lengths: list[Size]
    full_masks: tuple[str, ...]
    vision: VisionHeader | None = None


_header_decoder = msgspec.msgpack.Decoder(_HeaderOnWire)
_fields_decoder = msgspec.msgpack.Decoder(Fields)


class Run(NamedTuple):
    """The columns of neighbouring fields of one dtype and one shape, `stride` bytes apart."""

    fields: Fields
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    start: int
    stride: int

    def array(self, memory: memoryview | Array) -> Array:
        """Return the columns as one array (fields, *shape) over memory."""
        count = len(self.fields)
        if count == 1:
            return np.ndarray((1, *self.shape), self.dtype, memory, self.start)
        steps = [self.dtype.itemsize]
        for size in self.shape[:0:-1]:
            steps.insert(0, steps[0] * size)
        return np.ndarray((count, *self.shape), self.dtype, memory, self.start, (self.stride, *steps))


# All extents of a training run have the same fields.
@functools.lru_cache(maxsize=64)
def _stored_together(fields: Fields, full_masks: tuple[str, ...]) -> tuple[Fields, ...]:
    """Return the fields that have a column, neighbours of one kind together."""
    stored = (field for field in fields if field.name not in full_masks)
    return tuple(
        tuple(kind) for _, kind in itertools.groupby(stored, lambda field: (field.dtype, field.columns, field.tail))
    )


def lay_out(fields: Fields, full_masks: tuple[str, ...], sizes: Mapping[str, int], start: int) -> tuple[list[Run], int]:
    """Return the places of columns.

    Args:
        fields: The fields.
        full_masks: Names of those without a column.
        sizes: The first dimension of a column by the kind of its field: T of "S", N of "A", B of "".
        start: Offset of the first column.

    Returns:
        The columns, and the end of the last.
    """
    runs, stop = [], start
    for together in _stored_together(fields, full_masks):
        first = together[0]
        shape, dtype = (sizes[first.columns], *first.tail), _ARRAY_DTYPES[first.dtype]
        nbytes = math.prod(shape) * dtype.itemsize
        stride = align(nbytes)
        runs.append(Run(together, shape, dtype, start, stride))
        stop = start + (len(together) - 1) * stride + nbytes
        start += len(together) * stride
    return runs, stop


def write_header(packed: bytes, memory: memoryview) -> None:
    """Write an encoded header, and zeros up to the first block."""
    start, stop = _LENGTH.size + len(packed), header_bytes(packed)
    _LENGTH.pack_into(memory, 0, len(packed))
    memory[_LENGTH.size : start] = packed
    memory[start:stop] = bytes(stop - start)


def header_bytes(packed: bytes) -> int:
    """Return the offset of the first block behind an encoded header."""
    return align(_LENGTH.size + len(packed))


def read_header(memory: memoryview) -> tuple[ExtentHeader, int]:
    """Return an extent's header, and the offset of its first column.

    Raises:
        DecodeError: If there is no readable header, or its parts are inconsistent.
    """
    try:
        (length,) = _LENGTH.unpack_from(memory)
        found = _header_decoder.decode(memory[_LENGTH.size : _LENGTH.size + length])
        fields, errors = _fields_and_errors(bytes(found.fields), found.full_masks)
    except (struct.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"extent of {len(memory):,} B has no readable header: {error}") from error
    header = ExtentHeader(
        found.rows, fields, found.sequence_lengths, found.action_lengths, found.full_masks, found.vision
    )
    if reason := next(iter(errors or _errors(header)), ""):
        raise DecodeError(f"extent of {len(memory):,} B: its header {reason}")
    return header, align(_LENGTH.size + length)


# All extents of a training run have the same fields: they are decoded once.
@functools.lru_cache(maxsize=64)
def _fields_and_errors(packed: bytes, full_masks: tuple[str, ...]) -> tuple[Fields, tuple[str, ...]]:
    fields = _fields_decoder.decode(packed)
    return fields, tuple(_errors_of_fields(fields, full_masks))


def _errors(header: ExtentHeader) -> Iterator[str]:
    """Yield the errors of a header beyond its fields: each would make a reader fail or allocate without bound."""
    rows, tokens, actions = header.rows, header.sequence_lengths, header.action_lengths
    if not len(tokens) == len(actions) == rows or not rows:
        yield f"has lengths of other than its {rows} rows"
    elif not all(map(operator.le, actions, tokens)):
        yield "has a row with more actions than tokens"


def _errors_of_fields(fields: Fields, full_masks: tuple[str, ...]) -> Iterator[str]:
    columns = {field.name: field.columns for field in fields}
    for field in fields:
        yield from field_errors(field)
        if field.columns and field.tail:
            yield f"has a {field.name} of several numbers a column"
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
    if array.flags.writeable:
        tensor = torch.from_numpy(array)
    else:
        with warnings.catch_warnings():
            # Torch warns about memory that is not writable, as that of an actor's rows is; they are only read.
            warnings.simplefilter("ignore", UserWarning)
            tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def align(nbytes: int) -> int:
    """Return `nbytes` rounded up to the alignment of a block."""
    return (nbytes + _BLOCK_ALIGNMENT - 1) & -_BLOCK_ALIGNMENT
