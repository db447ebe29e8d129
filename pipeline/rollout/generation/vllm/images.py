"""The images of a request: their places in its prompt, and their pixels on the way to the engine's process.

The pixels of a request are copied into memory that both processes map, once for all its responses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.config.model_files import VLLM_IMAGE_MODELS
from pipeline.errors import FieldError
from pipeline.experience.vision_rows import VisionRows
from pipeline.models.vision_inputs import vision_backbone
from pipeline.rollout.generation.vllm import memory, wire

_PIXELS = "pixels"
_Grid = tuple[int, int, int]


def sight_of(actor: Any) -> wire.Sight | None:
    """Return the description of a model whose images vLLM takes; None for any other model."""
    backbone = vision_backbone(actor)
    if backbone is None or backbone.config.model_type not in VLLM_IMAGE_MODELS:
        return None
    config = backbone.config
    return wire.Sight(config.model_type, config.image_token_id, config.vision_config.spatial_merge_size)


def put(prompt: Sequence[int], vision: VisionRows, sight: wire.Sight | None) -> tuple[int, wire.Images]:
    """Copy the images of a prompt into memory of their own.

    Args:
        prompt: Tokens of the prompt; the tokens of an image stand in one run.
        vision: One row.
        sight: The model's.

    Returns:
        The descriptor of the memory, which the caller closes once the engine's process has taken the request over; and
        the message to it.

    Raises:
        FieldError: If the row has a video, the model takes no images in vLLM, or the prompt's image tokens are not
            those of its images.
    """
    pixels, grids = vision.pixel_values[0], vision.image_grid_thws[0]
    if sight is None:
        raise FieldError('rollout.engine "vllm" takes text alone with this model; the prompt has images')
    if pixels is None or grids is None or vision.video_grid_thws[0] is not None:
        raise FieldError('rollout.engine "vllm" takes no videos; the prompt has one')
    shapes = [(int(time), int(height), int(width)) for time, height, width in grids]
    spots = spots_of(prompt, shapes, sight)
    hashes = [_hash_of(image, grid) for image, grid in zip(_split(pixels, shapes), shapes, strict=True)]
    descriptor, places = memory.put("rlhfd-images", {_PIXELS: pixels})
    return descriptor, wire.Images(memory.path_of(descriptor), places, shapes, spots, hashes)


def pixels_of(images: wire.Images) -> list[Tensor]:
    """Return the pixels of each image, ``(its patches, D)``, mapped and not copied."""
    return _split(memory.mapped(images.path, images.pixels)[_PIXELS], images.grids)


def spots_of(prompt: Sequence[int], grids: Sequence[_Grid], sight: wire.Sight) -> list[tuple[int, int]]:
    """Return the first place and the number of each image's tokens in a prompt.

    Raises:
        FieldError: If the runs of image tokens are not as many or as long as the images require.
    """
    found = list(_runs(prompt, sight.image_token))
    asked = [time * height * width // sight.merge**2 for time, height, width in grids]
    if [length for _, length in found] != asked:
        raise FieldError(
            f"the prompt has runs of {[length for _, length in found]} image tokens, its images ask for {asked}"
        )
    return found


def _runs(prompt: Sequence[int], token: int) -> Iterable[tuple[int, int]]:
    start = None
    for place, other in enumerate((*prompt, -1)):
        if other == token:
            start = place if start is None else start
        elif start is not None:
            yield start, place - start
            start = None


def _split(pixels: Tensor, grids: Sequence[_Grid]) -> list[Tensor]:
    return list(pixels.split([time * height * width for time, height, width in grids]))


def _hash_of(pixels: Tensor, grid: _Grid) -> str:
    """Return the name of an image in vLLM's caches: equal images share what the encoder made of them."""
    found = hashlib.sha256(f"{grid} {pixels.dtype} ".encode())
    found.update(pixels.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
