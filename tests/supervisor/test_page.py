"""The page's feed of rollouts: what a cursor of any form gets; and its history on a disk that takes nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config.schema import Config
from pipeline.runtime.workspace import RunId, Workspace
from pipeline.supervisor.page import PageData, SampleFeed


@pytest.mark.parametrize("number", ["", "7", "x", "٣", "-1", "9" * 5000], ids=lambda number: f"{number:.3}")
def test_any_cursor_is_answered_with_the_next_one(tmp_path: Path, number: str) -> None:
    feed = SampleFeed(tmp_path)
    first = json.loads(feed.since(""))["cursor"]

    answer = json.loads(feed.since(f"{first.partition('.')[0]}.{number}"))

    assert answer == {"cursor": first, "samples": []}


def test_samples_that_cannot_be_read_for_a_time_are_answered_with_none(tmp_path: Path) -> None:
    assert not json.loads(SampleFeed(tmp_path / ("n" * 300)).since(""))["samples"]


def test_a_history_that_cannot_be_written_for_days_is_logged_once_a_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "state"
    config = Config.model_validate({"daemon": {"state_dir": str(state), "run_name": "r"}})
    workspace = Workspace(tmp_path, RunId("id", "identity", str(tmp_path), 1))
    page = PageData(config, workspace, None, is_local=True)  # type: ignore[arg-type]

    for _ in range(3):
        state.touch()
        for _ in range(100):
            page.save()
        state.unlink()
        page.save()
        shutil.rmtree(state)

    assert caplog.text.count("history not written") == 3


def test_an_answer_takes_one_look_at_the_cause_of_a_slow_run(tmp_path: Path) -> None:
    config = Config.model_validate({"daemon": {"state_dir": str(tmp_path / "state"), "run_name": "r"}})
    workspace = Workspace(tmp_path, RunId("id", "identity", str(tmp_path), 1))
    looks = []

    def why() -> dict[str, Any]:
        looks.append(1)
        return {"sentences": ["It waits."], "processes": [{"name": "rollout-0", "activity": "sample"}]}

    def answer(found: Mapping[str, Any] | None = None) -> dict[str, Any]:
        workers = [{"name": f"rollout-{index}", "role": "rollout", "index": index} for index in range(2)]
        return {"why": (found or why())["sentences"][0], "buffer": {}, "processes": workers}

    status = SimpleNamespace(status=answer, watchdog=SimpleNamespace(why=why))
    page = PageData(config, workspace, status, is_local=True)  # type: ignore[arg-type]

    shown = json.loads(page.live(0.0))

    assert len(looks) == 1
    assert (shown["status"]["why"], shown["why"]) == ("It waits.", ["It waits."])
    assert [process["activity"] for process in shown["status"]["processes"]] == ["sample", ""]
