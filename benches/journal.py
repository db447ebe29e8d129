"""The pauses of the buffer's loop while its snapshot is written.

The buffer holds a number of bytes in extents of one size; its loop does nothing but the snapshot, as fast as it can, so
the longest time between two turns is the delay of a ticket, the machine's own pauses included.
"""

from __future__ import annotations

import pathlib
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple, cast

from benches.measure import Sample, interleaved
from benches.report import ROOT, Section, Table
from pipeline.buffer.admission import Limits
from pipeline.buffer.buffer import Buffer
from pipeline.buffer.metrics import BufferMetrics
from pipeline.buffer.snapshot import BufferSnapshot
from pipeline.config.schema import Config, DaemonConfig
from pipeline.config.sections import BufferConfig
from pipeline.storage.allocator import ExtentAllocator
from pipeline.storage.arena import Arena
from pipeline.storage.layout import LedgerLayout
from pipeline.storage.ledger import Ledger

_ROWS = 16
_WRITES = 2
_MIB = 1 << 20


class _Pause(NamedTuple):
    longest_s: float
    write_s: float


def run(*, quick: bool) -> Sequence[Section]:
    """Measure snapshots of few large and of many small extents."""
    held = (16,) if quick else (64, 256)
    extents = 256 if quick else 1024
    shapes = [(mib, mib * _MIB // extents) for mib in held] + [(mib, mib * _MIB // (16 * extents)) for mib in held]
    found = interleaved(
        {shape: lambda shape=shape: _measure(ROOT, shape[0] * _MIB, shape[1]) for shape in shapes}, 1 if quick else 3
    )
    rows = []
    for (mib, nbytes), pauses in found.items():
        longest, writes = Sample.of(p.longest_s for p in pauses), Sample.of(p.write_s for p in pauses)
        label = (
            f"longest pause of the buffer while its journal is written, {mib} MiB in {mib * _MIB // nbytes:,} extents"
        )
        rows.append((label, f"{longest.scaled(1e3)} ms", f"{writes} s"))
    text = (
        "The journal is the periodic snapshot of the buffer's rows. The loop does nothing but the snapshot, which is"
        " written twice, to the disk of the checkout."
    )
    table = Table(("measurement", "figure", "one write takes"), rows)
    return [Section("journal", "The buffer's pause while its rows are written to disk", text, [table])]


def _measure(folder: pathlib.Path, held_bytes: int, extent_bytes: int) -> _Pause:
    """Write a snapshot a few times."""
    extents = held_bytes // extent_bytes
    layout = LedgerLayout(extents=extents, rows_per_extent=_ROWS)
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        tempfile.TemporaryDirectory(dir=folder, prefix=".bench-") as state,
    ):
        path = pathlib.Path(memory) / "arena"
        Arena.create(path, payload_bytes=held_bytes, ledger_bytes=layout.nbytes, layout=layout.identity)
        arena = Arena(path, payload=False)
        ledger = Ledger(arena.ledger, layout)
        ledger.publish(0, 1, 0)
        for place in range(extents):
            record = ledger.reserve(rows=_ROWS, prompts=1, offset=place * extent_bytes, nbytes=extent_bytes)
            ledger.seal(record, rows=_ROWS, nbytes=extent_bytes, checksum=0, policy_version=0, fingerprint=1, now_s=0.0)
        limits = Limits(_ROWS, _ROWS, _ROWS, 1, 1, 0, 1, extent_bytes // _ROWS)
        allocator = ExtentAllocator(arena.payload_bytes)
        buffer = Buffer(ledger, allocator, limits, lambda *_: None, cast(BufferMetrics, None), workers=1)
        config = Config(
            daemon=DaemonConfig(state_dir=pathlib.Path(state)), buffer=BufferConfig(journal_interval_s=0.01)
        )
        written: list[bool] = []
        snapshot = BufferSnapshot(config, arena, written.append)
        longest_s, last_s = 0.0, time.monotonic()
        began_s = last_s
        while len(written) < _WRITES:
            snapshot.step(buffer, last_s)
            time.sleep(0.0002)
            now_s = time.monotonic()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
        took_s = (time.monotonic() - began_s) / _WRITES
        snapshot.close(buffer)
        ledger.close()
        arena.close()
    return _Pause(longest_s, took_s)
