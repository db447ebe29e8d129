"""The rewards of a call's rows: the weighted sums of the scores of its functions, kept with their parts.

Rows without a reward are in the log: each cause once with its prompt's file and line, then at ten times, a hundred...
"""

from __future__ import annotations

import collections
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from pipeline.errors import ConfigError, RewardError, counted
from pipeline.experience.vision_rows import VisionRows
from pipeline.models.flat_rows import Index
from pipeline.progress import Telemetry
from pipeline.prompts.types import Prompt
from pipeline.rollout.reward.given_rows import GivenRows
from pipeline.rollout.reward.numbers import FurtherNumbers, columns_of
from pipeline.rollout.reward.wire import RowScore, row_score

LARGEST: Final = float(torch.finfo(torch.float32).max)
"""The largest reward."""
PREFIX: Final = "reward."
"""Begins the names of parts in `info`: ``reward.NAME``."""
_MOST_CAUSES: Final = 1000
_FURTHER: Final = f"a cause beyond the first {_MOST_CAUSES:,}"
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


class RowRewards(ABC):
    """Adds up the scores of functions, row by row. A row without one of the scores has no reward: NaN.

    Args:
        names: A name of each function, at least one, for messages.
        telemetry: Told of each further number that is left out.
        weights: One a function; None: 1 each.
        labels: A name of each function, of its column in an experience's `info`; without them there is no column.
        problems: Counts and logs the rows without a reward; None: the first of them ends the call.

    Attributes:
        labels: As given.
        parts: ``(B, functions)`` float32, the results of the last call before their weights, NaN in a row without a
            reward.
        exact: ``(B,)`` float64, the rewards of the last call before they are rounded to float32: groups compare these.
        numbers: Further numbers of each row of the last call by name (`pipeline.rollout.reward.numbers`).
        problem: The first row without a reward of the last call; None if all had one.
        problems: As given.

    Raises:
        ConfigError: If there are no functions, or not one weight a function.
    """

    def __init__(
        self,
        names: Sequence[str],
        telemetry: Telemetry,
        *,
        weights: Sequence[float] | None = None,
        labels: Sequence[str] = (),
        problems: RewardProblems | None = None,
    ) -> None:
        if not names:
            raise ConfigError("no reward functions: give at least one")
        if weights is not None and len(weights) != len(names):
            raise ConfigError(f"{counted(len(weights), 'weight')} for {counted(len(names), 'reward function')}")
        self._names = list(names)
        self._telemetry = telemetry
        self._weights = list(weights or [1.0] * len(names))
        self.labels = list(labels)
        self.problems = problems
        self.problem: RowScore | None = None
        self.parts = torch.empty(0, len(names))
        self.exact = torch.empty(0, dtype=torch.float64)
        self.numbers: list[dict[str, float]] = []
        self._further = FurtherNumbers(labels, telemetry)
        self._most_rows: int | None = None

    def bound(self, most_rows: int | None) -> None:
        """Set the most rows that functions get at once; None, as without a call: all rows of a call."""
        self._most_rows = most_rows

    def begin(self, prompts: Sequence[Prompt], group_size: int) -> None:
        """Set the prompts of the rows that are scored next in one call, each of `group_size` rows."""
        if self.problems is not None:
            self.problems.begin([prompt.location for prompt in prompts], group_size)

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        response_start: Tensor,
        response_end: Tensor,
        gt_answer: Sequence[Any],
        vision: VisionRows | None = None,
        columns: Sequence[Mapping[str, Any]] | None = None,
    ) -> Tensor:
        """Score rows.

        Args:
            input_ids: ``(B, S)`` int64, right-padded.
            attention_mask: ``(B, S)``, 1 where the token is real.
            response_start: ``(B,)`` int64, column of the first response token.
            response_end: ``(B,)`` int64, column after the last response token.
            gt_answer: One element a row; a JSON value for functions in other processes, like the columns.
            vision: Images and videos of the rows, for the functions that name them.
            columns: The further columns of each row's prompt; None: there are none.

        Returns:
            ``(B,)`` float32, NaN in a row without a score.

        Raises:
            RewardError: If a row has no reward, without `problems`.
            RlhfdError: If the processes of the functions have ended or do not answer, or a new one cannot load the
                functions.
        """
        given = GivenRows(input_ids, attention_mask, response_start, response_end, gt_answer, vision, columns)
        return self._kept(self._divided(given))

    def _divided(self, rows: GivenRows) -> list[RowScore]:
        """Return the score of each row, by as many calls as the bound asks for."""
        count = len(rows.input_ids)
        size = self._most_rows or max(count, 1)
        parts = ((rows.part(slice(first, first + size)), first) for first in range(0, count, size))
        return [score for part, first in parts for score in self._scores(part, first)]

    @abstractmethod
    def _scores(self, rows: GivenRows, first: int) -> list[RowScore]:
        """Return the score of each row; a part is NaN where its function does not apply.

        Args:
            rows: Some rows of the call.
            first: Number of the first of them in the call.
        """

    def info(self, kept: Index | None, *, has_turns: bool = False) -> dict[str, Tensor]:
        """Return a column of each part of the last call, and of each further number, NaN where a row has none.

        A single part has no column without turns: it is the score.

        Args:
            kept: The rows that have elements; None for all of them.
            has_turns: Whether an environment gave rewards too.

        Returns:
            ``(n,)`` float32 each, by name.
        """
        rows = list(range(len(self.parts))) if kept is None else kept.tolist()
        columns = columns_of([self.numbers[row] for row in rows])
        if len(self.labels) < (1 if has_turns else 2):
            return columns
        parts = self.parts[rows].unbind(dim=1)
        return columns | {f"{PREFIX}{label}": part.clone() for label, part in zip(self.labels, parts, strict=True)}

    def _kept(self, scores: Sequence[RowScore]) -> Tensor:
        """Keep the scores of a call and return its rewards, ``(B,)`` float32, NaN in a row without one."""
        checked = [self._checked(row, score) for row, score in enumerate(scores)]
        found = [(row, score) for row, score in enumerate(checked) if score.problem]
        self.problem = found[0][1] if found else None
        if self.problems is not None:
            self.problems.report(found)
        self.numbers = [{} if score.problem else self._further.of_row(score.numbers) for score in checked]
        missing = [math.nan] * len(self._names)
        raw = [missing if score.problem else score.parts for score in checked]
        self.parts = torch.tensor(raw, dtype=torch.float32).reshape(len(checked), len(self._names))
        self.exact = torch.tensor(
            [math.nan if score.problem else sum(self._weighted(score)) for score in checked], dtype=torch.float64
        )
        return self.exact.float()

    def _checked(self, row: int, score: RowScore) -> RowScore:
        """Return the score with 0 for a function that does not apply, or why the row has no reward."""
        if score.problem:
            return score
        if all(map(math.isnan, score.parts)):
            return self._without(row, none_applies(self._names))
        parts = [0.0 if math.isnan(part) else part for part in score.parts]
        applied = RowScore(parts=parts, numbers=score.numbers)
        weighted = self._weighted(applied)
        return applied if is_reward(sum(weighted)) else self._without(row, too_large(weighted))

    def _weighted(self, score: RowScore) -> list[float]:
        return [weight * part for weight, part in zip(self._weights, score.parts, strict=True)]

    def _without(self, row: int, error: RewardError) -> RowScore:
        if self.problems is None:
            raise error.at(f"row {row}")
        return row_score([error], is_joint=False)


def none_applies(names: Sequence[str]) -> RewardError:
    """Return the error of a row to which no reward function applies; `names` are those of the functions."""
    said = f"{names[0] if len(names) == 1 else 'every reward function'} returned None: no reward applies to the row"
    return RewardError(said, cause=said)


def is_reward(value: float) -> bool:
    """Return whether a number can be a reward: it is finite in float32 too, in which an experience holds it."""
    return abs(value) <= LARGEST


def too_large(weighted: Sequence[float]) -> RewardError:
    """Return the error of a row whose weighted scores have a sum that is no reward."""
    said = "the sum of the weighted scores is beyond float32"
    return RewardError(f"{said}: {' + '.join(f'{part:g}' for part in weighted)}", cause=said)
