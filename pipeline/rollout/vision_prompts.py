"""Prompts with images as inputs of a vision-language model: token ids with room for each image, and its pixels.

The image processor and the tokenizer of the model's directory make them. The processor classes of transformers, which
combine the two, are not used: that of Qwen2-VL requires a video processor, which requires torchvision, and its only
addition is to repeat an image token as often as the image needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pipeline.config.user_modules import install_command
from pipeline.errors import ConfigError, PromptError, counted
from pipeline.experience.vision_rows import VisionRows
from pipeline.prompts.rendering import Rendering, Template, render
from pipeline.prompts.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """Token ids of a prompt; with images, `vision` has "pixel_values" and "image_grid_thws" as in `ExperienceVL`.

    `cut` is the number of tokens that it had before them (`rollout.long_prompts`).
    """

    ids: list[int]
    vision: dict[str, Tensor] = field(default_factory=dict)
    cut: int = 0


class VisionPrompts:
    """Renders prompts for one vision-language model."""

    def __init__(self, path: str | Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Load the image processor.

        Args:
            path: The model's directory.
            tokenizer: Tokenizer of the actor.

        Raises:
            ConfigError: If the directory has no image processor, or a package that reads images is not installed.
        """
        try:
            import PIL.Image  # noqa: F401 - the image processor imports it at its first image only
        except ImportError as error:
            raise ConfigError(
                f"model.actor: a vision-language model, and images are read with pillow: {install_command('pillow')}"
            ) from error
        from transformers import AutoConfig, AutoImageProcessor

        try:
            # Named: the default is torchvision's backend if that is installed, and its pixels differ by rounding.
            self._processor = AutoImageProcessor.from_pretrained(str(path), local_files_only=True, backend="pil")
            config = AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, ImportError) as error:
            # An ImportError: earlier transformers, such as 5.17, want torchvision although another backend is named.
            reason = " ".join(str(error).split())
            raise ConfigError(f"model.actor: cannot load an image processor from {path}: {reason}") from error
        self._tokenizer = tokenizer
        self._image_token: int = config.image_token_id
        self._merged_patches: int = config.vision_config.spatial_merge_size**2
        around = [getattr(config, f"vision_{end}_token_id", None) for end in ("start", "end")]
        start, end = ([] if token is None else [token] for token in around)
        self._image_in_front = [*start, self._image_token, *end]

    def render(self, prompt: Prompt, template: Template | Rendering = "auto") -> RenderedPrompt:
        """Return token ids and pixels of a prompt.

        Args:
            prompt: A text without an image token gets its images in front.
            template: As in `pipeline.prompts.rendering.render`.

        Returns:
            Ids in which each image has its tokens, and the pixels.

        Raises:
            PromptError: If an image cannot be read, the prompt names another number of images than it has, or as
                `pipeline.prompts.rendering.render`.
            ConfigError: As `pipeline.prompts.rendering.render`.
        """
        ids = render(prompt, self._tokenizer, template)
        named = ids.count(self._image_token)
        if not named and isinstance(prompt.prompt, str):
            ids = [token for _ in prompt.images for token in self._image_in_front] + ids
            named = len(prompt.images)
        if named != len(prompt.images):
            raise PromptError(f"{counted(named, 'image token')} for {counted(len(prompt.images), 'image')}")
        if not prompt.images:
            return RenderedPrompt(ids)
        vision = self._pixels(prompt.images)
        tokens = iter((vision["image_grid_thws"].prod(dim=1) // self._merged_patches).tolist())
        return RenderedPrompt(
            [token for part in ids for token in ([part] * next(tokens) if part == self._image_token else [part])],
            vision,
        )

    def _pixels(self, paths: tuple[str, ...]) -> dict[str, Tensor]:
        processed: list[Any] = []
        for path in paths:
            try:
                processed.append(self._processor(images=_read(path), return_tensors="pt"))
            except OSError as error:
                raise PromptError(f"image {path}: {error.strerror or error}") from error
            # Decoders of broken files raise SyntaxError, ValueError, errors of their own ...
            except Exception as error:
                raise PromptError(f"image {path}: {type(error).__name__}: {error}") from error
        return {
            "pixel_values": torch.cat([one["pixel_values"] for one in processed]),
            "image_grid_thws": torch.cat([one["image_grid_thw"] for one in processed]),
        }


def _read(path: str) -> Any:
    from PIL import Image, ImageOps

    with Image.open(path) as image:
        # As it is seen: cameras write its rotation beside the pixels.
        upright = ImageOps.exif_transpose(image)
        if upright.mode in ("I", "F"):
            raise OSError(f"the white of its gray levels (mode {upright.mode}) is unknown: save it as a PNG")
        # Pillow clips levels of 16 bits to 255, which is white.
        if upright.mode.startswith("I;16"):
            upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
        # Always three channels: the file may have a palette, gray levels, or an alpha channel.
        return upright.convert("RGB")


def vision_rows_of(kept: Sequence[tuple[Prompt, RenderedPrompt]]) -> VisionRows:
    """Return the images of each prompt, with their paths: files are not stored."""
    return dataclasses.replace(
        VisionRows.none(len(kept)),
        pixel_values=[rendered.vision.get("pixel_values") for _, rendered in kept],
        image_grid_thws=[rendered.vision.get("image_grid_thws") for _, rendered in kept],
        raw_images=[list(prompt.images) or None for prompt, _ in kept],
    )
