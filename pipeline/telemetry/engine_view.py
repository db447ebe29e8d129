"""The engines of the workers, from readings of the metrics: the work in hand, and rates over a window."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, Final

from pipeline.telemetry.reader import Reading

_WINDOW_S: Final = 60.0
_EVERY_S: Final = 1.0
"""Least time between two readings that are kept."""
_RATES: Final = {
    "tokens_in": ("rlhfd_engine_tokens_total", {"direction": "in"}),
    "tokens_out": ("rlhfd_engine_tokens_total", {"direction": "out"}),
    "preemptions": ("rlhfd_engine_preemptions_total", {}),
    "hit": ("rlhfd_engine_prefix_tokens_total", {"result": "hit"}),
    "miss": ("rlhfd_engine_prefix_tokens_total", {"result": "miss"}),
}
_Totals = dict[str, dict[str, float]]


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
        self._kept: collections.deque[tuple[float, _Totals]] = collections.deque()
        self._newest: Reading | None = None
        self._newest_s = 0.0

    def add(self, now_s: float, reading: Reading) -> None:
        """Add a reading."""
        self._newest, self._newest_s = reading, now_s
        if self._kept and now_s - self._kept[-1][0] < _EVERY_S:
            return
        self._kept.append((now_s, _totals(reading)))
        while self._kept[0][0] < now_s - _WINDOW_S:
            self._kept.popleft()

    def view(self, worker: int) -> EngineView | None:
        """Return the engine of a worker; None if the worker shows none."""
        if self._newest is None:
            return None
        name, reading = str(worker), self._newest

        def responses(state: str) -> float | None:
            return reading.value("rlhfd_engine_responses", worker=name, state=state)

        if (running := responses("running")) is None:
            return None
        first_s, first = self._kept[0]
        then, now = first.get(name, {}), _totals(reading).get(name, {})
        grown = {rate: max(0.0, now.get(rate, 0.0) - then.get(rate, 0.0)) for rate in _RATES}
        seconds, looked_up = self._newest_s - first_s, grown["hit"] + grown["miss"]
        return EngineView(
            int(running),
            int(responses("waiting") or 0),
            int(responses("room") or 0),
            reading.value("rlhfd_engine_cache_ratio", worker=name) or 0.0,
            int(grown["preemptions"]),
            grown["tokens_in"] / seconds if seconds else 0.0,
            grown["tokens_out"] / seconds if seconds else 0.0,
            grown["hit"] / looked_up if looked_up else None,
        )


def _totals(reading: Reading) -> _Totals:
    """Return the totals of each worker by their names in `_RATES`."""
    found: _Totals = {}
    for worker in {key[1] for key in reading.families.get("rlhfd_engine_tokens_total", {})}:
        found[worker] = {
            rate: reading.value(name, worker=worker, **labels) or 0.0 for rate, (name, labels) in _RATES.items()
        }
    return found
