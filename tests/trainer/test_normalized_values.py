"""Normalized values: PopArt written out in float64, with a normalized head that is corrected; a critic as is."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeline.experience.running_moments import RATE
from pipeline.experience.types import Experience
from pipeline.models.critic import Critic
from pipeline.trainer.learner import Learner
from tests.support import tiny
from tests.trainer import test_learner as plain
from tests.trainer.test_learner import ACTION_COLUMNS, NORMALIZED, PROMPT_COLUMNS, ROWS, TRAINER

CLIP, RATE_OF_CRITIC = TRAINER.value_clip_range, TRAINER.critic_learning_rate
SCALES = ((300.0, 1000.0), (20.0, -50.0), (5000.0, 0.0))
"""Deviation and mean of the advantages of each step."""


def experience_of(learner: Learner, step: int) -> Experience:
    """Return rows whose returns have another scale in each step."""
    scale, shift = SCALES[step]
    rows = plain.experience_for(learner, "ppo", step)
    assert rows.advantages is not None and rows.action_mask is not None
    return replace(rows, advantages=(rows.advantages * scale + shift) * rows.action_mask)


def actions_of(rows: Experience) -> list[tuple[int, int]]:
    assert rows.action_mask is not None
    return [(row, column) for row in range(ROWS) for column in range(ACTION_COLUMNS) if rows.action_mask[row, column]]


class PopArt:
    """A critic in float64 whose head has normalized values; the formulas of the paper, an action at a time."""

    def __init__(self, critic: Critic) -> None:
        self.backbone = copy.deepcopy(critic.backbone).double()
        self.head = copy.deepcopy(critic.value_head).double()
        self.mean, self.stddev = 0.0, 1.0
        self.means: list[tuple[float, float]] = []
        parameters = [*self.backbone.parameters(), *self.head.parameters()]
        self.adamw = torch.optim.AdamW(
            parameters, lr=RATE_OF_CRITIC, betas=TRAINER.betas, weight_decay=TRAINER.weight_decay
        )

    def normalized(self, rows: Experience, row: int, column: int) -> Tensor:
        """Return the normalized value before an action."""
        assert rows.attention_mask is not None
        columns = torch.arange(PROMPT_COLUMNS + ACTION_COLUMNS)
        real = rows.attention_mask[row].bool() & (columns < PROMPT_COLUMNS + column)
        states = self.backbone(input_ids=rows.sequences[row][real].unsqueeze(0)).last_hidden_state
        value: Tensor = self.head(states[0, -1])[0]
        return value

    def values(self, rows: Experience) -> np.ndarray[Any, np.dtype[np.float64]]:
        with torch.no_grad():
            return np.array([float(self.normalized(rows, *at)) * self.stddev + self.mean for at in actions_of(rows)])

    def step(self, rows: Experience) -> float:
        """Take a step; return the loss."""
        assert rows.advantages is not None and rows.values is not None
        taken = actions_of(rows)
        old = np.array([float(rows.values[at]) for at in taken])
        # In float32 as the learner makes them.
        returns = np.array([float(rows.advantages[at] + rows.values[at]) for at in taken])
        self.observe(returns)
        loss = torch.zeros((), dtype=torch.float64)
        befores, targets = ((each - self.mean) / self.stddev for each in (old, returns))
        for at, before, target in zip(taken, befores, targets, strict=True):
            value = self.normalized(rows, *at)
            clipped = before + (value - before).clamp(-CLIP, CLIP)
            loss = loss + torch.maximum((value - target) ** 2, (clipped - target) ** 2) / 2 / len(taken)
        self.adamw.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([*self.backbone.parameters(), *self.head.parameters()], TRAINER.gradient_clip_norm)
        self.adamw.step()
        return float(loss.detach())

    def observe(self, returns: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        """Update the moments, and correct the head so that the values stay."""
        self.means.append((float(returns.mean()), float(np.square(returns).mean())))
        weights = (1 - RATE) ** np.arange(len(self.means))[::-1]
        mean, square = np.average(self.means, axis=0, weights=weights)
        stddev = float(np.sqrt(square - mean**2))
        with torch.no_grad():
            self.head.weight *= self.stddev / stddev
            self.head.bias.copy_((self.stddev * self.head.bias + self.mean - mean) / stddev)
        self.mean, self.stddev = float(mean), stddev


def test_steps_on_returns_of_any_scale_are_those_of_popart() -> None:
    learner = plain.new_learner("ppo", NORMALIZED)
    critic = learner._critic
    assert isinstance(critic, Critic)
    expected = PopArt(critic)

    for step in range(len(SCALES)):
        rows = experience_of(learner, step)
        before = expected.values(rows)
        stats, loss = learner.update([rows]), expected.step(rows)

        assert stats.value_loss == pytest.approx(loss, rel=1e-4)
        assert (stats.return_mean, stats.return_stddev) == pytest.approx((expected.mean, expected.stddev), rel=1e-6)
        changes = expected.values(rows) - before
        assert np.abs(changes).max() > 1e-3 * expected.stddev, "the step is seen"
        found = plain.action_values(critic, rows.sequences, rows.attention_mask, ACTION_COLUMNS)[rows.action_mask]
        np.testing.assert_allclose(found.detach().double().numpy() - before, changes, atol=2e-3 * np.abs(changes).max())
    np.testing.assert_allclose(
        critic.value_head.weight.detach(),
        expected.head.weight.detach() * expected.stddev,
        rtol=1e-2,
        atol=1e-3 * expected.stddev,
    )


def test_values_do_not_change_with_the_moments() -> None:
    learner = plain.new_learner("ppo", NORMALIZED.model_copy(update={"critic_learning_rate": 1e-30}))
    rows, critic = experience_of(learner, 0), learner._critic
    assert isinstance(critic, Critic) and rows.attention_mask is not None
    before = critic(rows.sequences, rows.attention_mask)

    learner.update([rows])

    assert torch.equal(critic(rows.sequences, rows.attention_mask), before)
    assert learner.tensors()["return_moments"][2] > 0


@pytest.mark.parametrize("changes", [{"micro_batch_size": 3}, {"packing": True}, {"epochs": 1}])
def test_a_step_does_not_depend_on_micro_batches_batches_or_packing(changes: dict[str, Any]) -> None:
    whole = plain.new_learner("ppo", NORMALIZED)
    cut = plain.new_learner("ppo", NORMALIZED.model_copy(update=changes))
    rows = experience_of(whole, 0)

    expected = whole.update([rows])
    stats = cut.update([plain.rows_of(rows, slice(5)), plain.rows_of(rows, slice(5, 8))])

    plain.assert_same(plain.applied_gradients(cut), plain.applied_gradients(whole))
    plain.assert_same_stats(stats, expected)


def test_returns_of_scale_1_train_as_without_normalization_but_for_their_deviation() -> None:
    # The gradient of the head is that of the loss divided by the squared deviation, once multiplied by it.
    normalized = plain.new_learner(
        "ppo", NORMALIZED.model_copy(update={"gradient_clip_norm": 1e9, "value_clip_range": 1e9})
    )
    unnormalized = plain.new_learner(
        "ppo", TRAINER.model_copy(update={"gradient_clip_norm": 1e9, "value_clip_range": 1e9})
    )
    rows = experience_of(normalized, 0)

    stats, other = normalized.update([rows]), unnormalized.update([rows])

    assert stats.return_stddev is not None and stats.value_loss is not None and other.value_loss is not None
    assert other.return_stddev is None and other.return_mean is None
    assert stats.value_loss == pytest.approx(other.value_loss / stats.return_stddev**2, rel=1e-5)
    for name, power in (("value_head.weight", 1), ("value_head.bias", 1), ("backbone.norm.weight", 2)):
        mine, others = (each.tensors()[f"critic.exp_avg.{name}"] for each in (normalized, unnormalized))
        torch.testing.assert_close(mine, others / stats.return_stddev**power, rtol=1e-4, atol=1e-6)


def test_a_learner_without_normalization_has_no_moments() -> None:
    assert "return_moments" not in plain.new_learner("ppo").tensors()
    assert "return_moments" not in Learner(NORMALIZED, "grpo", tiny.llama(), kl_coef=0.0).tensors()
