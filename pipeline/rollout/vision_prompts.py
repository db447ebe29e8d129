"""Prompts with images, as a vision-language model takes them: token ids with room for each image, and its pixels.

An image processor and the tokenizer do it, both from the model's directory. The processor classes that join the two in
transformers are left alone: that of Qwen2-VL wants a video processor, which wants torchvision, and all that it adds is
to write an image token as often as the image takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline.errors import ConfigError, PromptError
from pipeline.prompts import Prompt, Template, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """Token ids of a prompt; with images, `vision` has "pixel_values" and "image_grid_thws" as in `ExperienceVL`."""

    ids: list[int]
    vision: dict[str, Tensor] = field(default_factory=dict)


class VisionPrompts:
    """Renders prompts for one vision-language model."""

    def __init__(self, path: str | Path, tokenizer: PreTrainedTokenizerBase, *, field: str = "model.actor") -> None:
        """Load the image processor.

        Args:
            path: The model's directory.
            tokenizer: Its tokenizer.
            field: The configuration field that named the directory, for the error.

        Raises:
            ConfigError: If the directory has no image processor, or pillow is not installed.
        """
        try:
            import PIL.Image  # noqa: F401 - the image processor asks for it at its first image only
        except ImportError as error:
            raise ConfigError(
                f"{field}: a vision-language model, and images are read with pillow: pip install 'rlhfd[vision]'"
            ) from error
        from transformers import AutoConfig, AutoImageProcessor

        try:
            # Named, or it would be the one of torchvision where that is installed, whose pixels differ by rounding.
            self._processor = AutoImageProcessor.from_pretrained(str(path), local_files_only=True, backend="pil")
            config = AutoConfig.from_pretrained(str(path), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{field}: cannot load an image processor from {path}: {error}") from error
        self._tokenizer = tokenizer
        self._image_token: int = config.image_token_id
        self._merged_patches: int = config.vision_config.spatial_merge_size**2
        around = [getattr(config, f"vision_{end}_token_id", None) for end in ("start", "end")]
        start, end = ([] if token is None else [token] for token in around)
        self._image_in_front = [*start, self._image_token, *end]

    def render(self, prompt: Prompt, template: Template = "auto") -> RenderedPrompt:
        """Make token ids and pixels of a prompt.

        Args:
            prompt: A text that names no image token has its images in front.
            template: As in `pipeline.prompts.render`.

        Returns:
            Ids in which each image has its tokens, and the pixels.

        Raises:
            PromptError: If an image cannot be read, the prompt names another number of images than it has, or as
                `pipeline.prompts.render`.
            ConfigError: As `pipeline.prompts.render`.
        """
        ids = render(prompt, self._tokenizer, template)  # type: ignore[arg-type]
        named = ids.count(self._image_token)
        if not named and isinstance(prompt.prompt, str):
            ids = [token for _ in prompt.images for token in self._image_in_front] + ids
            named = len(prompt.images)
        if named != len(prompt.images):
            raise PromptError(f"{named} image tokens for {len(prompt.images)} images")
        if not prompt.images:
            return RenderedPrompt(ids)
        vision = self._pixels(prompt.images)
        tokens = iter((vision["image_grid_thws"].prod(dim=1) // self._merged_patches).tolist())
        return RenderedPrompt(
            [token for part in ids for token in ([part] * next(tokens) if part == self._image_token else [part])],
            vision,
        )

    def _pixels(self, paths: tuple[str, ...]) -> dict[str, Tensor]:
        made: list[Any] = []
        for path in paths:
            try:
                made.append(self._processor(images=_read(path), return_tensors="pt"))
            except OSError as error:
                raise PromptError(f"image {path}: {error.strerror or error}") from error
            # A decoder meets a broken file with whatever its format's code raises: SyntaxError, ValueError, its own ...
            except Exception as error:
                raise PromptError(f"image {path}: {type(error).__name__}: {error}") from error
        return {
            "pixel_values": torch.cat([one["pixel_values"] for one in made]),
            "image_grid_thws": torch.cat([one["image_grid_thw"] for one in made]),
        }


def _read(path: str) -> Any:
    from PIL import Image

    with Image.open(path) as image:
        # Three colours whatever the file has: a palette, shades of gray, four with an alpha.
        return image.convert("RGB")
