"""The pixels of some rows, kept a row at a time, so that any choice of rows takes its pixels along."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

from pipeline.errors import FieldError
from pipeline.experience.types import ExperienceVL
from pipeline.experience.vision import split_vision

MODEL_KEYWORDS = {
    "pixel_values": "pixel_values",
    "image_grid_thws": "image_grid_thw",
    "pixel_values_videos": "pixel_values_videos",
    "video_grid_thws": "video_grid_thw",
}
"""The vision fields of an experience, by the names that models of transformers have for them."""


@dataclass(frozen=True, slots=True)
class VisionRows:
    """Images and videos of B rows: in each field one element a row, None where the row has none.

    Rows are chosen by reference and are views of the tensors they came from; pixels are copied where rows are laid end
    to end, in `tensors` and nowhere else.

    Attributes:
        pixel_values: ``(patches of the row's images, D)``.
        image_grid_thws: ``(images, 3)`` int64.
        pixel_values_videos: ``(patches of the row's videos, D)``.
        video_grid_thws: ``(videos, 3)`` int64.
        raw_images: Anything that tells the row's images, as their paths.
    """

    pixel_values: list[Tensor | None]
    image_grid_thws: list[Tensor | None]
    pixel_values_videos: list[Tensor | None]
    video_grid_thws: list[Tensor | None]
    raw_images: list[Any]

    @classmethod
    def of(cls, experience: ExperienceVL) -> Self:
        """Take the pixels of a batch apart.

        Raises:
            FieldError: If counts, grids and pixels do not account for each other.
            ShapeError: If `raw_images` has neither an element a row nor one an image.
        """
        return cls(**split_vision(experience, len(experience.sequences)))

    @classmethod
    def none(cls, rows: int) -> Self:
        """Rows without images or videos."""
        nothing: list[Any] = [None] * rows
        return cls(**{field.name: nothing for field in fields(cls)})

    def __len__(self) -> int:
        """Rows, B."""
        return len(self.pixel_values)

    @property
    def tensors_exist(self) -> bool:
        """Whether any row has an image or a video."""
        return any(grids is not None for grids in (*self.image_grid_thws, *self.video_grid_thws))

    def rows(self, index: Sequence[int] | slice | Tensor) -> Self:
        """Choose rows, in any order, any of them as often as wanted."""
        if isinstance(index, slice):
            index = range(len(self))[index]
        places = index.tolist() if isinstance(index, Tensor) else index
        return type(self)(*([getattr(self, field.name)[place] for place in places] for field in fields(self)))

    def repeated(self, times: int) -> Self:
        """Each row `times` times, contiguous, as the responses to a prompt are."""
        return self.rows([row for row in range(len(self)) for _ in range(times)])

    def tensors(self) -> dict[str, Tensor]:
        """Pixels and grids of all rows end to end, by field; no key for what no row has."""
        parts = {name: [part for part in getattr(self, name) if part is not None] for name in MODEL_KEYWORDS}
        return {name: found[0] if len(found) == 1 else torch.cat(found) for name, found in parts.items() if found}

    def model_keywords(self, device: torch.device) -> dict[str, Tensor]:
        """`tensors` on a device, by the names that models have for them."""
        return {MODEL_KEYWORDS[name]: tensor.to(device) for name, tensor in self.tensors().items()}

    def counts(self) -> dict[str, Tensor]:
        """How many images and videos each row has, ``(B,)`` float32, by the key of `info`."""
        grids = {"image_num": self.image_grid_thws, "video_num": self.video_grid_thws}
        return {
            key: torch.tensor([0 if grid is None else len(grid) for grid in rows], dtype=torch.float32)
            for key, rows in grids.items()
        }

    def fields(self) -> dict[str, Any]:
        """The vision fields of an `ExperienceVL` of these rows."""
        empty: dict[str, Any] = dict.fromkeys(MODEL_KEYWORDS)
        images = None if all(images is None for images in self.raw_images) else self.raw_images
        return {**empty, **self.tensors(), "raw_images": images}


def take_vision(keywords: dict[str, Any], input_ids: Tensor) -> VisionRows | None:
    """Take the vision of prompts out of the keywords of a call.

    Args:
        keywords: `pixel_values`, `image_grid_thws`, `pixel_values_videos`, `video_grid_thws`, `image_num`, `video_num`
            and `raw_images` are removed; grids may also have the name that transformers gives them.
        input_ids: ``(prompts, P)``.

    Returns:
        The vision of each prompt; None where no keyword spoke of any.

    Raises:
        FieldError: If grids are given under both names, or counts, grids and pixels do not account for each other.
        ShapeError: If `raw_images` has neither an element a prompt nor one an image.
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
