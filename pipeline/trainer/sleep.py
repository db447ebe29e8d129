"""The turns of a rank on a card that it shares with engines, which sleep during its steps (`rollout.sleep`)."""

from __future__ import annotations

from pipeline.storage.card_turns import RankTurn
from pipeline.trainer.hooks import TrainerHook


class CardTurns(TrainerHook):
    """Steps only in the rank's turn.

    Args:
        turn: The rank's; closed at the end of training.
    """

    is_gate = True

    def __init__(self, turn: RankTurn) -> None:
        self._turn = turn

    @property
    def is_waiting(self) -> bool:  # type: ignore[override]
        """Whether a step waits for engines that are awake."""
        return self._turn.is_asking

    def may_step(self) -> bool:
        """Ask for the turn; return whether every engine sleeps."""
        return self._turn.take()

    def stepped(self) -> None:
        """Free the memory of the step, and let engines wake."""
        self._turn.give_back()

    def closing(self) -> None:
        """Give the turn back for good."""
        self._turn.close()
