"""Means over all rows of a step, of all ranks, that the learner does not need: of columns of `info`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, Self

import numpy as np

from pipeline.config.identity import run_dir
from pipeline.config.rewards import (
    function_labels,
    may_have_numbers,
    part_labels,
    reward_functions,
    reward_models,
)
from pipeline.config.schema import Config
from pipeline.experience.extent_format import Array
from pipeline.experience.ragged import RaggedRows
from pipeline.telemetry.metrics import MOST_NUMBERS
from pipeline.telemetry.number_names import COLUMN, NumberNames, sums_of

REWARD: Final = "reward/"
"""Begins the name of the mean of a reward function."""
_PART: Final = "reward."
_CUT: Final = "cut_ratio"
_WITHOUT_SIGNAL: Final = "groups_without_signal_ratio"
_STALENESS: Final = "staleness_mean_versions"


class RowMeans:
    """The means of a step by name, and the sums of a rank from which they are computed.

    The names are those of a line of ``metrics.jsonl``: "cut_ratio", the share of responses that were cut at their
    maximum length; "groups_without_signal_ratio", with GRPO, the share of groups whose scores are equal;
    "staleness_mean_versions", the versions that training was ahead of the rows; "reward/NAME", the mean score of each
    reward function or model, before its weight.

    Args:
        rewards: Column of `info` by name of a reward function or model, and its weight in that column.
        numbers: Names of the further numbers of reward functions, "reward/FUNCTION.NUMBER" of the rows that have one;
            None if no function may return them.
    """

    def __init__(self, rewards: Mapping[str, tuple[str, float]], numbers: NumberNames | None = None) -> None:
        self._rewards = rewards
        self._numbers = numbers
        self.names = (_CUT, _WITHOUT_SIGNAL, _STALENESS, *(f"{REWARD}{name}" for name in rewards))

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the means of a run."""
        numbers = NumberNames(run_dir(config)) if may_have_numbers(config) else None
        return cls(cls._of_functions(config), numbers)

    @staticmethod
    def _of_functions(config: Config) -> dict[str, tuple[str, float]]:
        if parts := part_labels(config):
            return {name: (f"{_PART}{name}", 1.0) for name in parts}
        if config.rollout.environment is not None:
            return {}
        # The score of a row is that of its one function or reward model, times the weight.
        functions = zip(function_labels(config), (reward.weight for reward in reward_functions(config)), strict=True)
        weights = [*functions, *((model.label, model.weight) for model in reward_models(config))]
        return {name: ("score", weight) for name, weight in weights if weight}

    def sums(self, batches: Sequence[RaggedRows], for_version: int) -> tuple[float, ...]:
        """Return the sum of each name over the rows of this rank, then the number of these rows, for each name.

        Args:
            batches: The batches of a step.
            for_version: The policy version that is trained on them.
        """
        places = MOST_NUMBERS if self._numbers is not None else 0
        sums, rows = [0.0] * (len(self.names) + places), [0.0] * (len(self.names) + places)
        for batch in batches:
            for at, values in enumerate(self._columns(batch.columns, for_version)):
                if values is not None:
                    sums[at] += float(values.sum(dtype=np.float64))
                    rows[at] += len(values)
            if places and (column := batch.columns.get(f"info.{COLUMN}")) is not None:
                for at, (total, count) in enumerate(zip(*sums_of(column), strict=True), start=len(self.names)):
                    sums[at] += total
                    rows[at] += count
        return (*sums, *rows)

    def means(self, ranks: Sequence[Sequence[float]]) -> dict[str, float]:
        """Return each mean by name from the sums of all ranks; NaN of a column that no row has.

        A further number of a reward function that no row has is left out.
        """
        totals = [math.fsum(values) for values in zip(*ranks, strict=True)]
        sums, rows = totals[: len(totals) // 2], totals[len(totals) // 2 :]
        means = [total / count if count else math.nan for total, count in zip(sums, rows, strict=True)]
        further = [] if self._numbers is None else self._numbers.names
        numbers = zip(further, means[len(self.names) :], strict=False)
        return {
            **dict(zip(self.names, means, strict=False)),
            **{f"{REWARD}{name}": mean for name, mean in numbers if not math.isnan(mean)},
        }

    def _columns(self, columns: Mapping[str, Array], for_version: int) -> list[Array | None]:
        mixed, version = columns.get("info.group_mixed"), columns.get("info.policy_version")
        return [
            columns.get("info.cut"),
            None if mixed is None else mixed == 0,
            None if version is None else np.maximum(for_version - version, 0),
            *(None if (found := columns.get(f"info.{column}")) is None else found / weight
              for column, weight in self._rewards.values()),
        ]  # fmt: skip
