"""The images and videos of rows, one list element a row, so that a selection of rows keeps its pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from pipeline.errors import FieldError
from pipeline.experience.types import VISION_FIELDS, ExperienceVL, compact
from pipeline.experience.vision import split_vision

MODEL_KEYWORDS = {
    "pixel_values": "pixel_values",
    "image_grid_thws": "image_grid_thw",
    "pixel_values_videos": "pixel_values_videos",
    "video_grid_thws": "video_grid_thw",
}
"""The vision fields of an experience that are tensors, with their names in transformers models."""
GRIDS_OF = {pixels_name: grids_name for pixels_name, grids_name, _ in VISION_FIELDS}
"""The name of the grids of each field of pixels."""
PIXELS = tuple(GRIDS_OF)


@dataclass(frozen=True, slots=True)
class VisionRows:
    """Images and videos of B rows: each field has one element a row, None if the row has none.

    A selection of rows copies no pixels: its tensors are views of the tensors they were split from. `tensors` copies,
    where it concatenates rows; a pickle has each view alone, and those that rows share once.

    Attributes:
        pixel_values: For each row ``(patches of the row's images, D)``.
        image_grid_thws: For each row ``(images, 3)`` int64: time, height and width of each image, in patches.
        pixel_values_videos: For each row ``(patches of the row's videos, D)``.
        video_grid_thws: For each row ``(videos, 3)`` int64, as `image_grid_thws`.
        raw_images: For each row any description of its images, such as their paths.
    """

    pixel_values: list[Tensor | None]
    image_grid_thws: list[Tensor | None]
    pixel_values_videos: list[Tensor | None]
    video_grid_thws: list[Tensor | None]
    raw_images: list[Any]

    @classmethod
    def of(cls, experience: ExperienceVL) -> Self:
        """Return the images and videos of a batch, split into rows.

        Args:
            experience: A batch of B rows; its pixels may be on any device. Without the counts in `info` it must have
                one image, or one video, a row.

        Returns:
            The images and videos of the B rows, as views of the batch's tensors.

        Raises:
            FieldError: If counts, grids and pixels are inconsistent.
            ShapeError: If `raw_images` has neither one element a row nor one element an image.
        """
        return cls(**split_vision(experience, len(experience.sequences)))

    @classmethod
    def none(cls, rows: int) -> Self:
        """Return rows without images or videos.

        Args:
            rows: Number of rows, B.

        Returns:
            B rows in which every field is None.
        """
        nothing: list[Any] = [None] * rows
        return cls(**{field.name: nothing for field in fields(cls)})

    @classmethod
    def joined(cls, parts: Sequence[VisionRows]) -> Self:
        """Return the rows of all parts.

        Args:
            parts: Any number of rows each.

        Returns:
            The rows in order, sharing their tensors with the parts.
        """
        return cls(*([row for part in parts for row in getattr(part, field.name)] for field in fields(cls)))

    def __len__(self) -> int:
        """Return the number of rows, B."""
        return len(self.pixel_values)

    def present(self) -> list[str]:
        """Return the fields in use.

        Returns:
            The names of those that at least one row has.
        """
        return [field.name for field in fields(self) if any(row is not None for row in getattr(self, field.name))]

    @property
    def tensors_exist(self) -> bool:
        """Whether at least one row has an image or a video."""
        return any(grids is not None for grids in (*self.image_grid_thws, *self.video_grid_thws))

    def rows(self, index: Sequence[int] | slice | Tensor) -> Self:
        """Return a selection of rows.

        Args:
            index: Row indices in any order, with repetitions if needed; a slice; or ``(n,)`` int64.

        Returns:
            The n selected rows, sharing their tensors with these rows.

        Raises:
            FieldError: If `index` is a mask.
        """
        if isinstance(index, slice):
            index = range(len(self))[index]
        places = index.tolist() if isinstance(index, Tensor) else index
        if any(isinstance(place, bool) for place in places):
            raise FieldError("index is a mask; it has the numbers of rows")
        return type(self)(*([getattr(self, field.name)[place] for place in places] for field in fields(self)))

    def firsts(self, name: str) -> list[int]:
        """Return for each row the first row that has its tensor of a field: responses to a prompt share their pixels.

        Args:
            name: The field.

        Returns:
            B indices; a row without the field, or with a tensor of its own, has its own index. Rows that share pixels
            have the same grids, too.
        """
        found: dict[tuple[Any, ...], int] = {}
        firsts = []
        for row, (tensor, grids) in enumerate(
            zip(getattr(self, name), getattr(self, GRIDS_OF.get(name, name)), strict=True)
        ):
            if tensor is None:
                firsts.append(row)
                continue
            layout = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
            firsts.append(found.setdefault((*layout, None if grids is None else str(grids.tolist())), row))
        return firsts

    def own(self, name: str) -> list[Tensor]:
        """Return the tensors of a field.

        Args:
            name: The field.

        Returns:
            One tensor for rows that share it, in the order of their first rows.
        """
        tensors = getattr(self, name)
        return [tensors[row] for row in dict.fromkeys(self.firsts(name)) if tensors[row] is not None]

    def on(self, device: torch.device, *, non_blocking: bool = False) -> Self:
        """Return the rows with their pixels on a device, those that rows share once; grids stay on the host.

        Args:
            device: The device.
            non_blocking: Whether copies from page-locked memory are asynchronous.

        Returns:
            B rows, which share their pixels as these do.
        """
        return replace(
            self,
            **{name: self._changed(name, lambda own: own.to(device, non_blocking=non_blocking)) for name in PIXELS},
        )

    def _changed(self, name: str, change: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        """Return a field with another tensor for each, those that rows share changed once."""
        tensors, firsts = getattr(self, name), self.firsts(name)
        found = {row: change(tensors[row]) for row in set(firsts) if tensors[row] is not None}
        return [found.get(first) for first in firsts]

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the rows for a pickle, which writes the whole storage of a tensor."""
        return type(self), (*(self._changed(name, compact) for name in MODEL_KEYWORDS), self.raw_images)

    def repeated(self, times: int) -> Self:
        """Return each row `times` times, the copies contiguous, in the order of the responses to a prompt.

        Args:
            times: Copies of each row, at least 1.

        Returns:
            B x `times` rows, sharing their tensors with these rows.
        """
        return self.rows([row for row in range(len(self)) for _ in range(times)])

    def tensors(self) -> dict[str, Tensor]:
        """Return pixels and grids of all rows, concatenated in row order.

        Returns:
            The tensors by field name, without the fields that no row has: pixels ``(patches of all rows, D)``, grids
            ``(images or videos of all rows, 3)`` int64. Not a copy if only one row has a value.
        """
        parts = {name: [part for part in getattr(self, name) if part is not None] for name in MODEL_KEYWORDS}
        return {name: found[0] if len(found) == 1 else torch.cat(found) for name, found in parts.items() if found}

    def model_keywords(self, device: torch.device) -> dict[str, Tensor]:
        """Return `tensors` on a device, under the keyword names of transformers models.

        Args:
            device: The model's device.

        Returns:
            `pixel_values`, `image_grid_thw`, `pixel_values_videos` and `video_grid_thw`, without those that no row has.
        """
        return {MODEL_KEYWORDS[name]: tensor.to(device) for name, tensor in self.tensors().items()}

    def counts(self) -> dict[str, Tensor]:
        """Return the number of images and videos of each row.

        Returns:
            `image_num` and `video_num`, ``(B,)`` float32, the keys of an experience's `info`.
        """
        grids = {"image_num": self.image_grid_thws, "video_num": self.video_grid_thws}
        return {
            key: torch.tensor([0 if grid is None else len(grid) for grid in rows], dtype=torch.float32)
            for key, rows in grids.items()
        }

    def fields(self) -> dict[str, Any]:
        """Return the vision fields of an `ExperienceVL` of these rows.

        Returns:
            All five vision fields by name, concatenated in row order; None for a field that no row has.
        """
        empty: dict[str, Any] = dict.fromkeys(MODEL_KEYWORDS)
        return {**empty, **self.tensors(), "raw_images": self.images()}

    def images(self) -> list[Any] | None:
        """Return the raw images of the rows, as an `ExperienceVL` has them.

        Returns:
            One element a row; None if no row has any.
        """
        return None if all(images is None for images in self.raw_images) else self.raw_images


def take_vision(keywords: dict[str, Any], input_ids: Tensor) -> VisionRows | None:
    """Remove the images and videos of prompts from the keywords of a call, and return them as rows.

    Args:
        keywords: `pixel_values`, `image_grid_thws`, `pixel_values_videos`, `video_grid_thws`, `image_num`, `video_num`
            and `raw_images` are removed; grids may also have their names in transformers.
        input_ids: ``(prompts, P)``.

    Returns:
        The images and videos of each prompt; None if none of these keywords has a value.

    Raises:
        FieldError: If grids are given under both names, or counts, grids and pixels are inconsistent.
        ShapeError: If `raw_images` has neither one element a prompt nor one element an image.
    """
    found: dict[str, Any] = {"raw_images": keywords.pop("raw_images", None)}
    for name, model_name in MODEL_KEYWORDS.items():
        found[name] = keywords.pop(name, None)
        if name != model_name and (twin := keywords.pop(model_name, None)) is not None:
            if found[name] is not None:
                raise FieldError(f"{name} and {model_name} are two names of one thing; give one of them")
            found[name] = twin
    counts = {name: keywords.pop(name, None) for name in ("image_num", "video_num")}
    if all(value is None for value in (*found.values(), *counts.values())):
        return None
    info = {
        name: torch.as_tensor(count, dtype=torch.float32).reshape(-1)
        for name, count in counts.items()
        if count is not None
    }
    for name, count in info.items():
        if len(count) != len(input_ids):
            raise FieldError(f"{name} has {len(count)} elements, input_ids has {len(input_ids)} rows")
    return VisionRows.of(ExperienceVL(sequences=input_ids, info=info, **found))
