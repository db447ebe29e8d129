"""Rows into an extent and out of it into a batch, in one process: against a plain copy of as many true bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from benches.measure import Sample, figure, interleaved, timed
from benches.report import Section, Table
from benches.ways.daemon import experience_of
from benches.workload import APPEND_ROWS, SHAPES, appends
from pipeline.experience import codec
from pipeline.experience.ragged import RaggedRows

_POOL = 8
# Larger than any cache, so that rows are gathered from memory, as in a run.
_COLD_BYTES = 256 << 20


def run(*, quick: bool) -> Sequence[Section]:
    """Measure each shape."""
    tables = [_table(name, quick) for name in (("small",) if quick else ("small", "medium", "large", "vl"))]
    text = (
        "CPU time. An append of 8 rows is encoded, checksum included; two are checked and gathered into a left-padded"
        " batch of 16, from extents that are in no cache. One thread. The share is relative to a plain copy of true"
        " bytes, from memory that is in no cache either."
    )
    return [Section("gather", "Encoding and gathering", text, tables)]


def _table(name: str, quick: bool) -> Table:
    made = appends(SHAPES[name], _POOL)
    experiences = [RaggedRows.of(experience_of(append.arrays)) for append in made]
    # Extents of an arena begin at multiples of 64 bytes.
    room = (max(append.nbytes for append in made) + (1 << 16)) // 64 * 64
    places = min(max(_POOL, _COLD_BYTES // room), 2048)
    arena = np.zeros(places * room, np.uint8)
    memory = memoryview(arena)
    extents = []
    for place in range(places):
        view = memory[place * room : (place + 1) * room]
        encoded = codec.encode(experiences[place % _POOL], view)
        extents.append((view[: encoded.nbytes], encoded.checksum))
    nbytes = 2 * sum(append.nbytes for append in made) / _POOL
    turns = iter(range(1 << 62))
    flat = np.zeros(int(nbytes), np.uint8)
    rows = list(range(APPEND_ROWS))

    def encode() -> None:
        place = next(turns) % places
        for offset in (0, 1):
            view = memory[(place + offset) % places * room :][:room]
            codec.encode(experiences[(place + offset) % places % _POOL], view)

    def gather() -> None:
        place = next(turns) * 2 % places
        readers = [
            codec.ExtentReader(view, checksum=checksum)
            for view, checksum in (extents[place], extents[(place + 1) % places])
        ]
        codec.gather_padded([(reader, rows) for reader in readers])

    def copy() -> None:
        start = next(turns) * len(flat) % (len(arena) - len(flat))
        flat[:] = arena[start : start + len(flat)]

    least_s = 0.1 if quick else 0.3

    def timing(work: Callable[[], None]) -> Callable[[], float]:
        return lambda: timed(work, least_s=least_s, clock=time.process_time)

    ways = {"encode": encode, "check and gather": gather, "plain copy": copy}
    found = interleaved({way: timing(work) for way, work in ways.items()}, 3 if quick else 5)
    speeds = {way: Sample.of(nbytes / seconds / 1e9 for seconds in times) for way, times in found.items()}
    lines = [
        (
            f"{way}, {name}",
            str(speed),
            figure(speed.over(speeds["plain copy"]).median),
            figure(nbytes / speed.median / 1e3),
        )
        for way, speed in speeds.items()
    ]
    return Table(("step", "GB/s", "of a plain copy", "us for 16 rows"), lines, name)
