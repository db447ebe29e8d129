"""Advantages and KL terms against slow references written from the papers, in Python floats."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipeline.config.losses import GROUP_ADVANTAGES
from pipeline.errors import ShapeError
from pipeline.experience.advantage_estimators import ADVANTAGES, AdvantageInputs
from pipeline.experience.advantages import (
    action_rewards,
    coati_action_rewards,
    coati_kl,
    generalized_advantages,
    group_advantages,
    group_mixed,
    k3_kl,
    kl_rewards,
)


def mask_of(lengths: list[int], columns: int) -> Tensor:
    """Real actions first, as in a maker's rows."""
    return torch.arange(columns) < torch.tensor(lengths).unsqueeze(1)


def slow_gae(values: list[float], rewards: list[float], gamma: float, lam: float) -> list[float]:
    """GAE by its definition (arXiv:1506.02438 eq. 16): the sum over l of (gamma lam)^l delta_{t+l}."""
    n = len(values)
    deltas = [rewards[t] + (gamma * values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
    return [sum((gamma * lam) ** step * deltas[t + step] for step in range(n - t)) for t in range(n)]


numbers = st.floats(-3, 3, width=32)


@settings(max_examples=200)
@given(data=st.data(), gamma=st.floats(0.5, 1.0), lam=st.floats(0.0, 1.0))
def test_gae_equals_its_definition(data: st.DataObject, gamma: float, lam: float) -> None:
    """Over the actions of the mask alone: columns outside the mask, holes included, are no time steps."""
    rows = data.draw(st.integers(1, 4))
    values, rewards = (
        data.draw(st.lists(st.lists(numbers, min_size=6, max_size=6), min_size=rows, max_size=rows)) for _ in range(2)
    )
    mask = data.draw(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=rows, max_size=rows))

    advantages = ADVANTAGES["gae"](
        AdvantageInputs(
            torch.zeros(rows), 1, torch.tensor(mask), torch.tensor(rewards), torch.tensor(values), gamma, lam
        )
    )

    for i in range(rows):
        actions = [column for column in range(6) if mask[i][column]]
        expected = [0.0] * 6
        by_action = slow_gae([values[i][t] for t in actions], [rewards[i][t] for t in actions], gamma, lam)
        for column, advantage in zip(actions, by_action, strict=True):
            expected[column] = advantage
        assert advantages[i].tolist() == pytest.approx(expected, abs=1e-4)


def test_tool_output_between_two_actions_takes_no_time() -> None:
    """With and without a hole the two actions have the advantages 0.5 * 4 + 0.25 * 1 - 2 + 1 = 1.25 and 5 - 4 = 1."""
    values, rewards = torch.tensor([[2.0, 9.0, 4.0]]), torch.tensor([[1.0, 9.0, 5.0]])

    holed = generalized_advantages(values, rewards, torch.tensor([[True, False, True]]), gamma=0.5, lam=0.5)

    assert holed.tolist() == [[1.25, 0.0, 1.0]]


def test_gae_worked_by_hand() -> None:
    """The errors are 1 + 0.5 * 2 - 1 = 1, 2 + 0 - 2 = 0 and 4; summed from the end with 0.25 they are 4, 1, 1.25."""
    values = torch.tensor([[1.0, 2.0, 0.0, 9.0]])
    rewards = torch.tensor([[1.0, 2.0, 4.0, 9.0]])

    advantages = generalized_advantages(values, rewards, mask_of([3], 4), gamma=0.5, lam=0.5)

    assert advantages.tolist() == [[1.25, 1.0, 4.0, 0.0]]


def test_gae_refuses_shapes_that_differ() -> None:
    with pytest.raises(ShapeError, match=r"rewards \(2, 3\)"):
        generalized_advantages(torch.zeros(2, 4), torch.zeros(2, 3), mask_of([4, 4], 4), gamma=1.0, lam=1.0)


@settings(max_examples=60)
@given(log_ratio=st.floats(-60, 80, width=32))
def test_k3_is_its_formula_and_never_negative(log_ratio: float) -> None:
    kl = k3_kl(torch.tensor([[log_ratio]]), mask_of([1], 1)).item()

    assert kl >= 0
    assert kl == pytest.approx(math.exp(-log_ratio) - 1 + log_ratio, rel=1e-3, abs=1e-6)


def test_k3_grows_with_the_improbability_under_the_reference_and_never_overflows() -> None:
    """The original's ratio is inverted (k = -2 gives 1.14 there), negative above 10, infinite further out."""
    kl = k3_kl(torch.tensor([[-2.0, 2.0, 15.0, -1000.0, 5.0]]), mask_of([4], 5))[0].tolist()

    assert kl[0] == pytest.approx(math.exp(2) - 3)
    assert kl[1] == pytest.approx(math.exp(-2) + 1)
    assert kl[2] == pytest.approx(14.0)
    assert 1e20 < kl[3] < math.inf
    assert kl[4] == 0.0
    assert k3_kl(torch.tensor([-60.0, -61.0])).tolist() == pytest.approx([math.exp(60)] * 2, rel=1e-5), "exact up to 60"


def test_k3_keeps_its_digits_near_zero() -> None:
    kl = k3_kl(torch.tensor([[1e-3, -1e-3]]), mask_of([2], 2))[0].tolist()

    assert kl == pytest.approx([4.998e-7, 5.002e-7], rel=1e-3)


def test_the_score_is_added_to_the_last_action_only() -> None:
    log_ratios = torch.tensor([[1.0, 2.0, 3.0, 9.0], [1.0, 9.0, 9.0, 9.0]])

    rewards = action_rewards(torch.tensor([2.0, -1.0]), log_ratios, mask_of([3, 1], 4), kl_coef=0.5)

    assert rewards.tolist() == [[-0.5, -1.0, 0.5, 0.0], [-1.5, 0.0, 0.0, 0.0]]


def test_rewards_of_turns_are_at_their_own_actions_and_the_rest_of_the_score_at_the_last_one() -> None:
    of_turns = torch.tensor([[0.5, 0.0, -2.0, 0.0], [0.0, 3.0, 0.0, 0.0]])

    rewards = action_rewards(torch.tensor([2.0, 3.0]), torch.zeros(2, 4), mask_of([4, 2], 4), 0.5, of_turns)

    assert rewards.tolist() == [[0.5, 0.0, -2.0, 3.5], [0.0, 3.0, 0.0, 0.0]]


def test_a_row_without_actions_is_refused_by_number() -> None:
    mask = mask_of([2, 0], 2)

    with pytest.raises(ShapeError, match="row 1"):
        action_rewards(torch.zeros(2), torch.zeros(2, 2), mask, kl_coef=0.1)
    with pytest.raises(ShapeError, match="row 1"):
        kl_rewards(torch.zeros(2, 2), mask, kl_coef=0.1)


def test_the_kl_of_a_group_response_is_the_mean_over_its_own_tokens() -> None:
    log_ratios = torch.tensor([[1.0, 2.0, 3.0, 100.0], [4.0, 100.0, 100.0, 100.0]])

    kl = kl_rewards(log_ratios, mask_of([3, 1], 4), kl_coef=0.5)

    assert kl.tolist() == [-1.0, -2.0]


@settings(max_examples=60)
@given(data=st.data(), group_size=st.integers(2, 5), groups=st.integers(1, 3))
def test_group_advantages_equal_their_definition(data: st.DataObject, group_size: int, groups: int) -> None:
    rewards = data.draw(st.lists(numbers, min_size=group_size * groups, max_size=group_size * groups))

    advantages = group_advantages(torch.tensor(rewards), group_size)

    for start in range(0, len(rewards), group_size):
        group = rewards[start : start + group_size]
        scale = statistics.stdev(group) + 1e-4
        expected = [(reward - statistics.fmean(group)) / scale for reward in group]
        assert advantages[start : start + group_size].tolist() == pytest.approx(expected, abs=2e-3, rel=1e-3)


def test_group_advantages_worked_by_hand() -> None:
    """Unbiased deviation of 0, 0, 0, 1 is exactly 0.5; a group is not mixed with its neighbour."""
    advantages = group_advantages(torch.tensor([0.0, 0.0, 0.0, 1.0, 7.0, 7.0, 7.0, 7.0]), 4)

    assert advantages.tolist() == pytest.approx([-0.25 / 0.5001] * 3 + [0.75 / 0.5001] + [0.0] * 4)


def test_groups_of_equal_scores_are_not_mixed() -> None:
    mixed = group_mixed(torch.tensor([1.0, 1.0, 0.0, 1.0]), 2)

    assert mixed.tolist() == [False, False, True, True]
    assert mixed.dtype == torch.bool


@pytest.mark.parametrize("estimator", GROUP_ADVANTAGES)
def test_a_group_of_equal_rewards_has_advantages_of_exactly_0_beside_a_mixed_one(
    estimator: str, subtests: pytest.Subtests
) -> None:
    for reward, size in itertools.product((0.1, 1 / 3, 0.7, 1e9 + 0.3, -12345.678, 3e38), (3, 5, 6, 7, 11)):
        with subtests.test(reward=reward, size=size):
            rewards = torch.cat([torch.full((size,), reward), torch.arange(float(size))])
            mask = torch.ones(2 * size, 1, dtype=torch.bool)
            found = ADVANTAGES[estimator](AdvantageInputs(rewards, size, mask))
            assert found[:size].tolist() == [0.0] * size
            assert found[size:].abs().max() > 0.5


def test_coatis_conventions_are_those_of_the_original() -> None:
    log_ratios = torch.tensor([[2.0, -1.0, 12.0, 3.0]])
    mask = mask_of([3], 4)

    kl = coati_kl(log_ratios, mask)
    rewards = coati_action_rewards(torch.tensor([7.0]), log_ratios, mask, kl_coef=0.5)

    assert kl[0].tolist() == pytest.approx([math.exp(2) - 3, math.exp(-1), -12.0, 0.0])
    assert rewards.tolist() == [[4.0, 5.5, -1.0, 0.0]]
