"""What every role's process has in common: where it lives, how it reports, when it must end."""

from __future__ import annotations

import dataclasses
import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from pipeline.config.schema import Config
from pipeline.telemetry import log as logs
from pipeline.telemetry.slab import SlotWriter

log = logging.getLogger(__name__)


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a child tells its supervisor, one JSON line each.

    A new `state` (``"ready"``, ``"finished"``; ``"unusable"``: never to be started again; ``"pending"``: a cluster
    has no place for it, and ``"placed"``: now it has), `progress` on the way to it, or the `error` that it ends with.
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
    _config_seen: tuple[int, int] | None = dataclasses.field(default=None, init=False, repr=False)

    @property
    def name(self) -> str:
        """The peer name, as in `pipeline.runtime.transport`."""
        return self.role if self.role in ("buffer", "setup") else f"{self.role}-{self.index}"

    def ready(self) -> None:
        """Tell the supervisor that the start is over; from the beat before it on, silence is a hang."""
        self.metrics.beat()
        self.report(Report(state="ready"))

    def reloaded(self) -> Config | None:
        """Return the instance's configuration if it is another one since the last call; the log level is set here.

        To be called between two pieces of work. A look costs some microseconds; the first one always reads, for the
        file may have changed while this process was starting.
        """
        path = self.folder / "config.json"
        found = path.stat()
        seen = (found.st_ino, found.st_mtime_ns)
        if seen == self._config_seen:
            return None
        is_first, self._config_seen = self._config_seen is None, seen
        config = Config.model_validate_json(path.read_bytes())
        logging.getLogger().setLevel(config.daemon.log_level.upper())
        if not is_first:
            log.info("configuration taken up")
        return config

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
    logs.count_warnings(lambda level: counters[level].inc())


def monotonic_s() -> float:
    """Return seconds on the machine-wide monotonic clock, comparable between processes and immune to clock steps."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def reward_source(config: Config) -> str:
    """Return the label ``source`` of the reward metrics: a model's scores, or functions' alone."""
    return "function" if config.model.reward is None else "model"
