"""A stream of tickets in front of a roller whose calls block: each ticket is rolled out by `finish`."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.models.weights.store import WeightsReader
from pipeline.rollout.roller import LocalRoller, Rolled
from pipeline.storage.weights_header import WeightsVersion

BLOCKING_TICKETS_AHEAD = 2


class RollStream:
    """One rollout at a time; all of it is done by `finish`."""

    updates_in_flight = False

    def __init__(self, roller: LocalRoller, tickets_ahead: int = BLOCKING_TICKETS_AHEAD) -> None:
        self.tickets_ahead = tickets_ahead
        self._roller = roller
        self._ticket: tuple[int, int, int, int] | None = None

    @property
    def has_room(self) -> bool:
        """Whether there is no ticket."""
        return self._ticket is None

    def begin(self, ticket: int, position: int, prompts: int, *, evaluation: int = -1) -> None:
        """Keep the ticket for `finish`."""
        self._ticket = ticket, position, prompts, evaluation

    def step(self) -> list[int]:
        """Return the ticket."""
        return [] if self._ticket is None else [self._ticket[0]]

    def finish(self, ticket: int) -> Rolled:
        """Roll the ticket out."""
        assert self._ticket is not None and self._ticket[0] == ticket
        _, position, prompts, evaluation = self._ticket
        self._ticket = None
        return self._roller.of(evaluation).roll(position, prompts)

    def cancel(self, tickets: Sequence[int]) -> None:
        """Drop the ticket."""
        if self._ticket is not None and self._ticket[0] in tickets:
            self._ticket = None

    def fetch(self, source: WeightsReader) -> WeightsVersion:
        """Replace the roller's weights."""
        return self._roller.fetch(source)

    def close(self) -> None:
        """Close the roller."""
        self._roller.close()
