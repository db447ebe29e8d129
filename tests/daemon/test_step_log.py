"""`metrics.jsonl` of a real run: each step has one line, through kills of the trainer and of the whole instance."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.support.daemon import SMALL, Daemon, task

pytestmark = pytest.mark.integration
__all__ = ["task"]


@pytest.mark.variant
def test_each_step_has_one_line_after_kills_of_trainer_and_supervisor(tmp_path: Path, task: Path) -> None:
    settings = (*SMALL, "trainer.save_every=4", "trainer.max_steps=0", "daemon.restart_delay_s=0.05")
    with Daemon(tmp_path, *settings, task=task) as daemon:
        for _ in range(3):
            daemon.wait_ready()
            daemon.wait_step(daemon.status()["step"] + 3)
            daemon.wait_replaced("trainer-0", daemon.signal(signal.SIGKILL, "trainer-0"))
        daemon.wait_ready()
        daemon.wait_step(daemon.status()["step"] + 1)
        # Shared memory goes with the instance: training continues at the last checkpoint, some steps back.
        daemon.signal(signal.SIGKILL)
        daemon.wait()
    with Daemon(tmp_path, *settings, task=task, name="again") as daemon:
        daemon.wait_ready()
        daemon.wait_step(daemon.status()["step"] + 2)
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0, daemon.errors
        ended = daemon.errors

    (path,) = tmp_path.glob("state/runs/*/metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert f"training ended: steps={len(lines)} " in ended
    assert all(line["rows"] == 32 and line["response_length_mean_tokens"] >= 1 for line in lines)
