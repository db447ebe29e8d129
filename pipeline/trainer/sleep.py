"""The turns of a rank on a card that it shares with engines, which sleep during its steps (`rollout.sleep`)."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator

from pipeline.errors import ExitCode
from pipeline.models.device import free_cached
from pipeline.runtime.role import Report, RoleContext
from pipeline.storage.card_turns import TURN_S, RankTurn
from pipeline.trainer.hooks import TrainerHook
from pipeline.trainer.metrics import TrainerMetrics

_WAITS_S = 1.0


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


@contextlib.contextmanager
def turn_of_start(context: RoleContext, metrics: TrainerMetrics) -> Iterator[None]:
    """Hold the rank's turn during passes of its start that are as large as a step's: the plan counts no engine beside.

    Once it waits, engines finish their tickets and sleep. The wait is no part of the start.

    Raises:
        SystemExit: At a shutdown.
    """
    turn, said_s = RankTurn(context.folder, context.index, free_cached), -math.inf
    try:
        while not turn.take():
            if context.stopping:
                sys.exit(ExitCode.OK)
            context.metrics.beat()
            if time.monotonic() - said_s > _WAITS_S:
                said_s = time.monotonic()
                context.report(Report(state="placed"))
            with metrics.waiting_for_card():
                time.sleep(TURN_S)
        yield
        turn.give_back()
    finally:
        turn.close()
