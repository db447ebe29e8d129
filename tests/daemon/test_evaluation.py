"""Evaluations of a real daemon whose processes are killed while held-out prompts are in their hands."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.cli.evaluate import evaluate as eval_command
from tests.support.daemon import SMALL, Daemon, loaded_first

pytestmark = pytest.mark.integration
PROMPTS = 12
REWARD = """
import os, time
def score(input_ids, attention_mask, *, response_start, **row):
    time.sleep(float(os.environ.get("HELD_OUT_S", "0")) * bool(row.get("held_out")))
    return float(input_ids[response_start] % 5)
"""


def settings(folder: Path, task: Path) -> tuple[str, ...]:
    (folder / "telling.py").write_text(REWARD)
    lines = (task / "prompts.jsonl").read_text().splitlines()[:PROMPTS]
    held_out = [{**json.loads(line), "held_out": True} for line in lines]
    (folder / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    return (
        *SMALL, "buffer.max_staleness=0", 'rewards=["telling:score"]', "rollout.reward_timeout_s=0",
        "trainer.max_steps=4", "trainer.keep_checkpoints=1", f"evaluation.files=['{folder / 'held.jsonl'}']",
        "evaluation.every=2", "evaluation.num_generations=3", "evaluation.batch_size=2", "evaluation.pass_reward=2.0",
    )  # fmt: skip


def kill_amid_evaluation(daemon: Daemon, version: int, role: str) -> None:
    """Kill the process of a role as soon as some held-out prompts are done at this version, and not all."""

    def pid_of_role() -> int | None:
        status = daemon.status()
        evaluation = status["evaluation"]
        under_way = status["policy_version"] == version and 0 < evaluation["done"] < evaluation["prompts"]
        return next(process["pid"] for process in status["processes"] if process["role"] == role) if under_way else None

    pid = daemon.wait_until(pid_of_role, f"version {version} is being evaluated")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def evaluated(checkpoint: Path, sets: tuple[str, ...]) -> Any:
    words = [word for one in sets for word in ("--set", one)]
    found = CliRunner().invoke(eval_command, ["--model", str(checkpoint), *words, "--json"], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def test_each_due_version_is_evaluated_whole_and_once_whoever_is_killed(
    tmp_path: Path, task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = settings(tmp_path, task)
    with Daemon(tmp_path, *sets, task=task, environment={"HELD_OUT_S": "0.2"}) as daemon:
        daemon.wait_ready()
        kill_amid_evaluation(daemon, 0, "rollout")
        kill_amid_evaluation(daemon, 2, "buffer")
        kill_amid_evaluation(daemon, 4, "trainer")
        assert daemon.wait() == 0, daemon.errors
        run = daemon.run_dir
        assert daemon.leftovers() == []

    found = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert [(one["version"], one["total"]["prompts"], one["total"]["failed"]) for one in found] == [
        (version, PROMPTS, 0) for version in (0, 2, 4)
    ]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], "evaluation" in line) for line in lines] == [
        (0, True), (1, False), (2, False), (2, True), (3, False), (4, False), (4, True)
    ]  # fmt: skip
    best = max(found[1:], key=lambda one: (one["total"]["pass_at_1"], one["total"]["reward_mean"], -one["version"]))
    assert (run / "checkpoints" / "best").resolve().name == f"step-{best['version']:06d}"
    # A former best one goes with the next checkpoint.
    assert {folder.name for folder in (run / "checkpoints").glob("step-*")} == {"step-000002", "step-000004"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    alone = evaluated(run / "checkpoints" / "step-000004", sets)
    assert [alone[key] for key in ("total", "files", "plan")] == [found[-1][key] for key in ("total", "files", "plan")]


# The first flush of a line of version 4, the last one, fails.
FAILING = """
import errno
fsync, failures = os.fsync, []
def failing(descriptor):
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    if path.endswith("/evaluations.jsonl") and not failures and b'"version":4,' in open(path, "rb").read():
        failures.append(path)
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    fsync(descriptor)
os.fsync = failing
"""


@pytest.mark.variant
def test_a_serial_run_ends_though_its_last_evaluation_was_not_written_at_once(tmp_path: Path, task: Path) -> None:
    sets = settings(tmp_path, task)
    environment = loaded_first(tmp_path, FAILING)

    with Daemon(tmp_path, *sets, task=task, arguments=("--serial",), environment=environment) as daemon:
        assert daemon.wait() == 0, daemon.errors
        assert "an evaluation was not written, it is tried again" in daemon.errors
        found = [json.loads(line) for line in (daemon.run_dir / "evaluations.jsonl").read_text().splitlines()]

    assert [one["version"] for one in found] == [0, 2, 4]
