"""Progress of long work: a heartbeat, with the numbers for `rlhfd status` and `rlhfd top` where they are known.

`SampledTokens` counts response tokens as they are sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pipeline.models.inputs import accepted_keywords


class ReportsProgress(Protocol):
    """A heartbeat with numbers."""

    def __call__(self, *, rows_done: int, rows: int, tokens: int | None = None) -> None:
        """Report progress.

        Args:
            rows_done: Rows of the call that are finished.
            rows: Rows of the call.
            tokens: Tokens sampled so far by the call, or by the engine since its start; None if the call samples none.
        """


def with_numbers(on_progress: Callable[..., None]) -> ReportsProgress:
    """Return a callback that takes the numbers of `ReportsProgress`, from one that may take no argument.

    Args:
        on_progress: Called with those of the numbers that its signature has.
    """
    taken = accepted_keywords(on_progress, {"rows_done": 0, "rows": 0, "tokens": None}).keys()

    def report(*, rows_done: int, rows: int, tokens: int | None = None) -> None:
        numbers = {"rows_done": rows_done, "rows": rows, "tokens": tokens}
        on_progress(**{name: numbers[name] for name in taken})

    return report


class SampledTokens:
    """Counts the response tokens of an engine as they are sampled, each once.

    Reports of the engine are counted as they come. The end of a request counts the tokens that no report named: those
    of its last step, or all of them if the engine makes no reports.

    Args:
        count: Called with each number of tokens.

    Attributes:
        in_hand: Tokens counted for requests that have not ended.
    """

    def __init__(self, count: Callable[[int], None]) -> None:
        self.in_hand = 0
        self._count = count
        self._reported = 0

    def reported(self, tokens: int) -> None:
        """Count the tokens since the last report.

        Args:
            tokens: Sampled so far by the engine's call; fewer than before are of a new call, whose predecessor has
                ended.
        """
        if tokens < self._reported:
            self.in_hand = self._reported = 0
        self._add(tokens - self._reported)
        self._reported = tokens

    def ended(self, tokens: int) -> None:
        """Count the rest of the tokens of ended requests.

        Args:
            tokens: All tokens of these requests.
        """
        self._add(max(0, tokens - self.in_hand))
        self.in_hand -= tokens

    def _add(self, tokens: int) -> None:
        self.in_hand += tokens
        if tokens:
            self._count(tokens)
