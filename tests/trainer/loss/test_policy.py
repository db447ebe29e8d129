"""Every policy loss, aggregation and correction against a slow reference, one action at a time, written from its paper.

Values and gradients, over rows of different lengths, end to end as the learner has them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.config import losses as config
from pipeline.errors import ConfigError
from pipeline.trainer.loss.aggregation import AGGREGATIONS, StepTotals
from pipeline.trainer.loss.objective import importance_weights
from pipeline.trainer.loss.policy import POLICY_LOSSES, PolicyInputs, PolicyTerms, load_policy_loss, ppo

LOW, HIGH, DUAL = 0.15, 0.3, 1.6
LENGTHS = (7, 1, 4, 6, 3)
Row = list[Tensor]


def inputs(seed: int = 0, **settings: Any) -> PolicyInputs:
    """Return rows of different lengths whose ratios are on both sides of every bound."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(sum(LENGTHS), generator=generator) * 3
    log_probs = old + 0.5 * torch.randn(old.shape, generator=generator)
    advantages = torch.randn(old.shape, generator=generator)
    return PolicyInputs(log_probs.requires_grad_(), old, advantages, torch.tensor(LENGTHS), LOW, HIGH, **settings)


def of_rows(values: Tensor) -> list[Row]:
    """The values of each row."""
    return [list(row) for row in values.split(list(LENGTHS))]


# References: from one row's actions, as lists of scalars, to one loss an action.


def clip(value: Tensor) -> Tensor:
    return torch.clip(value, 1 - LOW, 1 + HIGH)


def slow_ppo(new: Row, old: Row, advantages: Row) -> Row:
    """Minimum of both surrogates (arXiv:1707.06347 eq. 7), the bounds of DAPO (arXiv:2503.14476 eq. 8)."""
    losses = []
    for logp, logq, advantage in zip(new, old, advantages, strict=True):
        ratio = torch.exp(logp) / torch.exp(logq)
        losses.append(-torch.min(ratio * advantage, clip(ratio) * advantage))
    return losses


def slow_dual(new: Row, old: Row, advantages: Row) -> Row:
    """arXiv:1912.09729 eq. 5: max(min(r A, clip(r) A), c A) where A is negative."""
    losses = []
    for logp, logq, advantage in zip(new, old, advantages, strict=True):
        ratio = torch.exp(logp) / torch.exp(logq)
        objective = torch.min(ratio * advantage, clip(ratio) * advantage)
        if advantage < 0:
            objective = torch.max(objective, DUAL * advantage)
        losses.append(-objective)
    return losses


def slow_gspo(new: Row, old: Row, advantages: Row) -> Row:
    """arXiv:2507.18071 eq. 7: s = (pi(y) / pi_old(y)) ^ (1 / |y|), a product of probabilities; eq. 5 with it."""
    new_probability = torch.stack([torch.exp(logp) for logp in new]).prod()
    old_probability = torch.stack([torch.exp(logq) for logq in old]).prod()
    ratio = (new_probability / old_probability) ** (1 / len(new))
    return [-torch.min(ratio * advantage, clip(ratio) * advantage) for advantage in advantages]


def slow_cispo(new: Row, old: Row, advantages: Row) -> Row:
    """arXiv:2506.13585 eq. 4 and 5: the clipped ratio without gradient, times A log pi."""
    losses = []
    for logp, logq, advantage in zip(new, old, advantages, strict=True):
        weight = float(clip(torch.exp(logp.detach()) / torch.exp(logq)))
        losses.append(-weight * advantage * logp)
    return losses


def slow_reinforce(new: Row, old: Row, advantages: Row) -> Row:
    """Williams 1992: A grad log pi."""
    return [-advantage * logp for logp, advantage in zip(new, advantages, strict=True)]


SLOW: dict[str, Callable[[Row, Row, Row], Row]] = {
    "ppo": slow_ppo,
    "gspo": slow_gspo,
    "cispo": slow_cispo,
    "reinforce": slow_reinforce,
}


def slow_loss(
    of_row: Callable[[Row, Row, Row], Row], given: PolicyInputs, aggregation: str, constant: int = 9
) -> tuple[Tensor, Tensor]:
    """Return the loss and its gradient by the log-probs, summed row by row."""
    log_probs = given.log_probs.detach().clone().requires_grad_()
    columns = (of_rows(values) for values in (log_probs, given.old_log_probs, given.advantages))
    per_row = [of_row(*row) for row in zip(*columns, strict=True)]
    if aggregation == "token_mean":
        loss = torch.stack([loss for losses in per_row for loss in losses]).mean()
    elif aggregation == "sequence_mean":
        loss = torch.stack([torch.stack(losses).mean() for losses in per_row]).mean()
    else:
        loss = torch.stack([torch.stack(losses).sum() / constant for losses in per_row]).mean()
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return loss, gradient


TOTALS = StepTotals(float(sum(LENGTHS)), float(len(LENGTHS)), len(LENGTHS), 9)


def check(terms: PolicyTerms, given: PolicyInputs, expected: tuple[Tensor, Tensor], aggregation: str) -> None:
    loss = AGGREGATIONS[aggregation](terms.losses, given.counts, TOTALS)
    (gradient,) = torch.autograd.grad(loss, given.log_probs)

    torch.testing.assert_close(loss, expected[0])
    torch.testing.assert_close(gradient, expected[1])
    assert not terms.ratios.requires_grad


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_a_loss_and_its_gradient_are_those_of_its_paper(name: str, aggregation: str, seed: int) -> None:
    given = inputs(seed)
    expected = slow_loss(SLOW[name], given, aggregation)

    terms = load_policy_loss(name)(given)

    check(terms, given, expected, aggregation)


@pytest.mark.parametrize("seed", range(3))
def test_dual_clip_bounds_the_loss_of_negative_advantages(seed: int) -> None:
    given = inputs(seed, dual_clip=DUAL)
    expected = slow_loss(slow_dual, given, "token_mean")

    terms = POLICY_LOSSES["ppo"](given)

    check(terms, given, expected, "token_mean")
    single = POLICY_LOSSES["ppo"](inputs(seed)).losses
    assert (terms.losses <= single).all() and (seed == 2 or (terms.losses < single).any())


def test_the_clip_is_reported_where_it_is_in_force() -> None:
    log_ratios = torch.tensor([0.8, 1.0, 1.2, 1.4, 1.4]).log()
    given = PolicyInputs(
        log_ratios.requires_grad_(), torch.zeros(5), torch.tensor([-1.0, 1, 1, 1, -1]), torch.tensor([5]), LOW, HIGH
    )

    clipped = {name: POLICY_LOSSES[name](given).clipped.tolist() for name in POLICY_LOSSES}

    assert clipped["ppo"] == [True, False, False, True, False]
    assert clipped["cispo"] == [True, False, False, True, True]
    assert not any(clipped["reinforce"] + clipped["gspo"])
    bounded = {name: POLICY_LOSSES[name](replace(given, dual_clip=1.3)).clipped.tolist() for name in ("ppo", "gspo")}
    assert bounded["ppo"] == [True, False, False, True, True], "1.4 is beyond the dual clip of 1.3"


def test_a_row_without_an_action_adds_nothing_to_any_aggregation() -> None:
    losses, counts = torch.tensor([1.0, 3.0], requires_grad=True), torch.tensor([0, 2, 0])
    for name, aggregate in AGGREGATIONS.items():
        found = aggregate(losses, counts, StepTotals(actions=2, sequences=1, rows=2, constant_tokens=4))
        (gradient,) = torch.autograd.grad(found, losses)

        assert found.item() == {"token_mean": 2.0, "sequence_mean": 2.0, "dr_grpo": 0.5}[name]
        assert gradient.tolist() == [found.item() / 4] * 2


def test_a_ratio_beyond_all_measure_stays_finite() -> None:
    for name, loss in POLICY_LOSSES.items():
        log_probs = torch.zeros(2, requires_grad=True)
        terms = loss(PolicyInputs(log_probs, torch.tensor([-1e4, 1e4]), -torch.ones(2), torch.tensor([2])))
        (gradient,) = torch.autograd.grad(terms.losses.sum(), log_probs)
        assert terms.losses.isfinite().all() and gradient.isfinite().all(), name

    terms = ppo(PolicyInputs(torch.zeros(2), torch.tensor([1e4, -1e4]), torch.tensor([-1.0, 1.0]), torch.tensor([2])))
    assert terms.ratios.tolist() == pytest.approx([math.exp(-20), math.exp(20)])
    assert terms.losses.tolist() == pytest.approx([0.8, -1.2]), "the default clip range is 0.2"


def test_the_names_of_the_configuration_are_those_of_the_registry() -> None:
    assert set(config.POLICY_LOSSES) == set(POLICY_LOSSES)
    fields = config.LossSection.model_fields
    assert set(fields["loss_aggregation"].annotation.__args__) == set(AGGREGATIONS)  # type: ignore[union-attr]


OWN = """
import torch
from pipeline.trainer.loss.policy import PolicyTerms

def halved(inputs):
    return -inputs.advantages * inputs.log_probs / 2

def wrong(inputs):
    return inputs.log_probs.sum()

def whole(inputs):
    ones = torch.ones_like(inputs.log_probs)
    return PolicyTerms(-inputs.log_probs, ones, ones.bool())

def by_row(inputs):
    return -inputs.row_means(inputs.log_ratios()).exp() * inputs.advantages
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_losses_of_test.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_losses_of_test", raising=False)


def test_a_loss_of_ones_own_is_aggregated_like_the_others(own: None) -> None:
    given = inputs()
    expected = slow_loss(lambda new, old, advantages: [x / 2 for x in slow_reinforce(new, old, advantages)], given,
                         "sequence_mean")  # fmt: skip

    terms = load_policy_loss("my_losses_of_test:halved")(given)

    check(terms, given, expected, "sequence_mean")
    assert load_policy_loss("my_losses_of_test:whole")(given).clipped.all()


def test_a_loss_of_ones_own_may_look_at_the_actions_of_a_row(own: None) -> None:
    given = inputs()

    terms = load_policy_loss("my_losses_of_test:by_row")(given)

    means = [torch.stack(new).sub(torch.stack(old)).mean()
             for new, old in zip(of_rows(given.log_probs), of_rows(given.old_log_probs), strict=True)]  # fmt: skip
    expected = [-mean.exp() * torch.stack(row) for mean, row in zip(means, of_rows(given.advantages), strict=True)]
    torch.testing.assert_close(terms.losses, torch.cat(expected))


def test_a_loss_of_ones_own_that_cannot_be_used_is_named(own: None) -> None:
    with pytest.raises(ConfigError, match=r"my_losses_of_test:wrong returned \(\) for actions \(21,\)"):
        load_policy_loss("my_losses_of_test:wrong")(inputs())
    with pytest.raises(ConfigError, match=r"trainer\.policy_loss: my_losses_of_test has no function missing"):
        load_policy_loss("my_losses_of_test:missing")
    with pytest.raises(ConfigError, match=r"trainer\.policy_loss: cannot import no_such_module.*looked in"):
        load_policy_loss("no_such_module:loss")


# Off-policy correction.

CAP, FLOOR = 1.5, 0.7


def slow_weights(kind: str, new: Row, behaviour: Row) -> list[float]:
    """Return the weights of one row's actions, from probabilities."""
    ratios = [math.exp(float(a)) / math.exp(float(b)) for a, b in zip(new, behaviour, strict=True)]
    product = math.prod(ratios)
    if kind == "token":
        return [min(ratio, CAP) for ratio in ratios]
    if kind == "sequence":
        return [min(product, CAP)] * len(ratios)
    if kind == "token_mask":
        return [ratio if ratio <= CAP else 0.0 for ratio in ratios]
    if kind == "sequence_mask":
        return [product if product <= CAP else 0.0] * len(ratios)
    if kind == "icepop":
        return [ratio if FLOOR <= ratio <= CAP else 0.0 for ratio in ratios]
    return [1.0] * len(ratios)


@pytest.mark.parametrize("kind", ["token", "sequence", "token_mask", "sequence_mask", "icepop", "none"])
@pytest.mark.parametrize("seed", range(3))
def test_the_weights_are_those_of_the_papers(kind: str, seed: int) -> None:
    given = inputs(seed)
    log_probs, behaviour, counts = given.log_probs.detach(), given.old_log_probs, given.counts

    found = importance_weights(log_probs, behaviour, counts, kind, cap=CAP, floor=FLOOR)

    expected = [
        weight
        for new, old in zip(of_rows(log_probs), of_rows(behaviour), strict=True)
        for weight in slow_weights(kind, new, old)
    ]
    assert found.weights.tolist() == pytest.approx(expected, rel=1e-4)
    assert not importance_weights(given.log_probs, behaviour, counts, kind, cap=CAP, floor=FLOOR).weights.requires_grad
    if kind != "none":
        assert torch.equal(found.cut, found.weights != found.ratios)
        assert 0 < int(found.cut.sum()) < sum(LENGTHS)


@pytest.mark.parametrize("kind", ["token", "sequence", "token_mask", "sequence_mask", "icepop"])
def test_a_ratio_of_the_cap_or_the_floor_is_not_cut_and_one_beyond_all_measure_is_finite(kind: str) -> None:
    counts = torch.tensor([2])
    at_bound = importance_weights(torch.zeros(2), torch.zeros(2), counts, kind, cap=1.0, floor=1.0)
    beyond = importance_weights(torch.zeros(2), torch.full((2,), -1e4), counts, kind, cap=CAP, floor=FLOOR)

    assert at_bound.weights.tolist() == [1.0, 1.0] and not at_bound.cut.any()
    assert beyond.ratios.isfinite().all() and beyond.cut.all()
    assert (beyond.weights == (CAP if kind in ("token", "sequence") else 0)).all()


def test_an_unknown_correction_is_refused() -> None:
    given = inputs()
    with pytest.raises(ValueError, match="importance_correction is 'tis'"):
        importance_weights(given.log_probs, given.old_log_probs, given.counts, "tis", cap=2, floor=0.5)
