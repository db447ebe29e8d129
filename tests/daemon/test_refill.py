"""A run with dynamic sampling and several sources: kills and workers change no bit of it."""

import signal

import pytest

from tests.support.daemon import SMALL, Daemon, total

pytestmark = [pytest.mark.integration, pytest.mark.variant, pytest.mark.timeout(900)]
STEPS = 16
# Half the groups of 4 are flat or so: the reward is 1 for one first token in six. It takes time, so that a step is hit.
REWARD = """
import time

def score(input_ids, attention_mask, *, response_start, **_):
    time.sleep(0.01)
    return float(input_ids[response_start] % 6 == 0)
"""


def settings(folder, task):
    folder.mkdir()
    (folder / "rare.py").write_text(REWARD)
    source = f'{{path="{task / "prompts.jsonl"}"'
    return (
        *SMALL, f"trainer.max_steps={STEPS}", "trainer.save_every=4", "buffer.max_staleness=0", "rollout.max_refill=8",
        'rewards=["rare:score"]', "rollout.reward_timeout_s=0", f"model.actor={task / 'model'}",
        f"prompts.sources=[{source}, weight=3}}, {source}, weight=1}}]", "prompts.max_characters=8",
        "daemon.drain_timeout_s=0",
    )  # fmt: skip


def test_kills_workers_and_a_stop_change_no_bit_of_a_run_with_refill(tmp_path, task):
    with Daemon(tmp_path / "calm", *settings(tmp_path / "calm", task), arguments=("--serial",)) as daemon:
        calm = daemon.ended()

    folder = tmp_path / "killed"
    sets = (*settings(folder, task), "rollout.workers=2", "daemon.restart_limit=20")
    with Daemon(folder, *sets) as daemon:
        daemon.wait_ready()
        for step, name in ((1, "rollout-0"), (2, "buffer-0"), (3, "rollout-1"), (5, "trainer-0"), (6, "buffer-0")):
            daemon.wait_step(step)
            daemon.signal(signal.SIGKILL, name)
        daemon.wait_step(8)
        metrics = daemon.metrics()
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0, daemon.errors
    with Daemon(folder, *sets, name="again") as daemon:
        assert daemon.ended() == calm

    assert total(metrics, "rlhfd_items_dropped_total", reason="filtered") > 0
    assert total(metrics, "rlhfd_items_unaccounted") == 0
