"""The rows of a `DetachedReplayBuffer`: the schema they share, their copy to the CPU."""

from __future__ import annotations

import copy

import msgspec
import torch

from pipeline.errors import ShapeError
from pipeline.experience.codec import Extents
from pipeline.experience.extent_format import ExtentHeader, FieldHeader
from pipeline.experience.types import VISION_FIELDS, Experience

_COUNTS = tuple(f"info.{name}" for _, _, name in VISION_FIELDS)


class RowKind(msgspec.Struct, frozen=True):
    """The schema that all rows share: fields by name, each with dtype, columns and shape of a row."""

    fields: dict[str, tuple[str, str, tuple[int, ...]]]
    vision: bool

    def difference(self, known: RowKind) -> str:
        """Return a sentence on the first field in which the rows differ from the rows before."""
        if self.vision != known.vision:
            return "Experience and ExperienceVL do not go into one buffer"
        names = self.fields.keys() | known.fields.keys()
        name = min(name for name in names if self.fields.get(name) != known.fields.get(name))
        return f"{name}: {_words(self.fields.get(name))}; in the rows before it is {_words(known.fields.get(name))}"


def kinds_of(header: ExtentHeader) -> dict[str, RowKind]:
    """Return the schemas that all rows of a buffer share with the rows of an extent, by part.

    The fields of a row are one part. Images, videos and their counts are one part each, present only if a row of the
    extent has any: rows without images match rows with images.
    """
    vision = header.vision is not None
    counts = [field for field in header.fields if vision and field.name in _COUNTS]
    kinds = {"fields": _kind(tuple(field for field in header.fields if field not in counts), vision)}
    kinds |= {field.name: _kind((field,), vision) for field in counts}
    for medium in header.vision.media if header.vision else []:
        if medium.patches:
            kinds[medium.pixels.name] = _kind((medium.pixels, medium.grids), vision)
    return kinds


def _kind(fields: tuple[FieldHeader, ...], vision: bool) -> RowKind:
    return RowKind({field.name: (field.dtype, field.columns, field.tail) for field in fields}, vision)


def counted_alike(parts: Extents) -> Extents:
    """Return extents without the counts of images that only some of them have; a batch has counts by its grids."""
    names = [name for name in _COUNTS if len({name in reader.rows.named for reader, _ in parts}) > 1]
    alike = []
    for reader, chosen in parts if names else ():
        # Another thread may gather the reader itself.
        reader = copy.copy(reader)
        for name in names:
            reader.leave_out(name)
        alike.append((reader, chosen))
    return alike or parts


def rows_on_cpu(experience: Experience) -> Experience:
    """Return a shallow copy of a batch on the CPU with an attention mask; the given batch is not changed.

    Raises:
        ShapeError: If `sequences` is not (B, S) with at least one row.
    """
    if experience.sequences.ndim != 2:
        raise ShapeError(f"sequences has shape {tuple(experience.sequences.shape)}, expected (B, S)")
    if not len(experience.sequences):
        raise ShapeError("an experience without rows")
    experience = copy.copy(experience)
    experience.to_device("cpu")
    if experience.attention_mask is None:
        # Of one dtype, whatever that of the ids is: `extend` makes the same.
        experience.attention_mask = torch.ones_like(experience.sequences, dtype=torch.int64)
    return experience


def _words(field: tuple[str, str, tuple[int, ...]] | None) -> str:
    if field is None:
        return "missing"
    dtype, columns, tail = field
    return f"{dtype} ({', '.join(['B', *([columns] if columns else map(str, tail))])})"
