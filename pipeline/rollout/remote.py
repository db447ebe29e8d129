"""The models of a rollout worker, on another machine than the worker.

The worker is then a gateway (`pipeline.rollout.ray`) that keeps tickets, arena and metrics. The models here are behind
the same `EngineStream` as those of a worker of its own machine, and the gateway's calls are those of a `TicketStream`.
Each returns a `CallResult`: value or error, and the events to count. `RolloutNode.status` returns the progress of a
call under way; it runs in another thread. Engine and environments, which are processes of their own, go on between two
calls.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from pipeline.config.schema import Config
from pipeline.config.vllm_release import installed_version
from pipeline.errors import ConfigError, RlhfdError
from pipeline.models.loading import load_tokenizer
from pipeline.models.weights.copies import WeightsCopy
from pipeline.progress import Event
from pipeline.rollout.generation.interface import EngineLoad
from pipeline.rollout.loader import load_roller
from pipeline.rollout.ticket_stream import EngineStream, new_stream
from pipeline.rollout.worker_progress import WorkerTelemetry
from pipeline.runtime.actor_start import ActorSpec, enter
from pipeline.runtime.run_inputs import inputs_to_compare
from pipeline.telemetry.activity import Activities
from pipeline.telemetry.carried_records import CarriedRecords
from pipeline.telemetry.metrics import OTHER

_SILENT_SHARE: Final = 0.8


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerSpec(ActorSpec):
    """The specification of a remote worker.

    Attributes:
        texts: Whether errors of the start may quote prompts and answers.
        log_texts: Whether later errors and the log may quote them.
        vllm: Version of vLLM on the daemon's machine, "" if it has none.
    """

    texts: bool
    log_texts: bool = False
    vllm: str = dataclasses.field(default_factory=installed_version)


@dataclasses.dataclass(frozen=True)
class CallResult:
    """The result of a call: its value or its error, and the events during the call.

    Attributes:
        value: The return value.
        error: The error raised; None if there is a value.
        events: The calls of `RolloutMetrics` that count something, each a method with its arguments.
        status: The node's progress at the end of the call.
        has_room: Whether another ticket can make progress.
    """

    value: Any
    error: RlhfdError | None
    events: list[tuple[str, tuple[Any, ...]]]
    status: NodeStatus
    has_room: bool


@dataclasses.dataclass
class NodeStatus:
    """The progress of a node.

    Attributes:
        beats: Heartbeats so far.
        activity: The current activity.
        records: Log records since the last result or status.
        progress: Rows done and rows of the current stage.
        sampled: Response tokens that the node has sampled since its start.
        in_hand: The part of these tokens whose requests have not ended.
        load: The engine's work in hand; None before the first ticket.
    """

    beats: int = 0
    activity: str = OTHER
    records: Sequence[logging.LogRecord] = ()
    progress: tuple[int, int] = (0, 0)
    sampled: int = 0
    in_hand: int = 0
    load: EngineLoad | None = None


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A node that has loaded its models.

    Attributes:
        machine: Its machine's name.
        pid: Its process.
        tickets_ahead: Tickets that keep its engine full.
        inputs: The digests of the files that it reads (`pipeline.runtime.run_inputs`).
    """

    machine: str
    pid: int
    tickets_ahead: int
    inputs: dict[str, str]


class NodeClock(Activities):
    """The activity of a node, whose time the gateway counts; each change of it is a heartbeat."""

    def __init__(self, beat: Callable[[], None]) -> None:
        super().__init__(OTHER)
        self._beat = beat

    def enter(self, activity: str) -> str:
        """Begin an activity; return the one that ended."""
        ended, self._activity = self._activity, activity
        self._beat()
        return ended


class NodeTelemetry(WorkerTelemetry):
    """Collects the progress of a call until the gateway fetches it; the metrics of the node's `EngineStream`."""

    def __init__(self, *, log_texts: bool = False) -> None:
        super().__init__(log_texts=log_texts)
        self.clock = NodeClock(self.progress)
        self.beat_s = time.monotonic()
        self._status = NodeStatus()
        self._events: list[tuple[str, tuple[Any, ...]]] = []

    def staged(self, name: str, seconds: float) -> None:
        """Record the duration of a stage."""
        self._record("staged", name, seconds)

    def show_rows(self, done: int, rows: int) -> None:
        """Keep the rows in work and those of them that are done."""
        self._status.progress = done, rows

    def engine(self, load: EngineLoad) -> None:
        """Keep the engine's work in hand."""
        self._status.load = load

    def count(self, event: Event, kind: str) -> None:
        """Record an event."""
        self._record("count", event, kind)

    def engine_judged(self, verdict: str, gaps: Sequence[float]) -> None:
        """Record a probe of the engine."""
        self._record("engine_judged", verdict, gaps)

    def status(self, records: Sequence[logging.LogRecord]) -> NodeStatus:
        """Return the progress so far, with these log records; also to be called from another thread."""
        return dataclasses.replace(self._status, activity=self.clock.activity, records=records)

    def take(self) -> list[tuple[str, tuple[Any, ...]]]:
        """Return all events since the last call, and start anew."""
        events, self._events = self._events, []
        return events

    def _record(self, method: str, *arguments: Any) -> None:
        self._events.append((method, arguments))

    def _beat(self) -> None:
        self._status.beats += 1
        self.beat_s = time.monotonic()

    def _count_sampled(self, tokens: int, in_hand: int) -> None:
        self._status.sampled += tokens
        self._status.in_hand = in_hand


class RolloutNode:
    """The models of one worker on their machine; one thread calls it, a second one calls `status`."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._config: Config | None = None
        self._telemetry = NodeTelemetry(log_texts=spec.log_texts)
        self._records = CarriedRecords()
        self._is_busy = False
        self._has_logged_stacks = False
        self._stream: EngineStream | None = None
        logging.getLogger().addHandler(self._records)

    def load(self) -> CallResult:
        """Load models, reward and environment, and try them; the value is a `Loaded`.

        The error is a ConfigError that names the machine if a file, a module or the engine is missing here.
        """
        return self._call(self._load)

    def begin(self, ticket: int, position: int, prompts: int, evaluation: int) -> CallResult:
        """Take the prompts of a ticket over."""
        return self._call(lambda: self._loaded.begin(ticket, position, prompts, evaluation=evaluation))

    def step(self, longest_s: float) -> CallResult:
        """Advance the tickets until one has ended, for `longest_s` or one step; the value is those that have ended.

        The call is no heartbeat of its own: an engine without progress has none.
        """
        return self._call(lambda: self._step(longest_s), beats=False)

    def finish(self, ticket: int) -> CallResult:
        """Score an ended ticket; the value is a `pipeline.rollout.roller.Rolled`."""
        return self._call(lambda: self._loaded.finish(ticket))

    def cancel(self, tickets: Sequence[int]) -> CallResult:
        """Drop tickets."""
        return self._call(lambda: self._loaded.cancel(tickets))

    def fetch(self, weights: WeightsCopy) -> CallResult:
        """Replace the weights by these; the value is their `WeightsVersion`. The next steps ask the engine."""
        return self._call(lambda: self._loaded.fetch(weights))

    def close(self) -> None:
        """Close the models, and detach from this process's log."""
        logging.getLogger().removeHandler(self._records)
        if self._stream is not None:
            self._stream.close()

    def status(self, log_level: int, hang_timeout_s: float) -> NodeStatus:
        """Return the progress of the call under way; to be called from another thread.

        Args:
            log_level: The log level from here on.
            hang_timeout_s: Time without a heartbeat after which a process counts as hung; shortly before, all stacks
                are logged. 0: never.

        Returns:
            Heartbeats, activity and new log records.
        """
        logging.getLogger().setLevel(log_level)
        silent_s = time.monotonic() - self._telemetry.beat_s
        if silent_s <= _SILENT_SHARE * hang_timeout_s:
            self._has_logged_stacks = False
        elif hang_timeout_s and self._is_busy and self._stream is not None and not self._has_logged_stacks:
            self._has_logged_stacks = True
            self._records.emit(_hang_record(silent_s))
        return self._telemetry.status(self._records.take())

    @property
    def _loaded(self) -> EngineStream:
        assert self._stream is not None
        return self._stream

    def _step(self, longest_s: float) -> list[int]:
        until_s = time.monotonic() + longest_s
        while True:
            ended = self._loaded.step()
            if ended or time.monotonic() >= until_s:
                return ended

    def _call(self, call: Callable[[], Any], *, beats: bool = True) -> CallResult:
        # A pool of threads serves the calls; torch's number of threads is a setting of each thread.
        torch.set_num_threads(1 if self._config is None else self._config.rollout.threads)
        if beats:
            self._telemetry.progress()
        self._is_busy = True
        value, error = None, None
        try:
            value = call()
        except RlhfdError as raised:
            # Without its frames, which refer to the tensors they worked on.
            error = raised.with_traceback(None)
            error.__cause__ = error.__context__ = None
        finally:
            self._is_busy = False
        has_room = self._stream is None or self._stream.has_room
        status = self._telemetry.status(self._records.take())
        return CallResult(value, error, self._telemetry.take(), status, has_room)

    def _load(self) -> Loaded:
        machine = socket.gethostname()
        try:
            config = self._config = enter(self._spec)
            vllm = installed_version()
            if config.rollout.engine == "vllm" and vllm and self._spec.vllm not in ("", vllm):
                # The machine of the daemon needs none; one that is there is the release of all workers.
                raise ConfigError(f"vLLM {vllm} is installed, on the daemon's machine {self._spec.vllm}")
            torch.set_num_threads(config.rollout.threads)
            tokenizer = load_tokenizer(config.model.actor)
            roller = load_roller(config, tokenizer, self._telemetry, texts=self._spec.texts)
        except ConfigError as error:
            raise ConfigError(f"on {machine}: {error}", bare=f"on {machine}: {error.bare}") from error
        self._stream = new_stream(roller, config, self._telemetry)
        return Loaded(machine, os.getpid(), self._stream.tickets_ahead, inputs_to_compare(config))


def _hang_record(silent_s: float) -> logging.LogRecord:
    """Return the log record of a hang, with the stacks of all threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = [
        f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for number, frame in sys._current_frames().items()
    ]
    message, values = "no heartbeat: machine=%s silent_s=%.0f", (socket.gethostname(), silent_s)
    log = logging.getLogger(__name__)
    return log.makeRecord(log.name, logging.ERROR, __file__, 0, message, values, None, sinfo="\n".join(stacks))
