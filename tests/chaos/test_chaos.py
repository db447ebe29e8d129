"""Kill anything, at any moment: nothing finished is lost, nothing is trained twice, nothing is left behind.

The proof is in the weights: with ``max_staleness = 0`` a run that was killed hundreds of times ends, bit for bit, with
the weights and the experience of an undisturbed run of as many steps.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.chaos.campaign import TARGETS, Campaign, Target, trained_in
from tests.support.daemon import SMALL, Daemon, task, telling_reward, total  # noqa: F401 - a fixture
from tests.support.endings import Ending, endings

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

KILLS, FULL_KILLS = 5, 250
"""Kills of each of the three campaigns; the full ones by ``bin/test --chaos``."""

REPORT_EVERY = 50

SETTINGS = (
    *SMALL,
    "trainer.max_steps=0",
    "rollout.workers=2",
    "rollout.max_attempts=255",
    "daemon.restart_limit=100000",
    "daemon.restart_delay_s=0.02",
    "daemon.restart_delay_max_s=0.02",
    "daemon.hang_timeout_s=15",
)


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    return FULL_KILLS if request.config.getoption("--chaos") else KILLS


@pytest.fixture
def targets(request: pytest.FixtureRequest) -> tuple[Target, ...]:
    """Return the targets; the short campaign has no hangs, which tests/daemon/test_hangs.py tests one by one."""
    return TARGETS if request.config.getoption("--chaos") else tuple(target for target in TARGETS if not target.hangs)


def strike(campaign: Campaign, kills: int, say) -> None:
    """Kill `kills` times; a long campaign reports its progress."""
    for count in range(1, kills + 1):
        campaign.kill()
        if count % REPORT_EVERY == 0:
            say(f"{count} of {kills} kills")


def end_in_order(campaign: Campaign) -> None:
    """Stop the daemon; its totals balance to the end and nothing of it is left."""
    campaign.settle()
    daemon = campaign.daemon
    metrics = daemon.metrics()
    assert total(metrics, "rlhfd_items_unaccounted") == 0
    assert total(metrics, "rlhfd_items_dropped_total") == 0
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0, daemon.errors[-4000:]
    assert not daemon.shm_dir.exists()
    assert daemon.leftovers() == []


def ranks_ended(errors: str, ranks: int = 1) -> list[Ending]:
    """Return the last line of each rank, in order of ranks."""
    found = endings(errors)
    assert len(found) == ranks, errors[-4000:]
    return [found[name] for name in sorted(found)]


@pytest.mark.timeout(3600)
def test_after_any_number_of_kills_the_weights_are_those_of_a_run_that_nobody_disturbed(
    tmp_path: Path,
    task: Path,  # noqa: F811
    kills: int,
    targets: tuple[Target, ...],
    say,
    request: pytest.FixtureRequest,
):
    settings = (*SETTINGS, *telling_reward(tmp_path), "buffer.max_staleness=0")
    seed = request.config.getoption("--chaos-seed")
    with Campaign(tmp_path, *settings, task=task, seed=seed, targets=targets) as campaign:
        strike(campaign, kills, say)
        end_in_order(campaign)
        disturbed = ranks_ended(campaign.daemon.errors)
    say(campaign.report())

    folder = tmp_path / "undisturbed"
    folder.mkdir()
    telling_reward(folder)
    steps = f"trainer.max_steps={disturbed[0].steps}"
    with Daemon(folder, *settings, steps, task=task, arguments=("--serial",)) as serial:
        assert serial.wait(1800.0) == 0, serial.errors[-4000:]
    assert disturbed == ranks_ended(serial.errors)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_after_any_number_of_kills_each_of_two_ranks_has_the_digest_of_a_run_that_nobody_disturbed(
    tmp_path: Path,
    task: Path,  # noqa: F811
    kills: int,
    say,
    request: pytest.FixtureRequest,
):
    settings = (*SETTINGS, *telling_reward(tmp_path), "trainer.world_size=2", "buffer.max_staleness=0")
    with Campaign(tmp_path, *settings, task=task, seed=2 + request.config.getoption("--chaos-seed")) as campaign:
        strike(campaign, kills, say)
        end_in_order(campaign)
        disturbed = ranks_ended(campaign.daemon.errors, 2)
    say(campaign.report())

    folder = tmp_path / "undisturbed"
    folder.mkdir()
    telling_reward(folder)
    steps = f"trainer.max_steps={disturbed[0].steps}"
    with Daemon(folder, *settings, steps, task=task) as daemon:
        assert daemon.wait(1800.0) == 0, daemon.errors[-4000:]
    assert disturbed == ranks_ended(daemon.errors, 2)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_two_ranks_ahead_of_their_workers_train_every_row_exactly_once(
    tmp_path: Path,
    task: Path,  # noqa: F811
    kills: int,
    say,
    request: pytest.FixtureRequest,
):
    settings = (*SETTINGS, *telling_reward(tmp_path), "trainer.world_size=2", "buffer.max_staleness=2")
    with Campaign(tmp_path, *settings, task=task, seed=1 + request.config.getoption("--chaos-seed")) as campaign:
        strike(campaign, kills, say)
        end_in_order(campaign)
    say(campaign.report())

    steps = ranks_ended(campaign.daemon.errors, 2)[0].steps
    trained = campaign.trained_before_stops + trained_in(campaign.daemon.errors)
    assert trained == 64 * steps, "each step is 64 rows: none missing in it, none in two"
