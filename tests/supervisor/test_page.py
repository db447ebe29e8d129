"""The page's feed of rollouts: what a cursor of any form gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.supervisor.page import SampleFeed


@pytest.mark.parametrize("number", ["", "7", "x", "٣", "-1", "9" * 5000], ids=lambda number: f"{number:.3}")
def test_any_cursor_is_answered_with_the_next_one(tmp_path: Path, number: str) -> None:
    feed = SampleFeed(tmp_path)
    first = json.loads(feed.since(""))["cursor"]

    answer = json.loads(feed.since(f"{first.partition('.')[0]}.{number}"))

    assert answer == {"cursor": first, "samples": []}
