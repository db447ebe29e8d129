"""Moments of scores: of all rows of the steps, part of the state, published beside the models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.config.schema import Config
from pipeline.experience.running_moments import RATE, SCORES, Moments
from pipeline.models.weights.store import WeightsReader
from pipeline.storage.weights_header import WeightsVersion
from pipeline.trainer.learner import Learner
from pipeline.trainer.saving.rank_models import RankModels
from tests.support import tiny
from tests.support.protocol import House
from tests.trainer import test_learner as plain
from tests.trainer.test_learner import CPU, TRAINER, experience_for


def new_learner(seed: int = 0) -> Learner:
    return Learner(TRAINER, "grpo", tiny.llama(seed), kl_coef=0.0, observes_scores=True)


def test_scores_of_all_rows_of_all_steps_count_trained_or_not() -> None:
    learner, means = new_learner(), []
    for step in range(3):
        rows = experience_for(learner, "grpo", step)
        assert rows.info is not None
        rows.info["score"] = (rows.info["score"] * 10**step + step).float()
        rows.info["group_mixed"] = torch.arange(len(rows.sequences)) < 4
        scores = rows.info["score"].double().numpy()
        means.append((scores.mean(), np.square(scores).mean()))

        stats = learner.update([rows])

        weights = (1 - RATE) ** np.arange(step + 1)[::-1]
        mean, square = np.average(means, axis=0, weights=weights)
        found: Any = stats.reward_running_mean, stats.reward_running_stddev
        assert found == pytest.approx((mean, np.sqrt(square - mean**2)), rel=1e-9)
        assert stats.rows_trained == 4 and stats.rows == 8
        moments = Moments.of(learner.published()[SCORES])
        assert (moments.mean, moments.scale) == found


def test_moments_are_part_of_the_state_and_change_only_once_they_may() -> None:
    learner, seen = new_learner(), []
    live = learner.published()[SCORES]
    assert learner.tensors()[SCORES] is live

    learner.update([experience_for(learner, "grpo")], before_change=lambda: seen.append(live.clone()))

    assert not seen[0].any() and live[2] > 0


def test_a_learner_that_is_not_asked_for_them_publishes_none() -> None:
    learner = plain.new_learner("grpo")
    stats = learner.update([experience_for(learner, "grpo")])

    assert learner.published() == {} and SCORES not in learner.tensors()
    assert stats.reward_running_mean is None and stats.reward_running_stddev is None


def test_they_are_published_beside_the_models_in_float64_and_restored_with_them(tmp_path: Path) -> None:
    house, learner = House(tmp_path), new_learner()
    moments = learner.published()
    connection = house.connect()
    models = RankModels(Config(), {"actor": learner._actor}, connection, CPU, beside=moments)
    learner.update([experience_for(learner, "grpo")])
    expected = moments[SCORES].clone()

    published = models.writing(WeightsVersion(3), learner.tensors())()

    reader = WeightsReader(connection.weights_path)
    target = Moments.new_state()
    assert reader.fetch({SCORES: target}, partial=True).version == 3
    assert torch.equal(target, expected)
    assert len({*learner.published()} - {SCORES}) == 0
    reader.close()
    moments[SCORES].zero_()
    assert models.restore(published, learner.tensors())
    assert torch.equal(moments[SCORES], expected)
    house.close()
