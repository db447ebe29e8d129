"""The process of one tracker: follows the files of a run, and sends them to a library.

No process of the run waits for it, and none reads from it: one that hangs, fails or is killed costs the run nothing.
Its successor continues the same run of the library from the last note of its place.
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
from pipeline.tracking.adapters import Tracker, open_tracker
from pipeline.tracking.records import LineFollower, Place, SampleFollower, read_place, tracking_dir, write_place

_LOOK_S: Final = 1.0


def follow(
    run_dir: Path,
    name: str,
    opened: Callable[[Place, Path], Tracker],
    *,
    wait: Callable[[float], bool],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Send a run to a tracker until the end.

    Args:
        run_dir: Folder of the run.
        name: The tracker's.
        opened: Opens the tracker at the place of the process before, with the folder for its files.
        wait: Waits for some seconds; returns True at the end, after which the rest is sent.
        clock: Monotonic seconds.
    """
    folder = tracking_dir(run_dir)
    path = folder / f"{name}.json"
    place = read_place(path)
    tracker = opened(place, folder / name)
    place.run_id = tracker.run_id
    write_place(path, place)

    def note() -> float:
        tracker.flush()
        write_place(path, place)
        return clock()

    lines = LineFollower(run_dir, after_unix_s=place.unix_s)
    samples = SampleFollower(run_dir, after_unix_s=place.samples_unix_s)
    noted_s, is_ending = clock(), False
    try:
        while True:
            for record in lines.read():
                # Also amid a backlog, which takes long; never between lines of one time: a successor goes on by time.
                if record.unix_s != place.unix_s and clock() - noted_s >= _LOOK_S:
                    noted_s = note()
                tracker.log(record)
                place.step, place.unix_s = record.step, record.unix_s
            if rows := samples.read():
                tracker.table(max(place.step, 0), rows)
                place.samples_unix_s = samples.after_unix_s
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

    def opened(place: Place, folder: Path) -> Tracker:
        return open_tracker(
            name, run_id=place.run_id, run_name=run_dir.name, project=project, folder=folder, last_step=place.step
        )

    follow(run_dir, name, opened, wait=stopping.wait)
    return 0


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
