"""What a rollout worker rolls out with, on another machine than the worker itself.

The worker is a gateway then (`pipeline.launchers.ray`): tickets, arena and metrics are its own; each call here answers
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

from pipeline.config import Config
from pipeline.devices import process_device
from pipeline.errors import ConfigError, RlhfdError
from pipeline.models import load_tokenizer
from pipeline.rollout_models import RolloutModels, load_models
from pipeline.weights import WeightsCopy

_MOST_RECORDS: Final = 1000
_SILENCE: Final = 0.8
_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclasses.dataclass(frozen=True)
class Errand:
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
class Answer:
    """What became of a call: its value or its error, and what it was on the way.

    Attributes:
        value: What it returns.
        error: What it raised in place of that.
        stages: Activities that ended, each with its seconds.
        reward_errors: Why rows got no reward.
        scores: The parts of each row's reward, None for one without.
    """

    value: Any = None
    error: RlhfdError | None = None
    stages: list[tuple[str, float]] = dataclasses.field(default_factory=list)
    reward_errors: list[str] = dataclasses.field(default_factory=list)
    scores: list[Sequence[float] | None] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Look:
    """How it goes: signs of life so far, what is done now ("" for nothing), what was logged since the last look."""

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

    def taken(self, value: Any, error: RlhfdError | None) -> Answer:
        """Return all that was noted since the last time, with what became of the call."""
        answer = Answer(value, error, self._stages, self._reward_errors, self._scores)
        self._stages, self._reward_errors, self._scores = [], [], []
        return answer


class RolloutNode:
    """The models of one worker, where they compute; called by one thread, and by another one for `look`."""

    def __init__(self, errand: Errand) -> None:
        os.environ.update(_ENVIRONMENT)
        self._errand = errand
        self._config = Config.model_validate_json(errand.config)
        self._telemetry = NodeTelemetry()
        self._records = _Records()
        self._works = False
        self._told_stacks = False
        self._models: RolloutModels | None = None
        logging.getLogger().addHandler(self._records)
        logging.getLogger().setLevel(self._config.daemon.log_level.upper())

    def load(self) -> Answer:
        """Load models and reward, and try both; answers with this machine's name and this process's id.

        The answer's error is a ConfigError if something is not here, naming the machine.
        """
        return self._answer(self._load)

    def roll(self, position: int, prompts: int) -> Answer:
        """Roll out the prompts from a position on; answers with a `pipeline.roller.Rolled`."""
        assert self._models is not None
        models = self._models
        return self._answer(lambda: models.roll(position, prompts))

    def fetch(self, weights: WeightsCopy) -> Answer:
        """Compute with these weights from here on; answers with their `WeightsVersion`."""
        assert self._models is not None
        models = self._models
        return self._answer(lambda: models.fetch(weights))

    def close(self) -> None:
        """Let go of what it holds, and of this process's log."""
        logging.getLogger().removeHandler(self._records)
        if self._models is not None:
            self._models.close()

    def look(self) -> Look:
        """Return how the call under way goes; to be called from another thread."""
        silent_s = time.monotonic() - self._telemetry.beat_s
        limit_s = _SILENCE * self._config.daemon.hang_timeout_s
        if self._works and self._models is not None and silent_s > limit_s and not self._told_stacks:
            self._told_stacks = True
            self._records.emit(_silence(silent_s))
        return Look(self._telemetry.beats, self._telemetry.current, self._records.taken())

    def _answer(self, call: Callable[[], Any]) -> Answer:
        # A pool of threads serves the calls; how many threads torch takes is each one's own.
        torch.set_num_threads(self._config.rollout.threads)
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
        return self._telemetry.taken(value, error)

    def _load(self) -> tuple[str, int]:
        machine, release = socket.gethostname(), importlib.metadata.version("rlhfd")
        if release != self._errand.release:
            raise ConfigError(f"{machine} has rlhfd {release}, the daemon's machine {self._errand.release}")
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
        self._kept: collections.deque[logging.LogRecord] = collections.deque(maxlen=_MOST_RECORDS)

    def emit(self, record: logging.LogRecord) -> None:
        plain = {name: value for name, value in vars(record).items() if _is_plain(value)}
        if isinstance(record.args, tuple) and all(map(_is_plain, record.args)):
            plain["args"] = record.args
        else:
            plain |= {"msg": record.getMessage(), "args": ()}
        if record.exc_info and record.exc_info[0]:
            plain["stack_info"] = "".join(traceback.format_exception(*record.exc_info)).rstrip()
        self._kept.append(logging.makeLogRecord(plain))

    def taken(self) -> list[logging.LogRecord]:
        taken = []
        while self._kept:
            taken.append(self._kept.popleft())
        return taken


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
