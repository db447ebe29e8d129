"""Rows <-> the bytes of an extent: encoding drops the padding, and reading copies nothing.

An extent is a header and the columns of its rows, end to end (`extent_format`), then the part that a vision-language
experience adds (`vision_codec`). So an encode is one copy a column, and a batch is made of slices of extents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import xxhash

from pipeline.errors import ArenaFullError, DecodeError, FieldError
from pipeline.experience.extent_format import ExtentHeader, align, header_bytes, lay_out, read_header, write_header
from pipeline.experience.ragged import PaddedRows, Parts, RaggedRows, experience_of, join, pad
from pipeline.experience.types import Experience, ExperienceVL
from pipeline.experience.vision_codec import (
    GatheredVision,
    VisionPart,
    VisionReader,
    gather_vision,
    vision_part,
    vision_stop,
)
from pipeline.experience.vision_rows import VisionRows


class Encoded(NamedTuple):
    """Size and xxh3-64 checksum of an extent as written (checksum 0 if none was asked for)."""

    nbytes: int
    checksum: int


class Encoding:
    """Rows that are checked and ready to be written into an extent, which is as long as it needs to be.

    Attributes:
        header: Header of the extent.
        nbytes: Bytes of the extent.
    """

    def __init__(self, batch: Experience | RaggedRows) -> None:
        """Lay an extent out, without padding; its values are read when they are written.

        Args:
            batch: Rows on the CPU; an `Experience` is padded on either side or both, and its `action_mask` ends where
                the sequences end. Pixels, grids and raw images are written too.

        Raises:
            ShapeError: If a field's shape does not fit `sequences`, naming the field.
            FieldError: If token ids are not integers, a row has no tokens, a field or an element of `info` is not a
                tensor of B rows, or the vision fields are inconsistent.
        """
        self._rows: RaggedRows | PaddedRows = batch if isinstance(batch, RaggedRows) else PaddedRows(batch)
        self._vision = vision = _vision_of(batch)
        rows = self._rows
        self.header = ExtentHeader(
            len(rows.lengths), rows.fields, rows.lengths, rows.counts, rows.full_masks,
            None if vision is None else vision.header,
        )  # fmt: skip
        self._packed = msgspec.msgpack.encode(self.header)
        start = header_bytes(self._packed)
        self._runs, self._text_stop = lay_out(rows.fields, rows.full_masks, _sizes(self.header), start)
        self.nbytes = self._text_stop if vision is None else vision_stop(vision.header, align(self._text_stop))

    def write(self, memory: memoryview, *, checksum: bool = True) -> Encoded:
        """Write the rows.

        Args:
            memory: The extent; it may be longer than needed.
            checksum: Whether to compute the checksum.

        Returns:
            The number of bytes used, and their checksum.

        Raises:
            ArenaFullError: If the extent is too small.
        """
        if self.nbytes > len(memory):
            raise ArenaFullError(
                f"extent of {self.nbytes:,} B does not fit: {len(memory):,} B reserved for {self.header.rows} rows; "
                "raise buffer.row_bytes"
            )
        write_header(self._packed, memory)
        for run in self._runs:
            self._rows.write(run.fields, run.array(memory))
        if self._vision is not None:
            self._vision.write(memory, align(self._text_stop))
        return Encoded(self.nbytes, xxhash.xxh3_64_intdigest(memory[: self.nbytes]) if checksum else 0)


def encode(batch: Experience | RaggedRows, memory: memoryview) -> Encoded:
    """Write rows into an extent: `Encoding` and its `write`, with their arguments and errors."""
    return Encoding(batch).write(memory)


class ExtentReader:
    """A sealed extent, decoded in place.

    Attributes:
        header: Its header.
        memory: Its bytes.
        rows: Its rows without their vision fields, over these bytes.
        vision: Its vision part; None for text alone.
    """

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
        self.memory = memory
        self.header, start = read_header(memory)
        header = self.header
        runs, text_stop = lay_out(header.fields, header.full_masks, _sizes(header), start)
        if text_stop > len(memory):
            raise DecodeError(f"extent of {len(memory):,} B: its header describes {text_stop:,} B")
        stacks = {run.fields: run.array(memory) for run in runs}
        self.rows = RaggedRows(header.fields, header.sequence_lengths, header.action_lengths, header.full_masks, stacks)
        vision = header.vision
        self.vision = None if vision is None else VisionReader(vision, header.rows, memory, align(text_stop))

    def leave_out(self, name: str) -> None:
        """Read the extent as one whose rows have no field of this name, to be gathered beside such rows."""
        self.rows = self.rows.without(name)


Extents = Sequence[tuple[ExtentReader, Sequence[int]]]
"""Extents with the indices of the rows that are meant, in batch order."""


def gather(parts: Extents, *, pin_memory: bool = False) -> RaggedRows:
    """Copy rows of extents end to end into one block, each value once; rows of one extent go on to share their pixels.

    Args:
        parts: The rows.
        pin_memory: Whether the block is page-locked, for an asynchronous copy to a GPU.

    Returns:
        All the rows; they share no memory with the extents.

    Raises:
        DecodeError: If a row index is out of an extent's range, or raw images are damaged.
        FieldError: If a field is present in only some of the extents, or only some of the extents are
            vision-language ones.
    """
    rows = join(_text(parts), pin_memory=pin_memory)
    found = _vision(parts, rows.named, once=True, pin_memory=pin_memory)
    if found is None:
        return rows
    for name, counts in found.counts.items():
        rows = rows.with_info(name, counts.numpy())
    return replace(rows, vision=found.rows)


def gather_padded(parts: Extents, *, pin_memory: bool = False) -> Experience:
    """Copy rows of extents into one batch padded on the left, as wide as its longest row, each value once.

    Arguments and errors are those of `gather`; an `ExperienceVL` of vision-language extents.
    """
    tensors = pad(_text(parts), pin_memory=pin_memory)
    found = _vision(parts, tensors, once=False, pin_memory=pin_memory)
    if found is None:
        return experience_of(tensors)
    counts = {f"info.{name}": counts for name, counts in found.counts.items()}
    return experience_of({**tensors, **counts}, {**found.blocks, "raw_images": found.rows.images()})


def _sizes(header: ExtentHeader) -> dict[str, int]:
    return {"S": sum(header.sequence_lengths), "A": sum(header.action_lengths), "": header.rows}


def _text(parts: Extents) -> Parts:
    vision = sum(reader.vision is not None for reader, _ in parts)
    if 0 < vision < len(parts):
        raise FieldError(f"{vision} of {len(parts)} extents hold an ExperienceVL; a batch is of one kind")
    for reader, chosen in parts:
        rows = reader.header.rows
        if min(chosen) < 0 or max(chosen) >= rows:
            row = next(row for row in chosen if not 0 <= row < rows)
            raise DecodeError(f"row {row} is requested from an extent of {rows} rows")
    return [(reader.rows, chosen) for reader, chosen in parts]


def _vision(parts: Extents, names: Any, *, once: bool, pin_memory: bool) -> GatheredVision | None:
    """Return the images of rows, None for text alone; `names` are those of the fields."""
    vision = [(reader.vision, chosen) for reader, chosen in parts if reader.vision is not None]
    if not vision:
        return None
    counted = [name.removeprefix("info.") for name in names if name.startswith("info.")]
    return gather_vision(vision, counted=counted, once=once, pin_memory=pin_memory)


def _vision_of(batch: Experience | RaggedRows) -> VisionPart | None:
    if isinstance(batch, RaggedRows):
        return None if batch.vision is None else vision_part(batch.vision)
    return vision_part(VisionRows.of(batch)) if isinstance(batch, ExperienceVL) else None
