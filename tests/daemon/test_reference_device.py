"""Whole runs with the reference in the workers, and in the trainer: the same training, the memory on the other side."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.trainer.recording.replay import report
from tests.daemon.test_ranks import SETTINGS as RANKS
from tests.daemon.test_ranks import finished, slow_reward, strike
from tests.support.daemon import SMALL, Daemon, Metrics, telling_reward, total

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

STEPS = 4
REFERENCE_BYTES = 60_000_000


@pytest.fixture(scope="module")
def reference(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a reference that is much larger than the actor."""
    folder = tmp_path_factory.mktemp("reference") / "large"
    config = AutoConfig.from_pretrained(task / "model")
    config.hidden_size, config.intermediate_size = 768, 2560
    config.num_attention_heads = config.num_key_value_heads = 6
    config.head_dim, config.num_hidden_layers = 128, 2
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    assert 4 * model.num_parameters() > REFERENCE_BYTES
    model.save_pretrained(folder)
    return folder


class Ran(NamedTuple):
    run: Path
    ended: tuple[str, ...]
    weights: dict[str, torch.Tensor]
    held_bytes: dict[str, int]
    metrics: Metrics
    errors: str


def ran(folder: Path, task: Path, *sets: str, kills: tuple[str, ...] = (), arguments: Any = ()) -> Ran:
    """Run to the end; during it, read the memory of each role without the shared memory that it maps."""
    folder.mkdir()
    settings = (
        *SMALL, f"trainer.max_steps={STEPS}", "buffer.max_staleness=0", "trainer.kl_coef=0.5", "trainer.record=rows",
        "rollout.max_refill=4",
        "trainer.learning_rate=4e-4", "daemon.restart_delay_s=0.05",
        *telling_reward(folder, pause_s=0 if arguments else 0.02), *sets,
    )  # fmt: skip
    held: dict[str, int] = {}
    metrics: Metrics = {}
    with Daemon(folder, *settings, task=task, arguments=arguments) as daemon:
        if not arguments:
            daemon.wait_step(1)
            for name in kills:
                killed = daemon.signal(signal.SIGKILL, name)
                daemon.wait_replaced(name, killed)
            daemon.wait_step(2)
            metrics = daemon.metrics()
            held = {name: own_bytes(daemon.pids()[name]) for name in ("rollout-0", "trainer-0")}
        end = daemon.ended()
        run = daemon.run_dir
        checkpoint = run / "checkpoints" / f"step-{STEPS:06d}"
        return Ran(run, end, load_file(checkpoint / "model.safetensors"), held, metrics, daemon.errors)


def own_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return sum(int(kib) << 10 for kib in re.findall(r"Rss(?:Anon|File):\s+(\d+)", text))


@pytest.mark.variant
def test_the_reference_in_the_trainer_trains_alike_and_no_worker_holds_it(
    tmp_path: Path, task: Path, reference: Path
) -> None:
    where = [f"model.reference={reference}", "model.reference_device=trainer"]

    worker = ran(tmp_path / "worker", task, where[0])
    trainer = ran(tmp_path / "trainer", task, *where, kills=("trainer-0", "rollout-0"))
    serial = ran(tmp_path / "serial", task, *where, arguments=("--serial",))

    held = {name: trainer.held_bytes[name] - worker.held_bytes[name] for name in trainer.held_bytes}
    assert held["rollout-0"] < -0.8 * REFERENCE_BYTES and held["trainer-0"] > 0.8 * REFERENCE_BYTES, held
    for one, is_run in ((worker, True), (trainer, False)):
        seconds = total(one.metrics, "rlhfd_process_time_seconds_total", role="rollout", activity="ref_logprob")
        assert (seconds > 0) == is_run
        assert total(one.metrics, "rlhfd_kl_mean_nats") > 0.1
    assert trainer.ended == serial.ended
    before = load_file(task / "model" / "model.safetensors")
    learned = max(float((tensor - before[name]).abs().max()) for name, tensor in trainer.weights.items())
    gap = max(float((tensor - worker.weights[name]).abs().max()) for name, tensor in trainer.weights.items())
    assert gap < 1e-5 < 1e-3 < learned, (gap, learned)
    assert trainer.weights.keys() == before.keys()
    sizes = [sum(file.stat().st_size for file in one.run.rglob("checkpoints/**/*") if file.is_file())
             for one in (worker, trainer)]  # fmt: skip
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01), "the checkpoint has no reference"

    lines: list[str] = []
    threads = torch.get_num_threads()
    try:
        assert report(trainer.run, STEPS, "cpu", debug=False, write=lines.append), lines
    finally:
        torch.set_num_threads(threads)
    assert lines[-1].endswith("equal to the recorded ones"), lines


@pytest.mark.variant
def test_two_sharded_ranks_of_which_one_is_killed_train_as_on_the_workers_reference(tmp_path: Path, task: Path) -> None:
    # Away from the actor, whose KL to itself has a gradient of rounding alone, which AdamW takes for a direction.
    model = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data *= 0.8
    model.save_pretrained(tmp_path / "reference")
    settings = (
        *RANKS, f"trainer.max_steps={STEPS}", "trainer.kl_coef=0.5", "trainer.learning_rate=4e-4",
        "trainer.sharding=full", f"model.reference={tmp_path / 'reference'}",
    )  # fmt: skip
    checkpoint = Path("checkpoints") / f"step-{STEPS:06d}" / "model.safetensors"
    for name in ("worker", "trainer"):
        (tmp_path / name).mkdir()
    with Daemon(tmp_path / "worker", *settings, *slow_reward(tmp_path / "worker"), task=task) as daemon:
        finished(daemon)
        expected = load_file(daemon.run_dir / checkpoint)
    ours = (*settings, "model.reference_device=trainer")
    with Daemon(tmp_path / "trainer", *ours, *slow_reward(tmp_path / "trainer"), task=task) as daemon:
        daemon.wait_step(1)
        killed = strike(daemon, "trainer-1", "train")
        daemon.wait_replaced("trainer-1", killed)
        finished(daemon)
        found = load_file(daemon.run_dir / checkpoint)

    before = load_file(task / "model" / "model.safetensors")
    learned = max(float((tensor - before[name]).abs().max()) for name, tensor in found.items())
    gap = max(float((tensor - expected[name]).abs().max()) for name, tensor in found.items())
    assert gap < 1e-5 < 1e-3 < learned, (gap, learned)


@pytest.mark.variant
def test_a_run_goes_on_with_the_reference_in_the_other_role(tmp_path: Path, task: Path) -> None:
    settings = (*SMALL, "buffer.max_staleness=2", "trainer.warmup_steps=0")
    steps, errors = [], []
    for role in ("worker", "trainer", "host"):
        ended = steps[-1] if steps else 0
        keys = (f"model.reference_device={role}", f"trainer.max_steps={ended + 2 if role == 'host' else 0}")
        with Daemon(tmp_path, *settings, *keys, task=task, name=role) as daemon:
            if role != "host":
                daemon.wait_step(ended + 2)
                daemon.signal(signal.SIGTERM)
            steps.append(int(daemon.ended()[0]))
            errors.append(daemon.errors)

    assert len(steps) == 3 and steps[0] < steps[1] < steps[2]
    assert all("resuming: step=" in one and "spool taken in: rows=" in one for one in errors[1:])
    assert "quarantined" not in errors[1]
    assert 'model.reference_device was "trainer"' in errors[2], "rows without log-probs of the reference are set aside"
