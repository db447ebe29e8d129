"""The maker and the learner with images: each row keeps its pixels in all batches and micro-batches."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from pipeline.config.schema import TrainerConfig
from pipeline.errors import FieldError
from pipeline.experience.batching import make_experience_batch, remove_padding_in_sequences, split_experience_batch
from pipeline.experience.types import Experience, ExperienceVL
from pipeline.models.critic import Critic
from pipeline.models.log_probs import action_values
from pipeline.rollout.maker import NaiveExperienceMaker
from pipeline.rollout.reward.functions import FunctionReward
from pipeline.trainer.learner import Learner
from pipeline.trainer.state import digest_after
from tests.models.test_vision_inputs import MIXED, reference_log_probs
from tests.support import tiny, tiny_vision
from tests.support.items import assert_same
from tests.support.tiny_vision import EOS, PAD

Algorithm = Literal["ppo", "grpo"]
ROOM = 8
TOKENIZER = SimpleNamespace(pad_token_id=PAD, eos_token_id=EOS)


def even_share(input_ids: Tensor, attention_mask: Tensor, response_start: int, response_end: int, **_: Any) -> float:
    """Share of even ids in the response: another for almost every response."""
    return float((input_ids[response_start:response_end] % 2 == 0).float().mean())


def new_critic(actor: Any) -> Critic:
    critic = Critic.from_actor(actor).eval()
    nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(0))
    return critic


def new_maker(algorithm: Algorithm = "grpo", reward: Any = None, **settings: Any) -> NaiveExperienceMaker:
    actor = tiny_vision.model()
    return NaiveExperienceMaker(
        actor,
        new_critic(actor) if algorithm == "ppo" else None,
        reward or FunctionReward([even_share], TOKENIZER),
        tiny_vision.model(1),
        TOKENIZER,
        use_grpo=algorithm == "grpo",
        **{"num_generation": 2, **settings},
    )


def made_by(maker: NaiveExperienceMaker, *rows: Any, **changes: Any) -> ExperienceVL:
    """Experience of prompts, with a seed of 5 unless given; a keyword of None is left out."""
    made = tiny_vision.prompts(*rows) | changes
    settings = {"seed": made.pop("seed", 5), "eos_token_id": [EOS, 7, 8, 9]}
    keywords = {name: value for name, value in made.items() if value is not None}
    experience = maker.make_experience(**keywords, max_length=made["input_ids"].shape[1] + ROOM, **settings)
    assert isinstance(experience, ExperienceVL)
    return experience


def on_its_way_to_the_trainer(experience: ExperienceVL, order: list[int] | None = None) -> ExperienceVL:
    """Rows taken apart, stripped and batched again, in this order."""
    rows = remove_padding_in_sequences(split_experience_batch(experience))
    batch = make_experience_batch([rows[place] for place in order or range(len(rows))])
    assert isinstance(batch, ExperienceVL)
    return batch


def test_every_response_of_a_group_has_its_prompts_images() -> None:
    paths = [["a.png"], ["b.png", "c.png"], None, None]
    prompts = tiny_vision.prompts(*MIXED)

    experience = made_by(new_maker(), *MIXED, raw_images=paths)

    counts = {"image_num": [1, 1, 2, 2, 0, 0, 0, 0], "video_num": [0, 0, 0, 0, 0, 0, 1, 1]}
    for key, expected in counts.items():
        assert experience.info is not None and experience.info[key].dtype == torch.float32
        assert experience.info[key].tolist() == expected
    first, second, third = prompts["pixel_values"].split([24, 16, 16])
    assert experience.pixel_values is not None and experience.pixel_values_videos is not None
    assert torch.equal(experience.pixel_values, torch.cat([first, first, second, third, second, third]))
    assert torch.equal(experience.pixel_values_videos, prompts["pixel_values_videos"].repeat(2, 1))
    assert experience.raw_images == [path for path in paths for _ in range(2)]


def test_grids_as_a_list_of_one_tensor_a_prompt_are_taken() -> None:
    name = "image_grid_thws"
    grids = list(tiny_vision.prompts(*MIXED)[name])
    listed = [grids[0], torch.stack(grids[1:3]), None, None]
    expected = made_by(new_maker(), *MIXED)

    for counts in ({}, {"image_num": None}):
        experience = made_by(new_maker(), *MIXED, **{name: listed, **counts})

        assert_same(experience, expected)


def test_log_probs_of_actor_and_reference_are_those_of_each_row_by_itself() -> None:
    maker = new_maker()

    experience = made_by(maker, *MIXED)

    vision = tiny_vision.vision_of(tiny_vision.prompts(*MIXED)).repeated(2)
    for model, found in (
        (maker.actor, experience.action_log_probs),
        (maker.initial_model, experience.base_action_log_probs),
    ):
        # An image token that was sampled stands for no image: the model reads token 0 in its place.
        read = experience.sequences.clone()
        sampled = torch.isin(read[:, -ROOM:], torch.tensor([tiny_vision.IMAGE, tiny_vision.VIDEO]))
        read[:, -ROOM:].masked_fill_(sampled, 0)
        expected = reference_log_probs(model, read, experience.attention_mask, vision)[:, -ROOM:]
        compared = experience.action_mask & ~sampled
        torch.testing.assert_close(found[compared], expected[compared], atol=1e-5, rtol=0)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize(("inference", "logits"), [(1, 1), (3, 2), (None, 3)])
def test_experience_does_not_depend_on_mini_batches(
    algorithm: Algorithm, inference: int | None, logits: int | None
) -> None:
    whole = made_by(new_maker(algorithm, logits_forward_batch_size=None), *MIXED)

    cut = made_by(new_maker(algorithm, inference_batch_size=inference, logits_forward_batch_size=logits), *MIXED)

    assert torch.equal(cut.sequences, whole.sequences)
    for name in ("action_log_probs", "base_action_log_probs", "values", "kl", "advantages", "pixel_values"):
        torch.testing.assert_close(getattr(cut, name), getattr(whole, name), atol=2e-5, rtol=1e-4)


def test_values_of_ppo_are_those_that_the_trainer_takes() -> None:
    maker = new_maker("ppo")

    experience = made_by(maker, *MIXED, seed=2)

    batch = on_its_way_to_the_trainer(experience)
    vision = tiny_vision.vision_of(tiny_vision.prompts(*MIXED))
    num_actions = batch.action_mask.shape[1]
    found = action_values(maker.critic, batch.sequences, batch.attention_mask, num_actions, vision=vision)
    assert batch.values.abs().max() > 1e-2
    torch.testing.assert_close(found[batch.action_mask], batch.values[batch.action_mask], atol=1e-5, rtol=0)


def test_text_alone_in_a_vision_run_is_of_the_same_kind() -> None:
    experience = made_by(new_maker(), [9, 9, 9], [10, 11], image_num=None, video_num=None)

    assert experience.pixel_values is None and experience.raw_images is None
    assert experience.info["image_num"].tolist() == experience.info["video_num"].tolist() == [0.0] * 4


def test_grids_may_have_the_name_that_transformers_has_for_them() -> None:
    expected = made_by(new_maker(), *MIXED[:2])
    grids = tiny_vision.prompts(*MIXED[:2])["image_grid_thws"]

    found = made_by(new_maker(), *MIXED[:2], image_grid_thws=None, image_grid_thw=grids)

    assert torch.equal(found.action_log_probs, expected.action_log_probs)
    with pytest.raises(FieldError, match="image_grid_thws and image_grid_thw are two names of one thing"):
        made_by(new_maker(), *MIXED[:2], image_grid_thw=grids)


def test_images_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(FieldError, match="3 grids cannot be assigned to 2 rows"):
        made_by(new_maker(), *MIXED[:2], image_num=None)
    with pytest.raises(FieldError, match="image_num has 1 elements, input_ids has 2 rows"):
        made_by(new_maker(), *MIXED[:2], image_num=torch.tensor([3.0]))


def test_image_tokens_without_an_image_are_refused() -> None:
    without = {"image_grid_thws": torch.tensor([[1, 4, 6]]), "pixel_values": torch.zeros(24, tiny_vision.PATCH_VALUES)}

    with pytest.raises(FieldError, match="row 1: 8 image or video tokens more than its grids ask for"):
        made_by(new_maker(), *MIXED[:2], image_num=torch.tensor([1.0, 0.0]), **without)
    halved = {"image_grid_thws": torch.tensor([[1, 8, 3], [1, 4, 4], [1, 2, 8]])}
    with pytest.raises(FieldError, match="row 0: 2 image or video tokens more than its grids ask for"):
        made_by(new_maker(), *MIXED[:2], **halved)
    nothing = dict.fromkeys(["image_grid_thws", "pixel_values", "image_num", "video_num"])
    with pytest.raises(FieldError, match="row 0: 6 image or video tokens more than its grids ask for"):
        made_by(new_maker(), *MIXED[:2], **nothing)


def test_a_batch_without_its_images_is_not_trained_on() -> None:
    maker = new_maker()
    batch = on_its_way_to_the_trainer(made_by(maker, *MIXED))
    text = Experience(**{field.name: getattr(batch, field.name) for field in fields(Experience)})

    with pytest.raises(FieldError, match="image or video tokens more than its grids ask for"):
        new_learner(maker).update([text])


def test_an_actor_of_text_alone_is_not_shown_images() -> None:
    maker = NaiveExperienceMaker(
        tiny.llama(), None, FunctionReward([even_share], TOKENIZER), tiny.llama(), TOKENIZER, use_grpo=True
    )

    with pytest.raises(FieldError, match="images for a LlamaForCausalLM: not a vision-language model"):
        made_by(maker, [8, (1, 2, 2), 9])


class ForeignActor:
    """An actor that is not a transformers model; records the pixels of each call."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Tensor, Tensor]] = []

    def generate(self, input_ids: Tensor, pixel_values: Tensor, image_grid_thw: Tensor, **_: Any) -> Tensor:
        self.seen.append(("generate", pixel_values, image_grid_thw))
        return torch.cat([input_ids, torch.full((len(input_ids), 2), EOS)], dim=1)

    def __call__(self, input_ids: Tensor, pixel_values: Tensor, image_grid_thw: Tensor, **_: Any) -> Any:
        self.seen.append(("forward", pixel_values, image_grid_thw))
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 32))


def test_a_foreign_actor_gets_the_pixels_of_its_mini_batch() -> None:
    actor = ForeignActor()
    maker = NaiveExperienceMaker(
        actor, None, FunctionReward([even_share], TOKENIZER), None, TOKENIZER,
        kl_coef=0, use_grpo=True, num_generation=2, inference_batch_size=2,
    )  # fmt: skip

    made_by(maker, *MIXED[:2])

    first, second = tiny_vision.prompts(*MIXED[:2])["pixel_values"].split([24, 32])
    for stage in ("generate", "forward"):
        pixels = [pixels for name, pixels, _ in actor.seen if name == stage]
        assert torch.equal(pixels[0], first.repeat(2, 1)) and torch.equal(pixels[1], second.repeat(2, 1))
    assert actor.seen[1][2].tolist() == [[1, 4, 4], [1, 2, 8]] * 2


def test_only_a_reward_that_names_pixels_gets_them() -> None:
    seen: list[Any] = []

    def looks(input_ids: Tensor, attention_mask: Tensor, *, pixel_values: Tensor, raw_images: Any, **_: Any) -> float:
        seen.append((None if pixel_values is None else len(pixel_values), raw_images, set(_)))
        return 0.5

    made_by(new_maker(reward=FunctionReward([looks, even_share], TOKENIZER)), *MIXED[:3], raw_images=["a", "b", "c"])

    named = {"gt_answer", "response_start", "response_end", "tokenizer"}
    rows = [(24, ["a"], named), (32, ["b", "c"], named), (None, None, named)]
    assert seen == [row for row in rows for _ in range(2)]


def test_a_reward_model_that_names_pixels_gets_those_of_its_mini_batch() -> None:
    seen: list[tuple[int, list[float]]] = []

    def model(input_ids: Tensor, image_grid_thw: Tensor | None, image_num: Tensor, **others: Any) -> Tensor:
        assert "pixel_values" not in others
        seen.append((0 if image_grid_thw is None else len(image_grid_thw), image_num.tolist()))
        return input_ids.float().mean(dim=1)

    made_by(new_maker(reward=model, inference_batch_size=2), *MIXED[:3])

    assert seen == [(2, [1.0, 1.0]), (4, [2.0, 2.0]), (0, [0.0, 0.0])]


# The learner.


def new_learner(maker: NaiveExperienceMaker, *, reference: Any = None, **changes: Any) -> Learner:
    trainer = TrainerConfig(warmup_steps=0, decay_steps=0, critic_warmup_steps=0, learning_rate=1e-2, **changes)
    actor, critic = copy.deepcopy(maker.actor), copy.deepcopy(maker.critic)
    return Learner(trainer, "grpo" if critic is None else "ppo", actor, critic, kl_coef=0.1, reference=reference)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_on_fresh_experience_with_images_ratios_are_1(algorithm: Algorithm) -> None:
    maker = new_maker(algorithm, num_generation=4)
    batch = on_its_way_to_the_trainer(made_by(maker, *MIXED), order=None)

    stats = new_learner(maker).update([batch])

    assert stats.rows_trained >= 4
    assert stats.row_importance_ratios == pytest.approx([1.0] * stats.rows_trained, abs=1e-5)
    assert stats.clipped_ratio == 0


@pytest.mark.parametrize("cut", [{}, {"micro_batch_size": 3}], ids=["whole", "three rows"])
def test_a_step_with_images_on_a_reference_of_the_trainer_is_that_on_the_makers(cut: dict[str, int]) -> None:
    maker = new_maker(num_generation=4)
    batch = on_its_way_to_the_trainer(made_by(maker, *MIXED), order=None)
    theirs, ours = new_learner(maker, **cut), new_learner(maker, reference=maker.initial_model, **cut)

    expected, stats = theirs.update([batch]), ours.update([replace(batch, base_action_log_probs=None)])

    assert stats.kl_nats == pytest.approx(expected.kl_nats, rel=1e-5) and stats.kl_nats > 0.01
    assert stats.loss == pytest.approx(expected.loss, abs=1e-6)
    for (name, mine), its in zip(ours.tensors().items(), theirs.tensors().values(), strict=True):
        torch.testing.assert_close(mine, its, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("cut", [{"micro_batch_size": 1}, {"micro_batch_size": 3}, {"micro_batch_tokens": 60}])
def test_a_step_with_images_does_not_depend_on_micro_batches(algorithm: Algorithm, cut: dict[str, int]) -> None:
    maker = new_maker(algorithm, num_generation=3)
    batch = on_its_way_to_the_trainer(made_by(maker, *MIXED))
    # Off the policy that sampled, so that ratios spread.
    batch = replace(batch, action_log_probs=batch.action_log_probs + 0.1 * batch.action_mask)

    gradients = []
    for changes in ({"micro_batch_size": len(batch.sequences)}, cut):
        learner = new_learner(maker, **changes)
        learner.update([batch])
        moments = {name: tensor for name, tensor in learner.tensors().items() if "exp_avg." in name}
        gradients.append(moments)

    whole, cut = gradients
    sizes = {name: float(gradient.norm()) for name, gradient in whole.items()}
    assert min(size for name, size in sizes.items() if "patch_embed" in name) > 1e-4, "pixels were learned from"
    for name, expected in whole.items():
        torch.testing.assert_close(cut[name], expected, atol=1e-5 * max(sizes.values()), rtol=1e-4)


def test_rows_that_teach_nothing_leave_with_their_pixels() -> None:
    maker = new_maker(num_generation=2)
    batch = on_its_way_to_the_trainer(made_by(maker, *MIXED))
    taught = torch.tensor([False, False, True, True, False, False, True, True])
    batch.info["group_mixed"] = taught
    alone = on_its_way_to_the_trainer(batch, order=[2, 3, 6, 7])

    with_others, without = (new_learner(maker).update([rows]) for rows in (batch, alone))

    assert with_others.rows_trained == without.rows_trained == 4
    assert with_others.row_importance_ratios == pytest.approx(without.row_importance_ratios, abs=1e-5)
    assert with_others.gradient_norm == pytest.approx(without.gradient_norm, rel=1e-4)


def test_the_digest_of_what_was_trained_on_has_its_pixels() -> None:
    batch = on_its_way_to_the_trainer(made_by(new_maker(), *MIXED))
    assert batch.pixel_values is not None
    other = batch.pixel_values.clone()
    other[-1, -1] += 1

    digest = digest_after(0, [batch])

    assert digest == digest_after(0, [batch])
    assert digest != digest_after(0, [replace(batch, pixel_values=other)])
