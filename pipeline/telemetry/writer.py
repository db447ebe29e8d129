"""A process's metric handles: each writes words of its own slot, bound by declared name and labels.

Binding checks the names; an increment afterwards is one read and one store (about 0.1 us). A handle belongs to one
thread at a time.
"""

from __future__ import annotations

import array
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from operator import add, itemgetter
from typing import NamedTuple

from pipeline.errors import FieldError
from pipeline.telemetry.metrics import BY_NAME, EACH, METRICS, OWN, Kind, Metric, SlotName

WORD_BYTES = 8
LINE_WORDS = 8

Merge = Callable[[Sequence[float] | None], list[float]]


class Cell(NamedTuple):
    """One series of a slot and the offset of its words; `OWN` labels are not filled in."""

    metric: Metric
    labels: tuple[str, ...]
    start: int


class SlotLayout:
    """The words of a role's slot: series summed over incarnations, then event times (the newest counts), then gauges.

    Attributes:
        cells: Every series that the role may write.
        words: Number of float64 words, a whole number of cache lines.
        activities: Word of the seconds spent on each of `pipeline.telemetry.metrics.ACTIVITIES`.
    """

    def __init__(self, role: str, slots: tuple[SlotName, ...]) -> None:
        self.cells: list[Cell] = []
        start, bounds = 0, []
        for part in range(3):
            for metric in METRICS:
                if role in metric.owners and _part_of(metric) == part:
                    for labels in metric.series(slots):
                        self.cells.append(Cell(metric, labels, start))
                        start += metric.words
            bounds.append(start)
        self._summed, self._newest, _ = bounds
        self.words = -(-start // LINE_WORDS) * LINE_WORDS
        self.by_series = {(cell.metric.name, cell.labels): cell for cell in self.cells}
        self.activities = [cell.start for cell in self.cells if cell.metric.name == "rlhfd_process_time_seconds_total"]

    def merge(self, base: Sequence[float], live: Sequence[float] | None) -> list[float]:
        """Return the totals of a slot: `base` of its dead processes and `live` of the running one, if there is one.

        Rounding is monotone and a fold stores exactly this result, so a total never falls, not even by the last bit.
        """
        summed, newest = self._summed, self._newest
        if live is None:
            return [*base[:newest], *([math.nan] * (self.words - newest))]
        pairs = zip(base[:summed], live[:summed], strict=True)
        sums = [alive if dead != dead else dead if alive != alive else dead + alive for dead, alive in pairs]
        return [*sums, *_latest(base[summed:newest], live[summed:newest]), *live[newest:]]

    def merger(self, base: Sequence[float]) -> Merge:
        """Return ``merge`` bound to this base, for the many readings until the next fold, at half the time per reading.

        With 64 workers that have each died once this is most of a scrape: hence no branch per word if all series are
        bound again.
        """
        summed, newest = self._summed, self._newest
        present = [at for at in range(summed) if base[at] == base[at]]
        if len(present) < 2:
            return lambda live: self.merge(base, live)
        counted = [word if word == word else 0.0 for word in base[:summed]]
        counted_before, times = itemgetter(*present), base[summed:newest]

        def merge(live: Sequence[float] | None) -> list[float]:
            # NaN in the sum: this process has not yet bound all series of an earlier one.
            if live is None or math.isnan(sum(counted_before(live))):
                return self.merge(base, live)
            return [*map(add, counted, live), *_latest(times, live[summed:newest]), *live[newest:]]

        return merge


def _latest(dead: Sequence[float], alive: Sequence[float]) -> list[float]:
    """Return the later of two times for each pair; if one is absent, the other."""
    pairs = zip(dead, alive, strict=True)
    return [new if old != old else old if new != new else max(old, new) for old, new in pairs]


def _part_of(metric: Metric) -> int:
    return 0 if metric.kind != "gauge" else 1 if metric.outlives_writer else 2


class Counter:
    """A bound counter."""

    __slots__ = ("_at", "_words")

    def __init__(self, words: memoryview[float], at: int) -> None:
        self._words = words
        self._at = at

    def inc(self, amount: float = 1.0) -> None:
        """Add a finite amount that is not negative."""
        if not 0.0 <= amount < math.inf:
            raise FieldError(f"a counter cannot go up by {amount}")
        self._words[self._at] += amount

    def set_total(self, total: float) -> None:
        """Set the total of this process, for a count that is kept elsewhere.

        Raises:
            FieldError: If the total is less than before.
        """
        if not self._words[self._at] <= total < math.inf:
            raise FieldError(f"a counter cannot go from {self._words[self._at]} to {total}")
        self._words[self._at] = total


class Gauge:
    """A bound gauge, absent until it is set."""

    __slots__ = ("_at", "_words")

    def __init__(self, words: memoryview[float], at: int) -> None:
        self._words = words
        self._at = at

    def set(self, value: float) -> None:
        """Set the value; NaN makes the gauge absent."""
        self._words[self._at] = value

    def clear(self) -> None:
        """Make the gauge absent until the next `set`."""
        self._words[self._at] = math.nan


class Histogram:
    """A bound histogram.

    A negative observation counts in the first bucket and ends the sum for good: a sum that can fall is no counter, and
    Prometheus would take the fall for a restart. The sum is then -inf, and every later addition keeps it -inf.
    """

    __slots__ = ("_at", "_bounds", "_sum_at", "_words")

    def __init__(self, words: memoryview[float], at: int, bounds: tuple[float, ...]) -> None:
        self._words = words
        self._at = at
        self._bounds = bounds
        self._sum_at = at + len(bounds) + 1

    def observe(self, value: float, times: int = 1) -> None:
        """Count a finite value, once or several times.

        Raises:
            FieldError: If the value is NaN or infinite; rlhfd_nonfinite_total counts such values.
        """
        if not math.isfinite(value):
            raise FieldError(f"{value} is no observation")
        self._words[self._at + bisect_left(self._bounds, value)] += times
        self._words[self._sum_at] += value * times if value >= 0.0 else -math.inf

    def observe_many(self, values: Iterable[float]) -> None:
        """Count each of the finite values."""
        for value in values:
            self.observe(value)


class MetricWriter:
    """Binds the series of one slot.

    Args:
        name: The writing process.
        layout: Layout of a slot of its role.
        words: The slab's float64 words.
        at: Offset of the slot's live words among them.
    """

    def __init__(self, name: SlotName, layout: SlotLayout, words: memoryview[float], at: int) -> None:
        self.name = name
        self._layout = layout
        self._words = words
        self._live_at = at

    def counter(self, name: str, /, **labels: str) -> Counter:
        """Return the handle of a counter, which is 0 from now on.

        Labels that name the writer itself, and labels that have one value only, are left out.

        Raises:
            FieldError: If the catalogue declares no such counter for this role, or no such label value.
        """
        return Counter(self._words, self._bind("counter", name, labels)[1])

    def gauge(self, name: str, /, **labels: str) -> Gauge:
        """Return the handle of a gauge, absent until it is set; labels and errors as for `counter`."""
        return Gauge(self._words, self._bind("gauge", name, labels)[1])

    def histogram(self, name: str, /, **labels: str) -> Histogram:
        """Return the handle of a histogram without observations; labels and errors as for `counter`."""
        cell, at = self._bind("histogram", name, labels)
        return Histogram(self._words, at, cell.metric.buckets)

    def _bind(self, kind: Kind, name: str, labels: dict[str, str]) -> tuple[Cell, int]:
        metric = BY_NAME[name]
        implied = {
            label: values[0] for label, values in metric.labels.items() if len(values) == 1 and values[0] != EACH
        }
        given = {**implied, **labels}
        cell = self._layout.by_series.get((name, tuple(given.get(label, "") for label in metric.labels)))
        if cell is None or metric.kind != kind or given.keys() != metric.labels.keys() or OWN in labels.values():
            raise FieldError(f"{self.name.role} writes no {kind} {name} with the labels {labels}")
        at = self._live_at + cell.start
        if kind != "gauge" and math.isnan(self._words[at + metric.words - 1]):
            self._words[at : at + metric.words] = memoryview(array.array("d", bytes(metric.words * WORD_BYTES)))
        return cell, at
