"""Optional behaviour beside the tickets of a worker: samples, sleep.

A hook is given to the worker at its construction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.rollout.roller import Rolled
from pipeline.runtime.messages import Ticket

if TYPE_CHECKING:
    from pipeline.rollout.worker import RolloutWorker


class WorkerHook:
    """A hook that does nothing."""

    def may_work(self, worker: RolloutWorker) -> bool:
        """Return whether the worker may work on its tickets now; asked again until it may."""
        return True

    def rest(self, worker: RolloutWorker, longest_s: float) -> float:
        """Use the time without work; return the time until this must be called again, at most `longest_s`."""
        return longest_s

    def sealed(self, ticket: Ticket, rolled: Rolled, version: int) -> None:
        """Use a rollout that is in the arena and not reported yet; `version` is that of its weights."""

    def closing(self) -> None:
        """Close files and turns."""
