"""Spans of versions, beside a vLLM that keeps them and beside one that does not."""

from __future__ import annotations

from types import SimpleNamespace

from pipeline.rollout.generation.vllm.token_versions import TokenVersions


class Keeps:
    """An engine that keeps versions; it records those that it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def set_weight_version(self, version: str) -> None:
        self.told.append(version)


def of(tokens: int) -> SimpleNamespace:
    return SimpleNamespace(token_ids=list(range(tokens)))


def test_an_engine_that_keeps_versions_is_told_them_and_asked_for_the_spans() -> None:
    engine = Keeps()
    versions = TokenVersions(engine, -1)
    versions.update(0, {"7:0": 3})

    spans = versions.ended("7:0", SimpleNamespace(weight_versions=[SimpleNamespace(version="0", start=0, end=5)]))

    assert (engine.told, spans) == (["-1", "0"], [(0, 0, 5)])


def test_without_its_account_each_token_is_of_the_version_that_was_there_as_it_came() -> None:
    versions = TokenVersions(object(), 4)
    # Row 0 has two tokens, row 1 none; row 0 gets none under version 5, and waits.
    versions.update(5, {"7:0": 2, "7:1": 0})
    versions.update(6, {"7:0": 2, "7:1": 3})

    assert versions.ended("7:0", of(6)) == [(4, 0, 2), (6, 2, 6)]
    assert versions.ended("7:1", of(3)) == [(5, 0, 3)]
    assert versions.ended("7:2", of(4)) == [(6, 0, 4)]


def test_a_row_that_ends_or_is_dropped_leaves_nothing_for_the_next_of_its_name() -> None:
    versions = TokenVersions(object(), 0)
    versions.update(1, {"7:0": 2, "7:1": 2})
    versions.ended("7:0", of(3))
    versions.drop("7:1")

    assert [versions.ended(row, of(2)) for row in ("7:0", "7:1")] == [[(1, 0, 2)]] * 2


def test_the_same_version_again_is_one_span() -> None:
    versions = TokenVersions(object(), 0)
    versions.update(0, {"7:0": 2})

    assert versions.ended("7:0", of(5)) == [(0, 0, 5)]
