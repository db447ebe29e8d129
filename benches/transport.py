"""From an append in the worker to a padded batch in the trainer, every byte of it touched.

All ways do the same work (`benches.workload`), stay up, and take turns shape by shape. The bound is measured in the
same rounds; a way's share of it is the remainder after messages, accounting, checksums and padding.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benches.contest import (
    BARE,
    BOUND,
    COATI,
    DAEMON,
    OWN,
    PEERS,
    RAGGED,
    RAW,
    REPLAY,
    STREAMER,
    Contestant,
    FailedError,
    Runner,
    calibrate,
    running,
)
from benches.measure import Sample, figure, interleaved
from benches.report import Section, Table

OURS = (DAEMON, RAGGED, OWN, REPLAY)
Results = dict[Contestant, list[dict[str, Any]]]


def run(*, quick: bool) -> Sequence[Section]:
    """Measure all ways with one producer, and the fastest ones with two."""
    tables: list[Table] = []
    notes: list[str] = []
    ratios: list[tuple[str, str, str]] = []
    shapes = ("small", "large") if quick else ("small", "medium", "large", "vl")
    few = (BOUND, BARE, *OURS, RAW, STREAMER, COATI)
    ways = few if quick else (BOUND, BARE, *OURS, *PEERS)
    for producers in (1,) if quick else (1, 2):
        if producers == 2:
            ways, shapes = few, ("small", "large")
        with running(ways, producers) as (runners, failed):
            notes += [f"{title} did not run here: {reason}." for title, reason in failed.items()]
            for shape in shapes:
                results = contest(runners, shape, 0.5, 2 if quick else 3)
                tables.append(table(results, shape, producers))
                asked = {RAW: 0.8 if shape == "small" else 1.3}
                ratios += floors(results, asked, shape, producers)
                notes += [f"{way.title} failed at {shape}." for way in runners if way not in results]
    tables.append(floor_table(ratios))
    return [Section("transport", "Transport of experience between processes", "\n".join([_TEXT, *notes]), tables)]


def contest(runners: Mapping[Contestant, Runner], shape: str, seconds: float, rounds: int) -> Results:
    """Return the measurements of each way that works at this shape, in the order of the rounds.

    Args:
        runners: Ways that run.
        shape: Name of the appends' shape.
        seconds: Seconds of one measurement, about.
        rounds: Measurements of each way, in turns.
    """
    counts = calibrate(runners, shape, seconds)

    def measure(way: Contestant) -> dict[str, Any]:
        try:
            return runners[way].measure(shape, counts[way])
        except FailedError as error:
            return {"failed": str(error)}

    def report(text: str) -> None:
        print(text[:160], file=sys.stderr, flush=True)

    results = interleaved({way: lambda way=way: measure(way) for way in counts}, rounds, report=report)
    return {way: found for way, found in results.items() if not any("failed" in one for one in found)}


def speed(results: Sequence[Mapping[str, Any]]) -> Sample:
    """Return GB/s of true bytes."""
    return Sample.of(one["nbytes"] / one["seconds"] / 1e9 for one in results)


def floors(
    results: Results, asked: Mapping[Contestant, float], shape: str, producers: int
) -> Iterator[tuple[str, str, str]]:
    """Yield rows of `floor_table`: the ratios of rlhfd's speed to that of other ways.

    Args:
        results: Results of a contest.
        asked: The least ratio to each way.
        shape: The appends.
        producers: Number of producers.
    """
    for (way, least), own in itertools.product(asked.items(), (DAEMON, RAGGED, OWN)):
        if way in results and own in results:
            ratio = speed(results[own]).over(speed(results[way]))
            names = (one.title.partition(":")[0] for one in (own, way))
            yield f"{' against '.join(names)}, {shape}, {producers} to 1", figure(least), str(ratio)


def floor_table(rows: Sequence[tuple[str, str, str]]) -> Table:
    """Return the table of the ratios that are asked of rlhfd."""
    return Table(("ratio", "asked, at least", "measured"), rows, "Ratios asked of rlhfd")


def table(results: Results, shape: str, producers: int) -> Table:
    """Return the table of a contest, the fastest way first."""
    rows = []
    speeds = {way: speed(found) for way, found in results.items()}

    def ratio(way: Contestant, to: Contestant) -> str:
        return figure(speeds[way].over(speeds[to]).median) if to in speeds and to is not way else ""

    for way in sorted(results, key=lambda way: -speeds[way].median):
        items = Sample.of(one["items"] / one["seconds"] for one in results[way])
        cpu = Sample.of(one["cpu_s"] / one["nbytes"] * 1e9 for one in results[way])
        rows.append(
            (f"{way.title}, {shape}, {producers} to 1", str(speeds[way]), ratio(way, BOUND), ratio(way, BARE),
             ratio(way, COATI), ratio(way, RAW), figure(items.median), figure(cpu.median))
        )  # fmt: skip
    header = ("way", "GB/s", "of the bound", "of bare", "times coati's", "times raw ZeroMQ", "items/s", "CPU s/GB")
    return Table(header, rows, f"{shape}, {producers} producer{'s' * (producers > 1)}")


_TEXT = """Appends of 8 ragged rows, taken out as batches of 16: small S=512 A=256, medium S=2048 A=1024, large S=8192
A=7168, vl is medium and 1.2 MB of pixels a row. At most 8 batches are queued. GB/s are of true bytes, without padding.
The CPU of a way's own idle daemons counts only during its turn. rlhfd runs with leases, ledger, version stamps and xxh3
on both sides: an *external trainer* gets padded batches, or, *without padding*, rows without full masks, as they lie in
memory; *its own trainer* gets such rows, and writes its metrics elsewhere. Each call of the class for scripts waits for
an answer of its server. *bare* has the same three processes and messages, and plain copies of whole blocks into shared
memory and out of it, with their padding: no torch, trimming, checksums, ledger or recovery; the distance to it
estimates the gain that is possible. Rows reach rlhfd's worker as its maker makes them, without padding: each append is
trimmed once, before its first round. Those of the class for scripts are trimmed, and the other ways send padded arrays,
each time. Raw ZeroMQ goes directly from producer to consumer, so that data in a consumer is lost when it dies; its
second row has ZeroMQ's own streamer between.
"""
