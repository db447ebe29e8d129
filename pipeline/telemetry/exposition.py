"""The text that Prometheus scrapes, written by prometheus_client from the families that a `MetricsReader` reads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Final, cast

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pipeline.telemetry.metrics import METRICS, Metric
from pipeline.telemetry.reader import HistogramReading, MetricsReader

_Numbers = Mapping[tuple[str, ...], float]
_Histograms = Mapping[tuple[str, ...], HistogramReading]
# All names are valid in every scheme. The others look at each letter of each name again: half of the time of a scrape.
_ESCAPING: Final = ALLOWUTF8


class Exposition(Collector):
    """An instance's metrics in the formats of Prometheus.

    Args:
        reader: The source of all values.
    """

    def __init__(self, reader: MetricsReader) -> None:
        self._reader = reader
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[Family]:
        """Yield each family that has a series, in the order of the catalogue."""
        families = self._reader.read().families
        for metric in METRICS:
            if series := families.get(metric.name):
                if metric.kind == "histogram":
                    yield _histogram(metric, cast(_Histograms, series))
                else:
                    yield _scalars(metric, cast(_Numbers, series))

    def text(self) -> bytes:
        """Return the exposition in Prometheus' text format 0.0.4."""
        return generate_latest(self._registry, _ESCAPING)

    def openmetrics(self) -> bytes:
        """Return the exposition in OpenMetrics 1.0.0."""
        text: bytes = generate_openmetrics(self._registry, _ESCAPING)  # type: ignore[no-untyped-call]
        return text


def _scalars(metric: Metric, series: _Numbers) -> Family:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=[*metric.labels], unit=metric.unit)
    for labels, value in series.items():
        family.add_metric(labels, value)
    return family


def _histogram(metric: Metric, series: _Histograms) -> Family:
    family = HistogramMetricFamily(metric.name, metric.help, labels=[*metric.labels], unit=metric.unit)
    bounds = [floatToGoString(bound) for bound in (*metric.buckets, math.inf)]  # type: ignore[no-untyped-call]
    for labels, value in series.items():
        # OpenMetrics requires count and sum together or neither; without a sum the family has neither.
        family.add_metric(labels, [*zip(bounds, accumulate(value.buckets), strict=True)], value.total)
    return family
