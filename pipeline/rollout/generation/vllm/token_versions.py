"""The version of the weights that sampled each token: vLLM's own account, or ours beside an older vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Span = tuple[int, int, int]
"""Version, first token and end of a run of tokens of one version."""


class TokenVersions:
    """The spans of the rows in hand.

    vLLM 0.24 has no `set_weight_version`. Without it an update notes the tokens that each row has so far.

    Args:
        engine: vLLM's.
        version: Version of the engine's weights at the start.
    """

    def __init__(self, engine: Any, version: int) -> None:
        self._tell = getattr(engine, "set_weight_version", None)
        self._version = version
        self._spans: dict[str, list[Span]] = {}
        if self._tell is not None:
            self._tell(str(version))

    def update(self, version: int, generated: Mapping[str, int]) -> None:
        """Begin another version.

        Args:
            version: Version of the tokens from now on.
            generated: By row, the tokens that it has so far.
        """
        if self._tell is not None:
            self._tell(str(version))
        else:
            for row, tokens in generated.items():
                self._end_at(row, tokens)
        self._version = version

    def ended(self, row: str, completion: Any) -> list[Span]:
        """Return the spans of a row that has ended, of which no more is kept."""
        if self._tell is not None:
            return [(int(span.version), span.start, span.end) for span in completion.weight_versions or ()]
        self._end_at(row, len(completion.token_ids))
        return self._spans.pop(row)

    def drop(self, row: str) -> None:
        """Forget a row."""
        self._spans.pop(row, None)

    def _end_at(self, row: str, tokens: int) -> None:
        spans = self._spans.setdefault(row, [])
        extend(spans, self._version, spans[-1][2] if spans else 0, tokens)


def extend(spans: list[Span], version: int, start: int, end: int) -> None:
    """Add the tokens from `start` to `end`, of a version, to the spans of a row."""
    if spans and spans[-1][0] == version:
        spans[-1] = version, spans[-1][1], end
    elif end > start:
        spans.append((version, start, end))
