"""The weight of the KL: Ziegler's controller by hand, its bounds, its state; a constant weight has none."""

from __future__ import annotations

import math

import pytest
import torch

from pipeline.trainer.loss.kl_control import KlControl, next_kl_coef
from tests.trainer.test_learner import REFERENCE_SHIFT, ROWS, TRAINER, experience_of, new_learner


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        # target 0.05, 256 rows, horizon 2560: K = 0.1, as in the paper.
        (0.05, 0.01),
        (0.055, 0.01 * (1 + 0.1 * 0.1)),
        (0.045, 0.01 * (1 - 0.1 * 0.1)),
        (0.06, 0.01 * 1.02),
        (5.0, 0.01 * 1.02),
        (0.04, 0.01 * 0.98),
        (0.0, 0.01 * 0.98),
        (math.nan, 0.01),
        (math.inf, 0.01),
    ],
)
def test_a_step_changes_the_weight_by_its_clipped_relative_error(kl: float, expected: float) -> None:
    assert next_kl_coef(0.01, kl, 0.05, 256, 2560) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("kl", "factor"), [(5.0, 1.2), (0.0, 0.8)])
def test_rows_of_a_step_beyond_the_horizon_do_not_count(kl: float, factor: float) -> None:
    assert next_kl_coef(0.01, kl, 0.05, 60_000, 10_000) == pytest.approx(0.01 * factor, rel=1e-12)


def test_over_a_horizon_of_rows_a_constant_error_has_the_same_effect_in_many_steps_as_in_few() -> None:
    few, many = KlControl(0.1, 1.0, 1000), KlControl(0.1, 1.0, 1000)

    for _ in range(10):
        few.observe(1.1, 100)
    for _ in range(1000):
        many.observe(1.1, 1)

    assert few.kl_coef == pytest.approx(0.1 * 1.01**10)
    assert many.kl_coef == pytest.approx(0.1 * math.exp(0.1), rel=1e-4)


def test_the_state_is_the_weight_and_a_constant_weight_has_none() -> None:
    adaptive, constant = KlControl(0.1, 1.0, 100), KlControl(0.1, None, 100)
    adaptive.observe(9.0, 50)
    constant.observe(9.0, 50)
    assert (adaptive.kl_coef, constant.kl_coef) == (pytest.approx(0.11), 0.1)

    successor = KlControl(0.1, 1.0, 100)
    successor.tensors()["kl_coef"].copy_(adaptive.tensors()["kl_coef"])

    assert successor.kl_coef == adaptive.kl_coef
    assert successor.tensors()["kl_coef"].dtype == torch.float64
    assert constant.tensors() == {}
    assert "kl_coef" not in new_learner("grpo").tensors()


def test_a_learner_leads_its_weight_by_the_kl_of_all_its_rows() -> None:
    settings = {"kl_coef_target": 0.001}
    learner = new_learner("grpo", TRAINER.model_copy(update=settings), kl_coef=0.5, horizon_rows=80)
    experience = experience_of(learner._actor, "grpo")
    # Rows without signal count too: the KL is that of the policy, whatever is trained.
    assert experience.info is not None
    experience.info["group_mixed"] = torch.arange(ROWS) < 6
    kl = math.exp(-REFERENCE_SHIFT) - 1 + REFERENCE_SHIFT

    first, second = learner.update([experience]), learner.update([experience])

    assert first.kl_nats == pytest.approx(kl, rel=1e-5)
    assert (first.kl_coef, second.kl_coef) == (0.5, pytest.approx(0.5 * (1 + 0.2 * ROWS / 80), rel=1e-12))
    assert first.kl_loss == pytest.approx(0.5 * kl, rel=1e-4), "the weight of a step is that before its observation"


def test_without_a_horizon_of_its_own_a_learner_has_10_000_rows() -> None:
    learner = new_learner("grpo", TRAINER.model_copy(update={"kl_coef_target": 0.001}), kl_coef=0.5)

    learner.update([experience_of(learner._actor, "grpo")])

    assert learner._kl_coef == pytest.approx(0.5 * (1 + 0.2 * ROWS / 10_000), rel=1e-12)


def test_near_the_target_the_weight_follows_the_error_itself() -> None:
    settings = {"kl_coef_target": 0.005}
    learner = new_learner("grpo", TRAINER.model_copy(update=settings), kl_coef=0.5, horizon_rows=80)
    kl = math.exp(-REFERENCE_SHIFT) - 1 + REFERENCE_SHIFT
    assert 0.8 < kl / 0.005 < 1

    learner.update([experience_of(learner._actor, "grpo")])

    assert learner._kl_coef == pytest.approx(0.5 * (1 + (kl / 0.005 - 1) * ROWS / 80), rel=1e-6)
