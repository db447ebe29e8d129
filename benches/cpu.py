"""Costs of transport beside its time: bytes of the arena per item, and the buffer's share of a core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benches.contest import BARE, DAEMON, Contestant, running
from benches.measure import Sample, figure, interleaved
from benches.report import Section, Table
from benches.ways.daemon import experience_of
from benches.workload import APPEND_ROWS, SHAPES, appends
from pipeline.experience import codec

_ITEMS_PER_S = 1000


def run(*, quick: bool) -> Sequence[Section]:
    """Measure bytes of each shape, and the buffer at a steady rate."""
    shapes = ("small",) if quick else ("small", "medium", "large", "vl")
    return [
        Section(
            "cpu", "Bytes and CPU", _TEXT,
            [
                Table(("shape", "in the arena", "padded to the shape", "share"), [_bytes(name) for name in shapes]),
                Table(("process", "of a core"), _shares(quick)),
            ],
        )
    ]  # fmt: skip


def _bytes(name: str) -> tuple[str, ...]:
    shape, made = SHAPES[name], appends(SHAPES[name], 32)
    memory = memoryview(bytearray(max(append.nbytes for append in made) + (1 << 16)))
    stored = sum(codec.encode(experience_of(append.arrays), memory).nbytes for append in made) / len(made) / APPEND_ROWS
    pixels = made[0].arrays["pixel_values"].nbytes / APPEND_ROWS if shape.patches else 0
    padded = 16 * shape.tokens + 17 * shape.actions + 4 + pixels
    return f"bytes an item, {name}", f"{stored:,.0f}", f"{padded:,.0f}", figure(stored / padded)


def _shares(quick: bool) -> list[tuple[str, ...]]:
    pause_s = APPEND_ROWS / _ITEMS_PER_S
    appends_s = 1.0 if quick else 4.0
    with running([DAEMON, BARE], 1) as (runners, failed):
        if failed:
            raise RuntimeError(str(failed))

        def measure(way: Contestant) -> dict[str, Any]:
            return runners[way].measure("small", int(appends_s / pause_s) // 2 * 2, pause_s=pause_s)

        for runner in runners.values():
            runner.measure("small", 32)
        found = interleaved({way: lambda way=way: measure(way) for way in runners}, 1 if quick else 3)
    rate = Sample.of(one["items"] / one["seconds"] for one in found[DAEMON])
    daemon, bare = (
        Sample.of(one["parts"]["buffer"] / one["items"] * _ITEMS_PER_S for one in found[way]) for way in (DAEMON, BARE)
    )
    return [
        (f"buffer's process at {_ITEMS_PER_S:,} items/s", f"{daemon.scaled(100)} %"),
        ("measured at items/s", str(rate)),
        ("that of *bare* in its place: such messages, and nothing done", f"{bare.scaled(100)} %"),
    ]


_TEXT = """Bytes of an extent per row, header and alignment included, against a batch of the shape's full width with its
masks. The buffer's CPU is that of its process while a worker appends 8 rows every 8 ms, scaled to the rate that was
reached.
"""
