"""The vision part of an extent: grids and pixels of all rows, in row order, and the raw images of each row.

    for the images, then the videos, if any row has one:  grids (images, 3), then pixels (patches, D)
    for each row, if any row has raw images:              msgpack, null or a list of `RawImage`

Rows that share their pixels in memory, as the responses to one prompt, share them in the extent, too: they are stored
once, and a batch without padding has them once. Raw images are stored as given, a path or an encoded file; a decoded
image is never in the arena (docs/decisions).
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import struct
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch

from pipeline.errors import DecodeError, FieldError, ShapeError
from pipeline.experience.extent_format import (
    Array,
    FieldHeader,
    MediumHeader,
    Run,
    VisionHeader,
    align,
    as_array,
    field_errors,
    field_header,
    lay_out,
)
from pipeline.experience.tensor_pool import MEMORY
from pipeline.experience.types import VISION_FIELDS
from pipeline.experience.vision import check_raw_images, patches_of
from pipeline.experience.vision_rows import GRIDS_OF, VisionRows

# The modes that PNG stores without loss; it refuses the other modes, or truncates them to fewer bits.
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")


class RawImage(msgspec.Struct, frozen=True, array_like=True):
    """A stored raw image: a reference (a path or URL, UTF-8), an encoded file, or a PIL image as PNG."""

    kind: Literal["reference", "file", "pil"]
    data: bytes


_raw_decoder = msgspec.msgpack.Decoder(list[RawImage] | None)


@dataclasses.dataclass(frozen=True)
class VisionPart:
    """The vision part of an extent, checked and ready to be written.

    Attributes:
        header: Its part of the extent's header.
        columns: The tensors of each run of values, end to end.
        raw_rows: The raw images of each row, encoded.
    """

    header: VisionHeader
    columns: list[list[torch.Tensor]]
    raw_rows: list[bytes]

    def write(self, memory: memoryview, start: int) -> None:
        """Write the vision part at `start`, behind the text fields."""
        runs, at = _places(self.header, start)
        for run, tensors in zip(runs, self.columns, strict=True):
            np.concatenate([as_array(tensor) for tensor in tensors], out=run.array(memory)[0])
        for raw in self.raw_rows:
            memory[at : at + len(raw)] = raw
            at += len(raw)


def vision_part(rows: VisionRows) -> VisionPart:
    """Return the vision part of rows.

    Raises:
        FieldError: If the pixels, grids and raw images of a row do not match, the pixels of two rows differ in dtype or
            width, or a raw image is of a type that cannot be stored.
        ShapeError: If pixels are not ``(patches, D)``, or grids not ``(images, 3)``.
    """
    media, columns = [], []
    check_raw_images(rows.raw_images, rows.image_grid_thws)
    for pixels_name, grids_name, _ in VISION_FIELDS:
        pixels, grids, firsts = getattr(rows, pixels_name), getattr(rows, grids_name), rows.firsts(pixels_name)
        own = [
            row
            for row in dict.fromkeys(firsts)
            if patches_of(pixels[row], grids[row], pixels_name, grids_name, where=f"row {row}: ")
        ]
        if not own:
            continue
        stored = {pixels_name: [pixels[row].detach() for row in own], grids_name: [grids[row].detach() for row in own]}
        headers = []
        for name, tensors in stored.items():
            kinds = dict.fromkeys((tensor.dtype, tuple(tensor.shape[1:])) for tensor in tensors)
            if len(kinds) > 1:
                (dtype, tail), (other, others_tail) = [*kinds][:2]
                raise FieldError(f"{name} is {dtype} {tail} in one row, {other} {others_tail} in another")
            ((dtype, tail),) = kinds
            if not tail or 0 in tail:
                raise ShapeError(f"{name}: {tuple(tensors[0].shape)}, expected (patches, D)")
            headers.append(field_header(name, dtype, "", tail))
        counts = [0 if of_row is None else len(of_row) for of_row in grids]
        patches = sum(map(len, stored[pixels_name]))
        is_shared = len(own) < np.count_nonzero(counts)
        media.append(MediumHeader(headers[0], headers[1], patches, counts, firsts if is_shared else None))
        columns += [stored[grids_name], stored[pixels_name]]
    raw_rows = _packed_rows(rows.raw_images)
    return VisionPart(VisionHeader(media, [len(raw) for raw in raw_rows] or None), columns, raw_rows)


def vision_stop(header: VisionHeader, start: int) -> int:
    """Return the end of a vision part that starts at `start`."""
    _, at = _places(header, start)
    return at + sum(header.raw_bytes or ())


class VisionReader:
    """The vision part of a sealed extent, decoded in place."""

    def __init__(self, header: VisionHeader, rows: int, memory: memoryview, start: int) -> None:
        """Locate each row's grids, patches and raw images.

        Args:
            header: The vision part of the extent's header.
            rows: Rows of the extent.
            memory: The sealed extent.
            start: Offset of the vision part.

        Raises:
            DecodeError: If the header is inconsistent in itself, with the extent's size, or with the grids.
        """
        if found := next(_errors(header, rows), ""):
            raise DecodeError(f"extent of {len(memory):,} B: its header {found}")
        runs, raw_start = _places(header, start)
        raw_starts = list(itertools.accumulate(header.raw_bytes or (), initial=raw_start))
        if raw_starts[-1] > len(memory):
            raise DecodeError(f"extent of {len(memory):,} B: its header describes {raw_starts[-1]:,} B")
        media = [
            _Medium(medium, grids.array(memory)[0], pixels.array(memory)[0])
            for medium, grids, pixels in zip(header.media, runs[::2], runs[1::2], strict=True)
        ]
        self.media = {medium.header.pixels.name: medium for medium in media}
        self._memory = memory
        self._raw_starts = raw_starts

    def raw_images(self, row: int) -> list[Any] | None:
        """Return the raw images of a row, None if the row has none.

        Raises:
            DecodeError: If the raw images are damaged.
            FieldError: If one of them was a PIL image and pillow is not installed.
        """
        if len(self._raw_starts) == 1:
            return None
        packed = self._memory[self._raw_starts[row] : self._raw_starts[row + 1]]
        try:
            images = _raw_decoder.decode(packed)
            return None if images is None else [_unpacked(image) for image in images]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DecodeError(f"raw_images of row {row} cannot be read: {error}") from error


class GatheredVision(NamedTuple):
    """The vision part of a batch.

    Attributes:
        rows: Images and videos of its rows.
        blocks: By field the values of all rows, end to end; None for a field that no row has.
        counts: Counts for `info`, ``(B,)`` float32 by key.
    """

    rows: VisionRows
    blocks: dict[str, torch.Tensor | None]
    counts: dict[str, torch.Tensor]


def gather_vision(
    parts: Sequence[tuple[VisionReader, Sequence[int]]], *, counted: Collection[str], once: bool, pin_memory: bool
) -> GatheredVision:
    """Copy the pixels, grids and raw images of rows of extents.

    Args:
        parts: The vision parts of extents, with the indices of the rows to copy, in batch order.
        counted: Keys of the batch's `info`; a count among them is replaced, even by zeros alone.
        once: Whether values that rows of an extent share are copied once, and shared by the rows of the batch.
        pin_memory: Whether pixels and grids are page-locked.

    Raises:
        DecodeError: If raw images are damaged.
        FieldError: If the pixels of two rows differ in dtype or width.
    """
    blocks: dict[str, torch.Tensor | None] = {}
    columns: dict[str, list[torch.Tensor | None]] = {}
    counts: dict[str, torch.Tensor] = {}
    for pixels_name, grids_name, count_key in VISION_FIELDS:
        media = [(reader.media.get(pixels_name), row) for reader, chosen in parts for row in chosen]
        row_counts = [medium.header.counts[row] if medium else 0 for medium, row in media]
        if any(row_counts) or count_key in counted:
            counts[count_key] = torch.tensor(row_counts, dtype=torch.float32)
        rows = [(medium, row) if medium and medium.header.counts[row] else None for medium, row in media]
        for name in (pixels_name, grids_name):
            blocks[name], columns[name] = _gathered(name, rows, once=once, pin_memory=pin_memory)
    images = [reader.raw_images(row) for reader, chosen in parts for row in chosen]
    return GatheredVision(VisionRows(**columns, raw_images=images), blocks, counts)


# Pixels and grids.


class _Medium:
    """The images, or the videos, of an extent's rows; the grids and pixels of a row are those of its first."""

    def __init__(self, header: MediumHeader, grids: Array, pixels: Array) -> None:
        # As floats: a product that would overflow int64 stays large, and is refused.
        patches = grids.astype(np.float64).prod(axis=1)
        if (grids < 1).any() or patches.sum() != len(pixels):
            raise DecodeError(f"{header.grids.name} do not account for {len(pixels)} rows of {header.pixels.name}")
        self.header = header
        patch_starts = [0, *patches.cumsum().astype(np.int64).tolist()]
        stored = list(itertools.accumulate(_stored_counts(header), initial=0))
        self._columns = {
            header.grids.name: (header.grids, grids, stored),
            header.pixels.name: (header.pixels, pixels, [patch_starts[grid] for grid in stored]),
        }

    def field(self, name: str) -> FieldHeader:
        return self._columns[name][0]

    def values(self, name: str, row: int) -> Array:
        first = row if self.header.firsts is None else self.header.firsts[row]
        _, values, starts = self._columns[name]
        return values[starts[first] : starts[first + 1]]


def _gathered(
    name: str, rows: list[tuple[_Medium, int] | None], *, once: bool, pin_memory: bool
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """Return the values of rows end to end, and the part of each row."""
    # Dtype and width are compared only among the rows that have a value.
    fields = list(dict.fromkeys(medium.field(name) for medium, _ in filter(None, rows)))
    if not fields:
        return None, [None] * len(rows)
    ours, *others = fields
    for theirs in others:
        raise FieldError(f"{name} is {theirs.dtype} {theirs.tail} in one extent, {ours.dtype} {ours.tail} in another")
    values = [None if row is None else row[0].values(name, row[1]) for row in rows]
    # By their place in memory, which extents do not share.
    keys = [
        row if value is None or not once else value.__array_interface__["data"][0] for row, value in enumerate(values)
    ]
    own = {key: value for key, value in zip(keys, values, strict=True) if value is not None}
    sizes = [*map(len, own.values())]
    (tensor,), (out,) = MEMORY.empty(1, (sum(sizes), *ours.tail), ours.dtype, pin_memory=pin_memory)
    np.concatenate([*own.values()], out=out)
    views = dict(zip(own, tensor.split(sizes), strict=True))
    return tensor, [None if value is None else views[key] for key, value in zip(keys, values, strict=True)]


def _stored_counts(header: MediumHeader) -> list[int]:
    """Return the number of grids that are stored for each row: 0 for one with the images of an earlier row."""
    counts = list(header.counts)
    for row, first in enumerate(header.firsts or ()):
        if first != row:
            counts[row] = 0
    return counts


def _places(header: VisionHeader, start: int) -> tuple[list[Run], int]:
    """Return the places of grids and pixels, alternating, and the offset of the raw images."""
    places = []
    for medium in header.media:
        for field, rows in ((medium.grids, sum(_stored_counts(medium))), (medium.pixels, medium.patches)):
            runs, start = lay_out((field,), (), {field.columns: rows}, align(start))
            places += runs
    return places, align(start)


# Checks of a header and of an Experience.


def _errors(header: VisionHeader, rows: int) -> Iterator[str]:
    names = [medium.pixels.name for medium in header.media]
    if len(set(names)) < len(names) or not set(names) <= GRIDS_OF.keys():
        yield f"has pixels named {', '.join(names)}"
    for medium in header.media:
        for field in (medium.pixels, medium.grids):
            yield from field_errors(field)
        if medium.grids.name != GRIDS_OF[medium.pixels.name] or medium.grids.tail != (3,):
            yield f"has no grids for {medium.pixels.name}"
        if 0 in medium.pixels.tail:
            yield f"has a {medium.pixels.name} of shape {list(medium.pixels.tail)}"
        if len(medium.counts) != rows:
            yield f"counts {medium.grids.name} of {len(medium.counts)} rows, not of its {rows}"
        elif medium.firsts is not None and not _are_firsts(medium.firsts, medium.counts):
            yield f"gives rows the {medium.pixels.name} of rows that do not have them"
    if header.raw_bytes is not None and len(header.raw_bytes) != rows:
        yield f"has raw_images of {len(header.raw_bytes)} rows, not of its {rows}"


def _are_firsts(firsts: list[int], counts: list[int]) -> bool:
    if len(firsts) != len(counts):
        return False
    pairs = enumerate(firsts)
    return all(first <= row and firsts[first] == first and counts[first] == counts[row] for row, first in pairs)


# Raw images.


def _packed_rows(rows: list[Any]) -> list[bytes]:
    """Return the raw images of each row as msgpack; an empty list if no row has raw images."""
    if all(images is None for images in rows):
        return []
    return [
        msgspec.msgpack.encode(None if images is None else [_packed(image, row) for image in images])
        for row, images in enumerate(rows)
    ]


def _packed(image: Any, row: int) -> RawImage:
    if isinstance(image, str):
        try:
            return RawImage("reference", image.encode())
        except UnicodeEncodeError as error:
            raise FieldError(f"raw_images: row {row} has a path that is not valid text: {image!r}") from error
    if isinstance(image, bytes):
        return RawImage("file", image)
    if not hasattr(image, "save"):
        kind = type(image).__name__
        raise FieldError(f"raw_images: row {row} has a {kind}; only a path, bytes or a PIL image is stored")
    if getattr(image, "mode", None) not in _PNG_MODES:
        mode = getattr(image, "mode", None)
        raise FieldError(f"raw_images: row {row} has a {type(image).__name__} of mode {mode}, which PNG would change")
    file = io.BytesIO()
    image.save(file, format="PNG")
    return RawImage("pil", file.getvalue())


def _unpacked(image: RawImage) -> Any:
    if image.kind == "reference":
        return image.data.decode()
    return image.data if image.kind == "file" else _opened(image.data)


def _opened(data: bytes) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise FieldError("raw_images: the extent holds a PIL image, and pillow is not installed") from error
    try:
        image = Image.open(io.BytesIO(data), formats=["PNG"])
        # Decoded now, not at the trainer's first access: damage is an error of the extent.
        image.load()
    except (OSError, SyntaxError, ValueError, struct.error, zlib.error, Image.DecompressionBombError) as error:
        raise DecodeError(f"raw_images: a PNG cannot be read: {error}") from error
    return image
