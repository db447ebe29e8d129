"""A daemon whose worker has many small tickets in a streaming engine."""

import contextlib
import json
import os
import shutil
import signal

import pytest

from pipeline.telemetry.reader import MetricsReader
from pipeline.telemetry.slab import MetricsSlab
from tests.support import row_stream
from tests.support.daemon import SMALL, Daemon, telling_reward, total

pytestmark = pytest.mark.integration
STEPS = 7
KILLS = (1, 3)


def streaming(folder, task, *, workers=1):
    folder.mkdir()
    shutil.copy(row_stream.__file__, folder / "my_engine.py")
    settings = (
        *SMALL, f"trainer.max_steps={STEPS}", "buffer.max_staleness=0", "rollout.engine=my_engine:new_engine",
        "rollout.batch_size=1", "rollout.max_attempts=1", f"rollout.workers={workers}", *telling_reward(folder),
    )  # fmt: skip
    return Daemon(folder, *settings, task=task)


LYING = """
from my_engine import RowStream

class Lying(RowStream):
    def update_weights(self, actor, version):
        if version < 3:
            super().update_weights(actor, version)
        self._version = version

def new_engine(actor, *, directory, device, on_progress):
    return Lying(actor, on_progress, room_rows=64)
"""


@pytest.mark.timeout(400)
def test_a_worker_killed_with_many_tickets_in_hand_loses_none_and_changes_no_bit(tmp_path, task):
    with streaming(tmp_path / "undisturbed", task) as daemon:
        undisturbed = daemon.ended()
    with streaming(tmp_path / "killed", task) as daemon:
        daemon.wait_ready()
        with contextlib.closing(MetricsSlab.attach(daemon.shm_dir / "metrics")) as slab:
            reader = MetricsReader(slab)
            for step in KILLS:
                daemon.wait_step(step)
                pid = daemon.pids()["rollout-0"]
                daemon.wait_until(
                    lambda: (reader.read().value("rlhfd_rollouts_in_flight", worker="0") or 0) >= 4,
                    "it has four tickets in hand",
                )
                os.kill(pid, signal.SIGKILL)
                daemon.wait_replaced("rollout-0", pid)
            daemon.wait_step(KILLS[-1] + 1)
            metrics = daemon.metrics()
        killed = daemon.ended()

    assert killed == undisturbed
    assert total(metrics, "rlhfd_items_unaccounted") == 0
    assert total(metrics, "rlhfd_process_exits_total", role="rollout", reason="signal") == len(KILLS)
    assert total(metrics, "rlhfd_tickets_total", result="reissued") >= 4 * len(KILLS)
    assert total(metrics, "rlhfd_tickets_total", result="failed") == 0


def test_an_engine_that_ignores_version_3_seals_no_row_of_it_and_the_trainer_computes_log_probs(tmp_path, task):
    shutil.copy(row_stream.__file__, tmp_path / "my_engine.py")
    (tmp_path / "lying.py").write_text(LYING)
    settings = (
        *SMALL, "trainer.learning_rate=1e-5", "trainer.warmup_steps=0", "buffer.max_staleness=0",
        "rollout.engine=lying:new_engine", "rollout.batch_size=1", "rollout.log_probs=trainer",
        *telling_reward(tmp_path),
    )  # fmt: skip
    with Daemon(tmp_path, *settings, task=task) as daemon:
        assert daemon.wait() != 0

    assert "the engine computes with old weights: version=3 " in daemon.errors
    (lines,) = (tmp_path / "state" / "runs").glob("*/metrics.jsonl")
    steps = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3], "the rows of versions 0, 1 and 2"
    for step in steps:
        assert step["importance_ratio"] == pytest.approx(1.0, abs=1e-5)
        assert 0 <= step["behaviour_gap_nats"] < 1e-4, "engine and trainer agree in float32"
        assert step["behaviour_ratio_mean"] == pytest.approx(1.0, abs=1e-4)
