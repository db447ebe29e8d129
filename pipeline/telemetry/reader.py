"""The instance's metrics as a whole: the totals of all slots of the slab."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

from pipeline.telemetry.metrics import BY_NAME, METRICS, Conservation, Metric, SlotName
from pipeline.telemetry.slab import MetricsSlab

_HEARTBEAT: Final = "rlhfd_process_last_heartbeat_timestamp_seconds"
_GIT_S: Final = 5.0
_CUDA_PACKAGES: Final = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu11")


@dataclasses.dataclass(frozen=True)
class HistogramReading:
    """A histogram's observations by bucket, not cumulated, +Inf last; no sum once one of them was negative."""

    buckets: tuple[float, ...]
    total: float | None

    @property
    def count(self) -> float:
        """Number of observations."""
        return math.fsum(self.buckets)


Series = Mapping[tuple[str, ...], float | HistogramReading]
_Growing = dict[tuple[str, ...], float | HistogramReading]


@dataclasses.dataclass(frozen=True)
class Reading:
    """Every series that exists at one moment, by family name and label values.

    `conservation` is the last block of the buffer; None before the first.
    """

    families: Mapping[str, Series]
    conservation: Conservation | None = None

    def value(self, name: str, /, **labels: str) -> float | None:
        """Return a counter or gauge, summed over the labels that are not given; None if there is no such series."""
        found = [value for value in self._named(name, labels) if isinstance(value, float)]
        return math.fsum(found) if found else None

    def histogram_mean(self, name: str, /, **labels: str) -> float | None:
        """Return the mean of all observations, over the labels that are not given; None if there is none."""
        found = [value for value in self._named(name, labels) if isinstance(value, HistogramReading)]
        count = math.fsum(value.count for value in found)
        totals = [value.total for value in found if value.total is not None]
        return math.fsum(totals) / count if count and len(totals) == len(found) else None

    def _named(self, name: str, labels: dict[str, str]) -> list[float | HistogramReading]:
        metric = BY_NAME[name]
        series = self.families.get(name, {}).items()
        return [value for key, value in series if labels.items() <= dict(zip(metric.labels, key, strict=True)).items()]


class _Series(NamedTuple):
    """A series and its words in a slot."""

    metric: Metric
    labels: tuple[str, ...]
    words: slice


class _OwnSeries(NamedTuple):
    """A series of each slot of a role, one word at the same offset of each."""

    name: str
    labels: tuple[tuple[str, ...], ...]
    word: int


class MetricsReader:
    """Reads a slab; lives in the supervisor.

    Args:
        slab: The instance's slab.
        info: Labels of the families that never change, by name: rlhfd_build_info, rlhfd_run_info.
        names: Label values of the slab and the ones that are shown in their place: the names of reward functions.

    Attributes:
        external: Families that no slot holds, by name, each with all its series. The caller that sets them updates
            them.
    """

    def __init__(
        self,
        slab: MetricsSlab,
        info: Mapping[str, Mapping[str, str]] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self._slab = slab
        self._names = names or {}
        self.external: dict[str, Series] = {}
        for name, labels in (info or {}).items():
            self.external[name] = {tuple(labels[label] for label in BY_NAME[name].labels): 1.0}
        self._slots_of: dict[str, list[int]] = {}
        for index, slot in enumerate(slab.layout.slots):
            self._slots_of.setdefault(slot.role, []).append(index)
        # A series whose labels name the slot comes from that slot alone; all slots of a role add to any other series.
        self._shared = {role: self._series(SlotName(role), own=False) for role in self._slots_of}
        self._own: dict[str, list[_OwnSeries]] = {}
        self.name({})

    def name(self, names: Mapping[str, str]) -> None:
        """Show further names in place of label values of the slab: those of series with a label of their slot."""
        self._names = {**self._names, **names}
        self._own = {role: self._own_series(indices) for role, indices in self._slots_of.items()}

    def read(self) -> Reading:
        """Return the totals of all slots, dead processes included."""
        families: dict[str, _Growing] = {metric.name: {} for metric in METRICS}
        columns: dict[tuple[str, tuple[str, ...]], list[list[Sequence[float]]]] = {}
        for role, indices in self._slots_of.items():
            words_of = [*zip(*(self._slab.read(index) for index in indices), strict=True)]
            present = [_present(column) for column in words_of]
            for metric, labels, words in self._shared[role]:
                if present[words.stop - 1]:
                    columns.setdefault((metric.name, labels), []).append(present[words])
            for name, of_slots, word in self._own[role]:
                pairs = zip(of_slots, words_of[word], strict=True)
                is_whole = present[word] is words_of[word]
                families[name].update(pairs if is_whole else [pair for pair in pairs if pair[1] == pair[1]])
            self._read_heartbeats(indices, families[_HEARTBEAT])
        for (name, labels), parts in columns.items():
            together = parts[0] if len(parts) == 1 else [list(chain(*words)) for words in zip(*parts, strict=True)]
            families[name][labels] = _combine(BY_NAME[name], together)
        conservation = self._slab.conservation()
        for (name, labels), count in (conservation.samples() if conservation else {}).items():
            families[name][labels] = float(count)
        return Reading({**families, **self.external}, conservation)

    def _series(self, slot: SlotName, *, own: bool) -> list[_Series]:
        """Return the series of a slot whose labels name the slot, or the others."""
        itself = {"role": slot.role, "worker": str(slot.worker)}
        found = []
        for metric, labels, start in self._slab.layout.of_role[slot.role].cells:
            if metric.is_own("worker") == own:
                pairs = zip(metric.labels, labels, strict=True)
                filled = tuple(
                    itself[name] if metric.is_own(name) else self._names.get(value, value) for name, value in pairs
                )
                found.append(_Series(metric, filled, slice(start, start + metric.words)))
        return found

    def _own_series(self, indices: Sequence[int]) -> list[_OwnSeries]:
        each = [self._series(self._slab.layout.slots[index], own=True) for index in indices]
        return [
            _OwnSeries(found[0].metric.name, tuple(one.labels for one in found), found[0].words.start)
            for found in zip(*each, strict=True)
        ]

    def _read_heartbeats(self, indices: Sequence[int], heartbeats: _Growing) -> None:
        slots = [self._slab.layout.slots[index] for index in indices]
        live = {slot: self._slab.progress(*slot) for slot in slots if self._slab.is_live(*slot)}
        # A rank that waits in a collective is as alive as the ranks that it waits for.
        others_s = max((found.beat_s for found in live.values() if not found.in_collective), default=0.0)
        for (role, worker), found in live.items():
            if beat_s := max(found.beat_s, others_s) if found.in_collective else found.beat_s:
                # In whole milliseconds: the two clocks are not read at the same moment.
                heartbeats[role, str(worker)] = round(time.time() - time.monotonic() + beat_s, 3)


def _present(column: Sequence[float]) -> Sequence[float]:
    """Return the words that are not absent; usually all of them, which their sum shows: it is not NaN."""
    total = sum(column)
    return column if total == total else [word for word in column if word == word]


def _combine(metric: Metric, words: Sequence[Sequence[float]]) -> float | HistogramReading:
    """Return the value of one series from the words of several slots."""
    if metric.kind == "histogram":
        # fsum rounds once, so a growing total never falls, in any order of its parts. Buckets hold whole numbers, whose
        # sums are exact.
        total = math.fsum(words[-1])
        return HistogramReading(tuple(map(sum, words[:-1])), total if total >= 0.0 else None)
    if metric.kind == "counter":
        return math.fsum(words[0])
    # The first of several workers' gauges without a worker label counts: rank 0's values stand for the step.
    return max(words[0]) if metric.outlives_writer else words[0][0]


def build_info() -> dict[str, str]:
    """Return the labels of rlhfd_build_info from package metadata; torch itself is not imported."""
    torch = version_of("torch")
    local = torch.partition("+cu")[2]
    packaged = next((found for found in map(version_of, _CUDA_PACKAGES) if found), "")
    return {
        "version": version_of("rlhfd"),
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch,
        "cuda": f"{local[:-1]}.{local[-1]}" if local else ".".join(packaged.split(".")[:2]),
    }


def version_of(package: str) -> str:
    """Return the version of an installed package; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """Return the commit that is checked out, or from which this code was installed; empty if neither is known."""
    checkout = Path(__file__).resolve().parents[2] / ".git"
    if checkout.exists():
        # With its folder named, git reads the checkout of another user, too.
        words = ("git", f"--git-dir={checkout}", "rev-parse", "--verify", "HEAD")
        try:
            return subprocess.run(words, capture_output=True, text=True, timeout=_GIT_S, check=False).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            return ""
    try:
        origin = json.loads(importlib.metadata.distribution("rlhfd").read_text("direct_url.json") or "{}")
    except importlib.metadata.PackageNotFoundError:
        return ""
    return str(origin.get("vcs_info", {}).get("commit_id", ""))
