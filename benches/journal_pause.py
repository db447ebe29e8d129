"""Measures how long the buffer's loop pauses while its journal is written: `python benches/journal_pause.py FOLDER`.

The buffer holds so many bytes in extents of one size; its loop only looks after the journal, as fast as it can, so the
longest time between two turns is what a ticket would have waited, the machine's own pauses included.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
import time
from typing import cast

from pipeline.admission import Limits
from pipeline.arena import Arena, ExtentAllocator
from pipeline.buffer import Buffer
from pipeline.buffer_journal import BufferJournal
from pipeline.config import BufferConfig, Config, DaemonConfig
from pipeline.ledger import Ledger
from pipeline.ledger_records import LedgerLayout
from pipeline.observer import Observer

_ROWS = 16
_WRITES = 3


def measure(folder: pathlib.Path, held_bytes: int, extent_bytes: int) -> str:
    """Write a journal a few times; return what was measured, in words."""
    extents = held_bytes // extent_bytes
    layout = LedgerLayout(extents=extents, rows_per_extent=_ROWS)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, tempfile.TemporaryDirectory(dir=folder) as state:
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
        buffer = Buffer(ledger, allocator, limits, lambda *_: None, cast(Observer, None), workers=1)
        config = Config(
            daemon=DaemonConfig(state_dir=pathlib.Path(state)), buffer=BufferConfig(journal_interval_s=0.01)
        )
        written: list[bool] = []
        journal = BufferJournal(config, arena, written.append)
        longest_s, own_s, last_s = 0.0, 0.0, time.monotonic()
        began_s = last_s
        while len(written) < _WRITES:
            journal.step(buffer, last_s)
            own_s = max(own_s, time.monotonic() - last_s)
            time.sleep(0.0002)
            now_s = time.monotonic()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
        took_s = (time.monotonic() - began_s) / _WRITES
        journal.close(buffer)
        ledger.close()
        arena.close()
    return (
        f"{held_bytes >> 20} MiB in {extents} extents: longest pause {1e3 * longest_s:.0f} ms "
        f"(in the loop itself {1e3 * own_s:.0f} ms), a write takes {took_s:.2f} s"
    )


if __name__ == "__main__":
    for held_mib, extent_kib in ((64, 4), (64, 64), (256, 16), (256, 256)):
        print(measure(pathlib.Path(sys.argv[1]), held_mib << 20, extent_kib << 10))
