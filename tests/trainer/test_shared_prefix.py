"""A step of flat passes, packed or with each prompt computed once, is the step on padded rows, for any cut of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from pipeline.config.sections import ModelConfig
from pipeline.errors import ConfigError
from pipeline.experience.types import Experience
from pipeline.models.critic import Critic
from pipeline.models.log_probs import action_log_probs, action_values
from pipeline.models.lora import adapt, adapter_of
from pipeline.models.shared_prefix import may_share_prompts
from pipeline.trainer.learner import Learner
from tests.models.test_shared_prefix import ACTIONS, rows_of
from tests.support import tiny
from tests.support.padded_passes import log_probs_by_packing
from tests.trainer.test_learner import (
    TRAINER,
    Algorithm,
    applied_gradients,
    assert_same,
    assert_same_stats,
    disturbed,
)
from tests.trainer.test_learner import rows_of as rows_at
from tests.trainer.test_out_of_memory import Device

GROUPS = [4, 3, 4, 1]
FLAT: list[dict[str, Any]] = [{"shared_prefix": True}, {"packing": True, "shared_prefix": False}]
TOKENS_ONCE, TOKENS = 52, 79
"""Tokens of passes over `grouped` without the rows' last tokens: with each prompt once, and with all rows whole."""


def learner_of(build: Any, algorithm: Algorithm, *, lora: bool = False, **changes: Any) -> Learner:
    actor = build()
    critic = Critic.from_actor(actor) if algorithm == "ppo" else None
    if critic is not None:
        nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(3))
    if lora:
        adapt(actor, ModelConfig(lora_rank=4), seed=2)
        draws = torch.Generator().manual_seed(6)
        for tensor in adapter_of(actor).values():
            tensor.data += 0.05 * torch.randn(tensor.shape, generator=draws)
    return Learner(
        TRAINER.model_copy(update=changes), algorithm, actor, critic, kl_coef=0.0 if algorithm == "ppo" else 0.05,
        temperature=0.9, computes_log_probs=lora, reference=actor if lora else None,
    )  # fmt: skip


@torch.no_grad()
def grouped(learner: Learner, algorithm: Algorithm, *, holes: bool = False) -> Experience:
    """Rows of groups in any order, in the maker's format; fresh: their log-probs and values are the learner's."""
    sequences, mask, actions = rows_of(GROUPS, holes=holes, seed=1)
    log_probs = action_log_probs(learner._actor, sequences, mask, ACTIONS, temperature=0.9).masked_fill(~actions, 0)
    draws, rows = torch.Generator().manual_seed(4), len(sequences)
    values = torch.zeros(rows)
    if learner._critic is not None:
        values = action_values(learner._critic, sequences, mask, ACTIONS) * actions
    advantages = torch.randn((rows, ACTIONS) if algorithm == "ppo" else (rows,), generator=draws)
    score = torch.randn(rows, generator=draws)
    return Experience(
        sequences, log_probs, values, score, torch.zeros_like(advantages),
        advantages * actions if algorithm == "ppo" else advantages, mask, actions,
        base_action_log_probs=(log_probs - 0.1) * actions,
        info={"score": score, "group_mixed": torch.ones(rows, dtype=torch.bool)},
    )  # fmt: skip


def actor_passes(learner: Learner, *, shared: bool = True) -> list[int]:
    """The tokens of each pass of the actor from now on, but for those that look at the model."""
    log_probs_by_packing(learner._actor, *rows_of([2]), shared=shared)
    passes: list[int] = []
    learner._actor.base_model.register_forward_pre_hook(
        lambda module, words, keywords: passes.append(keywords["input_ids"].numel()), with_kwargs=True
    )
    return passes


@pytest.mark.parametrize("build", [tiny.llama, tiny.qwen2, tiny.gpt2])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("flat", [*FLAT, {"packing": True, "shared_prefix": True}], ids=str)
@pytest.mark.parametrize(
    "more", [{}, {"micro_batch_tokens": 30}, {"micro_batch_size": 3}, {"activation_checkpointing": True}], ids=str
)
def test_a_step_of_flat_passes_is_the_step_on_padded_rows(
    build: Any, algorithm: Algorithm, flat: Any, more: Any
) -> None:
    padded = learner_of(build, algorithm, shared_prefix=False)
    shared = learner_of(build, algorithm, **flat, **more)
    experience = disturbed(grouped(padded, algorithm, holes=True))
    passes = actor_passes(shared, shared=flat["shared_prefix"])

    expected, stats = padded.update([experience]), shared.update([experience])

    assert_same(applied_gradients(shared), applied_gradients(padded), 1e-5)
    assert_same_stats(stats, expected)
    assert stats.clipped_ratio == expected.clipped_ratio > 0
    assert stats.padding_ratio == 0 < expected.padding_ratio
    assert max(passes) <= more.get("micro_batch_tokens", 2048)
    assert (len(passes) > 1) == ("micro_batch_tokens" in more or "micro_batch_size" in more)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_a_group_whose_rows_are_in_several_batches_and_updates_is_trained_as_padded(algorithm: Algorithm) -> None:
    """As after leases, dealing to ranks, and with PPO's epochs and mini-batches."""
    more: dict[str, Any] = {"epochs": 2, "mini_batches": 2}
    padded = learner_of(tiny.llama, algorithm, shared_prefix=False, **more)
    shared = learner_of(tiny.llama, algorithm, shared_prefix=True, **more)
    experience = disturbed(grouped(padded, algorithm))
    parts = [rows_at(experience, slice(0, 5)), rows_at(experience, slice(5, None))]

    expected, stats = padded.update(parts), shared.update(parts)

    assert_same(applied_gradients(shared), applied_gradients(padded), 2e-5)
    assert_same_stats(stats, expected)
    assert stats.updates == 4


def test_by_default_a_cpu_computes_a_prompt_once_where_that_saves_enough() -> None:
    learner = learner_of(tiny.llama, "grpo")
    experience = grouped(learner, "grpo")
    passes = actor_passes(learner)

    learner.update([experience])
    shared = sum(passes)
    passes.clear()
    learner.update([rows_at(experience, torch.tensor([0, 11]))])

    assert experience.attention_mask is not None
    assert int(experience.attention_mask.sum()) - len(experience.sequences) == TOKENS
    assert shared == TOKENS_ONCE
    assert passes == [int(experience.attention_mask[[0, 11]].any(dim=0).sum()) * 2], "padded: two prompts"


@pytest.mark.parametrize("more", FLAT, ids=str)
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_on_fresh_experience_ratios_of_flat_passes_are_1(algorithm: Algorithm, more: Any) -> None:
    learner = learner_of(tiny.llama, algorithm, **more)

    stats = learner.update([grouped(learner, algorithm)])

    assert stats.row_importance_ratios == pytest.approx([1.0] * sum(GROUPS), abs=1e-5)
    assert stats.clipped_ratio == 0


def test_recomputed_log_probs_and_those_of_the_reference_are_computed_with_shared_prompts_too() -> None:
    """The reference is the actor without its adapters."""
    padded = learner_of(tiny.llama, "grpo", lora=True, shared_prefix=False)
    shared = learner_of(tiny.llama, "grpo", lora=True, shared_prefix=True)
    experience = grouped(padded, "grpo")
    passes = actor_passes(shared)

    expected, stats = padded.update([experience]), shared.update([experience])

    assert passes == [TOKENS_ONCE] * 3, "recomputed, reference, training"
    assert_same(applied_gradients(shared), applied_gradients(padded), 1e-5)
    assert_same_stats(stats, expected)
    assert stats.kl_nats is not None and abs(stats.kl_nats) > 1e-4
    assert stats.row_importance_ratios == pytest.approx([1.0] * sum(GROUPS), abs=1e-5)


@pytest.mark.parametrize("more", FLAT, ids=str)
@pytest.mark.parametrize("most_tokens", [25, 40])
def test_a_flat_pass_that_runs_out_of_memory_is_cut(most_tokens: int, more: Any) -> None:
    padded = learner_of(tiny.llama, "grpo", shared_prefix=False)
    flat = learner_of(tiny.llama, "grpo", **more)
    experience = disturbed(grouped(padded, "grpo"))
    passes = Device(flat._actor, most_tokens=most_tokens).passes

    expected, stats = padded.update([experience]), flat.update([experience])

    assert_same(applied_gradients(flat), applied_gradients(padded), 1e-5)
    assert_same_stats(stats, expected)
    assert passes[-1] <= most_tokens < max(passes)


def test_with_a_critic_or_an_actor_that_cannot_none_shares() -> None:
    def critic(backbone: PreTrainedModel) -> Critic:
        return Critic(backbone.base_model)

    asked = TRAINER.model_copy(update={"shared_prefix": True})
    refusal = r"^trainer\.shared_prefix: a Critic cannot share prompts: MistralAttention slides a window$"
    with pytest.raises(ConfigError, match=refusal):
        Learner(asked, "ppo", tiny.llama(), critic(tiny.mistral()))
    actor = tiny.llama()
    Learner(TRAINER, "ppo", actor, critic(tiny.mistral()))
    assert not may_share_prompts(actor)
    with pytest.raises(ConfigError, match=r"^trainer\.shared_prefix: a Mistral\w+ cannot share prompts"):
        Learner(asked, "grpo", tiny.llama(), kl_coef=0.1, reference=tiny.mistral())
