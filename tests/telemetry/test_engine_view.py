"""The workers' engines as the supervisor sees them: work in hand, and rates over a minute."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pipeline.rollout.generation.interface import EngineCounts, EngineLoad
from pipeline.rollout.metrics import RolloutMetrics
from pipeline.telemetry.engine_view import EngineView, EngineWindow
from pipeline.telemetry.metrics import SlotName
from pipeline.telemetry.reader import MetricsReader
from pipeline.telemetry.slab import MetricsSlab


@pytest.fixture
def slab(tmp_path: Path):
    slab = MetricsSlab.create(tmp_path / "metrics", [SlotName("supervisor"), *(SlotName("rollout", n) for n in (0, 1))])
    for worker in (0, 1):
        slab.begin("rollout", worker)
    yield slab
    slab.close()


def metrics_of(slab: MetricsSlab, worker: int) -> RolloutMetrics:
    return RolloutMetrics(slab.writer("rollout", worker), reward_source="function")


def test_a_worker_without_an_engine_shows_none(slab: MetricsSlab) -> None:
    window = EngineWindow()
    assert window.view(0) is None
    metrics_of(slab, 0)

    window.add(0.0, MetricsReader(slab).read())

    assert window.view(0) is None


def test_loads_and_rates_of_the_last_minute_are_those_of_each_worker(slab: MetricsSlab) -> None:
    reader, window = MetricsReader(slab), EngineWindow()
    first, second = metrics_of(slab, 0), metrics_of(slab, 1)
    first.engine(EngineLoad(8, 4, 0.25, 256, EngineCounts(1000, 2000, 5, 1000, 100)))
    second.engine(EngineLoad(1, 0, 1.0, None, EngineCounts(10, 20)))
    window.add(100.0, reader.read())
    first.engine(EngineLoad(6, 2, 0.03, 256, EngineCounts(1300, 5000, 7, 1200, 250)))
    window.add(110.0, reader.read())

    assert window.view(0) == EngineView(
        6, 2, 256, pytest.approx(0.97), preemptions=2, tokens_in_per_s=30.0, tokens_out_per_s=300.0,
        prefix_hit_ratio=0.75,
    )  # fmt: skip
    assert window.view(1) == EngineView(1, 0)
    first.engine(EngineLoad(0, 0, 1.0, 256, EngineCounts(1300, 5000, 7, 1200, 250)))
    window.add(171.0, reader.read())
    view = window.view(0)
    assert view is not None and (view.running, view.preemptions, view.tokens_out_per_s) == (0, 0, 0.0)


def test_the_views_of_64_workers_hold_the_supervisor_for_less_than_a_tick(tmp_path: Path) -> None:
    workers = range(64)
    with_all = MetricsSlab.create(
        tmp_path / "all", [SlotName("supervisor"), *(SlotName("rollout", n) for n in workers)]
    )
    for worker in workers:
        with_all.begin("rollout", worker)
        metrics_of(with_all, worker).engine(EngineLoad(worker, 0, counts=EngineCounts(10, 20)))
    window, reading = EngineWindow(), MetricsReader(with_all).read()

    begun_s = time.process_time()
    window.add(0.0, reading)
    views = [window.view(worker) for worker in workers]
    took_s = time.process_time() - begun_s
    with_all.close()

    assert [view and view.running for view in views] == [*workers]
    assert took_s < 0.25


def test_an_engine_that_starts_anew_with_its_worker_never_counts_backwards(slab: MetricsSlab) -> None:
    reader = MetricsReader(slab)
    metrics_of(slab, 0).engine(EngineLoad(1, 0, counts=EngineCounts(100, 200, 3, 40, 30)))
    slab.begin("rollout", 0)
    metrics_of(slab, 0).engine(EngineLoad(1, 0, counts=EngineCounts(10, 20, 1, 4, 1)))

    reading = reader.read()

    assert reading.value("rlhfd_engine_tokens_total", direction="in") == 110
    assert reading.value("rlhfd_engine_tokens_total", direction="out") == 220
    assert reading.value("rlhfd_engine_preemptions_total") == 4
    assert reading.value("rlhfd_engine_prefix_tokens_total", result="hit") == 31
    assert reading.value("rlhfd_engine_prefix_tokens_total", result="miss") == 13
