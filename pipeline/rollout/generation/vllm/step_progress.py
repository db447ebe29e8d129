"""Tokens of an engine, and whether its steps advance."""

from __future__ import annotations


class StepProgress:
    """Tokens sampled so far, and whether the steps advance.

    Keys and values that are computed again, because requests take the cache from each other, are no progress: without a
    new token only more computed tokens than ever since the last one are.

    Attributes:
        tokens: Sampled since the start.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._ended = 0
        self._seen = 0
        self._most_computed = 0

    def end(self, tokens: int) -> None:
        """Count the tokens of an ended response, which is not live any more."""
        self._ended += tokens

    def drop(self, live: int) -> None:
        """Forget the tokens of dropped responses, and the computed ones; `live` are the tokens of the others."""
        self._seen = self._ended + live
        self._most_computed = 0

    def look(self, live: int, computed: int) -> bool:
        """Return whether there is progress since the last look.

        Args:
            live: Tokens of the responses in hand.
            computed: Tokens of these whose keys and values are in the cache, prompts included.
        """
        before, self._seen = self._seen, self._ended + live
        if self._seen > before:
            self.tokens += self._seen - before
            self._most_computed = computed
            return True
        if computed > self._most_computed:
            self._most_computed = computed
            return True
        return False
