"""What a rollout worker rolls out with, on another machine than the worker itself.

The worker is a gateway then (`pipeline.rollout.ray`): tickets, arena and metrics are its own; each call here answers
with what became of it and what is to be counted, and `look` says from another thread how a call goes.
"""

from __future__ import annotations

import collections
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

from pipeline.config.schema import Config
from pipeline.errors import ConfigError, RlhfdError
from pipeline.models.device import process_device
from pipeline.models.loading import load_tokenizer
from pipeline.models.weights.store import WeightsCopy
from pipeline.rollout.loader import RolloutModels, load_models

_MOST_RECORDS: Final = 1000
_SILENCE: Final = 0.8
_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclasses.dataclass(frozen=True)
class WorkerSpec:
    """What there is to know to begin.

    Attributes:
        config: The instance's, as JSON.
        working_directory: Where the daemon was started; reward functions are found there if it is on this machine too.
        texts: Whether errors may quote prompts and answers.
        release: Of this package, on the daemon's machine.
    """

    config: str
    working_directory: str
    texts: bool
    release: str = dataclasses.field(default_factory=lambda: importlib.metadata.version("rlhfd"))


@dataclasses.dataclass(frozen=True)
class CallResult:
    """What became of a call: its value or its error, and what it was on the way.

    Attributes:
        value: What it returns.
        error: What it raised in place of that.
        stages: Activities that ended, each with its seconds.
        reward_errors: Why rows got no reward.
        scores: The parts of each row's reward, None for one without.
        records: What was logged since the last answer or look.
    """

    value: Any = None
    error: RlhfdError | None = None
    stages: list[tuple[str, float]] = dataclasses.field(default_factory=list)
    reward_errors: list[str] = dataclasses.field(default_factory=list)
    scores: list[Sequence[float] | None] = dataclasses.field(default_factory=list)
    records: list[logging.LogRecord] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class NodeStatus:
    """How it goes: signs of life so far, what is done now ("" for nothing), what was logged since the last one."""

    beats: int
    activity: str
    records: list[logging.LogRecord]


class NodeTelemetry:
    """Keeps what the work tells until somebody asks."""

    def __init__(self) -> None:
        self.beats = 0
        self.beat_s = time.monotonic()
        self.current = ""
        self._stages: list[tuple[str, float]] = []
        self._reward_errors: list[str] = []
        self._scores: list[Sequence[float] | None] = []

    @contextlib.contextmanager
    def activity(self, name: str) -> Iterator[None]:
        """Spend the block on an activity."""
        started_s, before = time.monotonic(), self.current
        self.current = name
        try:
            yield
        finally:
            self.current = before
        self._stages.append((name, time.monotonic() - started_s))

    def beat(self) -> None:
        """Note that the work goes on."""
        self.beats += 1
        self.beat_s = time.monotonic()

    def reward_errored(self, reason: str) -> None:
        """Note a row whose functions gave no reward."""
        self._reward_errors.append(reason)

    def scored(self, parts: Sequence[float] | None) -> None:
        """Note the parts of a row's reward."""
        self._scores.append(parts)

    def taken(self, value: Any, error: RlhfdError | None) -> CallResult:
        """Return all that was noted since the last time, with what became of the call."""
        answer = CallResult(value, error, self._stages, self._reward_errors, self._scores)
        self._stages, self._reward_errors, self._scores = [], [], []
        return answer


class RolloutNode:
    """The models of one worker, where they compute; called by one thread, and by another one for `look`."""

    def __init__(self, errand: WorkerSpec) -> None:
        os.environ.update(_ENVIRONMENT)
        self._errand = errand
        self._config: Config | None = None
        self._telemetry = NodeTelemetry()
        self._records = _Records()
        self._works = False
        self._told_stacks = False
        self._models: RolloutModels | None = None
        logging.getLogger().addHandler(self._records)

    def load(self) -> CallResult:
        """Load models and reward, and try both; answers with this machine's name and this process's id.

        The answer's error is a ConfigError if something is not here, naming the machine.
        """
        return self._answer(self._load, 1)

    def roll(self, position: int, prompts: int) -> CallResult:
        """Roll out the prompts from a position on; answers with a `pipeline.rollout.roller.Rolled`."""
        models, config = self._loaded()
        return self._answer(lambda: models.roll(position, prompts), config.rollout.threads)

    def fetch(self, weights: WeightsCopy) -> CallResult:
        """Compute with these weights from here on; answers with their `WeightsVersion`."""
        models, config = self._loaded()
        return self._answer(lambda: models.fetch(weights), config.rollout.threads)

    def close(self) -> None:
        """Let go of what it holds, and of this process's log."""
        logging.getLogger().removeHandler(self._records)
        if self._models is not None:
            self._models.close()

    def look(self, log_level: int, hang_timeout_s: float) -> NodeStatus:
        """Return how the call under way goes; to be called from another thread.

        Args:
            log_level: What is logged from here on.
            hang_timeout_s: Silence after which a process counts as hung; a bit before, all stacks are logged. 0: never.
        """
        logging.getLogger().setLevel(log_level)
        silent_s = time.monotonic() - self._telemetry.beat_s
        is_due = self._works and self._models is not None and not self._told_stacks
        if is_due and hang_timeout_s and silent_s > _SILENCE * hang_timeout_s:
            self._told_stacks = True
            self._records.emit(_silence(silent_s))
        return NodeStatus(self._telemetry.beats, self._telemetry.current, self._records.taken())

    def _loaded(self) -> tuple[RolloutModels, Config]:
        assert self._models is not None and self._config is not None
        return self._models, self._config

    def _answer(self, call: Callable[[], Any], threads: int) -> CallResult:
        # A pool of threads serves the calls; how many threads torch takes is each one's own.
        torch.set_num_threads(threads)
        self._telemetry.beat()
        self._works, self._told_stacks = True, False
        value, error = None, None
        try:
            value = call()
        except RlhfdError as raised:
            # Without its frames, which hold whatever they worked on.
            error = raised.with_traceback(None)
            error.__cause__ = error.__context__ = None
        finally:
            self._works = False
        return dataclasses.replace(self._telemetry.taken(value, error), records=self._records.taken())

    def _load(self) -> tuple[str, int]:
        machine, release = socket.gethostname(), importlib.metadata.version("rlhfd")
        # Before its configuration is read, which may have keys that this release does not know.
        if release != self._errand.release:
            raise ConfigError(f"{machine} has rlhfd {release}, the daemon's machine {self._errand.release}")
        self._config = Config.model_validate_json(self._errand.config)
        torch.set_num_threads(self._config.rollout.threads)
        if os.path.isdir(self._errand.working_directory):
            # Scorers are started from here, and look for reward functions where they were started.
            os.chdir(self._errand.working_directory)
            sys.path.append(self._errand.working_directory)
        try:
            tokenizer = load_tokenizer(self._config.model.actor)
            self._models = load_models(
                self._config, tokenizer, process_device(), self._telemetry, self._telemetry.scored,
                texts=self._errand.texts,
            )  # fmt: skip
        except ConfigError as error:
            raise ConfigError(f"on {machine}: {error}", bare=f"on {machine}: {error.bare}") from error
        return machine, os.getpid()


class _Records(logging.Handler):
    """Keeps log records in a form that another process can log as its own."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: collections.deque[logging.LogRecord] = collections.deque()
        self._left_out = 0

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._kept) >= _MOST_RECORDS:
            self._left_out += 1
            return
        try:
            self._kept.append(_plain_record(record))
        except Exception:  # noqa: BLE001 - what somebody else logs may not be formattable: no reason to end a rollout
            self.handleError(record)

    def taken(self) -> list[logging.LogRecord]:
        taken = [self._kept.popleft() for _ in range(len(self._kept))]
        if self._left_out:
            log, count, self._left_out = logging.getLogger(__name__), self._left_out, 0
            told = log.makeRecord(log.name, logging.WARNING, __file__, 0, "records left out: count=%d", (count,), None)
            taken.append(told)
        return taken


def _plain_record(record: logging.LogRecord) -> logging.LogRecord:
    plain = {name: value for name, value in vars(record).items() if _is_plain(value)}
    if isinstance(record.msg, str) and isinstance(record.args, tuple) and all(map(_is_plain, record.args)):
        # Fields that are formatted later keep their names.
        record.getMessage()
        plain["args"] = record.args
    else:
        plain |= {"msg": record.getMessage(), "args": ()}
    if record.exc_info and record.exc_info[0]:
        plain["stack_info"] = "".join(traceback.format_exception(*record.exc_info)).rstrip()
    return logging.makeLogRecord(plain)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (str, int, float))


def _silence(silent_s: float) -> logging.LogRecord:
    """Return what tells of a hang, with the stacks of all threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = [
        f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for number, frame in sys._current_frames().items()
    ]
    told, values = "no sign of life: machine=%s silent_s=%.0f", (socket.gethostname(), silent_s)
    log = logging.getLogger(__name__)
    return log.makeRecord(log.name, logging.ERROR, __file__, 0, told, values, None, sinfo="\n".join(stacks))
