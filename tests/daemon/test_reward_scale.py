"""Scores are divided by the deviation that was published with the version that sampled them, whoever dies."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest

from pipeline import recorded_batches
from pipeline.experience.running_moments import RATE
from tests.support.daemon import SMALL, Daemon, telling_reward

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
STEPS = 12
SETTINGS = (
    *SMALL,
    f"trainer.max_steps={STEPS}",
    "trainer.record=rows",
    "rollout.advantages=dr_grpo",
    "rollout.reward_scale=running",
    "buffer.max_staleness=2",
    "daemon.restart_delay_s=0.05",
)


def test_each_row_has_the_scale_of_its_version_whoever_dies(tmp_path: Path, task: Path) -> None:
    with Daemon(tmp_path, *SETTINGS, *telling_reward(tmp_path, pause_s=0.01), task=task) as daemon:
        for step, name in ((1, "trainer-0"), (3, "rollout-0"), (4, "trainer-0")):
            daemon.wait_step(step)
            daemon.wait_replaced(name, daemon.signal(signal.SIGKILL, name))
            daemon.wait_ready()
        assert daemon.wait() == 0, daemon.errors
        run = daemon.run_dir

    means, scales = [], {0: 1.0}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    batches = [*recorded_batches(run / "recording")]
    assert len(lines) == len(batches) == STEPS
    for step, (line, batch) in enumerate(zip(lines, batches, strict=True), 1):
        assert batch.info is not None and batch.reward is not None
        scores = batch.info["score"].double().numpy()
        means.append((scores.mean(), np.square(scores).mean()))
        mean, square = np.average(means, axis=0, weights=(1 - RATE) ** np.arange(step)[::-1])
        scales[step] = np.sqrt(square - mean**2)
        assert line["reward_running_stddev"] == pytest.approx(scales[step], rel=1e-9)
        assert line["reward_running_mean"] == pytest.approx(mean, rel=1e-9)
        divisors = np.array([scales[version] for version in batch.info["policy_version"].tolist()])
        np.testing.assert_allclose(batch.reward.numpy(), scores / divisors, rtol=1e-6)
    versions = {version for batch in batches for version in (batch.info or {})["policy_version"].tolist()}
    assert len(versions) >= 3 and len({scales[version] for version in versions}) >= 3
