"""Where a trainer begins: where a dead one was, at a checkpoint, or anew.

    shared memory holds          what the trainer does
    weights, their state         goes on from both, exactly; nothing is published again
    weights alone                publishes the last checkpoint as a rollback: what came after it exists no more;
                                 where there is none, the models as they started, version 0
    nothing (a new start)        publishes the last checkpoint of the same run (`trainer.resume`), or version 0

A checkpoint that does not hold what it says is left out for the one before it, loudly.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from pipeline.config.schema import Config
from pipeline.errors import CheckpointError, ConfigError, WeightsError
from pipeline.models.loading import load_actor, load_critic
from pipeline.models.lora import adapter_of, load_adapter, published
from pipeline.runtime.latest_checkpoint import (
    Latest,
    checkpoints_dir,
    forget_latest,
    read_latest,
    why_anew,
    write_latest,
)
from pipeline.storage.weights_header import WeightsVersion
from pipeline.trainer.checkpoints import CheckpointNote, copy_tensors, earlier_of_run, load_state, read_note, verify
from pipeline.trainer.connection import Connection
from pipeline.trainer.state import HasTensors, Progress, take_over, tensors_of

_FRESH = "`rlhfd start --fresh` starts anew"

log = logging.getLogger(__name__)


class Learns(HasTensors, Protocol):
    """Who trains (`pipeline.trainer.learner.Learner`)."""

    step: int


class Start(NamedTuple):
    """How a trainer begins.

    Attributes:
        progress: How far training had come.
        version: Number under which the weights are published first; None where they are published already.
        rollback: Whether versions that were published before are undone by that.
        checkpoint: What it goes on from, to be noted as the last one; None where it starts anew.
        saved_step: Step of the last checkpoint of this run, 0 for none.
    """

    progress: Progress = Progress()
    version: int | None = 0
    rollback: bool = False
    checkpoint: Latest | None = None
    saved_step: int = 0

    @property
    def position(self) -> int:
        """First prompt that may be missing from what it begins with."""
        return 0 if self.checkpoint is None else self.checkpoint.position


class Resumption:
    """One rank's way to its start; all ranks come to the same one, the first says so."""

    def __init__(
        self,
        config: Config,
        connection: Connection,
        learner: Learns,
        models: Mapping[str, torch.nn.Module],
        device: torch.device,
    ) -> None:
        """Look at nothing yet.

        Args:
            config: The run's.
            connection: To the daemon.
            learner: Its tensors and its step are set.
            models: ``actor`` and, with PPO, ``critic``, as they are at the start of a run; their weights are set.
            device: Where they are.
        """
        self._config = config
        self._connection = connection
        self._learner = learner
        self._models = models
        self._device = device
        self._root = checkpoints_dir(config)

    def find(self) -> Start:
        """Set models and learner to where this trainer begins; change nothing that another rank looks at.

        Raises:
            ConfigError: If a checkpoint was to be taken, and none of the run can be used.
            WeightsError: If the newest weights in shared memory cannot be used, and there is no checkpoint.
        """
        newest = self._connection.newest()
        start = self._at_checkpoint_or_anew() if newest is None else self._after(newest)
        self._learner.step = start.progress.step
        return start

    def settle(self, start: Start) -> None:
        """Note what is gone on from; once every rank has found its start, on the first.

        Raises:
            ConfigError: If nothing can be noted there; checkpoints could not be written, either.
        """
        if start.version is None:
            return
        try:
            if start.checkpoint is None:
                forget_latest(self._root)
            else:
                write_latest(self._root, start.checkpoint)
        except OSError as error:
            raise ConfigError(f"daemon.state_dir: no checkpoints can be written: {error}") from error

    # Where a trainer was before.

    def _after(self, newest: WeightsVersion) -> Start:
        latest = read_latest(self._root)
        try:
            progress = self._exactly(newest)
        except WeightsError as error:
            self._say(logging.ERROR, "what a dead trainer left in shared memory cannot be used: %s", str(error))
            found = self._newest_usable(latest)
            if found is None:
                # Models and moments are no longer what they were at the start, either.
                raise
        else:
            if progress is not None:
                return Start(progress, None, saved_step=0 if latest is None else latest.step)
            found = self._newest_usable(latest)
        if found is None:
            self._say(logging.WARNING, "no training state and no checkpoint: rolled back to the start, version=%d -> 0",
                      newest.version)  # fmt: skip
            return Start(rollback=True)
        folder, note, progress = found
        if (note.version, note.fingerprint) == (newest.version, f"{newest.fingerprint:016x}"):
            return Start(progress, None, saved_step=note.step)
        self._say(logging.WARNING, "rolled back to a checkpoint: version=%d -> %d step=%d path=%s",
                  newest.version, note.version, note.step, folder)  # fmt: skip
        return Start(progress, note.version, True, note.latest(folder), note.step)

    def _exactly(self, newest: WeightsVersion) -> Progress | None:
        """Take the newest weights and the state that belongs to them, if it is there."""
        state = tensors_of(self._learner, Progress(), self._device)
        if not self._connection.restore_training(newest, state):
            return None
        self._connection.restore(**{name: model.state_dict() for name, model in self._models.items()})
        progress = take_over(state, self._device)
        self._say(logging.INFO, "went on where a dead trainer was: version=%d step=%d", newest.version, progress.step)
        return progress

    # A new start.

    def _at_checkpoint_or_anew(self) -> Start:
        try:
            latest = read_latest(self._root)
        except ConfigError:
            if self._config.trainer.resume != "never":
                raise
            return Start()
        if latest is None:
            return Start()
        if reason := why_anew(self._config, latest):
            self._say(logging.INFO, "starting anew: the checkpoint is not gone on from: step=%d path=%s reason=%s",
                      latest.step, self._root / latest.path, reason)  # fmt: skip
            return Start()
        found = self._newest_usable(latest)
        if found is None:
            raise ConfigError(f"{self._root / latest.path}: no checkpoint of this run can be used; {_FRESH}")
        folder, note, progress = found
        changed = "".join(f" {change}" for change in _changes(note.config, self._config))
        self._say(logging.INFO, "resuming: step=%d path=%s%s (%s)", note.step, folder,
                  changed and f" changed:{changed}", _FRESH)  # fmt: skip
        # The buffer began at the position of the last one; if it is another's, it must hear so.
        return Start(progress, note.version, note.step != latest.step, note.latest(folder), note.step)

    # Checkpoints.

    def _newest_usable(self, latest: Latest | None) -> tuple[Path, CheckpointNote, Progress] | None:
        for folder in () if latest is None else earlier_of_run(self._root, latest):
            try:
                note = read_note(folder)
                verify(folder, note)
                return folder, note, self._load(folder)
            except CheckpointError as error:
                self._say(logging.ERROR, "a checkpoint cannot be used, trying the one before it: %s", str(error))
        return None

    def _load(self, folder: Path) -> Progress:
        state = tensors_of(self._learner, Progress(), self._device)
        targets = {name: published(model) for name, model in self._models.items()}
        loaders = {"actor": (load_actor, folder), "critic": (load_critic, folder / "critic")}
        saved = {}
        for name in self._models:
            load, path = loaders[name]
            try:
                adapted = name == "actor" and adapter_of(self._models[name])
                saved[name] = (
                    load_adapter(folder)
                    if adapted
                    else load(path, dtype=self._config.model.dtype, device="cpu").state_dict()
                )
            except ConfigError as error:
                raise CheckpointError(f"{path}: {error}") from error
        for name, target in targets.items():
            copy_tensors(saved[name], target, f"{folder} ({name})")
        load_state(folder, state)
        return take_over(state, self._device)

    def _say(self, level: int, message: str, *values: object) -> None:
        if self._connection.rank == 0:
            log.log(level, message, *values)


def _changes(before: Mapping[str, Any], config: Config) -> list[str]:
    """Return what is otherwise now in how it is trained, as ``trainer.learning_rate=0.0004->0.0001``."""
    was, now = before.get("trainer", {}), config.model_dump(mode="json")["trainer"]
    return [f"trainer.{key}={was[key]}->{now[key]}" for key in now if key in was and was[key] != now[key]]
