"""Prompts with images: the model's inputs, and images that cannot be read."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from pipeline.config.lengths import Lengths
from pipeline.errors import ConfigError, PromptError
from pipeline.models.loading import load_tokenizer
from pipeline.prompts.source import PromptSource
from pipeline.prompts.types import Prompt
from pipeline.rollout.first_rollouts import refuse_broken_reward
from pipeline.rollout.generation.blocking import BlockingEngine
from pipeline.rollout.generation.interface import Sampling
from pipeline.rollout.generation.transformers import TransformersGenerator
from pipeline.rollout.generation.weights import ModelWeights
from pipeline.rollout.maker import NaiveExperienceMaker
from pipeline.rollout.reward.functions import FunctionReward
from pipeline.rollout.roller import LocalRoller
from pipeline.rollout.vision_prompts import VisionPrompts
from tests.support import tiny, tiny_vision
from tests.support.tiny_vision import END, IMAGE, START

MEANS = (0.48145466, 0.4578275, 0.40821073)
DEVIATIONS = (0.26862954, 0.26130258, 0.27577711)
RED, GREEN = (255, 0, 0), (0, 255, 0)
A, B, QUESTION = 17, 18, 27


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision.save(tmp_path_factory.mktemp("eyes"))


@pytest.fixture
def vision(model_directory: Path) -> VisionPrompts:
    return VisionPrompts(model_directory, load_tokenizer(model_directory))


def painted(path: Path, width: int, height: int, colour: tuple[int, int, int]) -> str:
    Image.new("RGB", (width, height), colour).save(path)
    return str(path)


def prompt_of(text_or_messages: Any, *images: str) -> Prompt:
    return Prompt(position=0, epoch=0, index=0, prompt=text_or_messages, answer=None, images=images)


def normalized(colour: tuple[int, int, int]) -> torch.Tensor:
    """A patch of one colour: three colours, then time, height and width."""
    values = torch.tensor([(c / 255 - m) / d for c, m, d in zip(colour, MEANS, DEVIATIONS, strict=True)])
    return values.repeat_interleave(tiny_vision.PATCH_VALUES // 3)


def test_without_pillow_the_command_is_that_of_this_python(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)

    with pytest.raises(ConfigError, match=rf": {re.escape(sys.executable)} -m pip install pillow$"):
        VisionPrompts(model_directory, load_tokenizer(model_directory))


def test_a_texts_images_stand_in_front_of_it_in_their_order(tmp_path: Path, vision: VisionPrompts) -> None:
    images = painted(tmp_path / "red.png", 16, 24, RED), painted(tmp_path / "green.png", 8, 8, GREEN)

    rendered = vision.render(prompt_of("ab", *images))

    assert rendered.ids == [START, *[IMAGE] * 6, END, START, IMAGE, END, A, B]
    assert rendered.vision["image_grid_thws"].tolist() == [[1, 6, 4], [1, 2, 2]]
    expected = torch.cat([normalized(RED).expand(24, -1), normalized(GREEN).expand(4, -1)])
    torch.testing.assert_close(rendered.vision["pixel_values"], expected, atol=1e-5, rtol=0)


def test_images_stand_where_the_prompt_names_them(tmp_path: Path, vision: VisionPrompts) -> None:
    image = painted(tmp_path / "red.png", 16, 8, RED)
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]

    in_text = vision.render(prompt_of("a<|vision_start|><|image_pad|><|vision_end|>b", image))
    in_messages = vision.render(prompt_of([{"role": "user", "content": parts}], image))
    as_a_message = vision.render(prompt_of("ab", image), "chat")

    answer = 26
    assert in_text.ids == [A, START, IMAGE, IMAGE, END, B]
    assert in_messages.ids == [A, START, IMAGE, IMAGE, END, B, answer]
    assert as_a_message.ids == [START, IMAGE, IMAGE, END, A, B, answer]


def test_text_alone_is_rendered_as_ever(vision: VisionPrompts) -> None:
    rendered = vision.render(prompt_of("ab"))

    assert (rendered.ids, rendered.vision) == ([A, B], {})


def test_a_palette_and_shades_of_gray_are_read_as_three_colours(tmp_path: Path, vision: VisionPrompts) -> None:
    Image.new("RGB", (8, 8), RED).convert("P").save(tmp_path / "palette.png")
    Image.new("L", (8, 8), 255).save(tmp_path / "gray.png")

    palette, gray = (vision.render(prompt_of("a", str(tmp_path / name))) for name in ("palette.png", "gray.png"))

    torch.testing.assert_close(palette.vision["pixel_values"][0], normalized(RED), atol=1e-5, rtol=0)
    torch.testing.assert_close(gray.vision["pixel_values"][0], normalized((255, 255, 255)), atol=1e-5, rtol=0)


def test_gray_levels_of_16_bits_are_scaled_to_8(
    tmp_path: Path, vision: VisionPrompts, subtests: pytest.Subtests
) -> None:
    for level in (0, 0x40FF, 0xFFFF):
        for name in ("gray.png", "gray.tif"):
            Image.fromarray(np.full((8, 8), level, np.uint16)).save(tmp_path / name)

            gray = vision.render(prompt_of("a", str(tmp_path / name)))

            with subtests.test(name, level=level):
                expected = normalized((level >> 8,) * 3)
                torch.testing.assert_close(gray.vision["pixel_values"][0], expected, atol=1e-5, rtol=0)


def test_gray_levels_of_an_unknown_white_are_refused(tmp_path: Path, vision: VisionPrompts) -> None:
    for name, dtype in (("whole.tif", np.int32), ("float.tif", np.float32)):
        Image.fromarray(np.ones((8, 8), dtype)).save(tmp_path / name)

        with pytest.raises(PromptError, match=f"^image {tmp_path / name}: the white of its gray levels "):
            vision.render(prompt_of("a", str(tmp_path / name)))


def test_a_photo_is_turned_upright(tmp_path: Path, vision: VisionPrompts) -> None:
    stored = Image.new("RGB", (16, 8), GREEN)
    stored.paste(RED, (0, 0, 8, 8))
    rotation = stored.getexif()
    # Its left side is its top when it is turned to the right.
    rotation[0x0112] = 6
    stored.save(tmp_path / "turned.png", exif=rotation)
    stored.transpose(Image.Transpose.ROTATE_270).save(tmp_path / "upright.png")

    turned, upright = (vision.render(prompt_of("a", str(tmp_path / name))) for name in ("turned.png", "upright.png"))

    assert turned.vision["image_grid_thws"].tolist() == upright.vision["image_grid_thws"].tolist() == [[1, 4, 2]]
    assert torch.equal(turned.vision["pixel_values"], upright.vision["pixel_values"])


def test_an_image_that_cannot_be_read_is_named(tmp_path: Path, vision: VisionPrompts) -> None:
    whole = tiny_vision.picture(tmp_path / "whole.png", 40, 40).read_bytes()
    (tmp_path / "torn.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "empty.png").touch()
    painted(tmp_path / "thin.png", 1000, 2, RED)

    assert len(vision.render(prompt_of("a", str(tmp_path / "whole.png"))).ids) > 4
    for name in ("missing.png", "torn.png", "text.png", "empty.png", "thin.png", "."):
        with pytest.raises(PromptError, match=f"^image {tmp_path / name}: "):
            vision.render(prompt_of("a", str(tmp_path / name)))


def test_more_or_fewer_places_than_images_are_refused(tmp_path: Path, vision: VisionPrompts) -> None:
    image = painted(tmp_path / "red.png", 8, 8, RED)

    with pytest.raises(PromptError, match="1 image token for 2 images"):
        vision.render(prompt_of("<|image_pad|>b", image, image))
    with pytest.raises(PromptError, match="1 image token for 0 images"):
        vision.render(prompt_of("<|image_pad|>b"))


def test_a_directory_without_an_image_processor_is_refused(tmp_path: Path) -> None:
    tiny_vision.model().save_pretrained(tmp_path)
    tiny_vision.tokenizer().save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match=r"model\.actor: cannot load an image processor from "):
        VisionPrompts(tmp_path, load_tokenizer(tmp_path))


def test_a_package_that_an_image_processor_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, model_directory: Path
) -> None:
    def without_torchvision(*_: object, **__: object) -> None:
        raise ImportError("\nAutoImageProcessor requires the Torchvision library\nbut it was not found.\n")

    monkeypatch.setattr(transformers.AutoImageProcessor, "from_pretrained", without_torchvision)

    with pytest.raises(ConfigError, match=r"requires the Torchvision library but it was not found\.$"):
        VisionPrompts(model_directory, load_tokenizer(model_directory))


# The roller.


def constant(*_: Any, **__: Any) -> float:
    return 1.0


def source_of(folder: Path, *lines: dict[str, Any]) -> contextlib.closing[PromptSource]:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return contextlib.closing(PromptSource(path, 0))


def new_roller(source: PromptSource, model_directory: Path, *, sees: bool = True) -> LocalRoller:
    tokenizer = load_tokenizer(model_directory)
    actor: Any = tiny_vision.model() if sees else tiny.llama()
    maker = NaiveExperienceMaker(
        actor, None, FunctionReward([constant], tokenizer), None, tokenizer, kl_coef=0, use_grpo=True, num_generation=2
    )
    return LocalRoller(
        maker, source, tokenizer, ModelWeights({}, BlockingEngine(TransformersGenerator(actor))), seed=1,
        lengths=Lengths(32, 31, None), template="auto",
        sampling=Sampling(max_length=32, pad_token_id=tokenizer.pad_token_id, eos_token_ids=(tokenizer.eos_token_id,)),
        vocabulary=actor.config.get_text_config().vocab_size,
        vision=VisionPrompts(model_directory, tokenizer) if sees else None,
    )  # fmt: skip


def test_prompts_whose_images_are_missing_are_set_aside_with_line_and_path(
    tmp_path: Path, model_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    painted(tmp_path / "red.png", 16, 24, RED)
    painted(tmp_path / "green.png", 8, 8, GREEN)
    lines = (
        {"prompt": "ab", "images": ["red.png"]},
        {"prompt": "a", "images": ["gone.png"]},
        {"prompt": "abc"},
        {"prompt": "b", "images": ["green.png", "red.png"]},
    )
    with source_of(tmp_path, *lines) as source, caplog.at_level(logging.WARNING):
        rolled = new_roller(source, model_directory).roll(0, 4)
        at = {source.at(place).index: place for place in range(4)}

    assert rolled.prompts_failed == 1
    path = tmp_path / "gone.png"
    assert caplog.messages == [
        f"prompt set aside: position={at[1]} line=2 reason=image {path}: No such file or directory"
    ]
    kept = [line for line in sorted(at, key=lambda line: at[line]) if line != 1]
    paths = {0: ["red.png"], 2: None, 3: ["green.png", "red.png"]}
    patches = {0: [(RED, 24)], 2: [], 3: [(GREEN, 4), (RED, 24)]}
    expected = [[str(tmp_path / name) for name in paths[line]] if paths[line] else None for line in kept]
    experience: Any = rolled.rows.padded()
    assert experience.raw_images == [images for images in expected for _ in range(2)]
    colours = [colour for line in kept for _ in range(2) for colour, count in patches[line] for _ in range(count)]
    pixels = torch.stack([normalized(colour) for colour in colours])
    torch.testing.assert_close(experience.pixel_values, pixels, atol=1e-5, rtol=0)
    assert experience.info["image_num"].tolist() == [len(paths[line] or []) for line in kept for _ in range(2)]


def test_images_for_a_model_of_text_alone_are_refused(tmp_path: Path, model_directory: Path) -> None:
    painted(tmp_path / "red.png", 16, 24, RED)

    with (
        source_of(tmp_path, {"prompt": "ab", "images": ["red.png"]}) as source,
        pytest.raises(ConfigError, match=r"prompts\.jsonl:1: the prompt has images, but model\.actor takes text alone"),
    ):
        new_roller(source, model_directory, sees=False).roll(0, 1)


def test_rows_too_large_for_their_room_are_refused_before_the_first_ticket(
    tmp_path: Path, model_directory: Path
) -> None:
    painted(tmp_path / "red.png", 40, 40, RED)
    # Both responses have the same pixels.
    patches_bytes = 10 * 10 * tiny_vision.PATCH_VALUES * 4 // 2

    with source_of(tmp_path, {"prompt": "ab", "images": ["red.png"]}) as source:
        roller = new_roller(source, model_directory)
        refuse_broken_reward(roller, patches_bytes + 4096)
        with pytest.raises(ConfigError, match=r"^buffer\.row_bytes: extent of [\d,]+ B does not fit"):
            refuse_broken_reward(roller, patches_bytes // 2)
    # A prompt of text comes first, and fits.
    with source_of(tmp_path, {"prompt": "ab"}, {"prompt": "ab", "images": ["red.png"]}) as source:
        roller = new_roller(source, model_directory)
        assert not roller.has_images(0)
        refuse_broken_reward(roller, patches_bytes + 4096)
        with pytest.raises(ConfigError, match=r"^buffer\.row_bytes: extent of [\d,]+ B does not fit"):
            refuse_broken_reward(roller, patches_bytes // 2)
    with source_of(tmp_path, {"prompt": "ab"}) as source:
        refuse_broken_reward(new_roller(source, model_directory), patches_bytes // 2)
