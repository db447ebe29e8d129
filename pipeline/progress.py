"""The receiver of the progress and the events of long work."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal

Event = Literal["reward_errored", "number_left_out", "environment_answered", "out_of_memory", "weights_synced"]


class Telemetry:
    """Receives the progress and the events of long work, and drops them; a subclass counts the ones that it shows.

    A process gives one to all of its parts: its metrics, or in front of a gateway
    `pipeline.rollout.remote.NodeTelemetry`. The work alone calls it: a live thread proves nothing about a GPU that
    hangs.

    Args:
        log_texts: Whether the log may quote prompts, responses and answers.
    """

    def __init__(self, *, log_texts: bool = False) -> None:
        self.log_texts = log_texts

    @classmethod
    def none(cls) -> Telemetry:
        """Return a receiver that drops everything, for a part that nothing watches."""
        return Telemetry()

    def progress(self, *, rows_done: int = 0, rows: int = 0, tokens: int | None = None) -> None:
        """Write a heartbeat: a process without one for `daemon.hang_timeout_s` is killed.

        Args:
            rows_done: Rows of the call that are finished.
            rows: Rows of the call; 0 if it does not count them.
            tokens: Tokens sampled so far by the call, or by the engine since its start; None if the call samples none.
        """

    def activity(self, name: str) -> AbstractContextManager[None]:
        """Return a context that counts the time of its block for an activity.

        Args:
            name: Name of the activity, such as "generate".

        Returns:
            The context.
        """
        return contextlib.nullcontext()

    def phase(self, name: str) -> None:
        """Write a heartbeat at the begin of a phase of a step.

        Args:
            name: "forward", "backward", "reduce" or "optimizer".
        """

    def sampled(self, tokens: int) -> None:
        """Count the response tokens of ended requests, except for those that `progress` has counted.

        Args:
            tokens: All tokens of these requests.
        """

    def count(self, event: Event, kind: str) -> None:
        """Count an event.

        Args:
            event: "reward_errored", a row without a reward; "number_left_out", a further number of a reward function;
                "environment_answered", an answer of a row's environment; "out_of_memory", a call that ran out of the
                device's memory, and is run again in halves; "weights_synced", a weight sync.
            kind: Of a reward "timeout", "exception" or "invalid". Of a number "invalid" for one that is not finite,
                "name" where there are too many names. Of an answer "ok" or "tool_failed"; of a row without one as of a
                reward. Of a call "pass" or "generate". Of a sync "ok", "refused" for differences that did not lead to
                the published bytes, "mismatch" if the model did not compute with its weights after it.
        """

    def engine_judged(self, verdict: str, gaps: Sequence[float]) -> None:
        """Count a probe of the engine.

        Args:
            verdict: "ok", "gap" or "stale".
            gaps: Differences of its log-probs, in nats a token.
        """
