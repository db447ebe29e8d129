"""What a vision-language model is called with: tokens in which images stand, their pixels, positions in three axes.

Models of the Qwen2-VL kind: an image is a run of image tokens, as many as its grid has patches once merged, and the
position of a token has a time, a height and a width. The positions of rows are computed from the rows each time, by the
model's own `get_rope_index`, and handed to it: what it keeps between two calls (`rope_deltas`) is of the rows of the
call before, and after another batch, or with finished rows gone, it is of others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import FieldError, ShapeError
from pipeline.experience.vision_rows import VisionRows

_IMAGE, _VIDEO = 1, 2
_PLAIN_TOKEN = 0


def vision_backbone(model: Any) -> Any | None:
    """The part of a model that knows where images stand; None for a model of text alone.

    Args:
        model: A model of transformers, a `pipeline.models.critic.Critic` around one, or anything else.
    """
    for part in (model, getattr(model, "base_model", None), getattr(model, "backbone", None)):
        if hasattr(part, "get_rope_index"):
            return part
    return None


def is_vision_directory(path: str | Path) -> bool:
    """Whether a local model directory holds a vision-language model of the kind that this module speaks to."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(path), local_files_only=True)
    vision = getattr(config, "vision_config", None)
    return hasattr(config, "image_token_id") and hasattr(vision, "spatial_merge_size")


def vision_inputs(
    backbone: Any, input_ids: Tensor, attention_mask: Tensor, vision: VisionRows | None
) -> dict[str, Tensor]:
    """Keywords for a forward pass over whole rows.

    A row's first image tokens are its images, as many as its grids ask for. Those that are left the actor has sampled
    itself: they stand for no image, and the model reads token 0 in their place, here and in `plain_tokens`.

    Args:
        backbone: Of `vision_backbone`.
        input_ids: ``(B, S)`` int64.
        attention_mask: ``(B, S)``, 1 where the token is real, on whichever side the padding is.
        vision: Of the B rows; None only if no row has an image token, not even a sampled one.

    Returns:
        `input_ids`, `attention_mask`, `position_ids` ``(3, B, S)`` int64, and pixels and grids where there are any.

    Raises:
        ShapeError: If a row has fewer image tokens than its grids ask for.
        FieldError: If two images stand side by side without a token between them, or `vision` is missing.
    """
    device = input_ids.device
    if vision is None:
        vision = VisionRows.none(len(input_ids))
        check_prompt_images(backbone, input_ids, attention_mask, vision)
    # On the CPU: whoever computes positions reads the tokens one by one.
    ids, real = input_ids.cpu(), (attention_mask != 0).long().cpu()
    kinds = token_kinds(backbone, ids, real, vision)
    keywords = vision.model_keywords(device)
    positions, _ = backbone.get_rope_index(
        ids,
        mm_token_type_ids=kinds,
        attention_mask=real,
        **{name: grids.cpu() for name, grids in keywords.items() if name.endswith("_thw")},
    )
    return {
        "input_ids": torch.where(kinds == 0, plain_tokens(backbone, ids), ids).to(device),
        "attention_mask": attention_mask,
        "position_ids": positions.to(device),
        **keywords,
    }


def check_prompt_images(backbone: Any, input_ids: Tensor, attention_mask: Tensor, vision: VisionRows) -> None:
    """Refuse rows that have more image tokens, or fewer, than their grids ask for; for rows that nobody sampled.

    Arguments, errors: as in `vision_inputs`; a FieldError also where a row has more.
    """
    kinds = token_kinds(backbone, input_ids, attention_mask, vision)
    plain = plain_tokens(backbone, input_ids) != input_ids
    surplus = (plain & (attention_mask != 0) & (kinds == 0)).sum(dim=1)
    if bool(surplus.any()):
        row = int(surplus.nonzero()[0])
        raise FieldError(f"row {row}: {int(surplus[row])} image or video tokens more than its grids ask for")


def token_kinds(backbone: Any, input_ids: Tensor, attention_mask: Tensor, vision: VisionRows) -> Tensor:
    """Which tokens stand for images (1), which for videos (2), ``(B, S)`` int64; arguments, errors: `vision_inputs`."""
    kinds = torch.zeros_like(input_ids)
    for kind, name, grids in (
        (_IMAGE, "image_token_id", vision.image_grid_thws),
        (_VIDEO, "video_token_id", vision.video_grid_thws),
    ):
        expected = _expected_tokens(backbone, grids).to(input_ids.device)
        standing = (input_ids == getattr(backbone.config, name, -1)) & (attention_mask != 0)
        kinds.masked_fill_(standing & (standing.cumsum(dim=1) <= expected.unsqueeze(1)), kind)
        _check_tokens(kinds == kind, expected, grids if kind == _IMAGE else None)
    return kinds


def plain_tokens(backbone: Any, tokens: Tensor) -> Tensor:
    """Tokens that the actor sampled as the model is to read them: an image token among them stands for no image."""
    for name in ("image_token_id", "video_token_id"):
        token = getattr(backbone.config, name, None)
        tokens = tokens if token is None else tokens.masked_fill(tokens == token, _PLAIN_TOKEN)
    return tokens


def _expected_tokens(backbone: Any, grids: list[Tensor | None]) -> Tensor:
    """Image or video tokens that each row must have, ``(B,)`` int64."""
    merged = backbone.config.vision_config.spatial_merge_size**2
    return torch.tensor([0 if grid is None else int((grid.prod(dim=1) // merged).sum()) for grid in grids])


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
