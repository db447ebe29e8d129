"""Shared by the tests of metrics: an instance's slots, a conservation block, functions to write and read a slab."""

from __future__ import annotations

from pathlib import Path

from pipeline.telemetry.metrics import Conservation, SlotName
from pipeline.telemetry.reader import MetricsReader
from pipeline.telemetry.slab import MetricsSlab, SlotWriter

ROOT = Path(__file__).parents[2]
SLOTS = (
    SlotName("supervisor"),
    SlotName("buffer"),
    SlotName("trainer", 0),
    SlotName("rollout", 0),
    SlotName("rollout", 1),
)
STEPS = "rlhfd_train_steps_total"
PROMPTS = "rlhfd_prompts_total"
BLOCK = Conservation(
    sealed=100,
    trained=60,
    dropped=(5, 4, 3, 2, 1, 0),
    ready_items=10,
    leased_items=12,
    writing_items=8,
    ready_bytes=1000,
    leased_bytes=1200,
    writing_bytes=800,
    leases_active=2,
    tickets_outstanding=4,
)


def begun(slab: MetricsSlab, role: str, worker: int = 0) -> SlotWriter:
    """Start a new life of a slot and return its writer."""
    slab.begin(role, worker)
    return slab.writer(role, worker)


def value(slab: MetricsSlab, name: str, **labels: str) -> float | None:
    """Read one counter or gauge."""
    return MetricsReader(slab).read().value(name, **labels)
