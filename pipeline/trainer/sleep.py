"""The turn of a rank's start on a card that it shares with engines, which sleep meanwhile (`rollout.sleep`)."""

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
from pipeline.trainer.metrics import TrainerMetrics

_WAITS_S = 1.0


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
