"""A tracker beside a real daemon: killed and stopped, it costs the run nothing, and the same run goes on."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from pipeline.config.sections import missing_tracker
from tests.support.daemon import SMALL, Daemon, descendants, total

pytestmark = [pytest.mark.integration, pytest.mark.variant]


def tracker_of(daemon: Daemon) -> list[int]:
    def is_tracker(pid: int) -> bool:
        try:
            return b"pipeline.tracking.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False

    return [pid for pid in descendants(daemon.pid) if is_tracker(pid)]


def test_a_tracker_that_is_killed_and_then_stopped_costs_the_run_nothing(tmp_path: Path, task: Path) -> None:
    if problem := missing_tracker("tensorboard"):
        (pytest.fail if os.environ.get("CI") else pytest.skip)(problem)
    sets = (*SMALL, "metrics.tracker=['tensorboard']", "trainer.max_steps=0")
    with Daemon(tmp_path, *sets, task=task) as daemon:
        daemon.wait_ready()
        note = daemon.run_dir / "tracking" / "tensorboard.json"
        daemon.wait_until(lambda: note.exists() and json.loads(note.read_text())["unix_s"] > 0, "a step is sent")
        run_id = json.loads(note.read_text())["run_id"]
        (first,) = tracker_of(daemon)

        os.kill(first, signal.SIGKILL)
        daemon.wait_until(lambda: tracker_of(daemon) not in ([], [first]), "it is started again")
        sent = json.loads(note.read_text())["unix_s"]
        daemon.wait_until(lambda: json.loads(note.read_text())["unix_s"] > sent, "it goes on")
        (second,) = tracker_of(daemon)
        os.kill(second, signal.SIGSTOP)
        step = daemon.status()["step"]
        daemon.wait_step(step + 3)

        assert json.loads(note.read_text())["run_id"] == run_id
        assert total(daemon.metrics(), "rlhfd_tracker_starts_total", tracker="tensorboard") == 2
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0, daemon.errors
        assert tracker_of(daemon) == []
        assert "tracker tensorboard has not ended within 15 s, it is killed" in daemon.errors


def test_a_serial_run_says_that_it_has_no_tracker(tmp_path: Path, task: Path) -> None:
    if problem := missing_tracker("tensorboard"):
        (pytest.fail if os.environ.get("CI") else pytest.skip)(problem)
    sets = (*SMALL, "metrics.tracker=['tensorboard']", "trainer.max_steps=1")

    with Daemon(tmp_path, *sets, task=task, arguments=("--serial",)) as daemon:
        assert daemon.wait() == 0, daemon.errors

    assert "metrics.tracker: no tracker runs with --serial" in daemon.errors
