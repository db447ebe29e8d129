"""The examples and the README's trainer run as they stand."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline import RaggedRows, connect
from pipeline.errors import ConfigError
from tests.support import tiny
from tests.support.daemon import (
    END_TIMEOUT_S,
    SMALL,
    START_TIMEOUT_S,
    Daemon,
    clean_environment,
    is_alive,
    total,
    wait_until,
)
from tests.support.experiences import made_up

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
EXAMPLE = EXAMPLES / "own_trainer.py"
# What the README's lines take as given.
GIVEN = """
import sys
import torch
import pipeline
from pipeline.models.loading import load_actor
from own_trainer import policy_gradient_loss
actor = load_actor(sys.argv[1], dtype="float32", device="cpu")
optimizer = torch.optim.SGD(actor.parameters(), lr=1e-3)
"""


def train(daemon: Daemon, model: Path, *options: str) -> list[int]:
    """Run the example with these options; return the versions that it published."""
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--runtime-dir", daemon.runtime_dir, "--model", model, *options],
        cwd=daemon.folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
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
def test_an_own_trainer_trains_publishes_and_can_be_replaced(tmp_path: Path, task: Path) -> None:
    # The README connects to run/rlhfd.
    with Daemon(tmp_path, *SMALL, "trainer.kind=external", task=task, runtime_dir=tmp_path / "run" / "rlhfd") as daemon:
        daemon.wait_ready()

        assert train(daemon, task / "model", "--steps=2") == [1, 2]
        assert train(daemon, task / "model", "--steps=1", "--ragged") == [3]
        seen = daemon.wait_until(lambda: (status := daemon.status())["step"] == 3 and status, "its steps are shown")
        assert seen["policy_version"] == 3
        assert seen["reward_mean"] is not None
        (row,) = [process for process in seen["processes"] if process["role"] == "trainer"]
        assert (row["index"], row["state"]) == (0, "left")
        assert f"The external trainer (pid {row['pid']}) has left, " in daemon.ask("why").stdout
        assert "trainer 0 has left" in daemon.ask("status").stdout
        assert re.search(rf"^trainer 0 +{row['pid']} +left ", daemon.ask("top").stdout, re.MULTILINE)

        with subprocess.Popen(
            [sys.executable, "-c", GIVEN + readme_trainer(), task / "model"],
            cwd=daemon.folder,
            # Beside the tree that is tested: the environment may hold another one.
            env={**clean_environment(), "PYTHONPATH": os.pathsep.join([str(EXAMPLE.parent), str(ROOT)])},
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


@pytest.mark.integration
def test_an_own_trainer_outlives_its_supervisor_and_goes_on_with_the_next_one(tmp_path: Path, task: Path) -> None:
    settings = (*SMALL, "trainer.kind=external")
    program = [sys.executable, str(EXAMPLE), "--runtime-dir", str(tmp_path / "run"), "--model", str(task / "model")]
    output = tmp_path / "trainer.out"
    with Daemon(tmp_path, *settings, task=task) as daemon:
        daemon.wait_ready()
        with output.open("wb") as file:
            trainer = subprocess.Popen(program, stdout=file, stderr=file, cwd=tmp_path, env=clean_environment())
        try:
            daemon.wait_step(2)
            run_id, family = daemon.status()["run_id"], daemon.family()
            daemon.signal(signal.SIGKILL)
            daemon.wait()
            wait_until(lambda: not any(map(is_alive, family)), END_TIMEOUT_S, "no process of it is left")

            with Daemon(tmp_path, *settings, task=task, name="next") as following:
                assert following.wait_ready()["run_id"] == run_id
                step = following.status()["step"]
                # More than it had leased before.
                following.wait_step(step + 5)
                (row,) = [row for row in following.processes() if row["role"] == "trainer"]
                assert (row["pid"], row["state"]) == (trainer.pid, "connected")
                with pytest.raises(ConfigError, match="trainer rank 0 is connected already"):
                    connect(following.runtime_dir)
                metrics = following.metrics()
                assert total(metrics, "rlhfd_items_unaccounted") == 0
                following.signal(signal.SIGTERM)
                assert trainer.wait(END_TIMEOUT_S) == 0, output.read_text()
                assert following.wait() == 0, following.errors
        finally:
            trainer.kill()
            trainer.wait()
    versions = [int(version) for version in re.findall(r" version=(\d+)$", output.read_text(), re.MULTILINE)]
    assert versions == list(range(1, len(versions) + 1)), "one process publishes, without a gap"


@pytest.mark.parametrize("holes", [False, True])
def test_the_loss_of_rows_without_padding_is_that_of_the_padded_batch(holes: bool) -> None:
    example, actor = runpy.run_path(str(EXAMPLE)), tiny.llama()
    experience = made_up(6, ppo=False, holes=holes)
    experience.sequences %= tiny.VOCABULARY_SIZE

    padded = example["policy_gradient_loss"](actor, experience)
    padded.backward()
    expected = [parameter.grad for parameter in actor.parameters()]
    actor.zero_grad()
    ragged = example["ragged_policy_gradient_loss"](actor, RaggedRows.of(experience))
    ragged.backward()

    torch.testing.assert_close(ragged, padded)
    for parameter, gradient in zip(actor.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.integration
def test_own_prompts_and_rewards_are_trained_on(tmp_path: Path, task: Path) -> None:
    shutil.copytree(EXAMPLES / "own_reward", tmp_path, dirs_exist_ok=True)
    settings = ("buffer.sample_batch_size=32", "trainer.max_steps=2", f"model.actor={task / 'model'}")

    with Daemon(tmp_path, *settings, arguments=("--config", "grpo.toml")) as daemon:
        assert daemon.wait(START_TIMEOUT_S) == 0, daemon.errors

    parts = daemon.ask("samples", "--json").stdout
    assert "my_rewards:descending" in parts and "my_rewards:short" in parts
    assert "trained 64" in daemon.errors and "errored" not in daemon.errors


@pytest.mark.integration
def test_a_model_calls_the_calculator_and_sees_its_answer(tmp_path: Path, task: Path) -> None:
    shutil.copytree(EXAMPLES / "calculator", tmp_path, dirs_exist_ok=True)
    settings = ("buffer.sample_batch_size=32", "trainer.max_steps=2", f"model.actor={task / 'model'}")

    with Daemon(tmp_path, *settings, "samples.per_minute=600", arguments=("--config", "grpo.toml")) as daemon:
        assert daemon.wait(START_TIMEOUT_S) == 0, daemon.errors

    shown = daemon.ask("samples").stdout
    # A call, its stop, the result between brackets, and the answer.
    assert re.search("\\d+<eos>\N{MATHEMATICAL LEFT ANGLE BRACKET}\\d+>\N{MATHEMATICAL RIGHT ANGLE BRACKET}", shown)
    assert "trained 64" in daemon.errors and "errored" not in daemon.errors


def test_the_page_on_environments_shows_the_calculator() -> None:
    page = (ROOT / "docs" / "environments.md").read_text()
    shown = "\n".join(line.removeprefix("    ") for line in page.splitlines())
    code = (EXAMPLES / "calculator" / "calculator.py").read_text()
    keys = (EXAMPLES / "calculator" / "grpo.toml").read_text()

    assert code[code.index("from pipeline") :].strip() in shown
    assert keys[keys.index("[rollout]") : keys.index("[trainer]")].strip() in shown


@pytest.mark.integration
def test_the_replay_buffer_gives_each_row_once_and_ends() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "replay_buffer.py"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    # Two producers, six appends of four rows each, the number of an append in each of its rows.
    assert done.stdout.splitlines()[-1] == f"rows=48 sum={4 * (sum(range(6)) + sum(range(100, 106)))} left=0"


def test_every_example_is_run_here_or_planned() -> None:
    """Others: the tests of recipes, of runs like those of TRL and verl, of example runs and of cluster examples."""
    planned = {path.parent.name for path in EXAMPLES.glob("*/*-card*.toml")}
    assert {path.name for path in EXAMPLES.iterdir() if path.name != "__pycache__"} - planned == {
        "calculator",
        "coming-from",
        "kuberay",
        "math",
        "own_reward",
        "own_trainer.py",
        "prompts.jsonl",
        "replay_buffer.py",
        "reward-model",
        "slurm",
    }
