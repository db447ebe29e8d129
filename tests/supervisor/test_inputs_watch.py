"""Files of a run that change while it goes on are told of: a process that is replaced works by the change."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import user_modules
from pipeline.config.schema import Config
from pipeline.supervisor import inputs_watch
from pipeline.supervisor.inputs_watch import InputsWatch
from tests.support.daemon import wait_until

REWARD = "def score(*_, **__):\n    return {}\n"
CHANGED = (
    "changed while the run goes on: {}; processes that run work as before, a new one (as after a timeout) by the "
    "change: put it back, or restart"
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv(user_modules.FOLDER_VARIABLE, str(tmp_path))
    (tmp_path / "watched_rewards.py").write_text(REWARD.format(1.0))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    return Config.model_validate({
        "daemon": {"state_dir": str(tmp_path / "state"), "runtime_dir": str(tmp_path / "run")},
        "prompts": {"path": str(tmp_path / "prompts.jsonl")},
        "rewards": ["watched_rewards:score"],
    })  # fmt: skip


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_each_file_that_changes_is_told_of_once_and_once_it_is_as_before(
    tmp_path: Path, run: Config, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    watch = InputsWatch(run)
    watch.look()
    assert said(caplog) == []

    (tmp_path / "watched_rewards.py").write_text(REWARD.format(100.0))
    watch.look()
    watch.look()
    assert said(caplog) == [CHANGED.format("code of watched_rewards:score")]

    (tmp_path / "prompts.jsonl").write_text('{"prompt": "another"}\n')
    watch.look()
    assert said(caplog) == [CHANGED.format(f"prompts {tmp_path / 'prompts.jsonl'}")]

    (tmp_path / "watched_rewards.py").write_text(REWARD.format(1.0))
    watch.look()
    assert said(caplog) == ["as at the start again: code of watched_rewards:score"]


def test_files_that_are_gone_or_cannot_be_read_are_no_change(
    tmp_path: Path, run: Config, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = InputsWatch(run)

    (tmp_path / "prompts.jsonl").unlink()
    watch.look()

    def fails(config: Config) -> dict[str, str]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(inputs_watch, "inputs_of", fails)
    watch.look()
    assert said(caplog) == []


def test_a_changed_file_that_is_gone_or_cannot_be_read_is_not_as_at_the_start(
    tmp_path: Path, run: Config, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    watch = InputsWatch(run)
    prompts = tmp_path / "prompts.jsonl"
    text = prompts.read_text()
    prompts.write_text('{"prompt": "another"}\n')
    watch.look()
    assert said(caplog) == [CHANGED.format(f"prompts {prompts}")]

    prompts.unlink()
    watch.look()
    with monkeypatch.context() as patch:
        patch.setattr(inputs_watch, "inputs_of", lambda config: (tmp_path / "none").read_text())
        watch.look()
    assert said(caplog) == []

    prompts.write_text(text)
    watch.look()
    assert said(caplog) == [f"as at the start again: prompts {prompts}"]


def test_a_thread_looks_until_it_is_stopped(
    tmp_path: Path, run: Config, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs_watch, "_INTERVAL_S", 0.01)
    watch = InputsWatch(run)
    watch.start()

    (tmp_path / "watched_rewards.py").write_text(REWARD.format(100.0))
    wait_until(lambda: caplog.records, 10.0, "the warning")
    watch.stop()
    watch._thread.join(10.0)

    assert not watch._thread.is_alive()


def test_files_that_cannot_be_read_at_the_start_are_told_of(
    run: Config, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(config: Config) -> dict[str, str]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(inputs_watch, "inputs_of", unreadable)

    InputsWatch(run).look()

    assert said(caplog) == ["the run's files cannot be read now: no change of them will be noticed while it goes on"]
