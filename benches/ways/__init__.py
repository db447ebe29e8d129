"""Ways to bring appends from producers to a consumer, each in processes of its own, driven over its standard input.

A way is a module with a class `Way`. Its process is the consumer: it starts the producers and all processes between,
then takes orders, one JSON line each: ``{"shape": "small", "appends": 100, "pause_s": 0}``. It answers each with its
measurements in JSON. Only rlhfd's own ways import rlhfd: peers run on another Python and other versions.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Protocol

from benches.measure import cpu_seconds, descendants
from benches.workload import APPEND_ROWS, BATCH_ROWS, SHAPES, Arrays, appends, touch

POOL = 8
QUEUED_BATCHES = 8
_PER_BATCH = BATCH_ROWS // APPEND_ROWS

Send = Callable[[Arrays], None]


class Way(Protocol):
    """Interface of a way's module."""

    def address(self) -> Any:
        """Return a picklable address by which a producer connects to this consumer."""

    def batches(self) -> Iterator[Any]:
        """Yield batches of `BATCH_ROWS` rows as mappings of arrays, for ever."""

    @staticmethod
    def sender(address: Any, index: int) -> Send:
        """Return, in a producer's process, the function that sends one append."""


def serve(name: str, producers: int) -> None:
    """Run as the consumer of a way until standard input ends."""
    # Output of other code must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    way = importlib.import_module(f"benches.ways.{name}").Way()
    if hasattr(way, "share"):
        way.share(producers)
    crew: list[_Producer] = []
    try:
        crew += [_Producer(name, way.address(), index) for index in range(producers)]
        for producer in crew:
            producer.orders.recv()
        batches = way.batches()
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(_measure(way, crew, batches, **json.loads(line))), file=answers, flush=True)
    finally:
        for producer in crew:
            producer.process.kill()
        if hasattr(way, "close"):
            way.close()


class _Producer:
    def __init__(self, name: str, address: Any, index: int) -> None:
        context = get_context("spawn")
        self.orders, theirs = context.Pipe()
        self.process = context.Process(target=_produce, args=(name, address, index, theirs), daemon=True)
        self.process.start()


def _produce(name: str, address: Any, index: int, orders: Connection) -> None:
    """Run as a producer until the consumer is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    send: Send = importlib.import_module(f"benches.ways.{name}").Way.sender(address, index)
    made: dict[str, Any] = {}
    orders.send("ready")
    while True:
        try:
            shape, count, pause_s = orders.recv()
        except EOFError:
            return
        if shape not in made:
            made[shape] = appends(SHAPES[shape], POOL, seed=index)
        pool = made[shape]
        orders.send(
            (sum(pool[i % POOL].nbytes for i in range(count)), sum(pool[i % POOL].tokens for i in range(count)))
        )
        orders.recv()
        times = []
        try:
            for i in range(count):
                if pause_s:
                    time.sleep(pause_s)
                times.append(time.perf_counter())
                send(pool[i % POOL].arrays)
        except Exception:  # noqa: BLE001 - any error of a peer ends its turn
            traceback.print_exc()
            os._exit(1)
        orders.send(times if pause_s else [])


def _measure(
    way: Any, crew: list[_Producer], batches: Iterator[Any], shape: str, appends: int, pause_s: float = 0.0
) -> dict[str, Any]:
    each = appends // len(crew)
    if hasattr(way, "expect"):
        way.expect(shape)
    for producer in crew:
        producer.orders.send((shape, each, pause_s))
    promised = [producer.orders.recv() for producer in crew]
    before = _cpu_seconds(os.getpid())
    began_s = time.perf_counter()
    for producer in crew:
        producer.orders.send("go")
    tokens, taken_s = 0, []
    for _ in range(each * len(crew) // _PER_BATCH):
        batch = next(batches)
        taken_s.append(time.perf_counter())
        tokens += touch(batch)
    took_s = time.perf_counter() - began_s
    used = _cpu_seconds(os.getpid())
    sent_s = [producer.orders.recv() for producer in crew]
    if getattr(way, "is_checked", True) and tokens != sum(total for _, total in promised):
        raise RuntimeError(f"{tokens} is not the sum of the tokens that were sent, {promised}")
    # At low load a batch is complete with its second append: from the start of that one to its return.
    latencies = [taken - sent_s[0][_PER_BATCH * i + 1] for i, taken in enumerate(taken_s)] if pause_s else []
    return {
        "seconds": took_s,
        "nbytes": sum(nbytes for nbytes, _ in promised),
        "items": each * len(crew) * APPEND_ROWS,
        "cpu_s": sum(used.values()) - sum(before.get(pid, 0.0) for pid in used),
        "parts": {part: used[pid] - before.get(pid, 0.0) for part, pid in getattr(way, "parts", {}).items()},
        "latencies": latencies,
    }


def _cpu_seconds(root: int) -> dict[int, float]:
    """Return the CPU seconds of a process and all its descendants, by process id."""
    used = {}
    for pid in {root, *descendants(root)}:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            used[pid] = cpu_seconds(pid)
    return used
