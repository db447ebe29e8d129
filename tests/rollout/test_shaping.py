"""Rewards, advantages and further fields of a maker, by configuration."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.experience.running_moments import Moments
from pipeline.experience.types import Experience
from pipeline.models.critic import Critic
from pipeline.rollout.generation.interface import Responses, Sampling
from pipeline.rollout.maker import NaiveExperienceMaker
from pipeline.rollout.shaping import Shaping, load_advantages, shaping_of
from tests.support import tiny

EOS, PAD, A, G = 1, 0, 4, 2
PROMPTS = torch.tensor([[5, 6], [7, 8]])
# Ended by eos, cut, ended by eos in the last column, ended by a stop sequence in the last column.
RESPONSES = torch.tensor([[9, EOS, PAD, PAD], [9, 10, 11, 12], [9, 10, 11, EOS], [9, 10, 13, 14]])
LENGTHS = torch.tensor([2, 4, 4, 4])
SCORES = torch.tensor([1.0, 0.0, 0.5, 0.5])
SAMPLED = -torch.arange(1.0, 17.0).reshape(4, 4) / 10


class Engine:
    """Returns fixed responses, with log-probs that are not the model's."""

    def generate(self, input_ids: Tensor, attention_mask: Tensor, sampling: Sampling, **_: Any) -> Responses:
        rows = input_ids.repeat_interleave(G if len(input_ids) == 2 else 1, dim=0)
        mask = torch.arange(A) < LENGTHS.unsqueeze(1)
        return Responses(torch.cat([rows, RESPONSES], dim=1), LENGTHS, SAMPLED * mask)

    def update_weights(self, actor: Any) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


def experience(shaping: Shaping, *, ppo: bool = False, scores: Tensor = SCORES, **settings: Any) -> Experience:
    actor, reference = tiny.llama(), tiny.llama(1)
    critic = Critic.from_actor(actor) if ppo else None
    if critic is not None:
        torch.nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(3))

    def reward(input_ids: Tensor, **_: Any) -> Tensor:
        return scores[: len(input_ids)]

    tokenizer = SimpleNamespace(pad_token_id=PAD, eos_token_id=EOS)
    maker = NaiveExperienceMaker(
        actor, critic, reward, reference, tokenizer, use_grpo=not ppo, num_generation=G, generator=Engine(),
        shaping=shaping, **settings,
    )  # fmt: skip
    prompts = PROMPTS.repeat_interleave(2, dim=0) if ppo else PROMPTS
    return maker.make_experience(prompts, torch.ones_like(prompts), max_length=2 + A, stop_token_ids=[[13, 14]])


def test_the_default_adds_no_field() -> None:
    made = experience(Shaping())

    assert made.behaviour_log_probs is None
    assert made.info is not None and made.info.keys() == {"score", "group_mixed"}
    # Each field is memory of its own: a field may be changed in place.
    assert made.values is not None and made.reward is not None
    assert made.values.data_ptr() != made.reward.data_ptr()


def test_cut_responses_are_those_of_the_longest_length_without_a_stop() -> None:
    made = experience(Shaping(marks_cut=True))

    assert made.info is not None
    assert made.info["cut"].tolist() == [False, True, False, False]


def test_log_probs_of_the_engine_are_kept_beside_those_of_the_model() -> None:
    made = experience(Shaping(keeps_engine_log_probs=True))
    plain = experience(Shaping())

    assert made.behaviour_log_probs is not None and made.action_mask is not None
    assert torch.equal(made.behaviour_log_probs, SAMPLED * made.action_mask)
    assert made.action_log_probs is not None and plain.action_log_probs is not None
    assert torch.equal(made.action_log_probs, plain.action_log_probs)
    assert not torch.allclose(made.action_log_probs, made.behaviour_log_probs)


def test_long_responses_lose_reward_and_give_a_group_of_equal_scores_a_signal() -> None:
    made = experience(Shaping(overlong_buffer_tokens=4, overlong_penalty=0.5, longest=8), kl_coef=0.0)
    shaped = experience(Shaping(overlong_buffer_tokens=2, longest=4), kl_coef=0.0)

    assert made.reward is not None and shaped.reward is not None and shaped.info is not None
    assert torch.equal(made.reward, SCORES)
    # Lengths 2, 4, 4, 4 of 4, with a buffer of 2.
    assert shaped.reward.tolist() == [1.0, -1.0, -0.5, -0.5]
    assert shaped.info["score"].tolist() == SCORES.tolist()
    assert shaped.info["group_mixed"].tolist() == [True, True, False, False]
    equal = experience(Shaping(overlong_buffer_tokens=2, longest=4), kl_coef=0.0, scores=torch.full((4,), 0.5))
    assert equal.info is not None and equal.info["group_mixed"].tolist() == [True, True, False, False]


def test_the_kl_of_the_reward_has_the_estimator_that_is_configured() -> None:
    made = {name: experience(shaping_of(config(kl_estimator=name)), kl_coef=0.3) for name in ("k1", "k2", "k3")}

    for name, one in made.items():
        assert one.action_log_probs is not None and one.base_action_log_probs is not None
        assert one.action_mask is not None and one.reward is not None
        k = (one.action_log_probs - one.base_action_log_probs) * one.action_mask
        kl = {"k1": k, "k2": k**2 / 2, "k3": (-k).exp() - 1 + k}[name]
        expected = SCORES - 0.3 * kl.sum(dim=1) / one.action_mask.sum(dim=1)
        torch.testing.assert_close(one.reward, expected)


@pytest.mark.parametrize("advantages", ["grpo", "dr_grpo", "rloo"])
def test_a_kl_in_the_reward_gives_a_group_of_equal_scores_advantages_though_it_counts_as_equal(advantages: str) -> None:
    made = experience(shaping_of(config(advantages=advantages)), kl_coef=0.3)
    without = experience(shaping_of(config(advantages=advantages)), kl_coef=0.0)

    assert made.advantages is not None and without.advantages is not None and made.info is not None
    assert without.advantages[2:].tolist() == [0.0, 0.0]
    assert made.advantages[2] == -made.advantages[3] != 0
    assert made.info["group_mixed"].tolist() == [True, True, False, False]


def moments_of(*numbers: float) -> Tensor:
    state, values = Moments.new_state(), torch.tensor(numbers, dtype=torch.float64)
    Moments().after(len(values), float(values.sum()), float(values.square().sum())).keep(state)
    return state


@pytest.mark.parametrize(("name", "expected"), [("dr_grpo", [5.0, -5.0, 0.0, 0.0]), ("rloo", [10.0, -10.0, 0.0, 0.0])])
def test_scores_are_divided_by_the_deviation_of_those_before(name: str, expected: list[float]) -> None:
    scaled = shaping_of(config(advantages=name, reward_scale="running"))
    first = experience(scaled, kl_coef=0.0)
    assert scaled.score_moments is not None and first.reward is not None
    assert torch.equal(first.reward, SCORES), "no step was taken before: scores as they are"

    # As a fetch does it: in place. Deviation 0.1.
    scaled.score_moments.copy_(moments_of(0.4, 0.6))
    made = experience(scaled, kl_coef=0.0)

    assert made.advantages is not None and made.info is not None and made.reward is not None
    assert made.advantages.tolist() == pytest.approx(expected, rel=1e-6)
    assert made.reward.tolist() == pytest.approx([10.0, 0.0, 5.0, 5.0], rel=1e-6)
    assert made.info["score"].tolist() == SCORES.tolist(), "the score itself"
    assert made.info["group_mixed"].tolist() == [True, True, False, False]


def test_a_scaled_score_is_bounded_and_then_loses_the_penalty_of_length() -> None:
    shaping = Shaping(
        score_moments=moments_of(0.4, 0.6), reward_clip=6.0, overlong_buffer_tokens=2, longest=4, overlong_penalty=1.0
    )

    made = experience(shaping, kl_coef=0.0)

    assert made.reward is not None and made.info is not None
    # Scaled 10, 0, 5, 5; lengths 2, 4, 4, 4 of 4.
    assert made.reward.tolist() == pytest.approx([6.0, -1.0, 4.0, 4.0], rel=1e-6)
    assert made.info["reward_clipped"].tolist() == [True, False, False, False]


def test_gae_is_that_of_scaled_scores() -> None:
    settings: dict[str, Any] = {"ppo": True, "kl_coef": 0.0, "gamma": 0.9, "lam": 0.8}
    made = experience(Shaping(score_moments=moments_of(0.0, 16.0), reward_clip=None), **settings)

    assert made.advantages is not None and made.values is not None and made.reward is not None
    assert made.reward.tolist() == SCORES.tolist()
    values = made.values.double().numpy()
    for row, length in enumerate(LENGTHS.tolist()):
        running, expected = 0.0, np.zeros(A)
        for action in reversed(range(length)):
            last = action == length - 1
            reward, following = (SCORES[row].item() / 8, 0.0) if last else (0.0, values[row, action + 1])
            running = reward + 0.9 * following - values[row, action] + 0.9 * 0.8 * running
            expected[action] = running
        np.testing.assert_allclose(made.advantages[row].numpy(), expected, atol=1e-6)
    unscaled = experience(Shaping(reward_clip=None), **settings)
    assert unscaled.advantages is not None and not torch.allclose(made.advantages, unscaled.advantages)


@pytest.mark.parametrize(("name", "expected"), [
    ("dr_grpo", [0.5, -0.5, 0.0, 0.0]), ("rloo", [1.0, -1.0, 0.0, 0.0]), ("reinforce_baseline", [0.5, -0.5, 0.0, 0.0]),
])  # fmt: skip
def test_advantages_by_name(name: str, expected: list[float]) -> None:
    made = experience(shaping_of(config(advantages=name)), kl_coef=0.0)

    assert made.advantages is not None and made.info is not None
    assert made.advantages.tolist() == pytest.approx(expected)
    # Of any estimator: the trainer decides which rows it trains.
    assert made.info["group_mixed"].tolist() == [True, True, False, False]


OWN = """
def by_length(inputs):
    return inputs.rewards / inputs.action_mask.sum(dim=1)

def of_actions(inputs):
    return inputs.action_rewards - inputs.values

def ones(inputs):
    return (inputs.action_mask | True).float()

def wrong(inputs):
    return inputs.rewards[1:]
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_advantages_of_test.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_advantages_of_test", raising=False)


def test_advantages_of_ones_own(own: None) -> None:
    made = experience(shaping_of(config(advantages="my_advantages_of_test:by_length")), kl_coef=0.0)
    ppo = experience(Shaping(advantages=load_advantages("my_advantages_of_test:of_actions")), ppo=True, kl_coef=0.0)
    a_row = experience(Shaping(advantages=load_advantages("my_advantages_of_test:by_length")), ppo=True, kl_coef=0.0)

    everywhere = experience(Shaping(advantages=load_advantages("my_advantages_of_test:ones")), kl_coef=0.0)

    assert everywhere.advantages is not None and everywhere.action_mask is not None
    assert torch.equal(everywhere.advantages, everywhere.action_mask.float())
    assert made.advantages is not None and made.info is not None
    assert made.advantages.tolist() == pytest.approx((SCORES / LENGTHS).tolist())
    assert made.info["group_mixed"].tolist() == [True, True, False, False]
    assert ppo.advantages is not None and ppo.values is not None and ppo.action_mask is not None
    last = LENGTHS - 1
    rewards = torch.zeros(4, A).scatter(1, last.unsqueeze(1), SCORES.unsqueeze(1))
    torch.testing.assert_close(ppo.advantages, (rewards - ppo.values) * ppo.action_mask)
    assert a_row.advantages is not None
    torch.testing.assert_close(a_row.advantages, (SCORES / LENGTHS).unsqueeze(1) * ppo.action_mask)


def test_the_reward_that_an_estimator_of_ones_own_gets_has_the_kl(own: None) -> None:
    found = experience(Shaping(advantages=load_advantages("my_advantages_of_test:by_length")), ppo=True, kl_coef=0.3)

    assert found.advantages is not None and found.action_mask is not None
    assert found.action_log_probs is not None and found.base_action_log_probs is not None
    for row, length in enumerate(LENGTHS.tolist()):
        k = found.action_log_probs[row, :length] - found.base_action_log_probs[row, :length]
        expected = (SCORES[row].item() - 0.3 * k.sum().item()) / length
        assert found.advantages[row, :length].tolist() == pytest.approx([expected] * length, abs=1e-6)


def test_advantages_that_cannot_be_used_are_named(own: None) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.advantages returned \(3,\) for 4 rows of 4 actions"):
        experience(Shaping(advantages=load_advantages("my_advantages_of_test:wrong")))
    with pytest.raises(ConfigError, match=r"rollout\.advantages: my_advantages_of_test has no function missing"):
        load_advantages("my_advantages_of_test:missing")
    with pytest.raises(ConfigError, match=r"rollout\.advantages: cannot import no_such_module.*looked in"):
        load_advantages("no_such_module:advantages")


def config(**rollout: Any) -> Config:
    return Config.model_validate({"rollout": rollout})


def test_the_shaping_of_the_default_configuration_marks_cut_rows_and_has_no_clip() -> None:
    assert shaping_of(config()) == Shaping(reward_clip=None, marks_cut=True)
    assert shaping_of(config(algorithm="ppo")) == Shaping(reward_clip=None, marks_cut=True)
    assert shaping_of(config(engine="my_engines:new")).keeps_engine_log_probs
    assert shaping_of(config(max_length=24, max_new_tokens=9, overlong_buffer_tokens=3)).longest == 9
