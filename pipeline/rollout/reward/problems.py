"""Rows without a reward in the log: each cause once with its prompt's file and line, then at ten times, a hundred..."""

from __future__ import annotations

import collections
import logging
import math
from collections.abc import Sequence

from pipeline.progress import Telemetry
from pipeline.rollout.reward.wire import RowScore

_MOST_CAUSES = 1000
_FURTHER = f"a cause beyond the first {_MOST_CAUSES:,}"
"""A function may give each row a cause of its own, such as the keys of its result: these are counted as one."""

log = logging.getLogger(__name__)


class RewardProblems:
    """Counts and logs the rows without a reward.

    Args:
        telemetry: Told of each of them; says whether the log may quote the exception or the result of a function.
    """

    def __init__(self, telemetry: Telemetry = Telemetry.none()) -> None:
        self._telemetry = telemetry
        self._counts = collections.Counter[str]()
        self._locations: list[str] = []

    def begin(self, locations: Sequence[str], group_size: int) -> None:
        """Set the prompts of the rows that are scored next in one call.

        Args:
            locations: File and line of each prompt.
            group_size: Rows of each prompt (G).
        """
        self._locations = [location for location in locations for _ in range(group_size)]

    def report(self, problems: Sequence[tuple[int, RowScore]]) -> None:
        """Count and log the number among the rows, and the result, of each row without a reward."""
        for row, score in problems:
            self._telemetry.count("reward_errored", score.problem)
            cause = score.cause or score.problem
            if cause not in self._counts and len(self._counts) >= _MOST_CAUSES:
                cause = _FURTHER
            self._counts[cause] += 1
            count = self._counts[cause]
            if count == 1:
                text = score.text if self._telemetry.log_texts or not score.bare else score.bare
                location = f" prompt={self._locations[row]}" if row < len(self._locations) else ""
                log.warning("reward errored: row=%d reason=%s: %s%s", row, score.problem, text, location)
            elif math.log10(count).is_integer():
                log.warning("reward errored again: cause=%s times=%d", cause, count)
        self._locations = []
