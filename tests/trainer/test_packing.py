"""Which models and rows are packed, and steps on rows with images; test_shared_prefix.py has those on rows of text."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.errors import ConfigError, FieldError
from pipeline.experience.types import ExperienceVL
from pipeline.models.critic import Critic
from pipeline.models.log_probs import action_log_probs
from pipeline.models.packing import prepare_packing
from pipeline.trainer.learner import Learner
from tests.models.test_vision_inputs import ACTIONS, MIXED, answered
from tests.support import tiny, tiny_vision
from tests.trainer.test_learner import (
    TRAINER,
    Algorithm,
    applied_gradients,
    assert_same,
    assert_same_stats,
    experience_for,
)
from tests.trainer.test_shared_prefix import learner_of

PACKING: dict[str, Any] = {"packing": True}


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("more", [{}, {"micro_batch_tokens": 30}], ids=str)
def test_a_step_on_packed_rows_with_images_is_the_step_on_padded_ones(algorithm: Algorithm, more: Any) -> None:
    padded = learner_of(tiny_vision.model, algorithm, packing=False)
    packed = learner_of(tiny_vision.model, algorithm, packing=None, **more)
    made = tiny_vision.prompts(*MIXED)
    vision = tiny_vision.vision_of(made)
    ids, mask = answered(made, [5, 2, 4, 1])
    actions = mask[:, -ACTIONS:] != 0
    draws = torch.Generator().manual_seed(4)
    sampled, base, values, returns, advantages = torch.randn((5, *actions.shape), generator=draws) * actions
    with torch.no_grad():
        log_probs = action_log_probs(padded._actor, ids, mask, ACTIONS, temperature=0.9, vision=vision)
    experience = ExperienceVL(
        sequences=ids, attention_mask=mask, action_mask=actions, action_log_probs=log_probs + 0.2 * sampled,
        base_action_log_probs=log_probs + 0.2 * base, values=values, returns=returns, advantages=advantages,
        info={**vision.counts(), "group_mixed": torch.ones(4), "score": torch.zeros(4)}, **vision.fields(),
    )  # fmt: skip

    expected, stats = padded.update([experience]), packed.update([experience])

    assert packed.packs_rows and not padded.packs_rows
    assert_same(applied_gradients(packed), applied_gradients(padded), 1e-5)
    assert_same_stats(stats, expected)
    assert stats.padding_ratio == 0 < expected.padding_ratio


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))


def windowed() -> nn.Module:
    """Return a model whose rows are packed by a block mask of T x T alone."""
    return tiny.with_windows_in_masks_alone(tiny.mistral())


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (tiny.llama, None),
        (tiny.gpt2, None),
        (tiny.gemma3, None),
        (Custom, "model=Custom reason=only a language model of transformers can"),
        (windowed, "model=MistralForCausalLM reason=MistralForCausalLM does not give the windows of its layers"),
    ],
)
def test_by_default_rows_are_packed_where_a_kernel_keeps_them_apart(
    build: Any, reason: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    learner = Learner(TRAINER.model_copy(update={"packing": None}), "grpo", build())

    assert learner.packs_rows == (reason is None)
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("rows are")]
    assert ("rows are packed: model=" in line) if reason is None else (reason in line)


def test_models_of_which_one_cannot_be_packed_are_padded_as_before() -> None:
    actor = tiny.llama()
    critic = Critic(windowed().get_submodule("model"))

    assert not prepare_packing([actor, critic], torch.device("cpu"), None)
    learner = Learner(TRAINER.model_copy(update={"packing": None}), "ppo", actor, critic)
    stats = learner.update([experience_for(learner, "ppo")])

    assert stats.padding_ratio > 0


def test_models_and_rows_that_cannot_be_packed_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.packing: a Custom cannot be packed"):
        Learner(TRAINER.model_copy(update=PACKING), "grpo", Custom())
    learner = learner_of(tiny.llama, "grpo", packing=True)
    pixels: Any = {"pixel_values": torch.ones(32, 2), "image_grid_thws": torch.tensor([[1, 2, 2]] * 8)}
    with pytest.raises(FieldError, match="images for a LlamaForCausalLM: not a vision-language model"):
        learner.update([ExperienceVL(**vars(experience_for(learner, "grpo")), **pixels)])
