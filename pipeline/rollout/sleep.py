"""The turns of a worker's engine on a card that a trainer shares: it sleeps while a rank steps (`rollout.sleep`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.rollout.hooks import WorkerHook
from pipeline.rollout.metrics import RolloutMetrics
from pipeline.rollout.ticket_stream import EngineStream
from pipeline.storage.card_turns import TURN_S, EngineTurn

if TYPE_CHECKING:
    from pipeline.rollout.worker import RolloutWorker


class EngineSleep(WorkerHook):
    """Works only in the engine's turn.

    Args:
        turn: The engine's; closed with the worker.
        stream: Has the engine sleep and wake.
        metrics: Count the time of both.
    """

    def __init__(self, turn: EngineTurn, stream: EngineStream, metrics: RolloutMetrics) -> None:
        self._turn = turn
        self._stream = stream
        self._metrics = metrics

    def may_work(self, worker: RolloutWorker) -> bool:
        """Wake the engine unless a rank asks for the card or steps; return whether it is awake."""
        if self._turn.is_awake:
            return True
        if not self._turn.take():
            return False
        is_published = worker.newest() is not None
        with self._metrics.changing_sleep("wake"):
            self._stream.wake(None if is_published else worker.held.version)
        if is_published:
            worker.fetch()
        return True

    def rest(self, worker: RolloutWorker, longest_s: float) -> float:
        """Without a ticket in hand have the engine sleep if a rank asks for the card."""
        if worker.idle and not self._turn.is_awake:
            return longest_s
        if worker.idle and self._turn.is_wanted():
            with self._metrics.changing_sleep("sleep"):
                self._stream.sleep()
            # Not before: the rank steps at once.
            self._turn.give_back()
        return min(longest_s, TURN_S)

    def closing(self) -> None:
        """Close the turn."""
        self._turn.close()
