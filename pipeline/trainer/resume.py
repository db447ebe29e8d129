"""The point from which a trainer starts: a dead trainer's state, a checkpoint, or a new run.

    shared memory holds          the trainer
    weights and training state   continues from both, exactly; nothing is published again
    both of an earlier version   publishes that version as a rollback, which undoes all later versions, unless there is
                                 a later checkpoint (`trainer.keep_state_every`)
    weights alone                publishes the last checkpoint as a rollback, which undoes all later versions;
                                 without a checkpoint, publishes the models as they started, version 0
    nothing (a new start)        publishes the last checkpoint of the same run (`trainer.resume`), or version 0

A checkpoint that fails its verification is skipped for the previous one, with an error in the log.
"""

from __future__ import annotations

import dataclasses
import logging
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pipeline.config.changes import told
from pipeline.config.schema import Config
from pipeline.errors import CheckpointError, ConfigError, WeightsError
from pipeline.runtime.checkpoint_note import CheckpointNote, earlier_of_run, read_note, verify
from pipeline.runtime.latest_checkpoint import (
    Latest,
    checkpoints_dir,
    forget_latest,
    put_back_replaced,
    read_latest,
    why_anew,
    write_latest,
)
from pipeline.storage.weights_header import WeightsVersion
from pipeline.trainer.connection import Connection
from pipeline.trainer.saving.rank_models import RankModels
from pipeline.trainer.state import LearnerProtocol, Progress, progress_of, tensors_of

_FRESH = "`rlhfd start --fresh` starts anew"

_T = TypeVar("_T")

log = logging.getLogger(__name__)


class Start(NamedTuple):
    """The point from which a trainer starts.

    Attributes:
        progress: Progress of the training so far.
        version: Version number of the first publish; None if the weights are published already.
        rollback: Whether the first publish undoes versions that were published before.
        checkpoint: The checkpoint to resume from, to be recorded as the latest; None for a new run.
        saved_step: Step of the last checkpoint of this run, 0 for none.
        in_memory: Whether shared memory held the start, so that the latest checkpoint stays the latest.
        published: The newest published version, on ranks of several machines; None if there is none.
    """

    progress: Progress = Progress()
    version: int | None = 0
    rollback: bool = False
    checkpoint: Latest | None = None
    saved_step: int = 0
    in_memory: bool = False
    published: WeightsVersion | None = None


@dataclasses.dataclass(eq=False)
class Resumption:
    """Finds the start of one rank; all ranks find the same start, and the first rank logs it.

    Attributes:
        config: The run's configuration.
        connection: The connection to the daemon.
        learner: `find` sets its tensors and its step.
        models: The rank's models as they are at the start of a run; `find` sets their weights.
        agree: A collective of all ranks; returns True if every rank passed True.
        of_first: Returns the result of a call that reads files of the daemon's machine: of ranks on several machines a
            collective, in which the first rank calls.
    """

    config: Config
    connection: Connection
    learner: LearnerProtocol
    models: RankModels
    _: dataclasses.KW_ONLY
    agree: Callable[[bool], bool] = bool
    of_first: Callable[[Callable[[], Any]], Any] = operator.call

    @property
    def _root(self) -> Path:
        return checkpoints_dir(self.config)

    def find(self) -> Start:
        """Set models and learner to the start of this trainer; change nothing that another rank reads.

        Raises:
            ConfigError: If a checkpoint is to be resumed, and no checkpoint of the run is usable.
            WeightsError: If the newest weights in shared memory are unusable, and there is no checkpoint.
        """
        newest = self.connection.newest()
        start = self._from_checkpoint_or_new() if newest is None else self._after_death(newest)
        self.learner.step = start.progress.step
        return start

    def settle(self, start: Start) -> None:
        """Record the resumed checkpoint as the latest; called on the first rank, once every rank has found its start.

        Raises:
            ConfigError: If the record cannot be written; checkpoints could not be written, either.
        """
        if start.version is None or start.in_memory:
            return
        try:
            if start.checkpoint is None:
                forget_latest(self._root)
            else:
                write_latest(self._root, start.checkpoint)
        except OSError as error:
            raise ConfigError(f"daemon.state_dir: no checkpoints can be written: {error}") from error

    # After a trainer's death.

    def _after_death(self, newest: WeightsVersion) -> Start:
        latest: Latest | None = self.of_first(self._latest)
        progress, unusable = None, None
        kept = self.models.versions.kept()
        found = None
        if kept is not None and kept.age != newest.age and latest is not None and latest.version > kept.version:
            found = self._newest_usable(latest, above=kept.version)
        if kept is not None and found is None:
            try:
                progress = self._from_shared_memory(kept)
            except WeightsError as error:
                self._log(logging.ERROR, "a dead trainer's state in shared memory is unusable: %s", str(error))
                unusable = error
        if self.agree(progress is not None) and progress is not None and kept is not None:
            saved_step = 0 if latest is None else latest.step
            if kept.age == newest.age:
                return Start(progress, None, saved_step=saved_step)
            self._log(logging.WARNING, "rolled back to the newest version with a training state: version=%d -> %d",
                      newest.version, kept.version)  # fmt: skip
            return Start(progress, kept.version, True, saved_step=saved_step, in_memory=True)
        found = found or self._newest_usable(latest)
        if found is None and unusable is not None:
            # The failed restore may have overwritten models and moments: a start at version 0 is impossible, too.
            raise unusable
        if found is None:
            self._log(logging.WARNING, "no training state and no checkpoint: rolled back to the start, version=%d -> 0",
                      newest.version)  # fmt: skip
            return Start(rollback=True)
        folder, note, progress = found
        if (note.version, note.fingerprint) == (newest.version, f"{newest.fingerprint:016x}"):
            return Start(progress, None, saved_step=note.step)
        self._log(logging.WARNING, "rolled back to a checkpoint: version=%d -> %d step=%d path=%s",
                  newest.version, note.version, note.step, folder)  # fmt: skip
        return Start(progress, note.version, True, note.latest(folder), note.step)

    def _from_shared_memory(self, version: WeightsVersion) -> Progress | None:
        """Restore a version's weights and training state; return None without a training state."""
        state = tensors_of(self.learner, Progress())
        if not self.models.restore(version, state):
            return None
        progress = progress_of(state)
        self._log(logging.INFO, "resumed from shared memory: version=%d step=%d", version.version, progress.step)
        return progress

    # A new start.

    def _from_checkpoint_or_new(self) -> Start:
        latest: Latest | None = self.of_first(self._latest)
        if latest is None:
            return Start()
        if reason := self.of_first(lambda: why_anew(self.config, latest)):
            self._log(logging.INFO, "new run: the checkpoint is not resumed: step=%d path=%s reason=%s",
                      latest.step, self._root / latest.path, reason)  # fmt: skip
            return Start()
        found = self._newest_usable(latest)
        if found is None:
            raise ConfigError(f"{self._root / latest.path}: no checkpoint of this run can be used; {_FRESH}")
        folder, note, progress = found
        changed = told(note.config, self.config)
        self._log(logging.INFO, "resuming: step=%d path=%s%s (%s)", note.step, folder,
                  changed and f" changed:{changed}", _FRESH)  # fmt: skip
        # The buffer started at the latest checkpoint's position; a rollback sends it the position of an earlier one.
        return Start(progress, note.version, note.step != latest.step, note.latest(folder), note.step)

    # Checkpoints.

    def _latest(self) -> Latest | None:
        """Return the latest checkpoint, which a trainer that died as it replaced it may have left moved away."""
        try:
            # By each rank that reads it, so that none waits for another.
            put_back_replaced(self._root)
        except OSError as error:
            raise ConfigError(f"daemon.state_dir: a checkpoint cannot be put back: {error}") from error
        return read_latest(self._root)

    def _newest_usable(self, latest: Latest | None, *, above: int = -1) -> tuple[Path, CheckpointNote, Progress] | None:
        """Restore the newest checkpoint that can be used, of a version above `above`; return None if there is none."""
        folders = [] if latest is None else self.of_first(lambda: list(earlier_of_run(self._root, latest)))
        for folder in folders:
            # Agreed before the load: what one rank has found damaged, no rank reads.
            note = self._on_all_ranks(lambda folder: self.of_first(lambda: self._verified(folder)), folder)
            if note is not None and note.version <= above:
                return None
            progress = None if note is None else self._on_all_ranks(self._load, folder)
            if note is not None and progress is not None:
                return folder, note, progress
        return None

    def _on_all_ranks(self, call: Callable[[Path], _T], folder: Path) -> _T | None:
        """Return the result of a call that succeeds on every rank; None if it fails on one."""
        result = None
        try:
            result = call(folder)
        except CheckpointError as error:
            self._log(logging.ERROR, "a checkpoint cannot be used, trying the one before it: %s", str(error))
        return result if self.agree(result is not None) else None

    def _verified(self, folder: Path) -> CheckpointNote:
        note = read_note(folder)
        if self.connection.rank == 0:
            # Once: all ranks read the same files.
            verify(folder, note)
        return note

    def _load(self, folder: Path) -> Progress:
        state = tensors_of(self.learner, Progress())
        self.models.load(folder, state)
        return progress_of(state)

    def _log(self, level: int, message: str, *values: object) -> None:
        if self.connection.rank == 0:
            log.log(level, message, *values)
