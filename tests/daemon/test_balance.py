"""Ranks among which rows are dealt take the step of one rank; test_ranks.py kills them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.test_ranks import finished, slow_reward
from tests.support.daemon import SMALL, Daemon
from tests.support.endings import Ending

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def lines(daemon: Daemon) -> list[dict[str, Any]]:
    """Return the line of each step of a run that has ended."""
    (path,) = daemon.folder.glob("state/runs/*/metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def ended(folder: Path, task: Path, *settings: str) -> tuple[dict[str, Ending], list[dict[str, Any]]]:
    """Run to the end in a folder; return each rank's last line, and the line of each step."""
    folder.mkdir()
    with Daemon(folder, *settings, *slow_reward(folder), task=task) as daemon:
        return finished(daemon), lines(daemon)


@pytest.mark.variant
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_two_ranks_with_rows_dealt_take_the_step_of_one_rank(tmp_path, task, sharding):
    small = (*SMALL, "buffer.max_staleness=0", "trainer.max_steps=2")
    _, of_one = ended(tmp_path / "one", task, *small, "trainer.gradient_accumulation_steps=2")

    of_two = ("trainer.world_size=2", f"trainer.sharding={sharding}")
    _, dealt = ended(tmp_path / "two", task, *small, *of_two)

    assert len(of_one) == len(dealt) == 2
    assert dealt[0]["rows"] == of_one[0]["rows"] == 64
    for name in ("loss", "policy_loss", "kl_loss", "gradient_norm", "reward_mean", "response_length_mean_tokens"):
        assert dealt[0][name] == pytest.approx(of_one[0][name], rel=1e-5, abs=1e-7), name
