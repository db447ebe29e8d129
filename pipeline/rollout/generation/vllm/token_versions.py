"""The version of the weights that sampled each token of a response, by the tokens that it has at each update."""

from __future__ import annotations

Span = tuple[int, int, int]
"""Version, first token and end of a run of tokens of one version."""


def extend(spans: list[Span], version: int, end: int) -> None:
    """Add the tokens of a response up to `end` that no span has yet; a version sampled them."""
    start = spans[-1][2] if spans else 0
    if spans and spans[-1][0] == version:
        spans[-1] = version, spans[-1][1], end
    elif end > start:
        spans.append((version, start, end))
