"""The reading of a scrape by tests of daemons, beside that of prometheus_client."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.daemon import parse, total

ODD = ("", "a b", 'says "no"', "C:\\new", "two\nlines", '{a="b"} 3', "\\n", "#", "a\u2028b")


def test_samples_are_those_that_prometheus_client_reads() -> None:
    registry = CollectorRegistry()
    gauge = Gauge("gauge", 'Help with "quotes", {braces} and a\nline.', ["label", "other"], registry=registry)
    for number, value in enumerate(ODD):
        gauge.labels(value, "x").set(number / 7)
    gauge.labels("infinite", "x").set(-math.inf)
    Counter("counted", "Help.", registry=registry).inc(1 << 60)
    Histogram("seconds", "Help.", ["label"], registry=registry).labels("a").observe(0.3)
    text = generate_latest(registry).decode()

    found = parse(text)

    expected = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found == expected and len(found) > 25
    assert total(found, "gauge", other="x", label="two\nlines") == 4 / 7
