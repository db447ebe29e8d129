"""What a worker's metrics and the telemetry of an actor in front of them have in common."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from pipeline.progress import Telemetry
from pipeline.rollout.generation.interface import EngineLoad
from pipeline.telemetry.activity import Activities


class WorkerTelemetry(Telemetry):
    """Times the activities of a worker, and counts the response tokens of its engine as they are sampled, each once.

    Reports of the engine are counted as they come. The end of a request counts the tokens that no report named: those
    of its last step, or all of them if the engine makes no reports.

    Attributes:
        clock: The worker's activity.
    """

    clock: Activities

    def __init__(self, *, log_texts: bool = False) -> None:
        super().__init__(log_texts=log_texts)
        # Tokens counted for requests that have not ended, and those of the engine's present call.
        self._in_hand = self._reported = 0

    @contextlib.contextmanager
    def activity(self, name: str) -> Iterator[None]:
        """Count the time of the block for an activity, and its duration for the stage of that name."""
        started_s = time.monotonic()
        self.show_rows(0, 0)
        with self.clock.during(name):
            yield
        self.staged(name, time.monotonic() - started_s)

    def progress(self, *, rows_done: int = 0, rows: int = 0, tokens: int | None = None) -> None:
        """Write a heartbeat; show the progress of the stage if `rows` is above 0, and count tokens."""
        if rows:
            self.show_rows(rows_done, rows)
        if tokens is not None:
            if tokens < self._reported:
                # Of a new call, whose predecessor has ended.
                self._in_hand = self._reported = 0
            self._in_hand += tokens - self._reported
            self._count_sampled(tokens - self._reported, self._in_hand)
            self._reported = tokens
        self._beat()

    def sampled(self, tokens: int) -> None:
        """Count the response tokens of ended requests, except for those that a heartbeat has counted."""
        rest = max(0, tokens - self._in_hand)
        self._in_hand += rest - tokens
        self._count_sampled(rest, self._in_hand)

    def staged(self, name: str, seconds: float) -> None:
        """Count the duration of an ended activity for the stage of its name."""

    def show_rows(self, done: int, rows: int) -> None:
        """Show the rows in work and those of them that are done, without a heartbeat."""

    def engine(self, load: EngineLoad) -> None:
        """Show the work in hand of the worker's engine, and count its work since the last call."""

    def _beat(self) -> None:
        """Write a heartbeat."""

    def _count_sampled(self, tokens: int, in_hand: int) -> None:
        """Count response tokens, and show those of requests that have not ended."""
