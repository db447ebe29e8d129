"""The common part of every role's process: its folder, its reports, its shutdown."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from pipeline.config.rewards import reward_models
from pipeline.config.schema import Config
from pipeline.errors import ExitCode
from pipeline.storage.card_turns import TURN_S, EngineTurn, RankTurn
from pipeline.telemetry import log as logs
from pipeline.telemetry.slab import SlotWriter

_MOST_ERROR: Final = 4000
_WAITS_S = 1.0

log = logging.getLogger(__name__)


class ClusterNode(msgspec.Struct, frozen=True, omit_defaults=True):
    """A machine of a Ray cluster.

    Attributes:
        id: Ray's id of it; a machine that joins again has another one.
        name: Its host name.
        address: Its IP address.
        alive: Whether it belongs to the cluster; False once it has left.
        session: The name of the head's session, which has the time of its start: a head that is started anew has
            another one, and no node of the last one.
    """

    id: str
    name: str
    address: str
    alive: bool = True
    session: str = ""

    def __str__(self) -> str:
        """Return name and address, such as ``gpu-7 (10.0.0.7)``."""
        return f"{self.name} ({self.address})"


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of a child to its supervisor, one JSON line each.

    It has a new `state`, or `progress` towards it, or the `error` with which the child exits. States: ``"ready"``, with
    the name of the `device` that computes, empty if that is not known;
    ``"finished"``; ``"unusable"``: it is never started again; ``"pending"``: a cluster has no place for it;
    ``"placed"``: the cluster has a place for it, or it waits for its turn on a card: the time limit of its start begins
    anew. `killed`: SIGKILL has ended a process that it cannot go on without. `node`: a node of the cluster that has
    joined or left. `placed_on`: the node on which the worker's actor runs.
    """

    state: str = ""
    progress: str = ""
    error: str = ""
    device: str = ""
    killed: bool = False
    node: ClusterNode | None = None
    placed_on: ClusterNode | None = None


@dataclasses.dataclass
class RoleContext:
    """The parts of the instance that a role's process uses.

    Attributes:
        role: ``"buffer"``, ``"trainer"``, ``"rollout"`` or ``"setup"``.
        index: Rank or worker number.
        folder: The instance's shared-memory folder: sockets, arena, weights, metrics.
        metrics: This process's slot.
        report: Sends a report to the supervisor.
        generation: Number of the start of the role's group; ranks of one generation connect to each other.
        prompts: Prompts in one epoch, 0 if unknown.
        stopping: Set by SIGTERM; the loop ends at the next safe point.
        turn: A worker's, on a card that a trainer shares (`rollout.sleep`).
        in_process_group: Whether this rank is in a process group of torch. After an error it exits at once then: NCCL's
            teardown waits for this GPU's collectives, which wait for the other ranks, which wait for this one.
        newest_config: The configuration that `reloaded` has read last; None before its first call.
    """

    role: str
    index: int
    folder: Path
    metrics: SlotWriter
    report: Callable[[Report], None]
    generation: int = 0
    prompts: int = 0
    stopping: bool = False
    turn: EngineTurn | None = None
    in_process_group: bool = False
    newest_config: Config | None = None
    _config_seen: tuple[int, int] | None = dataclasses.field(default=None, init=False, repr=False)

    @property
    def name(self) -> str:
        """The name of the process, such as ``rollout-0``."""
        return self.role if self.role in ("buffer", "setup") else f"{self.role}-{self.index}"

    def ready(self, device: str = "") -> None:
        """Report the end of the start; from the heartbeat before it on, hang detection is active.

        Args:
            device: Name of the device that this process computes on; empty if it computes nothing itself.
        """
        self.metrics.beat()
        self.report(Report(state="ready", device=device))

    def reloaded(self) -> Config | None:
        """Return the instance's configuration if it has changed since the last call, and set the log level.

        To be called between two units of work. A call costs some microseconds; the first call always reads the file,
        because it may have changed while this process was starting.
        """
        is_first = self.newest_config is None
        if (text := self.changed_config()) is None:
            return None
        config = self.newest_config = Config.model_validate_json(text)
        logging.getLogger().setLevel(config.daemon.log_level.upper())
        if not is_first:
            log.info("configuration taken up")
        return config

    def changed_config(self) -> bytes | str | None:
        """Return the instance's configuration as JSON if it has changed since the last call, else None."""
        path = self.folder / "config.json"
        found = path.stat()
        seen = (found.st_ino, found.st_mtime_ns)
        if seen == self._config_seen:
            return None
        self._config_seen = seen
        return path.read_bytes()

    def stop_on_sigterm(self) -> None:
        """Let SIGTERM set `stopping`; SIGINT is ignored, the supervisor handles it."""

        def stop(*_: object) -> None:
            self.stopping = True

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def await_turn(
    context: RoleContext,
    turn: RankTurn | EngineTurn,
    waiting: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:
    """Take the turn of a start on a card that trainer and engine share. The wait is no part of the start.

    Args:
        context: The role that starts.
        turn: Its turn.
        waiting: Encloses each part of the wait.

    Raises:
        SystemExit: At a shutdown.
    """
    said_s = -math.inf
    while not turn.take():
        if context.stopping:
            sys.exit(ExitCode.OK)
        context.metrics.beat()
        if time.monotonic() - said_s > _WAITS_S:
            # The time limit of the start begins anew, and is that of a wait in which this process is stopped.
            said_s = time.monotonic()
            context.report(Report(state="placed"))
        with waiting():
            time.sleep(TURN_S)


def reporter(descriptor: int) -> Callable[[Report], None]:
    """Return the function that writes reports into a pipe to the supervisor, which takes lines of 64 KiB."""

    def report(message: Report) -> None:
        if (size := len(message.error)) > _MOST_ERROR:
            # PyTorch names each tensor that a model lacks; the log has all of them.
            message = msgspec.structs.replace(message, error=f"{message.error[:_MOST_ERROR]} ... ({size:,} characters)")
        os.write(descriptor, msgspec.json.encode(message) + b"\n")

    return report


def count_warnings(writer: SlotWriter) -> None:
    """Count this process's log records at warning or above."""
    counters = {
        level: writer.counter("rlhfd_log_messages_total", level=level) for level in ("warning", "error", "critical")
    }
    logs.count_warnings(lambda level: counters[level].inc())


def reward_source(config: Config) -> str:
    """Return the label ``source`` of the reward metrics: with scores of models, or of functions alone."""
    return "model" if reward_models(config) else "function"
