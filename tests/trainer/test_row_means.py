"""Means over the rows of a step: of all ranks, by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from pipeline.config.schema import Config
from pipeline.experience.ragged import RaggedRows
from pipeline.experience.types import Experience
from pipeline.trainer.process import progress_of_all_ranks
from pipeline.trainer.row_means import RowMeans
from pipeline.trainer.sharding.ranks import RankGroup
from pipeline.trainer.state import RankProgress


def batch(**info: list[Any]) -> RaggedRows:
    rows = len(next(iter(info.values())))
    columns = {name: torch.tensor(values) for name, values in info.items()}
    tokens, actions = torch.ones(rows, 2, dtype=torch.int64), torch.ones(rows, 1, dtype=torch.bool)
    return RaggedRows.of(Experience(tokens, attention_mask=tokens, action_mask=actions, info=columns))


def means_of(**sections: dict[str, Any]) -> RowMeans:
    return RowMeans.of(Config.model_validate(sections))


def test_means_are_over_the_rows_of_all_batches_of_all_ranks() -> None:
    means = RowMeans({"exact": ("reward.exact", 1.0)})
    first = [
        batch(cut=[True, False], group_mixed=[False, False], policy_version=[3, 5], **{"reward.exact": [1.0, 0.5]}),
        batch(cut=[True, True], group_mixed=[True, True], policy_version=[6, 4], **{"reward.exact": [0.0, 0.25]}),
    ]
    second = [batch(cut=[False] * 4, group_mixed=[True] * 4, policy_version=[5] * 4, **{"reward.exact": [2.0] * 4})]

    found = means.means([means.sums(first, 5), means.sums(second, 5)])

    # Staleness 2, 0, 0 (a version that was rolled back), 1 and four times 0.
    assert found == {
        "cut_ratio": 3 / 8, "groups_without_signal_ratio": 2 / 8, "staleness_mean_versions": 3 / 8,
        "reward/exact": 9.75 / 8,
    }  # fmt: skip


def test_a_column_that_no_row_has_is_no_number_and_one_that_some_rows_have_is_theirs() -> None:
    means = RowMeans({})

    found = means.means([means.sums([batch(policy_version=[1, 2]), batch(cut=[True, False])], 2)])

    assert math.isnan(found["groups_without_signal_ratio"])
    assert (found["cut_ratio"], found["staleness_mean_versions"]) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("sections", "found"),
    [
        ({"rewards": ["exact", "m:f"]}, {"reward/exact": 3.0, "reward/f": 5.0}),
        # The one function's score, times its weight.
        ({"rewards": [{"name": "exact", "weight": -2.0}]}, {"reward/exact": -0.5}),
        (
            {"rewards": ["exact"], "model": {"reward": "m"}},
            {"reward/exact": 3.0, "reward/model": 7.0},
        ),
        ({"rewards": [], "model": {"reward": "m"}}, {"reward/model": 1.0}),
        # With an environment the score has the rewards of turns, too.
        ({"rewards": ["exact"], "rollout": {"environment": "m:F"}}, {"reward/exact": 3.0}),
        ({"rewards": [], "rollout": {"environment": "m:F"}}, {}),
    ],
)
def test_each_reward_function_has_its_mean_before_its_weight(sections: dict[str, Any], found: dict[str, float]) -> None:
    means = means_of(**sections)
    rows = batch(score=[1.0], **{"reward.exact": [3.0], "reward.f": [5.0], "reward.model": [7.0]})

    shown = means.means([means.sums([rows], 0)])

    assert {name: value for name, value in shown.items() if name.startswith("reward/")} == found


def test_sums_travel_with_the_progress_of_a_rank_bit_for_bit(tmp_path: Path) -> None:
    own = RankProgress((1 << 63) - 1, 7, (0.1, math.pi, 1e300, 0.0))
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1)

    try:
        assert progress_of_all_ranks(RankGroup(torch.device("cpu")), own) == [own]
    finally:
        distributed.destroy_process_group()
