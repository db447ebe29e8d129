"""A telemetry that keeps all that it is told, and the events of a node's call."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from pipeline.progress import Event, Telemetry


class Told(Telemetry):
    """Keeps the events of each kind, in order."""

    def __init__(self, verdicts: list[tuple[str, Sequence[float]]] | None = None) -> None:
        super().__init__()
        self.beats: list[tuple[int, int, int | None]] = []
        self.phases: list[str] = []
        self.counted: dict[Event, list[str]] = collections.defaultdict(list)
        self.verdicts = [] if verdicts is None else verdicts

    def progress(self, *, rows_done: int = 0, rows: int = 0, tokens: int | None = None) -> None:
        self.beats.append((rows_done, rows, tokens))

    def phase(self, name: str) -> None:
        self.phases.append(name)

    def count(self, event: Event, kind: str) -> None:
        self.counted[event].append(kind)

    def engine_judged(self, verdict: str, gaps: Sequence[float]) -> None:
        self.verdicts.append((verdict, gaps))


def events_of(events: Sequence[tuple[str, tuple[Any, ...]]], name: str) -> list[Any]:
    """Return the kinds of a node's counted events of a name, or the arguments of each call of a method."""
    counted = [kind for method, (event, *kind) in events if method == "count" and event == name]
    return [kind for (kind,) in counted] or [arguments for method, arguments in events if method == name]
