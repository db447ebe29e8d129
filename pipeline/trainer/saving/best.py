"""The evaluations of a run as its trainer sees them: a line of ``metrics.jsonl`` each, and the best one's checkpoint.

The buffer leases no batch that would train a version that is due before its evaluation is complete
(`pipeline.buffer.evaluations`). So the trainer still holds exactly the evaluated weights when it reads the evaluation,
and writes their checkpoint only if they are the best so far. ``checkpoints/best`` is a link to that checkpoint, which
is not removed with the old ones.
"""

from __future__ import annotations

import dataclasses
import logging
import operator
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import CheckpointError
from pipeline.runtime.checkpoint_note import folder_name, read_note
from pipeline.runtime.latest_checkpoint import best_checkpoint, mark_best, read_latest
from pipeline.storage.weights_header import WeightsVersion
from pipeline.telemetry.evaluations import Evaluation, find, read_evaluations
from pipeline.trainer.hooks import TrainerHook

if TYPE_CHECKING:
    from pipeline.trainer.trainer import Trainer

log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class EvaluationFollower(TrainerHook):
    """Finds the evaluation of the newest version, and decides whether it is the best one.

    Attributes:
        path: The run's ``evaluations.jsonl``.
        checkpoints: Folder of the run's checkpoints.
        every: Versions per evaluation.
        keep_best: Whether any is the best one.
        agree: Returns True if all ranks that write checkpoints together passed True.
        of_first: Returns the result of a call that reads files of the run, on several machines the first rank's.
        leads: Whether this rank marks the best checkpoint.
        reads: Whether this rank's machine has the files; one that has none waits for the others in `take`.
    """

    path: Path
    checkpoints: Path
    _: dataclasses.KW_ONLY
    every: int
    keep_best: bool = True
    agree: Callable[[bool], bool] = bool
    of_first: Callable[[Callable[[], Any]], Any] = operator.call
    leads: bool = True
    reads: bool = True
    _best_step: int = dataclasses.field(default=-1, init=False)
    _taken: int | None = dataclasses.field(default=None, init=False)

    def began(self, trainer: Trainer) -> TrainerHook:
        """Make the latest checkpoint the best one if it is: a predecessor may have been killed before it marked it."""
        latest = read_latest(self.checkpoints) if self.leads and self.keep_best and trainer.saved_step else None
        if latest is not None and latest.step == trainer.saved_step:
            known = find(read_evaluations(self.path), latest.version, latest.fingerprint)
            if known is not None and self._is_better(known):
                self.keep(self.checkpoints / latest.path)
        return self

    def stepping(self, trainer: Trainer) -> None:
        """Tell the evaluation of the present weights to all hooks, and keep the weights if they are the best so far.

        The best one is known by its checkpoint: one that is being written is waited for.
        """
        if not trainer.has_published(due=self.is_due) or (evaluation := self.take(trainer.version)) is None:
            return
        trainer.tell_evaluated(evaluation)
        if not trainer.step:
            # The weights of step 0 are the model as it was given.
            return
        if self._best_step > trainer.saved_step:
            trainer.wait_for_checkpoint(is_slow=True)
        if not self.is_best(evaluation):
            return
        self._best_step = trainer.step
        if trainer.saved_step == trainer.step:
            self.saved(trainer.step)
        elif trainer.tried_step != trainer.step:
            trainer.checkpoint()

    def saved(self, step: int) -> None:
        """Make the checkpoint of the best step the best one."""
        if step == self._best_step and self.leads:
            self.keep(Path(folder_name(step)))

    def is_due(self, version: int) -> bool:
        """Return whether the version of a number is evaluated."""
        return version % self.every == 0

    def awaits(self, version: WeightsVersion) -> bool:
        """Return whether a version is due and its evaluation is not complete."""
        return self.reads and self.is_due(version.version) and self._find(version) is None

    def take(self, version: WeightsVersion) -> Evaluation | None:
        """Return the evaluation of a version, once; None if it is not due, or has none.

        A collective of sharded ranks if it is due: the file may get its line between the reads of two of them.
        """
        if not self.is_due(version.version) or version.version == self._taken:
            return None
        found: Evaluation | None = self.of_first(lambda: self._find(version))
        if not self.agree(found is not None) or found is None:
            return None
        self._taken = version.version
        return found

    def is_best(self, evaluation: Evaluation) -> bool:
        """Return whether an evaluation is better than that of the best checkpoint; a collective of sharded ranks."""
        return self.agree(self.keep_best and self.of_first(lambda: self._is_better(evaluation)))

    def keep(self, checkpoint: Path) -> None:
        """Make a checkpoint the best one."""
        try:
            mark_best(self.checkpoints, checkpoint)
        except OSError as error:
            log.error("the best checkpoint is not marked: path=%s error=%s", checkpoint, error.strerror)
            return
        log.info("best checkpoint so far: path=%s", checkpoint)

    def _find(self, version: WeightsVersion) -> Evaluation | None:
        return find(read_evaluations(self.path), version.version, f"{version.fingerprint:016x}")

    def _is_better(self, evaluation: Evaluation) -> bool:
        score = _score(evaluation)
        if score is None:
            return False
        try:
            best = best_checkpoint(self.checkpoints)
            if best is None:
                return True
            note = read_note(best)
        except (OSError, CheckpointError) as error:
            cause = error.__cause__ or error
            if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
                log.warning("the best checkpoint cannot be looked up, and stays the best: %s", error)
                return False
            log.warning("the best checkpoint cannot be read, the next best one takes its place: %s", error)
            return True
        # It has the line of this evaluation.
        if not (read := read_evaluations(self.path)):
            log.warning("the best checkpoint cannot be looked up, and stays the best: no evaluation in %s", self.path)
            return False
        known = find(read, note.version, note.fingerprint, evaluation.plan)
        # Under another plan the scores cannot be compared.
        before = None if known is None else _score(known)
        return before is None or score > before


def _score(evaluation: Evaluation) -> tuple[float, float] | None:
    total = evaluation.total
    if total.pass_at_1 is None or total.reward_mean is None:
        return None
    return total.pass_at_1, total.reward_mean
