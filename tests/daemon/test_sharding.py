"""Two trainer ranks that hold shards of the model: a killed rank changes neither the weights nor the experience."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.runtime.latest_checkpoint import read_latest
from pipeline.trainer.saving.publishing import BESIDE_FROM_BYTES
from tests.daemon.test_ranks import SETTINGS, STEPS, finished, slow_reward, strike
from tests.support.daemon import Daemon, task  # noqa: F401 - a fixture

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

# Actor and critic together are large enough for a thread that publishes.
SHARDED = (*SETTINGS, 'trainer.sharding="full"', "trainer.save_every=4", "rollout.algorithm=ppo")


def test_a_killed_rank_of_a_sharded_trainer_changes_neither_weights_nor_experience(
    tmp_path: Path,
    task: Path,  # noqa: F811
) -> None:
    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
        settings = (*SHARDED, *slow_reward(tmp_path / name))
    with Daemon(tmp_path / "undisturbed", *settings, task=task) as daemon:
        expected = finished(daemon)
        latest = read_latest(daemon.run_dir / "checkpoints")
        checkpoint = daemon.run_dir / "checkpoints" / f"step-{STEPS:06d}"
        assert sum(file.stat().st_size for file in checkpoint.rglob("model.safetensors")) > BESIDE_FROM_BYTES

    with Daemon(tmp_path / "killed", *settings, task=task) as daemon:
        for step, name in ((1, "trainer-1"), (3, "trainer-0")):
            daemon.wait_step(step)
            # The threads of both ranks publish the version before.
            killed = strike(daemon, name, "train")
            daemon.wait_replaced(name, killed)
        found = finished(daemon)

    assert found == expected
    assert daemon.errors.count("resumed from shared memory") >= 2 and "rolled back" not in daemon.errors
    assert latest is not None and (latest.step, latest.complete) == (STEPS, True)


@pytest.mark.variant
def test_a_checkpoint_of_two_sharded_ranks_is_continued_by_one_whole_rank_and_by_two_again(
    tmp_path: Path,
    task: Path,  # noqa: F811
) -> None:
    def run(steps: int, *settings: str) -> str:
        with Daemon(tmp_path, *SHARDED, *settings, f"trainer.max_steps={steps}", task=task) as daemon:
            finished(daemon)
            return daemon.errors

    first = run(4)
    second = run(6, "trainer.world_size=1", 'trainer.sharding="none"')
    third = run(8)

    assert "resuming" not in first
    assert "resuming: step=4 " in second and "trainer.world_size=2->1" in second
    assert "resuming: step=6 " in third and "trainer.world_size=1->2" in third
