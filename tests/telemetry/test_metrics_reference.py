from __future__ import annotations

from pathlib import Path

from pipeline.telemetry.metrics import METRICS
from pipeline.telemetry.metrics_reference import reference

ROOT = Path(__file__).parents[2]


def test_reference_of_the_metrics_is_what_the_catalogue_says() -> None:
    shown = (ROOT / "docs/metrics.md").read_text()

    assert shown == reference(), "python -m pipeline.telemetry.metrics_reference > docs/metrics.md"


def test_every_metric_has_one_line_with_its_help_and_the_values_of_its_labels() -> None:
    lines = reference().splitlines()

    for metric in METRICS:
        (line,) = [line for line in lines if line.startswith(f"| `{metric.name}` |")]
        assert metric.help in line
        assert all(
            f"`{value}`" in line for values in metric.labels.values() for value in values if value[:1] not in "@"
        )
