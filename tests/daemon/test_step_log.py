"""`metrics.jsonl` of a real run: each step has one line, through kills of the trainer and of the whole instance."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from pipeline.telemetry.samples import SampleReader, folder_of
from tests.support.daemon import SMALL, Daemon

pytestmark = pytest.mark.integration


@pytest.mark.variant
def test_each_step_has_one_line_after_kills_of_trainer_and_supervisor(tmp_path: Path, task: Path) -> None:
    settings = (*SMALL, "trainer.save_every=4", "trainer.max_steps=0", "daemon.restart_delay_s=0.05")
    with Daemon(tmp_path, *settings, task=task) as daemon:
        for _ in range(3):
            daemon.wait_ready()
            daemon.wait_step(daemon.status()["step"] + 3)
            daemon.wait_replaced("trainer-0", daemon.signal(signal.SIGKILL, "trainer-0"))
        daemon.wait_ready()
        daemon.wait_step(daemon.status()["step"] + 1)
        # Shared memory goes with the instance: training continues at the last checkpoint, some steps back.
        daemon.signal(signal.SIGKILL)
        daemon.wait()
    with Daemon(tmp_path, *settings, task=task, name="again") as daemon:
        daemon.wait_ready()
        daemon.wait_step(daemon.status()["step"] + 2)
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0, daemon.errors
        ended = daemon.errors

    (path,) = tmp_path.glob("state/runs/*/metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert f"training ended: steps={len(lines)} " in ended
    assert all(line["rows"] == 32 and line["response_length_mean_tokens"] >= 1 for line in lines)


def test_further_numbers_of_a_reward_are_in_the_lines_the_metrics_and_the_samples(tmp_path: Path, task: Path) -> None:
    (tmp_path / "numbered.py").write_text(
        "def score(input_ids, attention_mask, *, response_start, response_end, **_):\n"
        "    even = (response_end - response_start) % 2 == 0\n"
        "    return {'reward': float(even), 'two': 2.0, 'text': 'no'} | ({'even': 4.0} if even else {})\n"
    )
    settings = (*SMALL, "rewards=numbered:score", "trainer.max_steps=0", "samples.per_minute=6000")
    with Daemon(tmp_path, *settings, task=task) as daemon:
        daemon.wait_ready()
        daemon.wait_step(3)
        _, shown = daemon.get("/metrics")
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0, daemon.errors

    (run,) = tmp_path.glob("state/runs/*")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) >= 3 and {line["reward/score.two"] for line in lines} == {2.0}
    assert any(line.get("reward/score.even") == 4.0 for line in lines)
    assert 'rlhfd_reward_function_mean{function="score.two",role="trainer",worker="0"} 2.0' in shown
    assert 'rlhfd_reward_numbers_left_out_total{reason="invalid"}' in shown
    samples = SampleReader(folder_of(run)).read()
    assert samples and all(response.numbers["score.two"] == 2.0 for one in samples for response in one.responses)
    assert (
        daemon.errors.count("a further number of a reward is no finite number, the reward stands: name=score.text") == 1
    )
