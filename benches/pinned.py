"""Copies between a card and the arena, page-locked and not, against the card's own page-locked memory."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benches.measure import Sample, interleaved
from benches.report import Section, Table
from pipeline.models.weights.pinned import pin_arena
from pipeline.storage.arena import Arena

_TITLE = "The arena page-locked: copies to and from a card"


def run(*, quick: bool) -> Sequence[Section]:
    """Measure bandwidth in both directions; without a card, the section has no figures."""
    if not torch.cuda.is_available():
        return [Section("pinned", _TITLE, "Not measured: this machine has no card that PyTorch can use.", [])]
    nbytes = 1 << (26 if quick else 30)
    device = torch.device("cuda:0")
    on_card = torch.empty(nbytes, dtype=torch.uint8, device=device)
    own = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rlhfd-bench-") as folder:
        path = Path(folder) / "arena"
        Arena.create(path, payload_bytes=nbytes, ledger_bytes=4096, layout=1)
        locked_arena, plain_arena = Arena(path), Arena(path)
        pinned = pin_arena(locked_arena, device)
        assert pinned is not None
        for arena in (locked_arena, plain_arena):
            arena.populate()
        places = {
            "the card's own page-locked memory": own,
            "the arena, registered" if pinned.nbytes else "the arena, could not be registered": _bytes(locked_arena),
            "the arena, not registered": _bytes(plain_arena),
        }
        ways = {
            (direction, name): _copy(host, on_card, direction)
            for name, host in places.items()
            for direction in ("to the card", "from the card")
        }
        found = {way: Sample.of(values) for way, values in interleaved(ways, 3 if quick else 7).items()}
        rows = [
            (direction, name, str(Sample.of(nbytes / 1e9 / value for value in taken.values)),
             str(found[direction, "the card's own page-locked memory"].over(taken)))
            for (direction, name), taken in found.items()
        ]  # fmt: skip
        del places, ways
        pinned.close()
        locked_arena.close()
        plain_arena.close()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "none" if soft == resource.RLIM_INFINITY else f"{soft:,} B"
    text = (
        f"{nbytes >> 20:,} MiB at a time, limit on locked memory: {limit}. A share is relative to the card's own memory"
        " in that round."
    )
    header = ("direction", "host memory", "GB/s", "share")
    return [Section("pinned", _TITLE, text, [Table(header, sorted(rows))], torch.cuda.get_device_name())]


def _bytes(arena: Arena) -> torch.Tensor:
    return torch.frombuffer(arena.payload, dtype=torch.uint8)


def _copy(host: torch.Tensor, on_card: torch.Tensor, direction: str) -> Callable[[], float]:
    source, target = (host, on_card) if direction == "to the card" else (on_card, host)

    def copy() -> float:
        begins, ends = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begins.record()
        target.copy_(source, non_blocking=True)
        ends.record()
        torch.cuda.synchronize()
        return begins.elapsed_time(ends) / 1e3

    return copy
