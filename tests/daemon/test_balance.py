"""Ranks among which rows are dealt: the step of one rank, and the same run through kills."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.test_kills import balanced
from tests.daemon.test_ranks import SETTINGS, STEPS, finished, slow_reward, strike
from tests.support.daemon import SMALL, Daemon, Metrics
from tests.support.endings import Ending

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

RATIO = "rlhfd_rank_imbalance_ratio"


def lines(daemon: Daemon) -> list[dict[str, Any]]:
    """Return the line of each step of a run that has ended."""
    (path,) = daemon.folder.glob("state/runs/*/metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def imbalance(metrics: Metrics, rows: str) -> float:
    """Return how unequal the ranks' work was in the last step, of the rows "leased" or "trained"."""
    labels = ("rows", rows)
    return next(value for (name, own), value in metrics.items() if name == RATIO and labels in own)


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


@pytest.mark.variant
def test_kills_change_no_bit_of_a_run_with_rows_dealt(tmp_path, task):
    undisturbed, _ = ended(tmp_path / "undisturbed", task, *SETTINGS)
    folder = tmp_path / "killed"
    folder.mkdir()
    seen: list[tuple[float, float]] = []
    with Daemon(folder, *SETTINGS, *slow_reward(folder), task=task) as daemon:
        for name, activity, signalled in (("trainer-1", "train", 1), ("trainer-0", "wait_data", 3)):
            daemon.wait_step(signalled)
            killed = strike(daemon, name, activity, signal.SIGKILL)
            daemon.wait_replaced(name, killed)
            daemon.wait_ready()
            daemon.wait_step(signalled + 1)
            metrics = daemon.metrics()
            assert balanced(metrics)
            seen.append((imbalance(metrics, "leased"), imbalance(metrics, "trained")))

        assert finished(daemon) == undisturbed
    assert {ending.steps for ending in undisturbed.values()} == {STEPS}
    assert all(trained <= leased for leased, trained in seen)
    assert any(trained < leased for leased, trained in seen), seen
