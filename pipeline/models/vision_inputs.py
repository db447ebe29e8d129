"""Arguments of a vision-language model's forward pass: tokens with images, pixels, positions in three axes.

In models of the Qwen2-VL kind an image is a sequence of image tokens, one for each merged patch of its grid, and the
position of a token has a time, a height and a width. The positions are computed from the rows for each call, by the
model's own `get_rope_index`, and passed to it. The state that the model keeps between two calls (`rope_deltas`) belongs
to the rows of the previous call: after another batch, or without the finished rows, it is wrong.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import FieldError, ShapeError
from pipeline.experience.vision_rows import VisionRows
from pipeline.models.flat_rows import FlatRows
from pipeline.models.shared_images import image_keywords

_IMAGE, _VIDEO = 1, 2
_PLAIN_TOKEN = 0


def vision_backbone(model: Any) -> Any | None:
    """Return the part of a model that computes positions of images; None for a text-only model.

    Args:
        model: A model of transformers, a `pipeline.models.critic.Critic` around one, or any other object.
    """
    for part in (model, getattr(model, "base_model", None), getattr(model, "backbone", None)):
        if hasattr(part, "get_rope_index"):
            return part
    return None


def refuse_images(model: object, vision: VisionRows | None) -> None:
    """Refuse images of rows, if there are any, for a model of text alone, which would ignore them, by a FieldError."""
    if vision is not None and vision.tensors_exist:
        raise FieldError(f"images for a {type(model).__name__}: not a vision-language model of the Qwen2-VL kind")


def is_vision_directory(path: str | Path) -> bool:
    """Return whether a local model directory holds a vision-language model of the kind that this module supports."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    vision = getattr(config, "vision_config", None)
    return hasattr(config, "image_token_id") and hasattr(vision, "spatial_merge_size")


def vision_inputs(
    backbone: Any, input_ids: Tensor, attention_mask: Tensor, vision: VisionRows | None
) -> dict[str, Tensor]:
    """Return the keywords of a forward pass over whole rows.

    The first image tokens of a row belong to its images, as many as its grids require. Any further
    ones were sampled by the actor: they belong to no image, and the model reads token 0 in their place, here and in
    `plain_tokens`.

    Args:
        backbone: Result of `vision_backbone`.
        input_ids: ``(B, S)`` int64.
        attention_mask: ``(B, S)``, 1 where the token is real; the padding may be on either side.
        vision: Images and videos of the B rows; None only if no row has an image token, not even a sampled one.

    Returns:
        `input_ids`, `attention_mask`, `position_ids` ``(3, B, S)`` int64, and pixels and grids if there are any.

    Raises:
        ShapeError: If a row has fewer image tokens than its grids require.
        FieldError: If two images have no token between them, or `vision` is missing.
    """
    device = input_ids.device
    if vision is None:
        vision = VisionRows.none(len(input_ids))
        check_prompt_images(backbone, input_ids, attention_mask, vision)
    # On the CPU: `get_rope_index` reads the tokens one by one.
    ids, real = input_ids.cpu(), (attention_mask != 0).long().cpu()
    kinds = token_kinds(backbone, ids, real, vision)
    grids = replace(
        VisionRows.none(len(ids)), image_grid_thws=vision.image_grid_thws, video_grid_thws=vision.video_grid_thws
    )
    positions, _ = backbone.get_rope_index(
        ids,
        mm_token_type_ids=kinds,
        attention_mask=real,
        **grids.model_keywords(ids.device),
    )
    return {
        "input_ids": torch.where(kinds == 0, plain_tokens(backbone, ids), ids).to(device),
        "attention_mask": attention_mask,
        "position_ids": positions.to(device),
        **image_keywords(backbone, vision, device),
    }


def packed_vision_inputs(
    backbone: Any, rows: FlatRows, vision: VisionRows | None
) -> tuple[FlatRows, Tensor, dict[str, Tensor]]:
    """Return rows as the model reads them, the positions of their tokens ``(3, T)`` int64, and pixels and grids.

    Arguments and errors: as in `vision_inputs`.
    """
    padded = rows.padded()
    given = vision_inputs(backbone, padded.sequences, padded.attention_mask, vision)
    real = padded.attention_mask.flatten().nonzero().squeeze(1)
    tokens, positions = given.pop("input_ids").flatten()[real], given.pop("position_ids").flatten(1)[:, real]
    del given["attention_mask"]
    return replace(rows, tokens=tokens), positions, given


def check_prompt_images(backbone: Any, input_ids: Tensor, attention_mask: Tensor, vision: VisionRows) -> None:
    """Refuse prompts whose image tokens are not as many as their grids require; for rows without sampled tokens.

    Arguments and errors: as in `vision_inputs`; a FieldError also if a row has more image tokens than its grids
    require.
    """
    kinds = token_kinds(backbone, input_ids, attention_mask, vision)
    plain = plain_tokens(backbone, input_ids) != input_ids
    surplus = (plain & (attention_mask != 0) & (kinds == 0)).sum(dim=1)
    if bool(surplus.any()):
        row = int(surplus.nonzero()[0])
        raise FieldError(f"row {row}: {int(surplus[row])} image or video tokens more than its grids ask for")


def token_kinds(backbone: Any, input_ids: Tensor, attention_mask: Tensor, vision: VisionRows) -> Tensor:
    """Return 1 for each token of an image, 2 for one of a video, else 0, ``(B, S)`` int64; as `vision_inputs`."""
    kinds = torch.zeros_like(input_ids)
    for kind, name, grids in (
        (_IMAGE, "image_token_id", vision.image_grid_thws),
        (_VIDEO, "video_token_id", vision.video_grid_thws),
    ):
        expected = _expected_tokens(backbone, grids).to(input_ids.device)
        present = (input_ids == getattr(backbone.config, name, -1)) & (attention_mask != 0)
        kinds.masked_fill_(present & (present.cumsum(dim=1) <= expected.unsqueeze(1)), kind)
        _check_tokens(kinds == kind, expected, grids if kind == _IMAGE else None)
    return kinds


def plain_tokens(backbone: Any, tokens: Tensor) -> Tensor:
    """Return sampled tokens with token 0 for each image or video token: a sampled one belongs to no image."""
    for name in ("image_token_id", "video_token_id"):
        token = getattr(backbone.config, name, None)
        tokens = tokens if token is None else tokens.masked_fill(tokens == token, _PLAIN_TOKEN)
    return tokens


def _expected_tokens(backbone: Any, grids: list[Tensor | None]) -> Tensor:
    """Return the number of image or video tokens that each row must have, ``(B,)`` int64."""
    # Of height and width alone, each by itself, as the positions count them.
    merged = torch.tensor([1, *[backbone.config.vision_config.spatial_merge_size] * 2])
    return torch.tensor([0 if grid is None else int((grid.cpu() // merged).prod(dim=1).sum()) for grid in grids])


def _check_tokens(placed: Tensor, expected: Tensor, image_grids: list[Tensor | None] | None) -> None:
    short = placed.sum(dim=1) < expected
    if bool(short.any()):
        row = int(short.nonzero()[0])
        raise ShapeError(f"row {row}: {int(placed[row].sum())} image tokens, its grids ask for {int(expected[row])}")
    if image_grids is None:
        return
    starts = placed.clone()
    starts[:, 1:] &= ~placed[:, :-1]
    for row, (runs, grids) in enumerate(zip(starts.sum(dim=1).tolist(), image_grids, strict=True)):
        images = 0 if grids is None else len(grids)
        if runs != images:
            raise FieldError(f"row {row}: its image tokens stand in {runs} runs, one for each of {images} is needed")
