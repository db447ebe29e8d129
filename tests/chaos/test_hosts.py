"""Kill anything on any host of a cluster, or a host: what holds on one server holds on several (`test_chaos`).

The hosts are joined by a network that delays and loses frames (`tests.support.hosts`). Two have an actor each, one has
the second trainer rank, and none has room for another one's: what a lost host did waits until it is back.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
from pathlib import Path
from typing import Any

import pytest

from pipeline.trainer import setup
from tests.chaos.campaign import Campaign, Kill, Target, trained_in
from tests.chaos.test_chaos import ALONE, SETTINGS, end_in_order, ended_after, ranks_ended, strike, undisturbed
from tests.daemon.test_environment import ENVIRONMENT
from tests.daemon.test_environment import settings as turns_settings
from tests.support.daemon import Daemon, wait_until
from tests.support.hosts import Hosts

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.needs("ip")]

KILLS, FULL_KILLS, VLLM_KILLS = 3, 60, 60
DELAY_S, LOSS = 0.005, 0.005
_END_TIMEOUT_S = 60.0
TITLES = {
    "actor": "ray::_RolloutActor",
    "rank": "ray::_RankActor",
    "relay": "ray::WeightsRelay",
    "holder": "ray::WeightsHolder",
    "environment": "rlhfd: environment",
    "engine": " vllm",
}
"""Processes of hosts by the role of a target."""

SHORT = (Target("actor"), Target("rank"), Target("host", "killed"))
ROLES = (
    Target("rollout", "generate"),
    Target("rollout", "seal"),
    Target("rollout", "after seal"),
    Target("rollout", "fetch_weights"),
    Target("buffer"),
    Target("buffer", "wait_data"),
    Target("supervisor"),
    Target("supervisor", "drain"),
    Target("everything"),
    Target("host", "cut"),
    Target("host", "cut"),
    Target("host", "killed"),
    Target("host", "killed"),
    Target("actor"),
    Target("actor"),
    Target("relay"),
    Target("holder"),
)
RANKS = (
    Target("rank"),
    Target("rank"),
    Target("trainer", "train"),
    Target("trainer", "publish"),
    Target("trainer", "wait_data"),
    Target("trainer", "drain"),
)
TWO = ("trainer.world_size=2", "buffer.sample_batch_size=16", "buffer.max_staleness=0", "daemon.hang_timeout_s=20")

LEARNING = (
    "trainer.world_size=2", "rollout.workers=2", "trainer.max_steps=40", "trainer.learning_rate=1e-3",
    "trainer.warmup_steps=5", "trainer.decay_steps=0", "buffer.sample_batch_size=64", "rollout.max_length=10",
)  # fmt: skip
"""From a low start the reward of short prompts rises within some twenty steps."""
WARMUP_STEPS, DIGITS, SEEDS, ENDS, GAIN = 22, 3, 5, 8, 0.25


class HostsCampaign(Campaign):
    """A campaign that also kills what is on the hosts of a cluster, and hosts."""

    recovery_timeout_s = 300.0

    def __init__(self, hosts: Hosts, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._hosts = hosts

    def kill(self) -> Kill:
        """Kill the next target; whatever has no place without a lost host is up again before the next kill."""
        kill = super().kill()
        if kill.target.role == "host":
            self.daemon.wait_ready(self.recovery_timeout_s)
        return kill

    def _strike(self, target: Target) -> str:
        if target.role == "host":
            return self._strike_host(target)
        if target.role not in TITLES:
            return super()._strike(target)
        title = TITLES[target.role]
        found = self.daemon.wait_until(
            lambda: self._hosts.processes(title), f"a process {title} is up", self.recovery_timeout_s
        )
        os.kill(self._rng.choice(found), signal.SIGKILL)
        return ""

    def _strike_host(self, target: Target) -> str:
        host = self._rng.choice(self._hosts.numbers)
        if target.stage == "killed":
            self._hosts.lose(host)
            return target.stage
        left = f"node left the cluster: node={os.uname().nodename} address={self._hosts.address(host)} "
        before = self.daemon.errors.count(left)
        self._hosts.cut(host)
        self.daemon.wait_until(
            lambda: self.daemon.errors.count(left) > before,
            f"host {host} is out of the cluster",
            self.recovery_timeout_s,
        )
        self._hosts.join(host)
        return target.stage


@pytest.fixture
def is_full(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--chaos"))


def nothing_left(hosts: Hosts) -> None:
    wait_until(lambda: not hosts.left(), _END_TIMEOUT_S, f"nothing is left on the hosts: {hosts.left()}")


@pytest.mark.variant
@pytest.mark.timeout(7200)
def test_after_kills_on_hosts_and_of_hosts_the_end_is_that_of_one_server_that_nobody_disturbed(
    tmp_path: Path, task: Path, is_full: bool, say, request: pytest.FixtureRequest
):
    # Each of both folders gets the environment; with the hosts it takes time, so that there is something to hit.
    turns_settings(tmp_path / "undisturbed")
    settings = (*SETTINGS, *turns_settings(tmp_path), "trainer.max_steps=0", *TWO)
    (tmp_path / "answering.py").write_text(ENVIRONMENT.replace('os.environ.get("TURN_S", "0")', "0.05"))
    seed = 7 + request.config.getoption("--chaos-seed")
    targets = (*ROLES, *RANKS, Target("environment")) if is_full else SHORT
    with Hosts((1, 1, 1), delay_s=DELAY_S, loss=LOSS, seed=seed) as hosts:
        there = (*settings, *hosts.settings, "trainer.nodes=2")
        with HostsCampaign(hosts, tmp_path, *there, task=task, seed=seed, targets=targets) as campaign:
            disturbed = ended_after(campaign, FULL_KILLS if is_full else KILLS, say, ranks=2)
        nothing_left(hosts)
        say(f"frames lost: {hosts.lost_frames()}")

    assert disturbed == ranks_ended(undisturbed(tmp_path, task, settings, disturbed).errors, 2)


@pytest.mark.vllm
@pytest.mark.full
@pytest.mark.timeout(14400)
def test_kills_on_hosts_and_of_hosts_with_vllm_lose_no_row_and_train_none_twice(
    tmp_path: Path, task: Path, say, request: pytest.FixtureRequest
):
    settings = (
        *SETTINGS, *turns_settings(tmp_path), "trainer.max_steps=0", *TWO, *ALONE, "rollout.engine=vllm",
        "rollout.cache_bytes=64MiB", "daemon.hang_timeout_s=120", "trainer.nodes=2",
    )  # fmt: skip
    seed = 8 + request.config.getoption("--chaos-seed")
    targets = (*SHORT, Target("engine"), Target("environment"), Target("host", "cut"))
    with Hosts((1, 1, 1), delay_s=DELAY_S, loss=LOSS, seed=seed) as hosts:
        there = (*settings, *hosts.settings)
        with HostsCampaign(hosts, tmp_path, *there, task=task, seed=seed, targets=targets) as campaign:
            strike(campaign, VLLM_KILLS, say)
            end_in_order(campaign)
        nothing_left(hosts)
    say(campaign.report())

    steps = ranks_ended(campaign.daemon.errors, 2)[0].steps
    trained = campaign.trained_before_stops + trained_in(campaign.daemon.errors)
    assert trained == 32 * steps, "each step is 32 rows: none missing in it, none in two"


def rewards_of(folder: Path, task: Path, *settings: str) -> tuple[float, float]:
    """Train to the end; return the mean rewards of the first steps and of the last ones."""
    folder.mkdir()
    with Daemon(folder, *settings, task=task) as daemon:
        assert daemon.wait(1800.0) == 0, daemon.errors[-4000:]
    rewards = [json.loads(line)["reward_mean"] for line in (daemon.run_dir / "metrics.jsonl").read_text().splitlines()]
    return statistics.mean(rewards[:ENDS]), statistics.mean(rewards[-ENDS:])


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param((), id="the embedded engine"),
        pytest.param(("rollout.engine=vllm", "rollout.cache_bytes=64MiB"), id="vLLM", marks=pytest.mark.vllm),
    ],
)
def test_over_a_network_that_delays_and_loses_the_task_is_learned_as_on_one_server(
    tmp_path: Path, say, engine: tuple[str, ...]
):
    """With rows that may be stale: with fresh ones alone the runs are the same bit for bit."""
    task = tmp_path / "sort-digits"
    setup.prepare(task, warmup_steps=WARMUP_STEPS)
    lines = (task / "prompts.jsonl").read_text().splitlines(keepends=True)
    (task / "prompts.jsonl").write_text("".join(line for line in lines if len(json.loads(line)["answer"]) == DIGITS))
    with Hosts((1, 1, 1), delay_s=DELAY_S, loss=LOSS) as hosts:
        here = (*LEARNING, *engine)
        there = (*here, *hosts.settings, "trainer.nodes=2")
        found = [
            (
                rewards_of(tmp_path / f"there-{seed}", task, *there, f"daemon.seed={seed}"),
                rewards_of(tmp_path / f"here-{seed}", task, *here, f"daemon.seed={seed}"),
            )
            for seed in range(SEEDS)
        ]
    gains = [[last - first for first, last in runs] for runs in zip(*found, strict=True)]
    means, spreads = [statistics.mean(each) for each in gains], [statistics.stdev(each) for each in gains]
    say(
        f"gain of the mean reward, {SEEDS} seeds: over hosts {means[0]:.3f} (deviation {spreads[0]:.3f}), on one "
        f"server {means[1]:.3f} ({spreads[1]:.3f}); {gains}"
    )
    assert min(min(each) for each in gains) >= GAIN
    # Three standard errors of the difference of two means.
    assert abs(means[0] - means[1]) <= 3 * math.sqrt(sum(spread**2 for spread in spreads) / SEEDS)
