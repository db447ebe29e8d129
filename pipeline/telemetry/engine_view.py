"""The engines of the workers, from readings of the metrics: the work in hand, and rates over a window."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from pipeline.telemetry.reader import Reading, Series
from pipeline.telemetry.window import Window

_TOTALS: Final = ("rlhfd_engine_tokens_total", "rlhfd_engine_prefix_tokens_total", "rlhfd_engine_preemptions_total")
_Families = Mapping[str, Series]


@dataclasses.dataclass(frozen=True)
class EngineView:
    """The engine of one worker.

    Attributes:
        running: Responses that advance with each step.
        waiting: Responses that do not advance yet.
        room: Responses that could run at a time, at most; 0 for no limit.
        cache_ratio: Used share of the key-value cache.
        preemptions: Responses that lost their place in the cache during the window.
        tokens_in_per_s: Prompt tokens taken over a second.
        tokens_out_per_s: Tokens sampled a second.
        prefix_hit_ratio: Share of the prompt tokens that the prefix cache held; None if no response has ended.
    """

    running: int
    waiting: int
    room: int = 0
    cache_ratio: float = 0.0
    preemptions: int = 0
    tokens_in_per_s: float = 0.0
    tokens_out_per_s: float = 0.0
    prefix_hit_ratio: float | None = None

    def shown(self) -> dict[str, Any]:
        """Return the values for JSON, rounded."""
        return {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in dataclasses.asdict(self).items()
        }


class EngineWindow:
    """The engines of all workers over the last minute."""

    def __init__(self) -> None:
        self._totals = Window[_Families](60.0, 1.0)
        self._newest: _Families = {}
        self._newest_s = 0.0

    def add(self, now_s: float, reading: Reading) -> None:
        """Add a reading."""
        self._newest, self._newest_s = reading.families, now_s
        self._totals.add(now_s, {name: self._newest.get(name, {}) for name in _TOTALS})

    def view(self, worker: int) -> EngineView | None:
        """Return the engine of a worker; None if the worker shows none."""

        def value(families: _Families, name: str, *labels: str) -> float | None:
            # By its key: a search of all series for each worker would be quadratic in their number.
            found = families.get(name, {}).get(("rollout", str(worker), *labels))
            return found if isinstance(found, float) else None

        def now(name: str, *labels: str) -> float:
            return value(self._newest, name, *labels) or 0.0

        if (running := value(self._newest, "rlhfd_engine_responses", "running")) is None:
            return None
        first_s, first = self._totals.kept[0]

        def grown(name: str, *labels: str) -> float:
            return max(0.0, now(name, *labels) - (value(first, name, *labels) or 0.0))

        tokens, prefix, preemptions = _TOTALS
        seconds, hits = self._newest_s - first_s, grown(prefix, "hit")
        looked_up = hits + grown(prefix, "miss")
        return EngineView(
            int(running),
            int(now("rlhfd_engine_responses", "waiting")),
            int(now("rlhfd_engine_responses", "room")),
            now("rlhfd_engine_cache_ratio"),
            int(grown(preemptions)),
            grown(tokens, "in") / seconds if seconds else 0.0,
            grown(tokens, "out") / seconds if seconds else 0.0,
            hits / looked_up if looked_up else None,
        )
