"""A refusal is remembered as long as nothing changes that could lift it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.runtime.forkserver_refusal import ForkserverRefusal, conditions_of


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages on the path, with a .pth file and a sitecustomize."""
    folder = tmp_path / "packages"
    folder.mkdir()
    folder.joinpath("pyarrow-26.dist-info").mkdir()
    folder.joinpath("tools.pth").write_text("import tracer")
    folder.joinpath("sitecustomize.py").write_text("import tracer")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    return folder


def test_a_refusal_is_recalled_under_its_conditions_alone(tmp_path: Path) -> None:
    refusal = ForkserverRefusal(tmp_path)
    assert refusal.recall("a") == ""

    refusal.remember("a", "has a thread")

    assert [ForkserverRefusal(tmp_path).recall(conditions) for conditions in "ab"] == ["has a thread", ""]
    refusal.remember("b", "has a GPU")
    assert [refusal.recall(conditions) for conditions in "ab"] == ["", "has a GPU"]


def test_a_damaged_note_or_none_or_no_folder_is_no_refusal(tmp_path: Path) -> None:
    refusal = ForkserverRefusal(tmp_path)
    refusal.path.write_bytes(b"{")

    assert refusal.recall("a") == ""
    ForkserverRefusal(tmp_path / "missing").remember("a", "has a thread")


def edited(name: str) -> Callable[[Path], object]:
    return lambda folder: folder.joinpath(name).write_text("import nothing_else")


@pytest.mark.parametrize(
    "change",
    [edited("tools.pth"), edited("sitecustomize.py"), lambda folder: folder.joinpath("pyarrow-27.dist-info").mkdir()],
    ids=["pth", "sitecustomize", "package"],
)
def test_a_change_of_packages_or_of_what_runs_at_the_start_is_another_condition(
    packages: Path, change: Callable[[Path], object]
) -> None:
    before = conditions_of({}, "")
    assert conditions_of({}, "") == before

    change(packages)

    assert conditions_of({}, "") != before


def test_variables_and_the_type_of_the_model_are_conditions_and_those_of_a_session_are_not(tmp_path: Path) -> None:
    tmp_path.joinpath("config.json").write_text(json.dumps({"model_type": "qwen2"}))
    plain = conditions_of({"A": "1"}, "")

    assert conditions_of({"A": "1", "INVOCATION_ID": "7", "PWD": "/", "RLHFD_PARENT": "3"}, "") == plain
    assert (
        len({plain, conditions_of({"A": "2"}, ""), conditions_of({}, ""), conditions_of({"A": "1"}, str(tmp_path))})
        == 4
    )


def test_a_file_in_a_folder_on_the_path_that_has_no_packages_is_no_condition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = conditions_of({}, "")

    tmp_path.joinpath("state").mkdir()

    assert conditions_of({}, "") == before
