"""Bytes between the hosts of a run, counted by their network interfaces, against the least possible."""

from __future__ import annotations

import pytest

from pipeline.models.weights.store import WeightsReader
from tests.support.daemon import SMALL, Daemon, telling_reward, total
from tests.support.hosts import Hosts

pytestmark = [pytest.mark.integration, pytest.mark.needs("ip")]
BEGIN, STEPS = 4, 40
# Of the least possible, of a model of 3.4 MB: frames, acknowledgements, and the questions of ten times a second.
MOST = 1.1


@pytest.mark.variant
@pytest.mark.timeout(900)
def test_a_step_carries_little_more_between_hosts_than_its_weights_rows_and_gradients(tmp_path, task, record_property):
    """Float32 weights, which go whole: nearly each of them changes in a step."""
    settings = (
        *SMALL, *telling_reward(tmp_path), "trainer.world_size=2", "trainer.nodes=2", "buffer.sample_batch_size=16",
        "buffer.max_staleness=0", "trainer.max_steps=0",
    )  # fmt: skip
    with (
        Hosts((1, 1), delay_s=0.005) as hosts,
        Daemon(tmp_path, *settings, *hosts.settings, task=task) as daemon,
    ):
        daemon.wait_step(BEGIN)
        nbytes = WeightsReader(daemon.shm_dir / "weights").nbytes
        (rollout,) = hosts.places("ray::_RolloutActor")
        (rank,) = hosts.places("ray::_RankActor")

        def seen():
            metrics = daemon.metrics()
            weights = sum(total(metrics, "rlhfd_weight_sent_bytes_total", kind=one) for one in ("whole", "difference"))
            rows = total(metrics, "rlhfd_remote_rank_bytes_total", data="rows_received")
            return daemon.status()["step"], weights, rows, hosts.carried(rollout), hosts.carried(rank)

        before = seen()
        daemon.wait_step(before[0] + STEPS)
        after = seen()

    steps, weights, rows = (now - then for now, then in zip(after[:3], before[:3], strict=True))
    (to_rollout, from_rollout), (to_rank, from_rank) = (
        [(now - then) / steps for now, then in zip(after[place], before[place], strict=True)] for place in (3, 4)
    )
    assert weights / steps == pytest.approx(nbytes, rel=2 / STEPS), "a version a step, once to the machine"
    # Of two ranks each sends and receives half of a gradient's sum, then half of the sums.
    least_to_rollout, least_to_rank, least_from_rank = nbytes, nbytes + rows / steps, nbytes
    record_property(
        "shown",
        f"bytes a step of {steps}: weights of {nbytes:,} B and {rows / steps:,.0f} B of rows a rank; "
        f"to the rollouts' host {to_rollout:,.0f} ({to_rollout / least_to_rollout:.3f} of the least), "
        f"from it {from_rollout:,.0f} (twice the rank's rows and what else there is), "
        f"to the rank's {to_rank:,.0f} ({to_rank / least_to_rank:.3f}), "
        f"from it {from_rank:,.0f} ({from_rank / least_from_rank:.3f})",
    )
    assert least_to_rollout < to_rollout < MOST * least_to_rollout
    assert least_to_rank < to_rank < MOST * least_to_rank
    assert least_from_rank < from_rank < MOST * least_from_rank
