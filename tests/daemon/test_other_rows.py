"""Rows of a spool that were made with another configuration than the one that goes on."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.support.daemon import SMALL, Daemon


@pytest.mark.variant
@pytest.mark.timeout(600)
def test_a_serial_run_goes_on_without_the_rows_that_lack_log_probs_it_needs(tmp_path: Path, task: Path) -> None:
    settings = (*SMALL, "buffer.max_staleness=2")
    with Daemon(tmp_path, *settings, "rollout.log_probs=trainer", task=task) as daemon:
        daemon.wait_step(3)
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0, daemon.errors
    stopped_at = _number(r"training ended: steps=(\d+)", daemon.errors)
    spooled = _number(r"undelivered experiences spooled: rows=(\d+)", daemon.errors)
    assert spooled > 0

    more = ("rollout.log_probs=worker", f"trainer.max_steps={stopped_at + 2}")
    with Daemon(tmp_path, *settings, *more, task=task, name="serial", arguments=("--serial",)) as daemon:
        assert daemon.wait() == 0, daemon.errors

    assert f"spool taken in: rows={spooled} " in daemon.errors
    assert 'its rows have no log-probs of the policy: rollout.log_probs was "trainer"' in daemon.errors
    assert f"training ended: steps={stopped_at + 2} " in daemon.errors


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, text
    return int(found[1])
