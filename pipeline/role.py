"""What every role's process has in common: where it lives, how it reports, when it must end."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from pipeline import log
from pipeline.config import Config
from pipeline.metrics_slab import SlotWriter


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a child tells its supervisor, one JSON line each.

    A new `state` (``"ready"``, ``"finished"``, or ``"mistrusted"``: never to be started again), `progress` on the way
    to it, or the `error` that it ends with.
    """

    state: str = ""
    progress: str = ""
    error: str = ""


@dataclasses.dataclass
class RoleContext:
    """A role's surroundings.

    Attributes:
        role: ``"buffer"``, ``"trainer"``, ``"rollout"`` or ``"setup"``.
        index: Rank or worker number.
        folder: The instance's shared-memory folder: sockets, arena, weights, metrics.
        metrics: This process's slot.
        report: Tells the supervisor.
        prompts: Prompts in one epoch, 0 if unknown.
        generation: How often the role's group was started; ranks of one generation meet each other.
        stopping: Set by SIGTERM; the loop ends at the next safe point.
    """

    role: str
    index: int
    folder: Path
    metrics: SlotWriter
    report: Callable[[Report], None]
    generation: int = 0
    prompts: int = 0
    stopping: bool = False

    @property
    def name(self) -> str:
        """The peer name, as in `pipeline.transport`."""
        return self.role if self.role in ("buffer", "setup") else f"{self.role}-{self.index}"

    def ready(self) -> None:
        """Tell the supervisor that the start is over; from the beat before it on, silence is a hang."""
        self.metrics.beat()
        self.report(Report(state="ready"))

    def stop_on_sigterm(self) -> None:
        """Let SIGTERM set `stopping`; SIGINT is the supervisor's to handle."""

        def stop(*_: object) -> None:
            self.stopping = True

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def count_warnings(writer: SlotWriter) -> None:
    """Count this process's log records at warning or above."""
    counters = {
        level: writer.counter("rlhfd_log_messages_total", level=level) for level in ("warning", "error", "critical")
    }
    log.count_warnings(lambda level: counters[level].inc())


def monotonic_s() -> float:
    """Return seconds on the machine-wide monotonic clock, comparable between processes and immune to clock steps."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def reward_source(config: Config) -> str:
    """Return the label ``source`` of the reward metrics: a model's scores, or functions' alone."""
    return "function" if config.model.reward is None else "model"
