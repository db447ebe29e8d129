"""The turns of a worker's engine on a card that a trainer shares: it sleeps while a rank steps (`rollout.sleep`)."""

from __future__ import annotations

import dataclasses

from pipeline.rollout.metrics import RolloutMetrics
from pipeline.rollout.ticket_stream import EngineStream
from pipeline.rollout.worker import RolloutWorker, WorkerHook
from pipeline.storage.card_turns import TURN_S, EngineTurn


@dataclasses.dataclass
class EngineSleep(WorkerHook):
    """Works only in the engine's turn.

    Attributes:
        turn: The engine's; closed with the worker.
        stream: Has the engine sleep and wake.
        metrics: Count the time of both.
    """

    turn: EngineTurn
    stream: EngineStream
    metrics: RolloutMetrics

    def may_work(self, worker: RolloutWorker) -> bool:
        """Wake the engine unless a rank asks for the card or steps; return whether it is awake."""
        if self.turn.is_awake:
            return True
        if not self.turn.take():
            return False
        is_published = worker.newest() is not None
        with self.metrics.changing_sleep("wake"):
            self.stream.wake(None if is_published else worker.held.version)
        if is_published:
            worker.fetch()
        return True

    def rest(self, worker: RolloutWorker, longest_s: float) -> float:
        """Without a ticket in hand have the engine sleep if a rank asks for the card."""
        if worker.idle and not self.turn.is_awake:
            return longest_s
        if worker.idle and self.turn.is_wanted():
            with self.metrics.changing_sleep("sleep"):
                self.stream.sleep()
            # Not before: the rank steps at once.
            self.turn.give_back()
        return min(longest_s, TURN_S)

    def closing(self) -> None:
        """Close the turn."""
        self.turn.close()
