"""A long run leaks no resource: memory, descriptors, mappings, sockets, shared memory."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.daemon import SMALL, Daemon, telling_reward, total

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.full]

SOAK_S = 1200.0
WARM_UP_S = 60.0
"""Time for the caches and allocators of a new process to reach their final size."""
RESTARTED = ("rollout-1", "buffer-0")
"""Killed by turns: the surviving processes must hold no resource of the dead ones."""
_WINDOW = 8
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Held(NamedTuple):
    """The resources of one process at one moment."""

    at_s: float
    resident_bytes: int
    descriptors: int
    sockets: int
    mappings: int


def held_by(pid: int, now_s: float) -> Held:
    """Return the resources of a process, from /proc."""
    folder = Path(f"/proc/{pid}")
    links = []
    for link in (folder / "fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(os.readlink(link))
    return Held(
        now_s,
        int((folder / "statm").read_text().split()[1]) * _PAGE_BYTES,
        len(links),
        sum(link.startswith("socket:") for link in links),
        len((folder / "maps").read_text().splitlines()),
    )


def slope(samples: list[tuple[float, float]]) -> float:
    """Return the median of the slopes between all pairs (Theil and Sen): a spike does not move it."""
    pairs = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for place, earlier in enumerate(samples)
        for later in samples[place + 1 :]
    ]
    return statistics.median(pairs)


def growth(samples: list[Held]) -> float:
    """Return the growth of the memory held between steps, in bytes an hour.

    During a step a trainer holds some 20 MiB more, and the share of samples during a step depends on the load of the
    machine. A leak raises the floor: the least of each 8 samples.
    """
    windows = [samples[start : start + _WINDOW] for start in range(0, len(samples) - _WINDOW + 1, _WINDOW)]
    floors = [min(window, key=lambda sample: sample.resident_bytes) for window in windows]
    return 3600 * slope([(sample.at_s, sample.resident_bytes) for sample in floors])


@pytest.mark.timeout(1800)
def test_what_each_process_holds_stays_flat(tmp_path: Path, task: Path, say):
    # Each step is like the first: rewards that differ from the start, and weights that hardly move. A run takes more
    # memory once its rewards differ, and that is no leak.
    steady = (*telling_reward(tmp_path), "trainer.learning_rate=1e-12")
    settings = (*SMALL, *steady, "trainer.max_steps=0", "rollout.workers=2", "daemon.restart_limit=1000")
    histories: dict[tuple[str, int], list[Held]] = defaultdict(list)
    segment_bytes = []
    with Daemon(tmp_path, *settings, task=task) as daemon:
        daemon.wait_ready()
        began_s = time.monotonic()
        restarts_due_s = [began_s + SOAK_S * share for share in (0.3, 0.5, 0.7)]
        while (now_s := time.monotonic()) < began_s + SOAK_S:
            pids = {"supervisor": daemon.pid, **daemon.pids()}
            for name, pid in pids.items():
                with contextlib.suppress(OSError):
                    histories[name, pid].append(held_by(pid, now_s))
            segment_bytes.append(
                sum(file.stat().st_blocks * 512 for file in daemon.shm_dir.iterdir() if file.is_file())
            )
            if restarts_due_s and now_s > restarts_due_s[0]:
                name = RESTARTED[len(restarts_due_s) % 2]
                restarts_due_s.pop(0)
                with contextlib.suppress(ProcessLookupError, KeyError):
                    os.kill(pids[name], signal.SIGKILL)
            # Metrics are part of the load.
            metrics = daemon.metrics()
            assert total(metrics, "rlhfd_items_unaccounted") == 0
            time.sleep(max(0.0, now_s + SOAK_S / 120 - time.monotonic()))
        steps = daemon.status()["step"]
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0, daemon.errors[-4000:]

    say(_table(histories, steps))
    assert len(set(segment_bytes)) == 1, f"shared memory grew or shrank: {sorted(set(segment_bytes))}"
    lived = {process: [sample for sample in samples if sample.at_s > samples[0].at_s + WARM_UP_S]
             for process, samples in histories.items()}  # fmt: skip
    watched = {process: samples for process, samples in lived.items() if len(samples) >= 20}
    assert {name for name, _ in watched} >= {"supervisor", "trainer-0", "rollout-0"}
    for (name, pid), samples in watched.items():
        for field in ("descriptors", "sockets", "mappings"):
            values = [getattr(sample, field) for sample in samples]
            half = len(values) // 2
            # One open connection more or less at the moment of a sample is no leak.
            assert max(values[half:]) <= max(values[:half]) + 2, f"{name} {pid}: {field} grow: {values}"
        resident = statistics.median(sample.resident_bytes for sample in samples)
        allowed = 0.02 * resident + (2 << 20)
        grown = growth(samples) / 3600 * (samples[-1].at_s - samples[0].at_s)
        assert grown <= allowed, f"{name} {pid}: resident memory grew by {grown:,.0f} B of {resident:,.0f} B"


def fifths(samples: list[Held]) -> str:
    """Return the least and the median of resident MiB in each fifth of the time."""
    size = max(1, len(samples) // 5)
    parts = [[one.resident_bytes >> 20 for one in samples[at : at + size]] for at in range(0, size * 5, size)]
    return " ".join(f"{min(part)}/{statistics.median(part):.0f}" for part in parts if part)


def _table(histories: dict[tuple[str, int], list[Held]], steps: int) -> str:
    lines = [
        f"{SOAK_S:g} s, {steps} steps; first and last sample of each process, slope after its first {WARM_UP_S:g} s"
    ]
    for (name, pid), samples in sorted(histories.items()):
        settled = [sample for sample in samples if sample.at_s > samples[0].at_s + WARM_UP_S]
        rate = f"{growth(settled) / (1 << 20):+8.1f} MiB/h" if len(settled) >= 20 else "   too short"
        first, last = samples[0], samples[-1]
        lines.append(
            f"  {name:<11} pid {pid:<8} {last.at_s - first.at_s:6.0f} s  resident {first.resident_bytes >> 20:4} -> "
            f"{last.resident_bytes >> 20:4} MiB {rate} (fifths {fifths(settled)})  "
            f"descriptors {first.descriptors} -> {last.descriptors}  sockets {first.sockets} -> {last.sockets}  "
            f"mappings {first.mappings} -> {last.mappings}"
        )
    return "\n".join(lines)
