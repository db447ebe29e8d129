"""The same seed gives the same experience and the same weights, for any number of workers and engines."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.telemetry.evaluations import FILE_NAME, read_evaluations
from tests.support.daemon import PROGRAM, SMALL, Daemon, only_run, telling_reward

pytestmark = pytest.mark.integration
STEPS = 4
NORMALIZED = ("trainer.normalize_values=true", "rollout.reward_scale=running")


def run(
    folder: Path, task: Path, *sets: str, arguments: tuple[str, ...] = (), program: Path | None = None
) -> tuple[str, str, str]:
    """Run to the end; return steps, fingerprint of the weights and digest of all that was trained on."""
    folder.mkdir()
    steps = (f"trainer.max_steps={STEPS}", "trainer.critic_warmup_steps=1")
    settings = (*SMALL, *steps, "buffer.max_staleness=0", *telling_reward(folder), *sets)
    with Daemon(folder, *settings, task=task, arguments=arguments, program=program) as daemon:
        end = daemon.ended()
    line = "training ended: steps={} weights={} experiences={}".format(*end)
    assert line in (folder / "state" / "log" / "rlhfd.log").read_text()
    return end


@pytest.mark.timeout(600)
@pytest.mark.parametrize("algorithm", [pytest.param("grpo", marks=pytest.mark.variant), "ppo"])
def test_one_worker_two_workers_and_serial_give_the_same_bit_for_bit(tmp_path, task, algorithm):
    setting = (f"rollout.algorithm={algorithm}", *(NORMALIZED if algorithm == "ppo" else ()))
    # Evaluations beside the rollouts change nothing.
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text("".join((task / "prompts.jsonl").read_text().splitlines(keepends=True)[:9]))
    evaluated = (f"evaluation.files=['{held_out}']", "evaluation.every=2", "evaluation.num_generations=3")

    # Executed: its processes hash texts in another way than the others do, and than each other.
    one = run(tmp_path / "one", task, *setting, program=PROGRAM)
    two = run(tmp_path / "two", task, *setting, "rollout.workers=2", *evaluated)
    serial = run(tmp_path / "serial", task, *setting, *evaluated, arguments=("--serial",))

    assert one == two == serial
    found = [read_evaluations(only_run(tmp_path / name / "state") / FILE_NAME) for name in ("two", "serial")]
    assert [[one.version for one in each] for each in found] == [[0, 2, 4]] * 2
    assert [[one.total for one in each] for each in found] == [[one.total for one in found[0]]] * 2
    assert one[0] == str(STEPS)
    checkpoint = Path("checkpoints") / f"step-{STEPS:06d}" / "model.safetensors"
    weights = [load_file(only_run(tmp_path / name / "state") / checkpoint) for name in ("one", "two", "serial")]
    before = load_file(task / "model" / "model.safetensors")
    assert any(not torch.equal(tensor, before[name]) for name, tensor in weights[0].items()), "something was learned"
    for name, tensor in weights[0].items():
        assert (tensor == weights[1][name]).all(), name
        assert (tensor == weights[2][name]).all(), name


@pytest.mark.variant
@pytest.mark.timeout(300)
def test_another_seed_gives_another_run(tmp_path, task):
    first = run(tmp_path / "first", task, "daemon.seed=1")
    second = run(tmp_path / "second", task, "daemon.seed=2")

    assert first[2] != second[2]
