"""A run of some passes over its prompts: kills, a stop and the number of workers do not move its end."""

import json
import re
import signal

import pytest

from tests.support.daemon import SMALL, Daemon

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
PROMPTS = 45
# It takes time, so that a step is hit.
REWARD = """
import time

def score(input_ids, attention_mask, *, response_start, **_):
    time.sleep(0.02)
    return float(input_ids[response_start] % 2 == 0)
"""


def settings(folder, task, *more):
    folder.mkdir()
    (folder / "rare.py").write_text(REWARD)
    lines = (task / "prompts.jsonl").read_text().splitlines()[:PROMPTS]
    (folder.parent / "few.jsonl").write_text("\n".join(lines))
    return (
        *SMALL, "trainer.max_epochs=2", "trainer.save_every=4", "buffer.max_staleness=0", 'rewards=["rare:score"]',
        "rollout.reward_timeout_s=0", f"model.actor={task / 'model'}", f"prompts.path={folder.parent / 'few.jsonl'}",
        "daemon.drain_timeout_s=0", *more,
    )  # fmt: skip


@pytest.mark.parametrize("refill", [0, pytest.param(8, marks=pytest.mark.variant)])
def test_a_run_of_two_passes_ends_at_the_same_step_through_kills_and_a_stop(tmp_path, task, refill):
    more = (f"rollout.max_refill={refill}",)
    with Daemon(tmp_path / "calm", *settings(tmp_path / "calm", task, *more), arguments=("--serial",)) as daemon:
        calm = daemon.ended()
    # 90 prompts of 4 rows are 11 steps of 32, and 8 rows are left; fewer steps if groups are dropped.
    assert calm[0] == "11" if not refill else 0 < int(calm[0]) < 11

    folder = tmp_path / "killed"
    sets = (*settings(folder, task, *more), "rollout.workers=2", "daemon.restart_limit=20")
    with Daemon(folder, *sets) as daemon:
        daemon.wait_ready()
        assert daemon.status()["max_steps"] == 11, "what it takes where no row is dropped"
        for step, name in ((1, "rollout-0"), (2, "buffer-0"), (3, "trainer-0")):
            daemon.wait_step(step)
            daemon.signal(signal.SIGKILL, name)
        daemon.wait_step(4)
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0, daemon.errors
    with Daemon(folder, *sets, name="again") as daemon:
        assert daemon.ended() == calm

    with Daemon(folder, *sets, name="after") as daemon:
        assert daemon.wait() == 0, daemon.errors
    assert f"is complete: step {calm[0]} is the last of trainer.max_epochs = 2" in daemon.output
    with Daemon(folder, *sets, "trainer.max_epochs=3", name="further") as daemon:
        assert int(daemon.ended()[0]) > int(calm[0])
    steps = [json.loads(line) for line in next(folder.glob("state/runs/*/metrics.jsonl")).read_text().splitlines()]
    numbers = [line["step"] for line in steps if "step" in line and "evaluation" not in line]
    assert numbers == sorted(set(numbers)), "no step is taken twice"


@pytest.mark.variant
def test_two_ranks_end_together_with_their_passes(tmp_path, task):
    sets = settings(tmp_path / "two", task, "trainer.world_size=2", "rollout.max_refill=8")
    with Daemon(tmp_path / "two", *sets) as daemon:
        assert daemon.wait() == 0, daemon.errors
    assert "training is complete" in daemon.errors
    assert len(set(re.findall(r"training ended: steps=(\d+)", daemon.errors))) == 1
