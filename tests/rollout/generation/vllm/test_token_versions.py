"""Spans of versions, by the tokens that a response has at each update."""

from __future__ import annotations

from pipeline.rollout.generation.vllm.token_versions import Span, extend


def test_each_token_is_of_the_version_that_was_there_as_it_came() -> None:
    """Under version 5 the response gets no token, and waits."""
    spans: list[Span] = []
    for version, tokens in [(4, 2), (5, 2), (6, 6)]:
        extend(spans, version, tokens)

    assert spans == [(4, 0, 2), (6, 2, 6)]


def test_a_response_without_a_token_has_no_span_and_the_same_version_again_is_one() -> None:
    spans: list[Span] = []
    for version, tokens in [(3, 0), (4, 2), (4, 5)]:
        extend(spans, version, tokens)

    assert spans == [(4, 0, 5)]
