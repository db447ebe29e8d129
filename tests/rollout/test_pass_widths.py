"""Widths of a worker's passes, rounded up: other shapes, the same experience."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaForSequenceClassification

from pipeline.experience.types import Experience
from pipeline.models.critic import Critic
from pipeline.models.inputs import cache_keyword
from pipeline.models.pass_size import width_multiple
from pipeline.models.reward_model import SequenceReward
from pipeline.rollout.generation.interface import Sampling
from pipeline.rollout.generation.transformers import TransformersGenerator
from pipeline.rollout.maker import NaiveExperienceMaker
from pipeline.rollout.model_passes import ModelPasses
from pipeline.rollout.reward.functions import FunctionReward
from pipeline.rollout.rows import Rows
from tests.support import tiny

IDS = torch.tensor([[5, 6, 7, 2, 4], [0, 0, 7, 8, 9], [0, 0, 0, 4, 3], [0, 0, 0, 0, 2]])
MASK = (IDS != 0).long()


def widths_of(module: nn.Module) -> list[int]:
    """Return a list of the widths of a module's passes; the first call, of two tokens, tests a model's head."""
    widths: list[int] = []
    module.register_forward_pre_hook(
        lambda _, words, keywords: widths.append(keywords["input_ids"].shape[1]), with_kwargs=True
    )
    return widths


def maker_of(reward: Any, multiple: int | None, *, grpo: bool) -> NaiveExperienceMaker:
    critic = None if grpo else Critic.from_actor(tiny.llama())
    if critic is not None:
        nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(3))
    tokenizer = types.SimpleNamespace(pad_token_id=0, eos_token_id=1)
    return NaiveExperienceMaker(
        tiny.llama(), critic, reward, tiny.llama(seed=4), tokenizer, use_grpo=grpo, num_generation=2,
        inference_batch_size=4, width_multiple=multiple,
    )  # fmt: skip


def reward_model() -> SequenceReward:
    config = tiny.llama().config
    config.num_labels = 1
    torch.manual_seed(5)
    return SequenceReward(LlamaForSequenceClassification(config).eval())


@pytest.mark.parametrize("grpo", [True, False])
def test_a_rounded_width_changes_no_experience(grpo: bool) -> None:
    plain, rounded = (maker_of(reward_model(), multiple, grpo=grpo) for multiple in (None, 8))
    modules = [rounded.actor.base_model, rounded.initial_model.base_model, rounded.reward_model.model.base_model]
    modules += [] if grpo else [rounded.critic.backbone]
    seen = [widths_of(module) for module in modules]

    expected, made = (maker.make_experience(IDS, MASK, max_length=20, seed=3) for maker in (plain, rounded))

    # Of the decoding steps, each has one column.
    passes = [[width for width in widths if width > 2] for widths in seen]
    assert all(widths and all(width % 8 == 0 for width in widths) for widths in passes)
    assert torch.equal(made.sequences, expected.sequences)
    for name in ("action_log_probs", "base_action_log_probs", "advantages", "reward", "values", "kl"):
        torch.testing.assert_close(getattr(made, name), getattr(expected, name), atol=2e-5, rtol=0)


def test_a_long_row_beside_many_short_ones_is_a_pass_of_its_own() -> None:
    """With a bound of rows alone it made each short one as wide as itself."""
    lengths = np.array([3] * 15 + [60])
    rows = Rows(
        tokens=torch.randint(3, 10, (int(lengths.sum()) + 16,)), prompts=np.ones(16, dtype=int), lengths=lengths,
        prompt_columns=1, num_actions=60, pad_token_id=0, cut=torch.zeros(16, dtype=torch.bool),
    )  # fmt: skip
    actor, critic = tiny.llama(), Critic.from_actor(tiny.llama())
    passes = ModelPasses(None, 16, refuse_not_finite=True)
    seen = [widths_of(actor.base_model), widths_of(critic.backbone)]

    with torch.no_grad():
        passes.log_probs("actor", actor, rows, 1.0)
        passes.values(critic, rows, coati=False)

    assert [widths[-2:] for widths in seen] == [[4, 61], [4, 61]]


def test_reward_functions_get_rows_of_their_own_width() -> None:
    seen: list[int] = []

    def score(ids: Any, mask: Any, **_: Any) -> float:
        seen.append(len(ids))
        return 1.0

    made: list[Experience] = []
    for multiple in (None, 64):
        maker = maker_of(FunctionReward([score], None), multiple, grpo=True)
        made.append(maker.make_experience(IDS, MASK, max_length=20, seed=3))

    assert len(seen) == 2 * 4 * 2, "two makers, four prompts, two responses each"
    assert seen[:8] == seen[8:]


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_the_columns_of_prompts_and_of_fixed_caches_are_rounded(fixed_shapes: bool) -> None:
    never = Sampling(max_length=104, pad_token_id=0, eos_token_ids=(), seed=2)
    made, shapes = [], []
    for multiple in (1, 48):
        model = tiny.llama()
        widths = widths_of(model)
        rooms: set[int] = set()
        model.register_forward_hook(
            lambda model, words, keywords, output, rooms=rooms: rooms.add(  # type: ignore[misc]
                keywords[cache_keyword(model)].layers[0].keys.shape[2]
            ),
            with_kwargs=True,
        )
        engine = TransformersGenerator(model, fixed_shapes=fixed_shapes, width_multiple=multiple)
        made.append(engine.generate(IDS, MASK, never, group_size=2))
        shapes.append((widths[0], rooms))

    assert [width for width, _ in shapes] == [5, 48]
    if fixed_shapes:
        # The first one is the prompts' own.
        assert [rooms for _, rooms in shapes] == [{5, 64, 104}, {48, 96, 192}]
    assert torch.equal(made[1].sequences, made[0].sequences)
    torch.testing.assert_close(made[1].log_probs, made[0].log_probs, atol=2e-5, rtol=0)


def test_on_a_card_the_multiple_is_64_unless_it_is_configured() -> None:
    card, cpu = torch.device("cuda", 0), torch.device("cpu")

    assert [width_multiple(card, None), width_multiple(card, 8), width_multiple(cpu, None), width_multiple(cpu, 8)] == [
        64, 8, 1, 8,
    ]  # fmt: skip
