"""The presets rloo and dr_grpo, from scores to gradients, against the formulas of their papers in float64."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.experience.types import Experience
from pipeline.rollout.shaping import shaping_of
from pipeline.trainer.learner import Learner
from pipeline.trainer.process import objective_of
from tests.support import tiny
from tests.trainer.test_learner import ACTION_COLUMNS, PROMPT_COLUMNS, ROWS, applied_gradients, experience_of

GROUP = 4
SCORES = [1.0, 0.0, 0.5, 2.0, 1.0, 1.0, 1.0, 1.0]
"""Of two groups; the scores of the second are equal."""


def config_of(name: str) -> Config:
    sets = (
        f"rollout.algorithm={name}", f"rollout.num_generations={GROUP}", f"rollout.max_prompt_length={PROMPT_COLUMNS}",
        f"rollout.max_new_tokens={ACTION_COLUMNS}", "trainer.warmup_steps=0", "trainer.decay_steps=0",
        "trainer.gradient_clip_norm=1000", "trainer.packing=false", "trainer.shared_prefix=false",
    )  # fmt: skip
    return load(None, sets, {}).config


def made(config: Config, experience: Experience) -> Experience:
    """Return rows with the fields that a worker of a configuration gives them, but for the sampling."""
    assert experience.action_log_probs is not None and experience.base_action_log_probs is not None
    log_ratios = experience.action_log_probs - experience.base_action_log_probs
    rows = cast("Any", SimpleNamespace(action_mask=experience.action_mask, num_actions=ACTION_COLUMNS))
    fields = shaping_of(config).group_fields(
        rows, torch.tensor(SCORES), log_ratios, kl_coef=config.rollout_kl_coef, group_size=GROUP
    )
    for name, value in fields.items():
        setattr(experience, name, value)
    return experience


def references(experience: Experience) -> Experience:
    """Return the rows with a reference that differs in each token."""
    assert experience.action_mask is not None and experience.action_log_probs is not None
    noise = torch.randn(experience.action_mask.shape, generator=torch.Generator().manual_seed(4))
    experience.base_action_log_probs = (experience.action_log_probs + 0.3 * noise) * experience.action_mask
    return experience


def gradients(actor: torch.nn.Module, experience: Experience, weights: Tensor) -> list[Tensor]:
    """Return the gradients of - sum over rows of weight * log p(response), in float64, a row at a time."""
    model = copy.deepcopy(actor).double()
    assert experience.attention_mask is not None and experience.action_mask is not None
    for row in range(ROWS):
        real = experience.attention_mask[row].bool()
        tokens, actions = experience.sequences[row][real].unsqueeze(0), int(experience.action_mask[row].sum())
        log_probs = model(input_ids=tokens).logits[0, :-1].log_softmax(-1)
        chosen = log_probs.gather(-1, tokens[0, 1:].unsqueeze(-1)).squeeze(-1)[-actions:]
        (-weights[row] * chosen.sum()).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def advantages(name: str, experience: Experience, kl_coef: float) -> Tensor:
    """Return the advantages of a paper, ``(B,)`` float64, row by row."""
    assert experience.action_log_probs is not None and experience.base_action_log_probs is not None
    assert experience.action_mask is not None
    rewards = []
    for row, score in enumerate(SCORES):
        mask = experience.action_mask[row]
        k = (experience.action_log_probs - experience.base_action_log_probs)[row][mask].double()
        # The KL of a response is the mean over its actions (docs/losses.md).
        rewards.append(score - kl_coef * float(k.mean()))
    found = []
    for row, reward in enumerate(rewards):
        first = row // GROUP * GROUP
        group = rewards[first : first + GROUP]
        mean = sum(group) / GROUP if name == "dr_grpo" else (sum(group) - reward) / (GROUP - 1)
        found.append(reward - mean)
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize(("name", "kl_coef"), [("rloo", 0.05), ("dr_grpo", 0.0)])
def test_a_step_has_the_gradient_of_the_paper(name: str, kl_coef: float) -> None:
    config, actor = config_of(name), tiny.llama()
    experience = made(config, references(experience_of(actor, "grpo")))
    wanted = advantages(name, experience, kl_coef)
    # Sum over the actions of all rows, by a constant: all rows times the longest response.
    expected = gradients(actor, experience, wanted / (ROWS * ACTION_COLUMNS))
    trainer = config.trainer
    learner = Learner(
        trainer, config.rollout.algorithm, actor, kl_coef=config.trainer_kl_coef, objective=objective_of(config)
    )

    learner.update([experience])

    assert experience.advantages is not None
    torch.testing.assert_close(experience.advantages.double(), wanted, rtol=1e-6, atol=1e-6)
    for applied, slow in zip(applied_gradients(learner), expected, strict=True):
        torch.testing.assert_close(applied.double(), slow, rtol=1e-4, atol=2e-6)
    # A KL in the reward is a signal beside equal scores, too.
    assert bool((wanted[GROUP:] != 0).any()) == (name == "rloo")
