"""Every estimator of advantages against a slow reference, one response at a time, written from its paper."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pipeline.config import losses as config
from pipeline.errors import FieldError, ShapeError
from pipeline.experience.advantage_estimators import (
    ADVANTAGES,
    AdvantageInputs,
    overlong_rewards,
)
from pipeline.experience.advantages import KL_ESTIMATORS, k1_kl, k2_kl, k3_kl

G = 4


def inputs(seed: int = 0) -> AdvantageInputs:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(3 * G, 5, generator=generator) < 0.7
    mask[:, 0] = True
    rewards, values = torch.randn(2, 3 * G, 5, generator=generator)
    return AdvantageInputs(rewards[:, 0], G, mask, rewards * mask, values * mask, gamma=0.9, lam=0.8)


def slow_grpo(group: list[float]) -> list[float]:
    """arXiv:2402.03300 section 4.1.2, with the sample's standard deviation."""
    return [(reward - statistics.mean(group)) / (statistics.stdev(group) + 1e-4) for reward in group]


def slow_centered(group: list[float]) -> list[float]:
    """arXiv:2503.20783 section 3.2: without the division; the same in arXiv:2501.03262 before its batch's."""
    return [reward - statistics.mean(group) for reward in group]


def slow_rloo(group: list[float]) -> list[float]:
    """arXiv:2402.14740 section 3.2: the baseline of a response is the mean of the k - 1 others."""
    return [
        reward - statistics.mean(other for j, other in enumerate(group) if j != i) for i, reward in enumerate(group)
    ]


SLOW: dict[str, Callable[[list[float]], list[float]]] = {
    "grpo": slow_grpo,
    "dr_grpo": slow_centered,
    "rloo": slow_rloo,
    "reinforce_baseline": slow_centered,
}


@pytest.mark.parametrize("name", SLOW)
@pytest.mark.parametrize("seed", range(3))
def test_advantages_of_a_group_are_those_of_the_paper(name: str, seed: int) -> None:
    given = inputs(seed)
    rewards = given.rewards.tolist()

    found = ADVANTAGES[name](given)

    expected = [x for start in range(0, len(rewards), G) for x in SLOW[name](rewards[start : start + G])]
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_the_names_of_the_configuration_are_those_of_the_registry() -> None:
    assert set(config.ADVANTAGES) == set(ADVANTAGES)
    assert set(config.KlEstimator.__args__) == set(KL_ESTIMATORS)  # type: ignore[attr-defined]


def test_what_cannot_be_estimated_is_refused() -> None:
    mask = torch.ones(3, 2, dtype=torch.bool)
    for name in ("grpo", "rloo", "dr_grpo"):
        with pytest.raises(ShapeError, match="do not divide into groups of 2"):
            ADVANTAGES[name](AdvantageInputs(torch.zeros(3), 2, mask))
        with pytest.raises(ShapeError, match="group_size is 1"):
            ADVANTAGES[name](AdvantageInputs(torch.zeros(3), 1, mask))
    for given in ({}, {"values": mask.float()}, {"action_rewards": mask.float()}):
        with pytest.raises(FieldError, match="gae needs the values of a critic"):
            ADVANTAGES["gae"](AdvantageInputs(torch.zeros(3), 1, mask, **given))


def test_gae_discounts_nothing_and_has_a_lambda_of_095_by_default() -> None:
    given = inputs()
    by_default = AdvantageInputs(given.rewards, 1, given.action_mask, given.action_rewards, given.values)

    assert torch.equal(ADVANTAGES["gae"](by_default), ADVANTAGES["gae"](replace(by_default, gamma=1.0, lam=0.95)))


def test_the_penalty_of_length_is_that_of_the_paper() -> None:
    def slow(length: int, longest: int, cache: int) -> float:
        """arXiv:2503.14476 eq. 13."""
        if length <= longest - cache:
            return 0.0
        return ((longest - cache) - length) / cache if length <= longest else -1.0

    lengths = torch.arange(1, 21)

    found = overlong_rewards(lengths, 20, 8, 0.5)

    assert found.tolist() == pytest.approx([0.5 * slow(length, 20, 8) for length in range(1, 21)])
    assert found[-1] == -0.5 and found[11] == 0 and found[12] < 0
    assert overlong_rewards(torch.tensor([21, 40]), 20, 8, 0.5).tolist() == [-0.5, -0.5]


def test_the_estimators_of_the_kl_by_hand() -> None:
    k = torch.tensor([[0.5, -1.0, float("nan")]])
    mask = torch.tensor([[True, True, False]])

    assert k1_kl(k, mask)[0].tolist() == [0.5, -1.0, 0.0]
    assert k2_kl(k, mask)[0].tolist() == [0.125, 0.5, 0.0]
    assert k3_kl(k, mask)[0].tolist() == pytest.approx([0.1065307, 0.7182818, 0.0])


def test_k2_and_k3_estimate_the_kl_and_the_gradient_of_k2_is_that_of_the_kl() -> None:
    logits = torch.tensor([0.3, -0.2, 0.5, 0.1], requires_grad=True)
    reference = torch.tensor([0.1, 0.2, 0.2, 0.5]).log()
    log_probs = logits.log_softmax(-1)
    probs = log_probs.exp().detach()
    exact = (log_probs.exp() * (log_probs - reference)).sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    mask = torch.ones(1, 4, dtype=torch.bool)
    gradients = {}
    for name, estimate in KL_ESTIMATORS.items():
        # The expectation over tokens, weighted by their probability, without the gradient of the sampling.
        expectation = (probs * estimate((log_probs - reference).unsqueeze(0), mask)[0]).sum()
        (gradients[name],) = torch.autograd.grad(expectation, logits, retain_graph=True)
        if name != "k2":
            assert float(expectation.detach()) == pytest.approx(float(exact.detach()), rel=1e-5)

    torch.testing.assert_close(gradients["k2"], wanted)
    assert gradients["k1"].abs().max() < 1e-6
    assert gradients["k3"].abs().max() > 1e-2
