"""The process of one tracker: follows the files of a run, and sends them to a library.

No process of the run waits for it, and none reads from it: one that hangs, fails or is killed costs the run nothing.
Its successor continues the same run of the library from the last note of its progress.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pipeline.runtime.lifeline import die_with_parent
from pipeline.tracking.adapters import TrackedRun, Tracker, open_tracker
from pipeline.tracking.records import (
    LineFollower,
    Progress,
    SampleFollower,
    read_progress,
    read_settings,
    tracking_dir,
    write_progress,
)

_LOOK_S: Final = 1.0


def follow(
    run_dir: Path,
    name: str,
    opened: Callable[[Progress, Path], Tracker],
    *,
    wait: Callable[[float], bool],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Send a run to a tracker until the end.

    Args:
        run_dir: Folder of the run.
        name: The tracker's.
        opened: Opens the tracker at the progress of the process before, with the folder for its files.
        wait: Waits for some seconds; returns True at the end, after which the rest is sent.
        clock: Monotonic seconds.
    """
    folder = tracking_dir(run_dir)
    path = folder / f"{name}.json"
    progress = read_progress(path)
    tracker = opened(progress, folder / name)
    progress.run_id = tracker.run_id
    write_progress(path, progress)

    def note() -> float:
        tracker.flush()
        write_progress(path, progress)
        return clock()

    noted_s = clock()

    def beat() -> None:
        nonlocal noted_s
        if clock() - noted_s >= _LOOK_S:
            noted_s = note()

    lines = LineFollower(run_dir, after_unix_s=progress.unix_s, beat=beat)
    samples = SampleFollower(run_dir, after_unix_s=progress.samples_unix_s)
    is_ending = False
    try:
        while True:
            for record in lines.read():
                # Also amid a backlog, which takes long; never between lines of one time: a successor goes on by time.
                if record.unix_s != progress.unix_s:
                    beat()
                tracker.log(record)
                progress.step, progress.unix_s = record.step, record.unix_s
            if rows := samples.read():
                tracker.table(max(progress.step, 0), rows)
                progress.samples_unix_s = samples.after_unix_s
            # Each turn, also without news: the time of the file is the heartbeat.
            noted_s = note()
            if is_ending:
                return
            is_ending = wait(_LOOK_S)
    finally:
        tracker.close()


def main(run_dir: Path, name: str, project: str) -> int:
    """Run a tracker until SIGTERM; return its exit code."""
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Its own samples and values are all that it may need.
    os.environ.setdefault("WANDB_SILENT", "true")

    def opened(progress: Progress, folder: Path) -> Tracker:
        settings = read_settings(run_dir)
        return open_tracker(name, TrackedRun(progress.run_id, run_dir.name, project, folder, settings, progress.step))

    follow(run_dir, name, opened, wait=stopping.wait)
    return 0


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
