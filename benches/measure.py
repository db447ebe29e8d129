"""Figures that hold on a machine with other users: ways are measured in turns and compared within a turn.

An absolute figure of a shared machine depends as much on its other users as on the code. So the compared ways take
turns, in another order each round, and a ratio is the median of the ratios of the rounds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True)
class Sample:
    """Repeated measurements of one thing, in the order of the rounds."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> Sample:
        """Return the sample of these values; at least one."""
        sample = cls(tuple(values))
        if not sample.values:
            raise ValueError("a sample of no values")
        return sample

    @property
    def median(self) -> float:
        """Median of the values."""
        return statistics.median(self.values)

    def over(self, other: Sample) -> Sample:
        """Return the ratios to another way's values of the same rounds."""
        pairs = zip(self.values, other.values, strict=True)
        return Sample.of(mine / theirs for mine, theirs in pairs)

    def scaled(self, factor: float) -> Sample:
        """Return all values times a factor, as for another unit."""
        return Sample.of(value * factor for value in self.values)

    def __str__(self) -> str:
        """Median and range: ``1.23 (1.10 to 1.31)``; a single value alone."""
        if len(self.values) == 1:
            return figure(self.values[0])
        return f"{figure(self.median)} ({figure(min(self.values))} to {figure(max(self.values))})"


def figure(value: float) -> str:
    """Return a number with three significant digits, and commas in a large one."""
    if value == 0 or value != value:
        return f"{value:g}"
    rounded = float(f"{value:.3g}")
    # Without the "." that the # format leaves after three digits.
    return f"{rounded:,.0f}" if abs(rounded) >= 1000 else f"{rounded:#.3g}".rstrip(".")


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least `percent` of all do not exceed (nearest rank)."""
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * percent // 100))
    return ordered[int(rank) - 1]


def interleaved(
    ways: Mapping[_Key, Callable[[], _Value]], rounds: int, *, report: Callable[[str], None] = lambda _: None
) -> dict[_Key, list[_Value]]:
    """Measure each way once a round, each round in another order.

    Args:
        ways: The measured functions, by name.
        rounds: Number of rounds.
        report: Called with a line after each measurement.

    Returns:
        Each way's results in the order of the rounds.
    """
    order, results = list(ways), {way: [] for way in ways}  # type: tuple[list[_Key], dict[_Key, list[_Value]]]
    rng = random.Random(0)
    for turn in range(rounds):
        rng.shuffle(order)
        for way in order:
            result = ways[way]()
            results[way].append(result)
            report(f"round {turn + 1} of {rounds}: {way}: {result}")
    return results


def timed(
    work: Callable[[], object],
    *,
    least_s: float = 0.2,
    calls: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the seconds per call, over at least `least_s` and at least `calls` calls, after a warm-up call.

    With `time.process_time` as the clock the result is CPU time: on a busy machine the better measure of work that does
    not wait.
    """
    work()
    done, began_s = 0, clock()
    while True:
        work()
        done += 1
        took_s = clock() - began_s
        if done >= calls and took_s >= least_s:
            return took_s / done


def once(work: Callable[[], object], *, on_card: bool = False) -> float:
    """Return the seconds of a call; with those of a card up to the end of the work that it was given."""
    import torch

    def wait() -> None:
        if on_card:
            torch.cuda.synchronize()

    wait()
    began_s = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began_s


@contextlib.contextmanager
def watching(look: Callable[[], None], every_s: float) -> Iterator[None]:
    """Look at something again and again meanwhile, in a thread."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(every_s):
            look()

    thread = threading.Thread(target=watch, name="watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def end_process(process: subprocess.Popen[Any], within_s: float, number: signal.Signals = signal.SIGTERM) -> None:
    """End a process by a signal, in order if it does so in time."""
    process.send_signal(number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(within_s)
    process.kill()
    process.wait()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a living process has used, all its threads, user and system."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def descendants(pid: int) -> set[int]:
    """Return the pids of a process's children, and of theirs."""
    found = set()
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, children.read_text().split()):
                found |= {child, *descendants(child)}
    return found
