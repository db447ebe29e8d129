"""The example and the README's trainer run as they stand, against a real daemon."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon import SMALL, Daemon, clean_environment, task, total  # noqa: F401 - a fixture

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "own_trainer.py"
# What the README's lines take as given.
GIVEN = """
import sys
import torch
import pipeline
from pipeline.models import load_actor
from own_trainer import policy_gradient_loss
actor = load_actor(sys.argv[1], dtype="float32", device="cpu")
optimizer = torch.optim.SGD(actor.parameters(), lr=1e-3)
"""


def train(daemon: Daemon, model: Path, steps: int) -> list[int]:
    """Run the example for so many steps; return the versions that it published."""
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--runtime-dir", daemon.runtime_dir, "--model", model, "--steps", str(steps)],
        cwd=daemon.folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [int(version) for version in re.findall(r"^step=\d+ reward=.* version=(\d+)$", done.stdout, re.MULTILINE)]


def readme_trainer() -> str:
    """Return the lines of the README that train."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (block,) = [block for block in blocks if "pipeline.connect" in block]
    return str(block)


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_an_own_trainer_trains_publishes_and_can_be_replaced(tmp_path: Path, task: Path) -> None:  # noqa: F811
    # The README connects to run/rlhfd.
    with Daemon(tmp_path, *SMALL, "trainer.kind=external", task=task, runtime_dir=tmp_path / "run" / "rlhfd") as daemon:
        daemon.wait_ready()

        assert train(daemon, task / "model", steps=3) == [1, 2, 3]

        with subprocess.Popen(
            [sys.executable, "-c", GIVEN + readme_trainer(), task / "model"],
            cwd=daemon.folder,
            env={**clean_environment(), "PYTHONPATH": str(EXAMPLE.parent)},
        ) as successor:
            try:
                daemon.wait_until(
                    lambda: total(daemon.metrics(), "rlhfd_policy_version", role="rollout") >= 5,
                    "the worker has weights of the second trainer",
                )
                metrics = daemon.metrics()
                daemon.signal(signal.SIGTERM)
                assert successor.wait(60) == 0, "it ends when the daemon drains"
            finally:
                successor.kill()
        assert total(metrics, "rlhfd_items_trained_total") >= 5 * 32
        assert total(metrics, "rlhfd_items_unaccounted") == 0
        assert daemon.wait() == 0, daemon.errors
