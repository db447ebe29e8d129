"""The pixels of a vision-language batch: the assignment of images and videos to rows.

Pixels of all images are concatenated in one tensor. A grid (time, height, width) gives the number of its rows that an
image has; a count in `info` gives the number of grids of a row of the batch. The three must match each other.

The grids of a batch are one tensor (images, 3), or a list of one tensor a row, None for a row without images. The
grids of a row are (images, 3); (3,) is one image.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import FieldError, ShapeError
from pipeline.experience.types import VISION_FIELDS, BufferItemVL, ExperienceVL


def split_vision(experience: ExperienceVL, batch_size: int) -> dict[str, list[Any]]:
    """Return the pixels, grids and raw images of each row of a batch.

    Args:
        experience: A batch. Unless grids are a list or `info` has their count, there must be one grid a row.
        batch_size: Rows of the batch (B).

    Returns:
        For each vision field one element a row, None if the row has no image or video; grids are (images, 3).

    Raises:
        FieldError: If counts, grids, pixels and raw images do not match.
        ShapeError: If `raw_images` has neither an element a row nor one an image.
    """
    columns: dict[str, list[Any]] = {}
    image_counts = [0] * batch_size
    for pixels_name, grids_name, count_key in VISION_FIELDS:
        pixels, given = getattr(experience, pixels_name), getattr(experience, grids_name)
        listed = _listed_grids(grids_name, given, batch_size) if isinstance(given, list) else None
        grids = given if listed is None else _concatenate(grids_name, listed)
        patches = patches_of(pixels, grids, pixels_name, grids_name)
        counts = _counts(experience.info, count_key, grids, batch_size, listed)
        if grids is None:
            columns[pixels_name] = columns[grids_name] = [None] * batch_size
            continue
        if count_key == "image_num":
            image_counts = counts
        grid_rows = grids.split(counts)
        row_patches = [sum(patches[first : first + n]) for first, n in zip(_starts(counts), counts, strict=True)]
        pixel_rows = pixels.split(row_patches)
        columns[grids_name] = [rows if n else None for rows, n in zip(grid_rows, counts, strict=True)]
        columns[pixels_name] = [rows if n else None for rows, n in zip(pixel_rows, counts, strict=True)]
    columns["raw_images"] = _split_raw_images(experience.raw_images, image_counts)
    check_raw_images(columns["raw_images"], columns["image_grid_thws"])
    return columns


def grids_as_given(experience: ExperienceVL) -> dict[str, list[Any]]:
    """Return the grids of each row in the form that LightRFT's split has.

    Args:
        experience: A batch that `split_vision` has accepted.

    Returns:
        By field one element a row: of a list its tensors unchanged, None for a row without images; of a tensor without
        a count in `info`, with one image or video a row, (3,). Other fields have no key.
    """
    columns: dict[str, list[Any]] = {}
    for _, grids_name, count_key in VISION_FIELDS:
        grids = getattr(experience, grids_name)
        if isinstance(grids, list):
            columns[grids_name] = [grid if grid is not None and grid.numel() else None for grid in grids]
        elif grids is not None and len(grids) and count_key not in (experience.info or {}):
            columns[grids_name] = list(grids.unbind())
    return columns


def batch_vision(items: list[BufferItemVL]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Concatenate the pixels, grids and raw images of the rows.

    Args:
        items: The rows; the fields of a row without images, or without videos, are None. A grid of shape (3,) is one
            image.

    Returns:
        The vision fields of the batch, and the counts for `info`, ``(B,)`` float32 by key.

    Raises:
        FieldError: If the pixels, the grids, the count and the raw images of a row do not match.
    """
    fields: dict[str, Any] = {}
    counts: dict[str, Tensor] = {}
    all_grids = {name: [_of_images(getattr(item, name)) for item in items] for _, name, _ in VISION_FIELDS}
    for pixels_name, grids_name, count_key in VISION_FIELDS:
        row_counts = []
        for row, item in enumerate(items):
            pixels, grids = getattr(item, pixels_name), all_grids[grids_name][row]
            patches_of(pixels, grids, pixels_name, grids_name, where=f"row {row}: ")
            row_counts.append(0 if grids is None else len(grids))
            stated = (item.info or {}).get(count_key)
            if stated is not None and (count := _number(f"row {row}: info[{count_key!r}]", stated)) != row_counts[-1]:
                raise FieldError(f"row {row}: info[{count_key!r}] is {count:g}, {grids_name} has {row_counts[-1]}")
        fields[pixels_name] = _concatenate(pixels_name, [getattr(item, pixels_name) for item in items])
        fields[grids_name] = _concatenate(grids_name, all_grids[grids_name])
        if any(row_counts) or any(count_key in (item.info or {}) for item in items):
            counts[count_key] = torch.tensor(row_counts, dtype=torch.float32)
    images = [item.raw_images for item in items]
    check_raw_images(images, all_grids["image_grid_thws"])
    fields["raw_images"] = None if all(image is None for image in images) else images
    return fields, counts


def _of_images(grids: Tensor | None) -> Tensor | None:
    """Return the grids of a row as (images, 3)."""
    return grids.unsqueeze(0) if isinstance(grids, Tensor) and grids.shape == (3,) else grids


def _listed_grids(name: str, grids: list[Any], batch_size: int) -> list[Tensor | None]:
    """Return the listed grids of each row as (images, 3); None for a row without grids."""
    if len(grids) != batch_size:
        raise ShapeError(f"{name} has {len(grids)} elements, sequences has {batch_size} rows")
    rows: list[Tensor | None] = []
    for row, given in enumerate(grids):
        if given is not None and not isinstance(given, Tensor):
            raise FieldError(f"row {row}: {name} is a {type(given).__name__}, not a tensor")
        of_row = _of_images(given)
        if of_row is not None and (of_row.dim() != 2 or of_row.shape[1] != 3):
            raise ShapeError(f"row {row}: {name} of shape {tuple(of_row.shape)} is not (images, 3)")
        rows.append(None if of_row is None or not len(of_row) else of_row)
    return rows


def _counts(
    info: dict[str, Any] | None, key: str, grids: Tensor | None, batch_size: int, listed: list[Tensor | None] | None
) -> list[int]:
    grid_count = 0 if grids is None else len(grids)
    by_list = None if listed is None else [0 if rows is None else len(rows) for rows in listed]
    if info is not None and key in info:
        stated = _stated_counts(key, info[key], batch_size)
        if sum(stated) != grid_count:
            raise FieldError(f"info[{key!r}] counts {sum(stated)} grids, the batch has {grid_count}")
        if by_list is not None and by_list != stated:
            row = next(row for row in range(batch_size) if by_list[row] != stated[row])
            raise FieldError(f"row {row}: info[{key!r}] is {stated[row]}, the row has {by_list[row]} grids")
        return stated
    if by_list is not None:
        return by_list
    if grid_count not in (0, batch_size):
        raise FieldError(f"info[{key!r}] is missing: {grid_count} grids cannot be assigned to {batch_size} rows")
    return [1 if grid_count else 0] * batch_size


def _stated_counts(key: str, value: Any, batch_size: int) -> list[int]:
    try:
        stated = torch.as_tensor(value).reshape(-1).tolist()
    except (TypeError, ValueError, RuntimeError) as error:
        raise FieldError(f"info[{key!r}] is {value!r:.80}, not a number of grids for each row") from error
    if len(stated) != batch_size:
        raise ShapeError(f"info[{key!r}] has {len(stated)} counts, the batch has {batch_size} rows")
    for row, count in enumerate(stated):
        if count < 0 or count != count // 1:
            raise FieldError(f"row {row}: info[{key!r}] is {count}, not a number of grids")
    return [int(count) for count in stated]


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FieldError(f"{name} is {value!r:.80}, not a number of grids") from error


def _starts(counts: list[int]) -> list[int]:
    return [0, *itertools.accumulate(counts)][:-1]


def patches_of(
    pixels: Tensor | None, grids: Tensor | None, pixels_name: str, grids_name: str, *, where: str = ""
) -> list[int]:
    """Return the number of pixel rows of each grid; refuse pixels and grids that do not match."""
    for name, value in ((pixels_name, pixels), (grids_name, grids)):
        if value is not None and not isinstance(value, Tensor):
            raise FieldError(f"{where}{name} is a {type(value).__name__}, not a tensor")
    if (pixels is None) != (grids is None):
        missing, present = (pixels_name, grids_name) if pixels is None else (grids_name, pixels_name)
        raise FieldError(f"{where}{missing} is None, {present} is not: neither is of use without the other")
    if pixels is None or grids is None:
        return []
    if grids.dim() != 2 or grids.shape[1] != 3:
        raise ShapeError(f"{where}{grids_name} of shape {tuple(grids.shape)} is not (images, 3)")
    if grids.is_floating_point() or bool((grids < 1).any()):
        raise FieldError(f"{where}{grids_name} is {grids.tolist()!r:.80}; time, height and width are whole and above 0")
    patches: list[int] = grids.long().prod(dim=1).tolist()
    if sum(patches) != len(pixels):
        raise FieldError(f"{where}{pixels_name} has {len(pixels)} rows, {grids_name} accounts for {sum(patches)}")
    return patches


def _split_raw_images(images: list[Any] | None, image_counts: list[int]) -> list[Any]:
    if images is None:
        return [None] * len(image_counts)
    if len(images) == len(image_counts) and all(image is None or isinstance(image, list) for image in images):
        return images
    if len(images) != sum(image_counts):
        raise ShapeError(f"raw_images has {len(images)} elements: {len(image_counts)} rows, {sum(image_counts)} images")
    return [images[start : start + n] or None for start, n in zip(_starts(image_counts), image_counts, strict=True)]


def check_raw_images(images: list[Any], grids: list[Tensor | None]) -> None:
    """Refuse rows with another number of raw images than grids; a row may have no raw images."""
    for row, (raw, row_grids) in enumerate(zip(images, grids, strict=True)):
        if raw is not None and row_grids is not None and len(raw) != len(row_grids):
            raise FieldError(f"row {row}: raw_images has {len(raw)} images, image_grid_thws has {len(row_grids)}")


def _concatenate(name: str, values: list[Tensor | None]) -> Tensor | None:
    tensors = [value for value in values if value is not None]
    if not tensors:
        return None
    for row, value in enumerate(values):
        if value is not None and (value.dtype != tensors[0].dtype or value.shape[1:] != tensors[0].shape[1:]):
            raise FieldError(
                f"{name} is {value.dtype} {tuple(value.shape[1:])} in row {row}, "
                f"{tensors[0].dtype} {tuple(tensors[0].shape[1:])} elsewhere"
            )
    return torch.cat(tensors)
