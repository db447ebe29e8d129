"""A telemetry that keeps all that it is told, and the events of a node's call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.progress import Telemetry


class Told(Telemetry):
    """Keeps the events of each kind, in order."""

    def __init__(self, verdicts: list[tuple[str, Sequence[float]]] | None = None) -> None:
        super().__init__()
        self.beats: list[tuple[int, int, int | None]] = []
        self.phases: list[str] = []
        self.problems: list[str] = []
        self.answers: list[str] = []
        self.halved: list[str] = []
        self.verdicts = [] if verdicts is None else verdicts

    def progress(self, *, rows_done: int = 0, rows: int = 0, tokens: int | None = None) -> None:
        self.beats.append((rows_done, rows, tokens))

    def phase(self, name: str) -> None:
        self.phases.append(name)

    def reward_errored(self, reason: str) -> None:
        self.problems.append(reason)

    def environment_answered(self, result: str) -> None:
        self.answers.append(result)

    def out_of_memory(self, during: str) -> None:
        self.halved.append(during)

    def engine_judged(self, verdict: str, gaps: Sequence[float]) -> None:
        self.verdicts.append((verdict, gaps))


def events_of(events: Sequence[tuple[str, tuple[Any, ...]]], method: str) -> list[Any]:
    """Return the arguments of each of a node's events that is this method; one argument alone as it is."""
    found = [arguments for name, arguments in events if name == method]
    return [arguments[0] if len(arguments) == 1 else arguments for arguments in found]
