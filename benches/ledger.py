"""The time that the successor of a killed buffer needs to open the ledger, by rows held."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from benches.measure import Sample, interleaved, timed
from benches.report import Section, Table
from pipeline.storage.layout import LedgerLayout
from pipeline.storage.ledger import Ledger

_LEASED = 512


def run(*, quick: bool) -> Sequence[Section]:
    """Open ledgers of several sizes."""
    shapes = [(1600, 16), (100, 256)] if quick else [(1600, 16), (100, 256), (6250, 16), (391, 256)]
    found = interleaved({shape: _opening(*shape) for shape in shapes}, 3 if quick else 7)
    rows = [
        (f"opening a ledger of {extents * rows:,} rows in {extents:,} appends", f"{Sample.of(seconds).scaled(1e3)} ms")
        for (extents, rows), seconds in found.items()
    ]
    text = (
        f"CPU time. All rows of a ledger are ready but {_LEASED}, which are leased in batches of 16."
        " The ledger of a killed buffer is opened as its successor opens it."
    )
    return [Section("ledger", "Opening the ledger of a killed buffer", text, [Table(("measurement", "figure"), rows)])]


def held_ledger(extents: int, rows_per_extent: int, *, spare: int = 16) -> tuple[bytearray, LedgerLayout]:
    """Return the bytes of a ledger whose extents are all sealed, some of the rows leased, and its layout."""
    layout = LedgerLayout(extents + spare, rows_per_extent)
    memory = bytearray(layout.nbytes)
    ledger = Ledger(memoryview(memory), layout)
    for place in range(extents):
        record = ledger.reserve(rows=rows_per_extent, prompts=1, offset=place << 16, nbytes=1 << 16)
        ledger.seal(
            record, rows=rows_per_extent, nbytes=1 << 16, checksum=place, policy_version=0, fingerprint=1, now_s=0.0
        )
    records = list(ledger.sealed_extents())
    for place in range(_LEASED // 16):
        record = records[place * 16 // rows_per_extent]
        start = place * 16 % rows_per_extent
        ledger.lease([(record, list(range(start, start + 16)))])
    ledger.close()
    return memory, layout


def _opening(extents: int, rows_per_extent: int) -> Callable[[], float]:
    memory, layout = held_ledger(extents, rows_per_extent)

    def open_once() -> None:
        Ledger(memoryview(memory), layout).close()

    return lambda: timed(open_once, least_s=0.1, clock=time.process_time)
