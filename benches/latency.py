"""The latency of a batch at low load: from the start of the append that completes it to the return of `sample`."""

from __future__ import annotations

from collections.abc import Sequence

from benches.contest import BARE, COATI, PEERS, RAW, STREAMER, TRANSFER_QUEUE, Contestant, FailedError, running
from benches.measure import figure, interleaved, percentile
from benches.report import Section, Table
from benches.transport import OURS

_PAUSE_S = 0.025


def run(*, quick: bool) -> Sequence[Section]:
    """Measure each way with an append every 25 ms."""
    rounds, appends = (1, 20) if quick else (3, 48)
    shapes = ("small",) if quick else ("small", "large")
    ways = (BARE, *OURS, RAW, STREAMER, COATI) if quick else (BARE, *OURS, *PEERS)
    ways = tuple(way for way in ways if way is not TRANSFER_QUEUE)
    rows = []
    with running(ways, 1) as (runners, failed):
        for shape in shapes:

            def measure(way: Contestant, shape: str = shape) -> list[float]:
                try:
                    return runners[way].measure(shape, appends, pause_s=_PAUSE_S)["latencies"]
                except FailedError:
                    return []

            found = interleaved({way: lambda way=way: measure(way) for way in runners}, rounds)
            waits = {way: [1e3 * s for one in results for s in one] for way, results in found.items()}
            for way in sorted((way for way in waits if waits[way]), key=lambda way: percentile(waits[way], 50)):
                p50, p99 = (figure(percentile(waits[way], percent)) for percent in (50, 99))
                rows.append((f"{way.title}, {shape}, at low load", p50, p99, str(len(waits[way]))))
    notes = "".join(f" {title} did not run here: {reason}." for title, reason in failed.items())
    text = (
        "An append every 25 ms, a batch every two appends. From the start of the append that completes a batch until"
        " the consumer has the padded batch. On an idle machine most of the time is the wake-up of processes."
        f" TransferQueue is left out because of its duration.{notes}"
    )
    return [Section("latency", "Latency at low load", text, [Table(("way", "p50, ms", "p99, ms", "batches"), rows)])]
