"""Publishing and fetching weights against a plain copy of the same number of bytes, and the effect on others."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import torch

from benches.measure import Sample, interleaved, once, percentile
from benches.report import Section, Table
from pipeline.models.weights.store import WeightsPublisher, WeightsReader

_GIB = 2**30
_TENSOR_BYTES = 1 << 25
_SLOTS = 3
_TEXT = """A version of float32 tensors of 32 MiB, three slots in shared memory, bytes fingerprinted on both sides. A
speed is bytes of the version over time; a share is relative to a plain copy of the same number of bytes by one core
(`numpy.copyto`) in the same round. Publishing and fetching use up to four cores, {cores} here. *Beside a fetch*:
another worker fetches without a pause meanwhile; no process waits for a lock, they share the memory bus. Between two
rollouts of the same version a worker only looks for a newer one. {note}"""


def run(*, quick: bool) -> Sequence[Section]:
    """Measure versions of several sizes; sizes that do not fit are named in the text."""
    sizes = [1 << 26] if quick else [_GIB, 8 * _GIB]
    device = torch.device("cuda:0") if torch.cuda.is_available() else torch.device("cpu")
    rows, note = [], ""
    for nbytes in sizes:
        if reason := _too_large(nbytes):
            note = f"A version of {nbytes / _GIB:g} GiB was left out: {reason}."
            print(note, flush=True)
            continue
        rows += _measure(nbytes, device, rounds=2 if quick else 5)
    text = _TEXT.format(cores=min(4, len(os.sched_getaffinity(0))), note=note)
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    header = ("version", "operation", "GB/s", "share of a plain copy")
    return [Section("weights", "Weights through shared memory", " ".join(text.split()), [Table(header, rows)], name)]


def _too_large(nbytes: int) -> str:
    """Return the reason why a version cannot be measured here, "" if it can.

    Needed: the slots, the trainer's tensors, the worker's, and two of a plain copy.
    """
    free = {
        "/dev/shm": (shutil.disk_usage("/dev/shm").free, _SLOTS * nbytes),
        "memory": (os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), (_SLOTS + 3) * nbytes),
    }
    return "; ".join(
        f"{needed / _GIB:.0f} GiB needed of {place}, {available / _GIB:.0f} GiB free"
        for place, (available, needed) in free.items()
        if needed > available
    )


def _tensors(nbytes: int, device: torch.device, value: float) -> dict[str, torch.Tensor]:
    count = max(1, nbytes // _TENSOR_BYTES)
    return {f"actor.{index}": torch.full((nbytes // count // 4,), value, device=device) for index in range(count)}


def _measure(nbytes: int, device: torch.device, *, rounds: int) -> list[tuple[str, ...]]:
    trained, target = _tensors(nbytes, device, 1.0), _tensors(nbytes, device, 0.0)
    plain = np.ones(nbytes // 4, dtype=np.float32), np.zeros(nbytes // 4, dtype=np.float32)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rlhfd-bench-") as folder:
        path = Path(folder) / "weights"
        publisher = WeightsPublisher(path, trained, slots=_SLOTS)
        reader = WeightsReader(path)
        version = 0

        def publish() -> float:
            nonlocal version
            version += 1
            return once(lambda: publisher.publish(version, trained))

        def fetch() -> float:
            return once(lambda: reader.fetch(target))

        for _ in range(_SLOTS):
            publish()
        ways: dict[str, Callable[[], float]] = {
            "plain copy": lambda: once(lambda: np.copyto(plain[1], plain[0])),
            "publish": publish,
            "fetch": fetch,
        }
        for way in ways.values():
            way()
        found = {name: Sample.of(values) for name, values in interleaved(ways, rounds).items()}
        alone = _looks(reader)
        with _Fetching(path, nbytes):
            taken = interleaved({f"{name}, beside a fetch": way for name, way in ways.items()}, rounds)
            beside = {name: Sample.of(values) for name, values in taken.items()}
            looks = _looks(reader)
        label = f"{nbytes / _GIB:.3g} GiB"
        rows = [
            (label, name, str(Sample.of(nbytes / 1e9 / value for value in own.values)), str(copy.over(own)))
            for copy, group in ((found["plain copy"], found), (beside["plain copy, beside a fetch"], beside))
            for name, own in group.items()
        ]
        rows.append((label, "a look for a newer version", f"{alone} µs at the 99th percentile", ""))
        rows.append((label, "a look, beside a fetch", f"{looks} µs at the 99th percentile", ""))
        publisher.close()
        reader.close()
    return rows


class _Fetching:
    """Another worker, which fetches without a pause."""

    def __init__(self, path: Path, nbytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._started, self._stop = context.Event(), context.Event()
        self._process = context.Process(target=_fetch_until, args=(path, nbytes, self._started, self._stop))

    def __enter__(self) -> None:
        self._process.start()
        if not self._started.wait(120):
            raise RuntimeError("the other worker did not begin to fetch")

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._process.join(60)


def _fetch_until(path: Path, nbytes: int, started: Event, stop: Event) -> None:
    reader, target = WeightsReader(path), _tensors(nbytes, torch.device("cpu"), 0.0)
    while not stop.is_set():
        reader.fetch(target)
        started.set()
    reader.close()


def _looks(reader: WeightsReader) -> str:
    times = []
    for _ in range(20_000):
        began_s = time.perf_counter()
        reader.newest()
        times.append(time.perf_counter() - began_s)
    return f"{percentile(times, 99) * 1e6:.1f}"
