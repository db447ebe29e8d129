"""The vision part of an extent: grids and pixels of all rows, in row order, and the raw images of each row.

    for the images, then the videos, if any row has one:  grids (images, 3), then pixels (patches, D)
    for each row, if any row has raw images:              msgpack, null or a list of `RawImage`

The patches of a row are contiguous, so rows that are neighbours in extent and batch are copied with one slice. Raw
images are stored as given, a path or an encoded file; a decoded image is never in the arena (docs/decisions).
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import struct
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

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
from pipeline.experience.types import VISION_FIELDS, ExperienceVL
from pipeline.experience.vision import split_vision

_GRIDS_OF = {pixels_name: grids_name for pixels_name, grids_name, _ in VISION_FIELDS}
# The modes that PNG stores without loss; it refuses the other modes, or truncates them to fewer bits.
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")


class RawImage(msgspec.Struct, frozen=True, array_like=True):
    """A stored raw image: a reference (a path or URL, UTF-8), an encoded file, or a PIL image as PNG."""

    kind: Literal["reference", "file", "pil"]
    data: bytes


_raw_decoder = msgspec.msgpack.Decoder(list[RawImage] | None)


@dataclasses.dataclass(frozen=True)
class VisionPart:
    """The vision part of an extent, checked and ready to be written."""

    header: VisionHeader
    tensors: list[torch.Tensor]
    raw_rows: list[bytes]

    def write(self, memory: memoryview, start: int) -> None:
        """Write the vision part at `start`, behind the text fields."""
        runs, at = _places(self.header, start)
        for run, tensor in zip(runs, self.tensors, strict=True):
            run.array(memory)[0] = as_array(tensor)
        for raw in self.raw_rows:
            memory[at : at + len(raw)] = raw
            at += len(raw)


def vision_part(experience: ExperienceVL) -> VisionPart:
    """Return the vision part of a batch, after the consistency check of `split_vision`.

    Args:
        experience: A batch that may travel (`pipeline.experience.checks.check_travels`).

    Raises:
        FieldError: If counts, grids and pixels are inconsistent, or a raw image is of a type that cannot be stored.
        ShapeError: If a field's shape is not that of pixels, grids or raw images.
    """
    rows = len(experience.sequences)
    for pixels_name, _, _ in VISION_FIELDS:
        pixels = getattr(experience, pixels_name)
        if pixels is not None and (pixels.ndim < 2 or 0 in pixels.shape[1:]):
            raise ShapeError(f"{pixels_name}: {tuple(pixels.shape)}, expected (patches, D)")
    columns = split_vision(experience, rows)
    media, tensors = [], []
    for pixels_name, grids_name, _ in VISION_FIELDS:
        pixels, grids = getattr(experience, pixels_name), getattr(experience, grids_name)
        if pixels is None:
            continue
        media.append(
            MediumHeader(
                field_header(pixels_name, pixels.dtype, "", tuple(pixels.shape[1:])),
                field_header(grids_name, grids.dtype, "", (3,)),
                len(pixels),
                [0 if row is None else len(row) for row in columns[grids_name]],
            )
        )
        tensors += [grids.detach(), pixels.detach()]
    raw_rows = _packed_rows(columns["raw_images"])
    return VisionPart(VisionHeader(media, [len(raw) for raw in raw_rows] or None), tensors, raw_rows)


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


def gather_vision(
    parts: Sequence[tuple[VisionReader, Sequence[int]]], *, counted: Collection[str], pin_memory: bool
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Copy the pixels, grids and raw images of rows of extents, each value once.

    Args:
        parts: The vision parts of extents, with the indices of the rows to copy, in batch order.
        counted: Keys of the batch's `info`; a count among them is replaced, even by zeros alone.
        pin_memory: Whether pixels and grids are page-locked.

    Returns:
        The vision fields of `ExperienceVL` that at least one row has; the counts for `info`, ``(B,)`` float32 by key.

    Raises:
        DecodeError: If raw images are damaged.
        FieldError: If the pixels of two rows differ in dtype or width.
    """
    fields: dict[str, Any] = {}
    counts: dict[str, torch.Tensor] = {}
    for pixels_name, _, count_key in VISION_FIELDS:
        media = [(reader.media.get(pixels_name), chosen) for reader, chosen in parts]
        row_counts = [medium.counts(row) if medium else 0 for medium, chosen in media for row in chosen]
        if any(row_counts) or count_key in counted:
            counts[count_key] = torch.tensor(row_counts, dtype=torch.float32)
        if any(row_counts):
            fields |= _gather_medium([(medium, chosen) for medium, chosen in media if medium], pin_memory)
    images = [reader.raw_images(row) for reader, chosen in parts for row in chosen]
    if any(image is not None for image in images):
        fields["raw_images"] = images
    return fields, counts


# Pixels and grids.


class _Medium:
    """The images, or the videos, of an extent's rows: those of row r end where those of row r + 1 start."""

    def __init__(self, header: MediumHeader, grids: Array, pixels: Array) -> None:
        # As floats: a product that would overflow int64 stays large, and is refused.
        patches = grids.astype(np.float64).prod(axis=1)
        if (grids < 1).any() or patches.sum() != len(pixels):
            raise DecodeError(f"{header.grids.name} do not account for {len(pixels)} rows of {header.pixels.name}")
        self.header = header
        self.grids = grids
        self.pixels = pixels
        patch_starts = [0, *patches.cumsum().astype(np.int64).tolist()]
        self.grid_starts = list(itertools.accumulate(header.counts, initial=0))
        self.patch_starts = [patch_starts[grid] for grid in self.grid_starts]

    def counts(self, row: int) -> int:
        return self.header.counts[row]


def _gather_medium(parts: list[tuple[_Medium, Sequence[int]]], pin_memory: bool) -> dict[str, torch.Tensor]:
    # Dtype and width are compared only among the media that have a chosen row.
    parts = [(medium, chosen) for medium, chosen in parts if any(map(medium.counts, chosen))]
    first = parts[0][0].header
    for medium, _ in parts:
        for ours, theirs in ((medium.header.pixels, first.pixels), (medium.header.grids, first.grids)):
            if ours != theirs:
                raise FieldError(
                    f"{ours.name} is {ours.dtype} {ours.tail} in one extent, {theirs.dtype} {theirs.tail} in another"
                )
    return {
        first.grids.name: _gather_slices(
            first.grids, [(medium.grids, medium.grid_starts, chosen) for medium, chosen in parts], pin_memory
        ),
        first.pixels.name: _gather_slices(
            first.pixels, [(medium.pixels, medium.patch_starts, chosen) for medium, chosen in parts], pin_memory
        ),
    }


def _gather_slices(
    field: FieldHeader, parts: list[tuple[Array, list[int], Sequence[int]]], pin_memory: bool
) -> torch.Tensor:
    """Concatenate the values of rows; each part is (values, start of each row, chosen rows)."""
    slices = [(source, start, stop) for source, starts, chosen in parts for start, stop in _slices(starts, chosen)]
    count = sum(stop - start for _, start, stop in slices)
    (tensor,), (out,) = MEMORY.empty(1, (count, *field.tail), field.dtype, pin_memory=pin_memory)
    at = 0
    for source, start, stop in slices:
        out[at : at + stop - start] = source[start:stop]
        at += stop - start
    return tensor


def _slices(starts: list[int], chosen: Sequence[int]) -> list[tuple[int, int]]:
    """Return the slices that hold the chosen rows in order, adjacent slices merged into one."""
    slices: list[tuple[int, int]] = []
    for row in chosen:
        start, stop = starts[row], starts[row + 1]
        if slices and slices[-1][1] == start:
            slices[-1] = (slices[-1][0], stop)
        elif start < stop:
            slices.append((start, stop))
    return slices


def _places(header: VisionHeader, start: int) -> tuple[list[Run], int]:
    """Return the places of grids and pixels, alternating, and the offset of the raw images."""
    places = []
    for medium in header.media:
        for field, rows in ((medium.grids, sum(medium.counts)), (medium.pixels, medium.patches)):
            runs, start = lay_out((field,), (), {field.columns: rows}, align(start))
            places += runs
    return places, align(start)


# Checks of a header and of an Experience.


def _errors(header: VisionHeader, rows: int) -> Iterator[str]:
    names = [medium.pixels.name for medium in header.media]
    if len(set(names)) < len(names) or not set(names) <= _GRIDS_OF.keys():
        yield f"has pixels named {', '.join(names)}"
    for medium in header.media:
        for field in (medium.pixels, medium.grids):
            yield from field_errors(field)
        if medium.grids.name != _GRIDS_OF[medium.pixels.name] or medium.grids.tail != (3,):
            yield f"has no grids for {medium.pixels.name}"
        if 0 in medium.pixels.tail:
            yield f"has a {medium.pixels.name} of shape {list(medium.pixels.tail)}"
        if len(medium.counts) != rows:
            yield f"counts {medium.grids.name} of {len(medium.counts)} rows, not of its {rows}"
    if header.raw_bytes is not None and len(header.raw_bytes) != rows:
        yield f"has raw_images of {len(header.raw_bytes)} rows, not of its {rows}"


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
