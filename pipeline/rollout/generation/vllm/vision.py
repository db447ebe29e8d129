"""Vision-language models in vLLM, with pixels that the worker has prepared.

vLLM's own processors read images, ask the hub's files about sizes, and need torchvision. None of that is used: a prompt
arrives with its image tokens and pixels as the trainer reads them, too. An image or video token that was sampled
belongs to no image: the model reads token 0 in its place (`pipeline.models.vision_inputs`).
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
import types
from typing import Any

import torch
from torch import Tensor
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs.engine import mm_input
from vllm.model_executor.models.registry import ModelRegistry
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)

from pipeline.rollout.generation.vllm.images import pixels_of
from pipeline.rollout.generation.vllm.releases import has_field
from pipeline.rollout.generation.vllm.wire import Images

_CLASSES = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}
_PLAIN_TOKEN = 0


def register(kind: str) -> None:
    """Let vLLM load models of a type, one of `VLLM_IMAGE_MODELS`, as a class of ours."""
    if importlib.util.find_spec("torchvision") is None:
        _replace_what_needs_torchvision()
    name = _CLASSES[kind]
    base = getattr(importlib.import_module(f"vllm.model_executor.models.{kind}"), name)
    factories = base._processor_factory
    info = type(
        "Info",
        (factories.info,),
        {
            # An image as large as a row: the encoder's room is made for it.
            "get_mm_max_tokens_per_item": lambda self, seq_len, mm_counts: {"image": seq_len},
            "get_supported_mm_limits": lambda self: {"image": None},
        },
    )

    def without_files(self: Any, info: Any, dummy_inputs: Any, *, cache: Any = None) -> None:
        self.info, self.dummy_inputs, self.cache, self.data_parser = info, dummy_inputs, cache, None

    def embed_input_ids(self: Any, input_ids: Tensor, *images: Any, **masks: Any) -> Tensor:
        # The embeddings of images replace those of their tokens.
        for token in (self.config.image_token_id, self.config.video_token_id):
            input_ids = input_ids.masked_fill(input_ids == token, _PLAIN_TOKEN)
        embedded: Tensor = base.embed_input_ids(self, input_ids, *images, **masks)
        return embedded

    processor = type("Processor", (factories.processor,), {"__init__": without_files})
    factories = dataclasses.replace(factories, info=info, processor=processor)
    ModelRegistry.register_model(
        name, type(name, (base,), {"embed_input_ids": embed_input_ids, "_processor_factory": factories})
    )


def arguments_of(max_length: int) -> dict[str, Any]:
    """Return vLLM's arguments for a registered model; a row has fewer images than tokens."""
    arguments: dict[str, Any] = {
        "skip_mm_profiling": True,
        "mm_processor_cache_gb": 0,
        "limit_mm_per_prompt": {"image": max_length},
    }
    if has_field(EngineArgs, "mm_device_do_normalize"):
        arguments["mm_device_do_normalize"] = False
    return arguments


def prompt_of(tokens: list[int], images: Images) -> Any:
    """Return vLLM's input of a prompt with images; its requests share the pixels."""
    items = [
        MultiModalKwargsItem(
            {
                "pixel_values": MultiModalFieldElem(
                    data=pixels, field=MultiModalFlatField(slices=[[slice(0, len(pixels))]])
                ),
                "image_grid_thw": MultiModalFieldElem(
                    data=torch.tensor(grid), field=MultiModalBatchedField(keep_on_cpu=True)
                ),
            }
        )
        for pixels, grid in zip(pixels_of(images), images.grids, strict=True)
    ]
    spots = [PlaceholderRange(offset=start, length=length) for start, length in images.spots]
    return mm_input(tokens, MultiModalKwargsItems({"image": items}), {"image": images.hashes}, {"image": spots})


def _replace_what_needs_torchvision() -> None:
    """Let vLLM import classes of transformers that read images and videos; none of them is called."""
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as with_pillow

    folder = "transformers.models.qwen2_vl"
    images: Any = types.ModuleType(f"{folder}.image_processing_qwen2_vl")
    images.smart_resize, images.Qwen2VLImageProcessor = with_pillow.smart_resize, with_pillow.Qwen2VLImageProcessorPil
    videos: Any = types.ModuleType(f"{folder}.video_processing_qwen2_vl")
    videos.Qwen2VLVideoProcessor = type("Qwen2VLVideoProcessor", (), {})
    sys.modules |= {images.__name__: images, videos.__name__: videos}
