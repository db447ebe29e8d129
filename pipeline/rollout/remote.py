"""The models of a rollout worker, on another machine than the worker.

The worker is then a gateway (`pipeline.rollout.ray`) that keeps tickets, arena and metrics. Each call here returns a
`CallResult`: value or error, and the events to count. `RolloutNode.status` returns the progress of a call under way; it
runs in another thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from pipeline.config import user_modules
from pipeline.config.schema import Config
from pipeline.errors import ConfigError, RlhfdError
from pipeline.models.loading import load_tokenizer
from pipeline.models.weights.copies import WeightsCopy
from pipeline.progress import Telemetry
from pipeline.rollout.loader import load_roller
from pipeline.rollout.roller import LocalRoller
from pipeline.rollout.sampled_tokens import SampledTokens
from pipeline.storage.weights_header import WeightsVersion
from pipeline.telemetry.carried_records import CarriedRecords

_SILENT_SHARE: Final = 0.8
_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclasses.dataclass(frozen=True)
class WorkerSpec:
    """The specification of a remote worker.

    Attributes:
        config: The instance's, as JSON.
        working_directory: Folder of the daemon's start; reward functions are imported from there if it exists on this
            machine too.
        texts: Whether errors of the start may quote prompts and answers.
        modules: The folder of the configuration file, searched first for reward functions and engines.
        log_texts: Whether later errors and the log may quote them.
        release: The version of this package on the daemon's machine.
    """

    config: str
    working_directory: str
    texts: bool
    modules: str = ""
    log_texts: bool = False
    release: str = dataclasses.field(default_factory=lambda: importlib.metadata.version("rlhfd"))


@dataclasses.dataclass(frozen=True)
class CallResult:
    """The result of a call: its value or its error, and the events during the call.

    Attributes:
        value: The return value.
        error: The error raised; None if there is a value.
        stages: Activities that ended, each with its seconds.
        reward_errors: The reason of each row without a reward.
        numbers_left_out: The reason of each further number of a reward function that is left out.
        out_of_memory: "pass" or "generate", for each call that ran out of the device's memory.
        scores: The parts of each row's reward, None for a row without one.
        judged: Verdict and differences of each probe of the engine.
        records: Log records since the last result or status.
        sampled: Response tokens that the node has sampled since its start.
    """

    value: Any = None
    error: RlhfdError | None = None
    stages: list[tuple[str, float]] = dataclasses.field(default_factory=list)
    reward_errors: list[str] = dataclasses.field(default_factory=list)
    out_of_memory: list[str] = dataclasses.field(default_factory=list)
    scores: list[Sequence[float] | None] = dataclasses.field(default_factory=list)
    judged: list[tuple[str, Sequence[float]]] = dataclasses.field(default_factory=list)
    records: list[logging.LogRecord] = dataclasses.field(default_factory=list)
    sampled: int = 0
    numbers_left_out: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class NodeStatus:
    """The progress of a node.

    Attributes:
        beats: Heartbeats so far.
        activity: The current activity, "" for none.
        records: Log records since the last result or status.
        progress: Rows done and rows of the current stage.
        sampled: Response tokens that the node has sampled since its start.
        in_hand: The part of these tokens whose requests have not ended.
    """

    beats: int
    activity: str
    records: list[logging.LogRecord]
    progress: tuple[int, int] = (0, 0)
    sampled: int = 0
    in_hand: int = 0


class NodeTelemetry(Telemetry):
    """Collects the progress of a call until the gateway fetches it."""

    def __init__(self, *, log_texts: bool = False) -> None:
        super().__init__(log_texts=log_texts)
        self.beats = 0
        self.beat_s = time.monotonic()
        self.current = ""
        self.rows = (0, 0)
        self.tokens = 0
        self._sampled = SampledTokens(self._count_sampled)
        self._out_of_memory: list[str] = []
        self._stages: list[tuple[str, float]] = []
        self._reward_errors: list[str] = []
        self._numbers_left_out: list[str] = []
        self._scores: list[Sequence[float] | None] = []
        self._judged: list[tuple[str, Sequence[float]]] = []

    @contextlib.contextmanager
    def activity(self, name: str) -> Iterator[None]:
        """Count the time of the block for an activity."""
        started_s, before = time.monotonic(), self.current
        self.current, self.rows = name, (0, 0)
        try:
            yield
        finally:
            self.current = before
        self._stages.append((name, time.monotonic() - started_s))

    def progress(self, *, rows_done: int = 0, rows: int = 0, tokens: int | None = None) -> None:
        """Count a heartbeat; keep the progress of the stage if `rows` is above 0, and count tokens."""
        if rows:
            self.rows = (rows_done, rows)
        if tokens is not None:
            self._sampled.reported(tokens)
        self.beats += 1
        self.beat_s = time.monotonic()

    def sampled(self, tokens: int) -> None:
        """Count the response tokens of ended requests, except for those that a heartbeat has counted."""
        self._sampled.ended(tokens)

    @property
    def in_hand(self) -> int:
        """Tokens counted for requests that have not ended."""
        return self._sampled.in_hand

    def reward_errored(self, reason: str) -> None:
        """Record a row without a reward."""
        self._reward_errors.append(reason)

    def number_left_out(self, reason: str) -> None:
        """Record a further number of a reward function that is left out."""
        self._numbers_left_out.append(reason)

    def out_of_memory(self, during: str) -> None:
        """Record a call that ran out of the device's memory."""
        self._out_of_memory.append(during)

    def engine_judged(self, verdict: str, gaps: Sequence[float]) -> None:
        """Record a probe of the engine."""
        self._judged.append((verdict, gaps))

    def scored(self, parts: Sequence[float] | None) -> None:
        """Record the parts of a row's reward."""
        self._scores.append(parts)

    def take(self, value: Any, error: RlhfdError | None) -> CallResult:
        """Return the result of a call with all events since the last one, and start anew."""
        result = CallResult(
            value,
            error,
            self._stages,
            self._reward_errors,
            self._out_of_memory,
            self._scores,
            self._judged,
            sampled=self.tokens,
            numbers_left_out=self._numbers_left_out,
        )
        self._stages, self._reward_errors, self._out_of_memory, self._scores, self._judged = [], [], [], [], []
        self._numbers_left_out = []
        return result

    def _count_sampled(self, tokens: int) -> None:
        self.tokens += tokens


class RolloutNode:
    """The models of one worker on their machine; one thread calls it, a second one calls `status`."""

    def __init__(self, spec: WorkerSpec) -> None:
        os.environ.update(_ENVIRONMENT)
        self._spec = spec
        self._config: Config | None = None
        self._telemetry = NodeTelemetry(log_texts=spec.log_texts)
        self._records = CarriedRecords()
        self._is_busy = False
        self._has_logged_stacks = False
        self._roller: LocalRoller | None = None
        logging.getLogger().addHandler(self._records)

    def load(self) -> CallResult:
        """Load models and reward, and try both; the value is this machine's name and this process's id.

        The error is a ConfigError that names the machine if a file or module is missing here.
        """
        return self._call(self._load, 1)

    def roll(self, position: int, prompts: int, evaluation: int = -1) -> CallResult:
        """Roll out prompts; the value is a `pipeline.rollout.roller.Rolled`."""
        roller, config = self._loaded()
        return self._call(lambda: roller.roll(position, prompts, evaluation=evaluation), config.rollout.threads)

    def fetch(self, weights: WeightsCopy) -> CallResult:
        """Replace the weights by these; the value is their `WeightsVersion`."""
        roller, config = self._loaded()
        return self._call(lambda: _proven(roller, weights), config.rollout.threads)

    def close(self) -> None:
        """Close the roller, and detach from this process's log."""
        logging.getLogger().removeHandler(self._records)
        if self._roller is not None:
            self._roller.close()

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
        is_due = self._is_busy and self._roller is not None and not self._has_logged_stacks
        if is_due and hang_timeout_s and silent_s > _SILENT_SHARE * hang_timeout_s:
            self._has_logged_stacks = True
            self._records.emit(_hang_record(silent_s))
        telemetry = self._telemetry
        return NodeStatus(
            telemetry.beats,
            telemetry.current,
            self._records.take(),
            telemetry.rows,
            telemetry.tokens,
            telemetry.in_hand,
        )

    def _loaded(self) -> tuple[LocalRoller, Config]:
        assert self._roller is not None and self._config is not None
        return self._roller, self._config

    def _call(self, call: Callable[[], Any], threads: int) -> CallResult:
        # A pool of threads serves the calls; torch's number of threads is a setting of each thread.
        torch.set_num_threads(threads)
        self._telemetry.progress()
        self._is_busy, self._has_logged_stacks = True, False
        value, error = None, None
        try:
            value = call()
        except RlhfdError as raised:
            # Without its frames, which refer to the tensors they worked on.
            error = raised.with_traceback(None)
            error.__cause__ = error.__context__ = None
        finally:
            self._is_busy = False
        return dataclasses.replace(self._telemetry.take(value, error), records=self._records.take())

    def _load(self) -> tuple[str, int]:
        machine, release = socket.gethostname(), importlib.metadata.version("rlhfd")
        # Before the configuration is read, which may have keys that this release does not know.
        if release != self._spec.release:
            raise ConfigError(f"{machine} has rlhfd {release}, the daemon's machine {self._spec.release}")
        self._config = Config.model_validate_json(self._spec.config)
        torch.set_num_threads(self._config.rollout.threads)
        if os.path.isdir(self._spec.working_directory):
            # Scorers import reward functions from the folder they are started in, which is this process's.
            os.chdir(self._spec.working_directory)
        os.environ[user_modules.FOLDER_VARIABLE] = self._spec.modules
        user_modules.extend_path()
        try:
            tokenizer = load_tokenizer(self._config.model.actor)
            self._roller = load_roller(self._config, tokenizer, self._telemetry, texts=self._spec.texts)
        except ConfigError as error:
            raise ConfigError(f"on {machine}: {error}", bare=f"on {machine}: {error.bare}") from error
        return machine, os.getpid()


def _proven(roller: LocalRoller, weights: WeightsCopy) -> WeightsVersion:
    """Replace the weights, and ask the engine about these."""
    fetched = roller.fetch(weights)
    roller.telemetry.sampled(roller.weights.prove(fetched.version))
    return fetched


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
