"""Log-probs, values and sampling with images: the same numbers as the model itself gives for one row at a time."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.errors import ConfigError, FieldError, ShapeError
from pipeline.experience.batching import make_experience_batch
from pipeline.experience.types import BufferItem
from pipeline.experience.vision_rows import VisionRows
from pipeline.models.critic import Critic
from pipeline.models.loading import load_actor, load_critic, sees_images
from pipeline.models.log_probs import action_log_probs, action_values
from pipeline.models.packing import packed_action_log_probs, prepare_packing
from pipeline.models.shared_prefix import prepare_shared_prefix
from pipeline.models.vision_inputs import vision_inputs
from pipeline.rollout.generation.interface import Sampling
from pipeline.rollout.generation.transformers import TransformersGenerator
from tests.models.test_varlen_attention import assert_same_gradients
from tests.support import tiny, tiny_vision
from tests.support.padded_passes import log_probs_by_packing, values_by_packing
from tests.support.tiny_vision import EOS, IMAGE, PAD

ACTIONS = 5
MIXED = ([8, (1, 4, 6), 9], [10, (1, 4, 4), 11, (1, 2, 8), 13, 14], [9, 9, 9, 9], [(8, 4, 2), 7])
"""An image; two of different sizes; text alone; a video of more points in time than it is wide."""
ENDING = (EOS, 7, 8, 9)
"""So many tokens end a response that responses have many lengths."""


def reference_log_probs(model: Any, ids: Tensor, mask: Tensor, vision: VisionRows) -> Tensor:
    """Log-prob of each token but the first, by the model itself, a row at a time and without padding."""
    result = torch.zeros(ids.shape[0], ids.shape[1] - 1)
    for row in range(len(ids)):
        real = mask[row] != 0
        tokens = ids[row : row + 1, real]
        kinds = (tokens == IMAGE).long() + 2 * (tokens == tiny_vision.VIDEO).long()
        model.model.rope_deltas = None
        with torch.no_grad():
            logits = model(
                input_ids=tokens, mm_token_type_ids=kinds, **vision.rows([row]).model_keywords(ids.device)
            ).logits
        chosen = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        result[row, real.nonzero()[1:, 0] - 1] = chosen[0]
    return result


def answered(made: dict[str, Tensor], lengths: list[int], seed: int = 1) -> tuple[Tensor, Tensor]:
    """Prompts with answers of these lengths, of tokens that stand for no image."""
    draws = torch.Generator().manual_seed(seed)
    answers = torch.randint(7, len(tiny_vision.SYMBOLS), (len(lengths), ACTIONS), generator=draws)
    mask = torch.arange(ACTIONS) < torch.tensor(lengths)[:, None]
    return (
        torch.cat([made["input_ids"], answers * mask], dim=1),
        torch.cat([made["attention_mask"], mask.long()], dim=1),
    )


@pytest.mark.parametrize(("kind", "rows"), [("qwen2_vl", MIXED), ("qwen2_5_vl", MIXED), ("qwen3_vl", MIXED[:3])])
def test_packed_rows_give_the_numbers_and_gradients_of_padded_ones(kind: str, rows: Any) -> None:
    model = tiny_vision.model() if kind == "qwen2_vl" else tiny_vision.relative(kind)
    plain, packing = model.double(), copy.deepcopy(model).double()
    plain_critic, critic = Critic.from_actor(plain), Critic.from_actor(packing)
    for each in (plain_critic, critic):
        torch.nn.init.normal_(each.value_head.weight, generator=torch.Generator().manual_seed(0))
    made = tiny_vision.prompts(*rows)
    vision = tiny_vision.vision_of(made)
    ids, mask = answered(made, [5, 2, 4, 1][: len(rows)])
    # A sampled token of an image belongs to none.
    ids[0, -2] = IMAGE
    actions = mask[:, -ACTIONS:] != 0
    encoder = [name for name, _ in packing.named_modules() if name.endswith("visual.blocks.0.attn")]

    assert prepare_packing([packing, critic], torch.device("cpu"), None)

    expected = action_log_probs(plain, ids, mask, ACTIONS, vision=vision)
    found, _ = log_probs_by_packing(packing, ids, mask, actions, vision=vision)
    expected_values = action_values(plain_critic, ids, mask, ACTIONS, vision=vision)
    values = values_by_packing(critic, ids, mask, actions, vision=vision)
    torch.testing.assert_close(found, expected.masked_fill(~actions, 0), atol=1e-5, rtol=0)
    torch.testing.assert_close(values, expected_values.masked_fill(~actions, 0), atol=1e-5, rtol=0)
    for loss in (expected, expected_values, found, values):
        loss.masked_fill(~actions, 0).sum().backward()
    assert_same_gradients(packing, plain)
    assert_same_gradients(critic, plain_critic)
    assert packing.config.vision_config._attn_implementation == "sdpa" and encoder
    assert torch.equal(action_log_probs(packing, ids, mask, ACTIONS, vision=vision), expected)


def test_packed_rows_do_not_see_the_images_of_others() -> None:
    model, made = tiny_vision.model(), tiny_vision.prompts([8, (1, 4, 4), 9], [8, (1, 4, 4), 9])
    vision = tiny_vision.vision_of(made)
    ids, mask = answered(made, [5, 5])
    ids[1] = ids[0]
    actions = mask[:, -ACTIONS:] != 0
    assert prepare_packing([model], torch.device("cpu"), None)

    with torch.no_grad():
        (first, second), _ = log_probs_by_packing(model, ids, mask, actions, vision=vision)
        swapped, _ = log_probs_by_packing(model, ids, mask, actions, vision=vision.rows([1, 0]))

    assert not torch.allclose(first, second, atol=1e-3)
    torch.testing.assert_close(swapped, torch.stack([second, first]), atol=1e-5, rtol=0)
    with pytest.raises(ConfigError, match=r"^k: a Qwen2VL\w+ cannot share prompts: only a model of text alone can$"):
        prepare_shared_prefix([model], torch.device("cpu"), True, key="k")


def test_a_model_that_makes_no_block_mask_of_three_axes_is_refused() -> None:
    """Of positions in one axis alone, those of text, Qwen3-VL's own attention makes it."""
    model = tiny_vision.relative("qwen3_vl")
    model.set_attn_implementation("eager")

    with pytest.raises(ConfigError, match="Qwen3VLModel lets a packed row attend to the row before it"):
        prepare_packing([model], torch.device("cpu"), True)

    items = [BufferItem(torch.tensor(row), action_mask=torch.tensor([True])) for row in ([7, 8, 9], [9, 7])]
    with torch.no_grad():
        found = packed_action_log_probs(model, make_experience_batch(items, packing_samples=True))
        expected = [
            model(input_ids=item.sequences[None]).logits[0, -2].log_softmax(-1)[item.sequences[-1]] for item in items
        ]
    torch.testing.assert_close(torch.cat(found), torch.stack(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("kind", "rows"), [("qwen2_vl", MIXED), ("qwen2_5_vl", MIXED), ("qwen3_vl", MIXED[:3])])
def test_log_probs_are_those_of_each_row_by_itself_of_its_relatives_and_of_sampling_too(kind: str, rows: Any) -> None:
    # Qwen3-VL has its videos in frames with a time before each: another prompt than that of `tiny_vision`.
    model = tiny_vision.model() if kind == "qwen2_vl" else tiny_vision.relative(kind)
    made = tiny_vision.prompts(*rows)
    vision = tiny_vision.vision_of(made)
    ids, mask = answered(made, [5, 2, 4, 1][: len(rows)])
    sampling = Sampling(made["input_ids"].shape[1] + 12, PAD, ENDING, seed=3)

    found = action_log_probs(model, ids, mask, ACTIONS, vision=vision)
    sampled = TransformersGenerator(model).generate(made["input_ids"], made["attention_mask"], sampling, vision=vision)

    real = mask[:, -ACTIONS:] != 0
    expected = reference_log_probs(model, ids, mask, vision)[:, -ACTIONS:]
    torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=0)
    assert sampled.log_probs is not None
    real = torch.arange(12) < sampled.lengths[:, None]
    whole_mask = torch.cat([made["attention_mask"], real.long()], dim=1)
    whole = action_log_probs(model, sampled.sequences, whole_mask, 12, vision=vision)
    torch.testing.assert_close(sampled.log_probs[real], whole[real], atol=1e-4, rtol=0)


def test_videos_of_qwen3_vl_in_frames_are_those_of_each_row_by_itself_padded_packed_and_sampled() -> None:
    """Its prompts have a time and the marks of vision around each frame."""

    def frames(time: int, height: int, width: int) -> list[int]:
        per_frame = [tiny_vision.VIDEO] * tiny_vision.image_tokens((1, height, width))
        return [token for at in range(time) for token in (10 + at, tiny_vision.START, *per_frame, tiny_vision.END)]

    image = [tiny_vision.START, *[IMAGE] * 4, tiny_vision.END]
    rows = [[8, *frames(3, 4, 2), 9], [8, *image, *frames(2, 4, 4), 7], [9, 9]]
    width, draws = max(map(len, rows)), torch.Generator().manual_seed(0)
    made = {
        "input_ids": torch.tensor([[PAD] * (width - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    }
    pixels = [torch.randn(patches, tiny_vision.PATCH_VALUES, generator=draws) for patches in (16, 24, 32)]
    vision = VisionRows(
        pixel_values=[None, pixels[0], None],
        image_grid_thws=[None, torch.tensor([[1, 4, 4]]), None],
        pixel_values_videos=[pixels[1], pixels[2], None],
        video_grid_thws=[torch.tensor([[3, 4, 2]]), torch.tensor([[2, 4, 4]]), None],
        raw_images=[None] * 3,
    )
    model = tiny_vision.relative("qwen3_vl")
    ids, mask = answered(made, [5, 2, 4])
    actions = mask[:, -ACTIONS:] != 0
    expected = reference_log_probs(model, ids, mask, vision)[:, -ACTIONS:]

    with torch.no_grad():
        found = action_log_probs(model, ids, mask, ACTIONS, vision=vision)
        assert prepare_packing([model], torch.device("cpu"), None)
        packed, _ = log_probs_by_packing(model, ids, mask, actions, vision=vision)
    sampling = Sampling(width + 6, PAD, ENDING, seed=3)
    sampled = TransformersGenerator(model).generate(*made.values(), sampling, vision=vision)

    torch.testing.assert_close(found[actions], expected[actions], atol=1e-5, rtol=0)
    torch.testing.assert_close(packed[actions], expected[actions], atol=1e-5, rtol=0)
    real = torch.arange(6) < sampled.lengths[:, None]
    whole_mask = torch.cat([made["attention_mask"], real.long()], dim=1)
    whole = action_log_probs(model, sampled.sequences, whole_mask, 6, vision=vision)
    assert sampled.log_probs is not None
    torch.testing.assert_close(sampled.log_probs[real], whole[real], atol=1e-4, rtol=0)


def test_a_rows_log_probs_depend_on_its_own_pixels() -> None:
    model, made = tiny_vision.model(), tiny_vision.prompts([8, (1, 4, 4), 9], [8, (1, 4, 4), 9])
    vision = tiny_vision.vision_of(made)
    ids, mask = answered(made, [5, 5])
    ids[1] = ids[0]

    first, second = action_log_probs(model, ids, mask, ACTIONS, vision=vision)
    swapped = action_log_probs(model, ids, mask, ACTIONS, vision=vision.rows([1, 0]))

    assert (first - second).abs().max() > 1e-3
    torch.testing.assert_close(swapped, torch.stack([second, first]), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("group_size", "batch_rows"), [(1, None), (3, None), (3, 2), (3, 4)])
def test_sampling_log_probs_are_those_of_a_forward_pass(group_size: int, batch_rows: int | None) -> None:
    model, made = tiny_vision.model(), tiny_vision.prompts(*MIXED)
    vision = tiny_vision.vision_of(made)
    sampling = Sampling(made["input_ids"].shape[1] + 12, PAD, ENDING, seed=3)

    responses = TransformersGenerator(model).generate(
        made["input_ids"],
        made["attention_mask"],
        sampling,
        group_size=group_size,
        batch_rows=batch_rows,
        vision=vision,
    )

    assert responses.log_probs is not None and len(responses.lengths.unique()) > 2
    real = torch.arange(12) < responses.lengths[:, None]
    mask = torch.cat([made["attention_mask"].repeat_interleave(group_size, dim=0), real.long()], dim=1)
    whole = action_log_probs(model, responses.sequences, mask, 12, vision=vision.repeated(group_size))
    torch.testing.assert_close(responses.log_probs[real], whole[real], atol=1e-4, rtol=0)


def test_the_same_tokens_come_whatever_the_mini_batches_with_images() -> None:
    model, made = tiny_vision.model(), tiny_vision.prompts(*MIXED)
    vision = tiny_vision.vision_of(made)
    sampling = Sampling(made["input_ids"].shape[1] + 12, PAD, ENDING, seed=4)

    once, apart = (
        TransformersGenerator(model).generate(
            made["input_ids"], made["attention_mask"], sampling, group_size=2, batch_rows=rows, vision=vision
        )
        for rows in (None, 1)
    )

    assert torch.equal(once.sequences, apart.sequences)


def test_greedy_responses_are_those_of_the_models_own_generate() -> None:
    model, made = tiny_vision.model(7), tiny_vision.prompts(*MIXED[:3])
    vision = tiny_vision.vision_of(made)
    width = made["input_ids"].shape[1]

    found = TransformersGenerator(model).generate(
        made["input_ids"], made["attention_mask"], Sampling(width + 6, PAD, do_sample=False), vision=vision
    )

    ids, kinds = made["input_ids"], (made["input_ids"] == IMAGE).long()
    expected = model.generate(
        input_ids=ids,
        attention_mask=made["attention_mask"],
        mm_token_type_ids=kinds,
        **vision.model_keywords(ids.device),
        max_length=width + 6,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=PAD,
    )
    # Of those it makes images that are not there.
    assert not torch.isin(expected[:, width:], torch.tensor([IMAGE, tiny_vision.VIDEO])).any()
    assert torch.equal(found.sequences, expected)


def test_what_the_model_keeps_from_another_batch_changes_nothing() -> None:
    model, made = tiny_vision.model(), tiny_vision.prompts(*MIXED)
    vision = tiny_vision.vision_of(made)
    ids, mask = answered(made, [5, 2, 4, 1])
    expected = action_log_probs(model, ids, mask, ACTIONS, vision=vision)

    model.model.rope_deltas = torch.full((4, 1), 1000)

    assert torch.equal(action_log_probs(model, ids, mask, ACTIONS, vision=vision), expected)


def test_an_image_token_that_was_sampled_stands_for_no_image() -> None:
    model, made = tiny_vision.model(), tiny_vision.prompts(MIXED[0], MIXED[2])
    vision = tiny_vision.vision_of(made)
    ids, mask = answered(made, [5, 5])
    ids[:, -3] = IMAGE
    plain = ids.clone()
    plain[:, -3] = 0

    found = action_log_probs(model, ids, mask, ACTIONS, vision=vision)

    expected = reference_log_probs(model, plain, mask, vision)[:, -ACTIONS:]
    torch.testing.assert_close(found[:, [0, 1, 3, 4]], expected[:, [0, 1, 3, 4]], atol=1e-5, rtol=0)
    assert (found[:, 2] - expected[:, 2]).abs().min() > 1e-3


def test_too_few_image_tokens_are_refused_by_row() -> None:
    made = tiny_vision.prompts(MIXED[2], MIXED[0])
    made["input_ids"][1][made["input_ids"][1] == IMAGE] = torch.tensor([IMAGE] * 5 + [9])

    with pytest.raises(ShapeError, match="row 1: 5 image tokens, its grids ask for 6"):
        vision_inputs(tiny_vision.model().model, made["input_ids"], made["attention_mask"], tiny_vision.vision_of(made))


def test_images_without_a_token_between_them_are_refused() -> None:
    made = tiny_vision.prompts([8, (1, 4, 4), (1, 4, 4)])
    kept = (made["input_ids"] != tiny_vision.END)[0]
    ids = made["input_ids"][:, kept]
    ids = ids[ids != tiny_vision.START][None]

    with pytest.raises(FieldError, match="row 0: its image tokens stand in 1 runs, one for each of 2"):
        vision_inputs(tiny_vision.model().model, ids, torch.ones_like(ids), tiny_vision.vision_of(made))


def test_values_see_the_pixels_on_whichever_side_the_padding_is() -> None:
    critic = Critic.from_actor(tiny_vision.model()).eval()
    torch.nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(0))
    made = tiny_vision.prompts(*MIXED)
    vision = tiny_vision.vision_of(made)
    ids, mask = answered(made, [5, 5, 5, 5])

    together = action_values(critic, ids, mask, ACTIONS, vision=vision)

    for row in range(len(ids)):
        real = mask[row] != 0
        alone = torch.nn.functional.pad(ids[row : row + 1, real], (2, 0))
        alone_mask = torch.nn.functional.pad(mask[row : row + 1, real], (2, 0))
        values = action_values(critic, alone, alone_mask, ACTIONS, vision=vision.rows([row]))
        torch.testing.assert_close(values[0], together[row], atol=1e-5, rtol=0)
    with torch.no_grad():
        brighter = copy.deepcopy(vision)
        brighter.pixel_values[0] = brighter.pixel_values[0] + 1  # type: ignore[operator]
        moved = (action_values(critic, ids, mask, ACTIONS, vision=brighter) - together).abs().amax(dim=1)
    assert moved[0] > 1e-3 and moved[1:].max() < 1e-5


def test_a_vision_language_directory_is_loaded_as_one(tmp_path: Path) -> None:
    tiny_vision.save(tmp_path / "eyes")
    tiny.llama().save_pretrained(tmp_path / "text")

    actor = load_actor(tmp_path / "eyes", dtype="float32", device="cpu")
    critic = load_critic(tmp_path / "eyes", dtype="float32", device="cpu")

    made = tiny_vision.prompts(*MIXED)
    vision = tiny_vision.vision_of(made)
    ids, mask = answered(made, [5, 2, 4, 1])
    expected = action_log_probs(tiny_vision.model(), ids, mask, ACTIONS, vision=vision)
    assert torch.equal(action_log_probs(actor, ids, mask, ACTIONS, vision=vision), expected)
    assert action_values(critic, ids, mask, ACTIONS, vision=vision).abs().max() == 0
    assert sees_images(tmp_path / "eyes") and not sees_images(tmp_path / "text")
    with pytest.raises(ConfigError, match=r"model\.actor: no such directory"):
        sees_images(tmp_path / "missing")
