"""Optional behaviour beside the steps of a trainer: recording, step log, evaluations with the best checkpoint.

A hook is given to the trainer at its construction. The order of the hooks is the order of their stores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from pipeline.storage.weights_header import WeightsVersion
from pipeline.telemetry.evaluations import Evaluation
from pipeline.trainer.connection import Batch
from pipeline.trainer.state import Progress
from pipeline.trainer.step_stats import StepStats

if TYPE_CHECKING:
    from pipeline.trainer.trainer import Trainer


class TakenStep(NamedTuple):
    """A step that was taken.

    Attributes:
        step: Number of the step.
        stats: Statistics of the step.
        batches: Batches of the step, in order.
        progress: The progress after it.
        row_means: Means over its rows by name (`pipeline.trainer.row_means`), NaN of a column that no row has.
    """

    step: int
    stats: StepStats
    batches: Sequence[Batch]
    progress: Progress
    row_means: Mapping[str, float] = MappingProxyType({})


class TrainerHook:
    """A hook that does nothing."""

    def began(self, trainer: Trainer) -> TrainerHook:
        """Return the hook that takes part from here on; the first weights are published, or a predecessor's are."""
        return self

    def stepping(self, trainer: Trainer) -> None:
        """Use the present weights: they are about to change, or training has ended with them."""

    def taken(self, taken: TakenStep) -> None:
        """Record a step: before its publish, so that no published step lacks its record after a kill."""

    def published(self, step: int, version: WeightsVersion) -> None:
        """Record the version of the weights after a step, whose page is turned."""

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Record the evaluation of the weights after a step, which another hook has found."""

    def flush(self) -> None:
        """Flush all records to disk: a checkpoint is written next, and counts on them."""

    def saved(self, step: int) -> None:
        """Use the checkpoint of a step."""

    def give_way(self) -> bool:
        """Remove files for a checkpoint that found no room; return whether any were removed."""
        return False

    def awaits(self, version: WeightsVersion) -> bool:
        """Return whether a run whose last step was taken must not end yet; `version` is the newest."""
        return False

    def close(self) -> None:
        """Close the files."""
