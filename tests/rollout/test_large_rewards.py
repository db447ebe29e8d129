"""Rewards that float32 does not hold, small differences beside large rewards, and the clip of rewards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config.schema import Config
from pipeline.errors import RewardError
from pipeline.experience.ragged import RaggedRows
from pipeline.experience.types import Experience
from pipeline.models.critic import Critic
from pipeline.progress import Telemetry
from pipeline.rollout.maker import NaiveExperienceMaker
from pipeline.rollout.metrics import RolloutMetrics
from pipeline.rollout.reward.functions import FunctionReward, checked_scores
from pipeline.rollout.reward.row_rewards import RewardProblems
from pipeline.rollout.roller import Rolled
from pipeline.rollout.shaping import Shaping, shaping_of
from pipeline.telemetry.slab import MetricsSlab
from tests.support import tiny
from tests.support.slabs import SLOTS, begun, value
from tests.support.tiny import Tokenizer


def rewarding(*rewards: float) -> Callable[..., float]:
    """Return a function that gives these rewards, one after the other."""
    left = iter(rewards)

    def given(input_ids: Any, attention_mask: Any, **_: Any) -> float:
        return next(left)

    return given


def score(functions: Sequence[Callable[..., float]], rows: int, **options: Any) -> torch.Tensor:
    ids = torch.ones(rows, 3, dtype=torch.long)
    starts = torch.ones(rows, dtype=torch.long)
    return FunctionReward(functions, Tokenizer(), **options)(ids, ids, starts, starts + 2, [None] * rows)


def make(*rewards: float, shaping: Shaping, grpo: bool = True) -> Experience:
    actor = tiny.llama()
    maker = NaiveExperienceMaker(
        actor,
        None if grpo else Critic.from_actor(actor),
        FunctionReward([rewarding(*rewards)], Tokenizer()),
        None,
        Tokenizer(),
        kl_coef=0.0,
        use_grpo=grpo,
        num_generation=2,
        shaping=shaping,
        seed=3,
    )
    prompts = torch.tensor([[5, 6]] * (len(rewards) // 2 if grpo else len(rewards)))
    return maker.make_experience(prompts, torch.ones_like(prompts), max_length=6)


def test_a_reward_beyond_float32_is_a_problem_of_its_function_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    given = rewarding(1.0, *[1e39] * 6, -2e38, *[-1e300] * 4)

    found = score([given], 12, problems=RewardProblems(Telemetry(log_texts=True)))

    assert [bool(one) for one in found.isnan()] == [False, *[True] * 6, False, *[True] * 4]
    first, again = [record.getMessage() for record in caplog.records]
    assert "given returned 1e+39; float32, in which a reward is trained, holds" in first
    assert "given returned a number beyond float32" in again and "times=10" in again


def test_a_sum_beyond_float32_is_a_problem_with_its_parts() -> None:
    with pytest.raises(RewardError, match=r"the sum of the weighted scores is beyond float32: 3e\+38 \+ 3e\+38"):
        score([rewarding(3e38), rewarding(1.5e38)], 1, weights=[1.0, 2.0])
    with pytest.raises(RewardError, match="judge returned 1e\\+39 for row 1"):
        checked_scores(torch.tensor([1.0, 1e39], dtype=torch.float64), 2, "judge")


def test_a_small_difference_beside_large_rewards_is_a_signal() -> None:
    experience = make(1e8, 1e8 + 1, 1e8, 1e8, shaping=shaping_of(Config()))

    assert experience.info is not None and experience.advantages is not None and experience.reward is not None
    assert experience.info["group_mixed"].tolist() == [True, True, False, False]
    # (r - mean) / (unbiased standard deviation + eps), with the rewards 0 and 1.
    assert experience.advantages.tolist() == pytest.approx([-0.5 / (0.5**0.5 + 1e-4), 0.5 / (0.5**0.5 + 1e-4), 0, 0])
    tensors = (experience.advantages, experience.reward, experience.values, experience.info["score"])
    assert {tensor.dtype for tensor in tensors if tensor is not None} == {torch.float32}


def last_rewards(experience: Experience) -> list[float]:
    """Return the rewards behind the advantages of PPO with gamma and lambda 1 at the first action."""
    assert experience.advantages is not None and experience.values is not None
    return (experience.advantages + experience.values)[:, 0].tolist()


def test_ppo_clips_no_score_unless_a_key_says_so_and_counts_those_that_it_clips() -> None:
    def config(**rollout: Any) -> Config:
        return Config.model_validate({"rollout": {"algorithm": "ppo", "lam": 1.0, **rollout}})

    def made(shaping: Shaping) -> Experience:
        actor = tiny.llama()
        reward = FunctionReward([rewarding(100.0, -6.0, 4.0)], Tokenizer())
        maker = NaiveExperienceMaker(
            actor, Critic.from_actor(actor), reward, None, Tokenizer(), kl_coef=0.0, lam=1.0, shaping=shaping, seed=3
        )
        prompts = torch.tensor([[5, 6]] * 3)
        return maker.make_experience(prompts, torch.ones_like(prompts), max_length=6)

    off, on, coati = made(shaping_of(config())), made(shaping_of(config(reward_clip=5))), made(Shaping())

    assert last_rewards(off) == pytest.approx([100, -6, 4], abs=1e-4)
    assert last_rewards(on) == pytest.approx([5, -5, 4], abs=1e-4) == last_rewards(coati)
    assert off.info is not None and on.info is not None and coati.info is not None
    assert on.info["reward_clipped"].tolist() == [True, True, False]
    assert on.info["score"].tolist() == [100, -6, 4]
    # The penalty of length is no part of the score: it is neither clipped nor counted.
    long = Shaping(reward_clip=5.0, overlong_buffer_tokens=4, overlong_penalty=40.0, longest=4)
    for own in (None, lambda inputs: inputs.rewards):
        penalized = made(replace(long, advantages=own))
        assert penalized.action_mask is not None and penalized.advantages is not None and penalized.info is not None
        lengths = penalized.action_mask.sum(dim=1).tolist()
        rewards = last_rewards(penalized) if own is None else penalized.advantages[:, 0].tolist()
        expected = [score - 10 * length for score, length in zip([5, -5, 4], lengths, strict=True)]
        assert rewards == pytest.approx(expected, abs=1e-4)
        assert penalized.info["reward_clipped"].tolist() == [True, True, False]
    assert "reward_clipped" not in off.info and "reward_clipped" not in coati.info


def test_a_group_compares_clipped_scores() -> None:
    experience = make(100.0, 7.0, 4.0, 6.0, shaping=shaping_of(Config.model_validate({"rollout": {"reward_clip": 5}})))

    assert experience.info is not None and experience.reward is not None
    assert experience.reward.tolist() == [5, 5, 4, 5]
    assert experience.info["group_mixed"].tolist() == [False, False, True, True]
    assert experience.info["reward_clipped"].tolist() == [True, True, False, True]


def test_clipped_rows_are_counted_and_logged_at_one_and_ten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    slab = MetricsSlab.create(tmp_path / "metrics", SLOTS)
    metrics = RolloutMetrics(begun(slab, "rollout"), reward_source="function")
    experience = make(100.0, 7.0, 4.0, 6.0, shaping=shaping_of(Config.model_validate({"rollout": {"reward_clip": 5}})))

    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            metrics.rolled(Rolled(RaggedRows.of(experience), 0), prompts=2, group_size=2)

    assert [record.getMessage() for record in caplog.records] == [
        "rewards clipped: rows=3, by rollout.reward_clip", "rewards clipped: rows=12, by rollout.reward_clip",
    ]  # fmt: skip
    assert value(slab, "rlhfd_rewards_clipped_total") == 12
    slab.close()
