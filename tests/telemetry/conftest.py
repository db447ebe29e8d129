"""A slab of an instance's slots, for the tests of metrics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.telemetry.slab import MetricsSlab
from tests.support.slabs import SLOTS


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics"


@pytest.fixture
def slab(path: Path) -> Iterator[MetricsSlab]:
    slab = MetricsSlab.create(path, SLOTS)
    yield slab
    slab.close()
