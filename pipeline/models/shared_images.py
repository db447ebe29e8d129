"""Images that rows of a pass have in common, as those of one prompt: the model's encoder computes them once.

    rows       a  a  b  -  a           a, b: images of a row; -: a row without
    pixels     a     b                 of the first row that has them
    encoder    features of a and b
    model      features of a  a  b  a, in the order of rows

The encoder is called by the model itself, with the grids of all rows. Its hooks know these grids by their tensor, and
give it those of the pixels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from pipeline.experience.vision_rows import VisionRows
from pipeline.models.flat_rows import on_device, ranges, starts_of

_MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""The encoders of others may return their features under other names."""
_HAS_HOOKS = "repeats_images"
"""An attribute of the encoder: a copy of it has the hooks, too."""
_grids_of: Any = WeakTensorKeyDictionary()
"""The grids of pixels by those of all rows."""
_places_of: Any = WeakTensorKeyDictionary()
"""The places of all rows' features among those of the pixels, by the grids of pixels."""


def image_keywords(backbone: Any, vision: VisionRows, device: torch.device) -> dict[str, Tensor]:
    """Return `VisionRows.model_keywords` for one pass of a model, with the pixels of rows with the same images once.

    Args:
        backbone: Result of `pipeline.models.vision_inputs.vision_backbone`.
        vision: Images and videos of the rows.
        device: The model's.
    """
    firsts = _firsts(vision) if backbone.config.model_type in _MODEL_TYPES else list(range(len(vision)))
    own = [row for row, first in enumerate(firsts) if row == first]
    if len(own) == len(firsts):
        return vision.model_keywords(device)
    pixels = [pixels if row == firsts[row] else None for row, pixels in enumerate(vision.pixel_values)]
    keywords = replace(vision, pixel_values=pixels).model_keywords(device)
    grids = torch.cat([grid for row in own if (grid := vision.image_grid_thws[row]) is not None]).to(device)
    merged = backbone.config.vision_config.spatial_merge_size**2
    counts = np.array([0 if grid is None else int(grid.prod(dim=1).sum()) // merged for grid in vision.image_grid_thws])
    starts = np.zeros_like(counts)
    starts[own] = starts_of(counts[own])
    _places_of[grids] = on_device(ranges(starts[firsts], counts), device)
    _grids_of[keywords["image_grid_thw"]] = grids
    encoder = backbone.visual
    if not getattr(encoder, _HAS_HOOKS, False):
        encoder.register_forward_pre_hook(_give_own_grids, with_kwargs=True)
        encoder.register_forward_hook(_repeat_features, with_kwargs=True)
        setattr(encoder, _HAS_HOOKS, True)
    return keywords


def _firsts(vision: VisionRows) -> list[int]:
    """Return the first row with the same images for each row; a row without images is its own."""
    firsts = vision.firsts("pixel_values")
    if firsts != list(range(len(vision))):
        return firsts
    # Rows of a caller's own may have copies.
    found, firsts = dict[tuple[Any, ...], list[int]](), []
    for row, (pixels, grids) in enumerate(zip(vision.pixel_values, vision.image_grid_thws, strict=True)):
        if pixels is None or grids is None:
            firsts.append(row)
            continue
        # The pixels are compared only where a thousand of them, at an odd distance, are equal.
        some = pixels.flatten()[:: (pixels.numel() // 1000) | 1]
        key = (pixels.shape, pixels.dtype, *grids.flatten().tolist(), *some.tolist())
        others = found.setdefault(key, [])
        first = next((other for other in others if _is_same(pixels, vision.pixel_values[other])), row)
        firsts.append(first)
        others.append(row)
    return firsts


def _is_same(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and torch.equal(one, other)


def _give_own_grids(_: nn.Module, words: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    grids = keywords.get("grid_thw")
    own = None if grids is None else _grids_of.get(grids)
    return (words, keywords) if own is None else (words, {**keywords, "grid_thw": own})


def _repeat_features(_: nn.Module, words: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
    grids = keywords.get("grid_thw")
    places = None if grids is None else _places_of.get(grids)
    if places is None:
        return output
    output.pooler_output = output.pooler_output[places]
    if (into_layers := getattr(output, "deepstack_features", None)) is not None:
        output.deepstack_features = [features[places] for features in into_layers]
    return output
