"""Images that rows of a pass have in common: the encoder computes each once, numbers and gradients stay the same."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.experience.vision_rows import VisionRows
from pipeline.models import shared_images, vision_inputs
from pipeline.models.log_probs import action_log_probs
from pipeline.models.packing import prepare_packing
from tests.models.test_varlen_attention import assert_same_gradients
from tests.models.test_vision_inputs import ACTIONS, MIXED, answered
from tests.support import tiny_vision
from tests.support.padded_passes import log_probs_by_packing

# Two prompts with images of the same sizes and other pixels; a video has no part in it.
PROMPTS = ([8, (1, 4, 6), 9], [8, (1, 4, 6), 9], *MIXED[1:])
ORDER = [2, 2, 0, 3, 1, 0, 0, 1, 2, 3]
PATCHES = 24 + 24 + 16 + 16
"""Of the images of the prompts, each once."""


def model_of(kind: str) -> Any:
    return (tiny_vision.model() if kind == "qwen2_vl" else tiny_vision.relative(kind)).double()


def given(kind: str, *, copies: bool) -> tuple[Tensor, Tensor, VisionRows]:
    """Ids, mask and images of several responses to each prompt, in no order."""
    # Qwen3-VL has its videos in frames with a time before each: another prompt than that of `tiny_vision`.
    prompts = PROMPTS[:4] if kind == "qwen3_vl" else PROMPTS
    made, order = tiny_vision.prompts(*prompts), [*ORDER, *([4, 4] if len(prompts) > 4 else [])]
    vision = tiny_vision.vision_of(made).rows(order)
    if copies:
        # As rows that came through shared memory.
        copied = {
            field.name: [row.clone() if isinstance(row, Tensor) else row for row in getattr(vision, field.name)]
            for field in dataclasses.fields(vision)
        }
        vision = VisionRows(**copied)
    lengths = [5, 2, 4, 1, 3] * 3
    ids, mask = answered({name: made[name][order] for name in ("input_ids", "attention_mask")}, lengths[: len(order)])
    return ids, mask, vision


def answered_by(model: Any, ids: Tensor, mask: Tensor, vision: VisionRows, *, packed: bool) -> Tensor:
    actions = mask[:, -ACTIONS:] != 0
    if packed:
        return log_probs_by_packing(model, ids, mask, actions, vision=vision)[0]
    return action_log_probs(model, ids, mask, ACTIONS, vision=vision).masked_fill(~actions, 0)


def patches_of(model: Any) -> list[int]:
    seen: list[int] = []
    model.model.visual.patch_embed.register_forward_pre_hook(lambda _, words: seen.append(len(words[0])))
    return seen


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("copies", [False, True])
def test_the_encoder_computes_each_image_once(
    kind: str, packed: bool, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = model_of(kind), model_of(kind)
    ids, mask, vision = given(kind, copies=copies)
    if packed:
        assert prepare_packing([plain], torch.device("cpu"), None) and prepare_packing([model], ids.device, None)
    with monkeypatch.context() as each_alone:
        each_alone.setattr(vision_inputs, "image_keywords", lambda _, rows, device: rows.model_keywords(device))
        expected = answered_by(plain, ids, mask, vision, packed=packed)
        expected.sum().backward()
    seen = patches_of(model)

    found = answered_by(model, ids, mask, vision, packed=packed)

    assert seen[0] == PATCHES
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    found.sum().backward()
    assert_same_gradients(model, plain)
    # A copy, as a reference is made, and the same model again: with repeated images, and without.
    twin = copy.deepcopy(model)
    for each in (twin, model):
        torch.testing.assert_close(answered_by(each, ids, mask, vision, packed=packed), expected, atol=1e-10, rtol=0)
        few = answered_by(each, ids[:4], mask[:4], vision.rows(range(4)), packed=packed)
        torch.testing.assert_close(few, expected[:4], atol=1e-10, rtol=0)


def test_large_images_that_differ_in_a_tenth_are_told_apart_without_comparing_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As white pages: of n images each would be compared with each."""
    compared: list[int] = []
    monkeypatch.setattr(shared_images, "_is_same", lambda *each: compared.append(1) or False)
    pages = [torch.ones(4096, 96) for _ in range(12)]
    for number, page in enumerate(pages):
        page[2000 + 30 * number : 2400 + 30 * number] = 0.25
    nothing = VisionRows.none(12)
    rows = dataclasses.replace(nothing, pixel_values=[*pages], image_grid_thws=[torch.tensor([[1, 64, 64]])] * 12)
    model = tiny_vision.model()

    keywords = shared_images.image_keywords(model.model, rows, torch.device("cpu"))

    assert not compared and len(keywords["pixel_values"]) == 12 * 4096


def test_images_that_differ_in_one_value_are_two() -> None:
    model = tiny_vision.model()
    ids, mask, vision = given("qwen2_vl", copies=True)
    rows = vision.rows([2, 5])
    assert rows.pixel_values[1] is not None
    seen = patches_of(model)

    for _ in range(2):
        answered_by(model, ids[[2, 5]], mask[[2, 5]], rows, packed=False)
        rows.pixel_values[1][3, 7] += 0.5

    assert seen == [24, 48]
