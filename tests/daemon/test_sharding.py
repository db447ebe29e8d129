"""Two trainer ranks that hold shards of the model: a killed rank changes neither the weights nor the experience."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.runtime.latest_checkpoint import read_latest
from pipeline.trainer.saving.publishing import BESIDE_FROM_BYTES
from tests.daemon.test_ranks import SETTINGS, STEPS, finished, slow_reward, strike
from tests.support.daemon import Daemon, only_run
from tests.support.endings import Ending

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

# Actor and critic together are large enough for a thread that publishes.
OF_CRITIC = "rollout.algorithm=ppo", "trainer.normalize_values=true", "rollout.reward_scale=running"
SHARDED = (*SETTINGS, 'trainer.sharding="full"', "trainer.save_every=4", *OF_CRITIC)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, task: Path) -> tuple[dict[str, Ending], Path]:
    """Return each rank's last line of a run without a kill, and its state, whose checkpoints are whole."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with Daemon(folder, *SHARDED, *slow_reward(folder), task=task) as daemon:
        expected = finished(daemon)
        latest = read_latest(daemon.run_dir / "checkpoints")
        checkpoint = daemon.run_dir / "checkpoints" / f"step-{STEPS:06d}"
        assert sum(file.stat().st_size for file in checkpoint.rglob("model.safetensors")) > BESIDE_FROM_BYTES
    assert latest is not None and (latest.step, latest.complete) == (STEPS, True)
    return expected, daemon.state_dir


@pytest.fixture
def undisturbed(whole: tuple[dict[str, Ending], Path]) -> dict[str, Ending]:
    return whole[0]


def killed(folder: Path, task: Path, *settings: str, after: int = 0) -> tuple[dict[str, Ending], str]:
    """Kill each rank once while it trains and both publish; return each rank's last line, and the log."""
    with Daemon(folder, *SHARDED, *slow_reward(folder), *settings, task=task) as daemon:
        for step, name in ((1, "trainer-1"), (2, "trainer-0")):
            daemon.wait_step(after + step)
            daemon.wait_replaced(name, strike(daemon, name, "train"))
        return finished(daemon), daemon.errors


def test_a_damaged_checkpoint_and_killed_ranks_of_a_sharded_trainer_change_neither_weights_nor_experience(
    tmp_path: Path, task: Path, whole: tuple[dict[str, Ending], Path]
) -> None:
    """The run goes back to the checkpoint before the damaged one, with its prompts, and on from there."""
    expected, state = whole
    shutil.copytree(state, tmp_path / "state")
    newest = only_run(tmp_path / "state") / "checkpoints" / f"step-{STEPS:06d}" / "model.safetensors"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 4
    newest.write_bytes(content)

    found, errors = killed(tmp_path, task, after=STEPS // 2)

    assert found == expected
    assert f"resuming: step={STEPS // 2} " in errors and f"step={STEPS // 2} instead of {STEPS}" in errors
    assert errors.count("resumed from shared memory") >= 2 and "rolled back" not in errors


@pytest.mark.variant
def test_ranks_without_the_state_of_each_version_go_back_and_end_with_the_same_weights(
    tmp_path: Path, task: Path, undisturbed: dict[str, Ending]
) -> None:
    found, errors = killed(tmp_path, task, "trainer.keep_state_every=3", "trainer.save_every=0")

    assert found == undisturbed
    assert "rolled back to the newest version with a training state: version=" in errors


@pytest.mark.variant
def test_a_checkpoint_of_two_sharded_ranks_is_continued_by_one_whole_rank_and_by_two_again(
    tmp_path: Path, task: Path
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
