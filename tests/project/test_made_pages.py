"""The documents that are made of the code are what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.made import metrics
from docs.made.__main__ import DOCUMENTS
from pipeline.telemetry.metrics import METRICS

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_is_what_the_code_says(name: str) -> None:
    assert (DOCS / name).read_text() == DOCUMENTS[name](), "python -m docs.made"


def test_every_metric_has_one_line_with_its_help_and_the_values_of_its_labels() -> None:
    lines = metrics.page().splitlines()

    for metric in METRICS:
        (line,) = [line for line in lines if line.startswith(f"| `{metric.name}` |")]
        assert metric.help in line
        assert all(
            f"`{value}`" in line for values in metric.labels.values() for value in values if value[:1] not in "@"
        )
