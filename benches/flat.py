"""The buffer's cost per item, by number of producers and of items held; the goal is a flat line.

The buffer's own loop without its sockets: a worker sends `Sealed`, the buffer settles it, leases a batch, issues a
ticket and publishes its totals; the trainer acknowledges. The number of held items stays the same.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benches.measure import Sample, figure, interleaved
from benches.report import Section, Table
from pipeline.buffer.admission import Limits
from pipeline.buffer.buffer import Buffer
from pipeline.buffer.metrics import BufferMetrics
from pipeline.buffer.process import SHOW_S
from pipeline.runtime.messages import Ack, Credit, Hello, Lease, Message, Sealed, Ticket, WantTickets
from pipeline.runtime.transport import trainer_name, worker_name
from pipeline.storage.allocator import ExtentAllocator
from pipeline.storage.layout import LedgerLayout
from pipeline.storage.ledger import Ledger
from pipeline.telemetry.metrics import SlotName
from pipeline.telemetry.slab import MetricsSlab

_ROWS = 16
_NBYTES = 1 << 12


class Loop:
    """A buffer that holds `held` items, its workers and its trainer."""

    def __init__(self, folder: Path, workers: int, held: int) -> None:
        extents = held // _ROWS
        layout = LedgerLayout(extents + 4 * workers + 64, _ROWS)
        ledger = Ledger(memoryview(bytearray(layout.nbytes)), layout)
        ledger.publish(0, 0, 0)
        for place in range(extents):
            record = ledger.reserve(rows=_ROWS, prompts=_ROWS, offset=place * _NBYTES, nbytes=_NBYTES)
            ledger.seal(record, rows=_ROWS, nbytes=_NBYTES, checksum=1, policy_version=0, fingerprint=0, now_s=0.0)
        slab = MetricsSlab.create(folder / f"slab-{workers}-{held}", [SlotName("supervisor", 0), SlotName("buffer", 0)])
        slab.begin("buffer")
        self._metrics = BufferMetrics(slab.writer("buffer"))
        limits = Limits(_ROWS, _ROWS << 12, 1, _ROWS, 1024, extents + 2 * workers, 1, _NBYTES // _ROWS)
        allocator = ExtentAllocator((extents + 4 * workers + 64) * (2 * _NBYTES + 1024))
        self._sent: list[tuple[str, Message]] = []
        self._shown_s = 0.0
        self._buffer = Buffer(
            ledger, allocator, limits, lambda peer, message: self._sent.append((peer, message)), self._metrics,
            workers=workers,
        )  # fmt: skip
        for index in range(workers):
            self._buffer.handle(Hello(worker_name(index), index, []), 0.0)
            self._buffer.handle(WantTickets(worker_name(index), index, 2), 0.0)
        self._buffer.handle(Hello(trainer_name(0), 99, []), 0.0)
        self._buffer.step(0.0)
        self._buffer.handle(Credit(trainer_name(0), 99, 2), 0.0)

    def turn(self) -> int:
        """Answer the buffer's messages one at a time; return the number of items that were sealed."""
        sent, self._sent = self._sent, []
        items = 0
        for peer, message in sent:
            if isinstance(message, Ticket):
                self._handle(Sealed(peer, message.ticket, _ROWS, _NBYTES, 1, 0, 0))
                items += _ROWS
            elif isinstance(message, Lease):
                self._handle(Ack(peer, message.lease))
        return items

    def _handle(self, message: Message) -> None:
        self._buffer.handle(message, 0.0)
        self._buffer.step(0.0)
        if (now_s := time.monotonic()) - self._shown_s >= SHOW_S:
            self._metrics.publish(self._buffer, 0.0, 1)
            self._shown_s = now_s


def run(*, quick: bool) -> Sequence[Section]:
    """Measure growth in one dimension at a time."""
    items = 2_000 if quick else 16_000
    sizes = [(1, 100), (64, 100), (1, 10_000)] if quick else [
        *((workers, 1_000) for workers in (1, 4, 16, 64)), *((1, held) for held in (100, 10_000, 100_000)),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        loops = {size: Loop(Path(folder), *size) for size in sizes}
        found = interleaved({size: _costs(loop, items) for size, loop in loops.items()}, 3 if quick else 5)
    samples = {size: Sample.of(costs).scaled(1e6) for size, costs in found.items()}
    first = samples[sizes[0]]
    rows = [
        (f"buffer, an item, {workers} workers, {held:,} items held", str(sample), figure(sample.over(first).median))
        for (workers, held), sample in samples.items()
    ]
    text = (
        f"CPU time of the buffer per item without its sockets, appends of {_ROWS} rows: one transaction each for an"
        " issued ticket, seal, lease and acknowledgement; the totals are published as often as in a run."
    )
    table = Table(("load", "CPU, us", "times the first"), rows)
    return [Section("flat", "The buffer's cost by producers and by items held", text, [table])]


def _costs(loop: Loop, items: int) -> Callable[[], float]:
    def measure() -> float:
        began_s, done = time.process_time(), 0
        while done < items:
            done += loop.turn()
        return (time.process_time() - began_s) / done

    return measure
