"""The ranks of an external trainer: connected, or left, as their locks and metrics slots show.

A connected rank holds the lock of its rank (`pipeline.trainer.connect`), and the kernel releases the lock at any death.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from pipeline.runtime.transport import trainer_name
from pipeline.storage.files import try_lock
from pipeline.telemetry.metrics import Progress
from pipeline.telemetry.slab import MetricsSlab

_ROLE = "trainer"


@dataclasses.dataclass(frozen=True)
class ExternalRank:
    """One rank of an external trainer at one moment.

    Attributes:
        rank: The rank.
        pid: Pid of its process, of the last one if it has left; 0 if none has connected.
        state: Whether a process is connected, has left, or none has connected.
        since_s: Monotonic time since which this state is seen.
        progress: Activity of the rank; empty unless it is connected.
    """

    rank: int
    pid: int
    state: Literal["connected", "left", "absent"]
    since_s: float
    progress: Progress

    @property
    def name(self) -> str:
        """The name of its process in answers."""
        return trainer_name(self.rank)


class ExternalTrainer:
    """Watches the ranks of an external trainer.

    Args:
        folder: The instance's folder in shared memory, which holds the locks.
        slab: The instance's metrics, with a slot for each rank.
        ranks: Number of ranks; 0 without an external trainer.
        on_left: Called when a rank has left, before its gauges are removed.
    """

    def __init__(
        self, folder: Path, slab: MetricsSlab, ranks: int, *, on_left: Callable[[], None] = lambda: None
    ) -> None:
        self._on_left = on_left
        self._folder = folder
        self._slab = slab
        self._seen: dict[int, tuple[int, str, float]] = dict.fromkeys(range(ranks), (0, "", 0.0))

    def look(self, now_s: float) -> Sequence[ExternalRank]:
        """Return the state of each rank, and fold the slot of one that has left."""
        return [self._look(rank, now_s) for rank in self._seen]

    def _look(self, rank: int, now_s: float) -> ExternalRank:
        if self._slab.is_live(_ROLE, rank):
            self._fold_if_gone(rank)
        pid = self._slab.pid(_ROLE, rank)
        is_connected = self._slab.is_live(_ROLE, rank)
        state: Literal["connected", "left", "absent"] = "connected" if is_connected else "left" if pid else "absent"
        if self._seen[rank][:2] != (pid, state):
            self._seen[rank] = pid, state, now_s
        progress = self._slab.progress(_ROLE, rank) if is_connected else Progress(0.0, "", 0.0, -1, 0.0, False)
        return ExternalRank(rank, pid, state, self._seen[rank][2], progress)

    def _fold_if_gone(self, rank: int) -> None:
        try:
            descriptor = os.open(self._folder / f"{trainer_name(rank)}.lock", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._fold(rank)
            return
        try:
            if try_lock(descriptor, fcntl.LOCK_EX):
                # Under the lock: no process connects, and so begins the slot, meanwhile.
                self._fold(rank)
        finally:
            os.close(descriptor)

    def _fold(self, rank: int) -> None:
        self._on_left()
        self._slab.fold(_ROLE, rank)


def process_row(found: ExternalRank, now_s: float, resident_bytes: int) -> dict[str, Any]:
    """Return a rank as a process in the answer of `rlhfd status`."""
    return {
        "name": found.name,
        "role": _ROLE,
        "index": found.rank,
        "pid": found.pid or None,
        "state": found.state,
        "restarts": 0,
        "uptime_s": round(now_s - found.since_s, 1) if found.state == "connected" else 0.0,
        "resident_bytes": resident_bytes if found.state == "connected" else 0,
        "devices": "its own",
        "last_exit": None,
    }
