"""Two trainer ranks: whichever process is killed, weights and digest of experience are those of an undisturbed run."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.telemetry.slab import MetricsSlab
from tests.daemon.test_kills import balanced
from tests.support.daemon import SMALL, Daemon, telling_reward, total
from tests.support.endings import Ending, endings

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

STEPS = 8
# Of each of the 32 rows that a worker scores in a step: a run does not end before its kills.
PAUSE_S = 0.01
ROWS_OF_HALF_A_VERSION = 32
SETTINGS = (
    *SMALL,
    f"trainer.max_steps={STEPS}",
    "trainer.world_size=2",
    "rollout.workers=2",
    "buffer.max_staleness=0",
    "daemon.restart_delay_s=0.02",
)


def slow_reward(folder: Path) -> tuple[str, str]:
    """Write a reward by which responses differ, and which takes its time; return the settings that use it."""
    return telling_reward(folder, pause_s=PAUSE_S)


def two_ranks(folder: Path, task: Path) -> Daemon:
    """Return a daemon in a folder of its own, not started."""
    folder.mkdir()
    return Daemon(folder, *SETTINGS, *slow_reward(folder), task=task)


def finished(daemon: Daemon) -> dict[str, Ending]:
    """Wait for the end; return each rank's last line."""
    assert daemon.wait() == 0, daemon.errors
    return endings(daemon.errors)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, task: Path) -> dict[str, Ending]:
    """Return each rank's last line of a run without a kill."""
    with two_ranks(tmp_path_factory.mktemp("ranks") / "undisturbed", task) as daemon:
        return finished(daemon)


@contextlib.contextmanager
def metrics_of(daemon: Daemon) -> Iterator[MetricsSlab]:
    slab = MetricsSlab.attach(daemon.shm_dir / "metrics")
    try:
        yield slab
    finally:
        slab.close()


def strike(daemon: Daemon, name: str, activity: str, number: signal.Signals = signal.SIGKILL) -> int:
    """Send a signal to a process while it is in an activity; return its pid."""
    role, _, index = name.partition("-")
    pid = daemon.wait_until(lambda: daemon.pids().get(name), f"{name} is up")
    with metrics_of(daemon) as slab:
        daemon.wait_until(
            lambda: slab.pid(role, int(index)) == pid and slab.progress(role, int(index)).activity == activity,
            f"{name} is in {activity}",
            # The passes of a step may take less than the usual pause, and no further step may come.
            poll_s=0.001,
        )
        os.kill(pid, number)
    return pid


def rows_here(daemon: Daemon) -> int:
    """Return the rows of this version that are rolled out: ready or leased."""
    with metrics_of(daemon) as slab:
        held = slab.conservation()
        return 0 if held is None else held.ready_items + held.leased_items


@pytest.mark.variant
def test_a_killed_rank_buffer_and_worker_change_no_rows_of_any_rank(tmp_path, task, undisturbed):
    """One run: a rank is killed in its step, then the buffer, then a worker whose half of a version's rows is late.

    That worker is stopped, and killed once the other half has arrived: these rows are not for the rank whose prompts
    come earlier.
    """
    with two_ranks(tmp_path / "killed", task) as daemon:
        daemon.wait_step(1)
        other = daemon.pids()["trainer-0"]
        killed = strike(daemon, "trainer-1", "train")
        daemon.wait_replaced("trainer-1", killed)
        daemon.wait_replaced("trainer-0", other)
        daemon.wait_ready()

        killed = strike(daemon, "buffer-0", "wait_data")
        daemon.wait_replaced("buffer-0", killed)
        daemon.wait_ready()

        daemon.wait_step(daemon.status()["step"] + 1)
        late = strike(daemon, "rollout-0", "generate", signal.SIGSTOP)
        daemon.wait_until(lambda: rows_here(daemon) >= ROWS_OF_HALF_A_VERSION, "the other worker's rows are there")
        metrics = daemon.metrics()
        assert balanced(metrics)
        leased, trained = (total(metrics, "rlhfd_rank_imbalance_ratio", rows=rows) for rows in ("leased", "trained"))
        assert 0 < trained <= leased
        os.kill(late, signal.SIGKILL)

        assert finished(daemon) == undisturbed


@pytest.mark.variant
@pytest.mark.parametrize(("name", "activity"), [("trainer-0", "train"), ("trainer-1", "wait_data")])
def test_the_successors_of_killed_ranks_continue_the_digest(tmp_path, task, undisturbed, name, activity):
    with two_ranks(tmp_path / "killed", task) as daemon:
        daemon.wait_step(2)
        killed = strike(daemon, name, activity)
        daemon.wait_replaced(name, killed)

        assert finished(daemon) == undisturbed


@pytest.mark.variant
def test_a_stopped_and_started_run_continues_the_digest_of_its_checkpoint(tmp_path, task, undisturbed):
    with two_ranks(tmp_path / "stopped", task) as first:
        first.wait_step(2)
        first.signal(signal.SIGTERM)
        assert {ending.steps for ending in finished(first).values()} != {STEPS}, "stopped before its end"
    with Daemon(first.folder, *SETTINGS, *slow_reward(first.folder), task=task, name="second") as second:
        assert finished(second) == undisturbed


@pytest.mark.variant
def test_both_ranks_log_one_digest(undisturbed):
    assert undisturbed.keys() == {"trainer-0", "trainer-1"}
    assert undisturbed["trainer-0"].experiences == undisturbed["trainer-1"].experiences
    assert undisturbed["trainer-0"].weights != undisturbed["trainer-1"].weights == "-"
