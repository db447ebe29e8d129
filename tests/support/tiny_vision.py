"""A Qwen2-VL small enough for a test, with tokenizer and image processor: built from configurations, never loaded.

Two text layers, one vision layer, patches of 4 x 4 pixels merged 2 x 2: an image 16 pixels wide and 24 high has 6 x 4
patches and 6 image tokens. With larger patches few of them make megabytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from pipeline.experience.types import ExperienceVL
from pipeline.experience.vision_rows import VisionRows
from tests.support import tiny

SYMBOLS = (
    "<pad>", "<eos>", "<unk>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>",
    *"0123456789abcdefgh >?\n",
)  # fmt: skip
PAD, EOS, _, IMAGE, VIDEO, START, END = range(7)
PATCH = 4
MERGE = 2
PATCH_VALUES = 3 * 2 * PATCH * PATCH
"""Values of a patch: three colours, two points in time, 4 x 4 pixels."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


TEXT = {
    "vocab_size": len(SYMBOLS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": EOS,
}
ROTATION = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 3, 3]}
SIGHT = {"num_heads": 2, "spatial_merge_size": MERGE, "temporal_patch_size": 2}
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}


def model(seed: int = 0, patch: int = PATCH) -> Qwen2VLForConditionalGeneration:
    """A Qwen2-VL whose answers depend on the image and on positions in it."""
    config = Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": ROTATION},
        vision_config={**SIGHT, "depth": 1, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "patch_size": patch},
        **TOKENS,
    )
    return tiny.seeded(Qwen2VLForConditionalGeneration, config, seed, 0.15)


def relative(kind: str, seed: int = 0, depth: int = 2) -> PreTrainedModel:
    """A Qwen2.5-VL ("qwen2_5_vl", windows of attention) or Qwen3-VL ("qwen3_vl", features into several layers)."""
    sight = {
        **SIGHT,
        "depth": depth,
        "hidden_size": 32,
        "out_hidden_size": 64,
        "intermediate_size": 48,
        "patch_size": PATCH,
    }
    if kind == "qwen2_5_vl":
        windows = {"window_size": 4 * PATCH, "fullatt_block_indexes": [1]}
        text = {**TEXT, "rope_parameters": ROTATION}
        config: Any = Qwen2_5_VLConfig(text_config=text, vision_config={**sight, **windows}, **TOKENS)
        return tiny.seeded(Qwen2_5_VLForConditionalGeneration, config, seed, 0.15)
    deep = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    text = {**TEXT, "head_dim": 16, "rope_parameters": {**ROTATION, "mrope_interleaved": True}}
    config = Qwen3VLConfig(text_config=text, vision_config={**sight, **deep}, **TOKENS)
    return tiny.seeded(Qwen3VLForConditionalGeneration, config, seed, 0.15)


def tokenizer() -> PreTrainedTokenizerFast:
    """A letter a token, the marks of vision one token each."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({symbol: place for place, symbol in enumerate(SYMBOLS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"<[^<>]+>|[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        chat_template=CHAT_TEMPLATE,
    )


def save(folder: Path, seed: int = 0, patch: int = PATCH, *, made: PreTrainedModel | None = None) -> Path:
    """Write model, tokenizer and image processor into a directory, as a checkpoint of the hub has them.

    Args:
        folder: The directory.
        seed: Of the model.
        patch: Pixels along a side of a patch.
        made: Another model in place of that of `model`, with these patches.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    (made or model(seed, patch)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    Qwen2VLImageProcessorPil(
        patch_size=patch,
        merge_size=MERGE,
        temporal_patch_size=2,
        size={"shortest_edge": 8 * 8, "longest_edge": 1024 * 1024},
    ).save_pretrained(folder)
    return folder


def picture(path: Path, width: int, height: int, seed: int = 0) -> Path:
    """Write an image of noise."""
    values = torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    Image.fromarray(values.numpy()).save(path)
    return path


def image_tokens(grid: tuple[int, int, int]) -> int:
    """Tokens that stand for an image or video of this grid."""
    return grid[0] * grid[1] * grid[2] // MERGE**2


def prompts(*rows: list[int | tuple[int, int, int]], seed: int = 0) -> dict[str, torch.Tensor]:
    """Left-padded prompts and the pixels of their images, as `make_experience` takes them.

    Args:
        rows: Each a list of token ids and of grids (time, height, width); a grid of more than one time is a video.
        seed: Of the pixels.
    """
    draws = torch.Generator().manual_seed(seed)
    ids: list[list[int]] = []
    grids: dict[bool, list[tuple[int, int, int]]] = {False: [], True: []}
    counts: dict[bool, list[int]] = {False: [], True: []}
    for row in rows:
        tokens: list[int] = []
        for part in row:
            if isinstance(part, int):
                tokens.append(part)
            else:
                tokens += [START, *[VIDEO if part[0] > 1 else IMAGE] * image_tokens(part), END]
        ids.append(tokens)
        for video in (False, True):
            found = [part for part in row if not isinstance(part, int) and (part[0] > 1) == video]
            grids[video] += found
            counts[video].append(len(found))
    width = max(map(len, ids))
    made = {
        "input_ids": torch.tensor([[PAD] * (width - len(row)) + row for row in ids]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids]),
        "image_num": torch.tensor(counts[False], dtype=torch.float32),
        "video_num": torch.tensor(counts[True], dtype=torch.float32),
    }
    for video, pixels_name, grids_name in (
        (False, "pixel_values", "image_grid_thws"),
        (True, "pixel_values_videos", "video_grid_thws"),
    ):
        if grids[video]:
            made[grids_name] = torch.tensor(grids[video])
            patches = int(made[grids_name].prod(dim=1).sum())
            made[pixels_name] = torch.randn(patches, PATCH_VALUES, generator=draws)
    return made


def vision_of(made: dict[str, torch.Tensor]) -> VisionRows:
    """The pixels of `prompts` a row."""
    fields = {name: made[name] for name in made if "pixel" in name or "grid" in name}
    info = {name: made[name] for name in ("image_num", "video_num")}
    return VisionRows.of(ExperienceVL(sequences=made["input_ids"], info=info, **fields))
