"""Tokens of a long rollout: metric, status and history move while it samples, and a kill takes none back."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.support.daemon import Daemon, total

pytestmark = [pytest.mark.integration, pytest.mark.variant, pytest.mark.timeout(600)]

# One ticket has 1,024 rows: seconds in the engine.
SETTINGS = ("rollout.batch_size=128", "rollout.num_generations=8", "buffer.sample_batch_size=1024",
            "trainer.max_steps=0", "daemon.restart_delay_s=0.02")  # fmt: skip


def test_tokens_move_during_a_long_rollout_and_a_killed_worker_takes_none_back(tmp_path: Path, task: Path) -> None:
    with Daemon(tmp_path, *SETTINGS, task=task) as daemon:
        daemon.wait_ready()

        def sampled() -> float:
            return total(daemon.metrics(), "rlhfd_tokens_total", kind="response")

        def grows(count: int) -> float:
            """Wait for `count` different totals while no further rollout ends; return the last."""
            totals: list[float] = []

            def seen() -> bool:
                metrics = daemon.metrics()
                ended = total(metrics, "rlhfd_response_length_tokens_count")
                now = total(metrics, "rlhfd_tokens_total", kind="response")
                if not totals or totals[0] != ended:
                    totals[:] = [ended, now]
                elif now != totals[-1]:
                    totals.append(now)
                return len(totals) > count

            daemon.wait_until(seen, f"{count} totals within one rollout")
            assert totals[1:] == sorted(totals[1:])
            return totals[-1]

        before = grows(3)
        status = json.loads(daemon.ask("status", "--json").stdout)
        assert status["tokens_per_s"] > 0
        pid = daemon.pids()["rollout-0"]
        daemon.signal(signal.SIGKILL, "rollout-0")
        after = sampled()
        assert after >= before
        daemon.wait_until(lambda: daemon.pids().get("rollout-0") not in (None, pid), "another worker")
        assert grows(3) > after
        daemon.wait_step(1)
        metrics = daemon.metrics()
        sealed = total(metrics, "rlhfd_response_length_tokens_sum")
        assert total(metrics, "rlhfd_tokens_total", kind="response") > sealed, "the lost rollout was sampled too"
        assert total(metrics, "rlhfd_items_unaccounted") == 0
        code, page = daemon.get("/api/live?after_s=0")
        assert code == 200 and any(point.get("tokens_per_s", 0) > 0 for point in json.loads(page)["history"])
