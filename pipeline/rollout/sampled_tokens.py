"""Response tokens, counted as they are sampled."""

from __future__ import annotations

from collections.abc import Callable


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
