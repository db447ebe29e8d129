"""Copies between a card and page-locked slots of shared memory, against page-locked memory of the card's own."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benches.measure import Sample, interleaved, once
from benches.report import Section, Table
from pipeline.models.weights.store import WeightsPublisher, WeightsReader

_TITLE = "Copies between a card and shared memory"
_TENSORS = 64


def run(*, quick: bool) -> Sequence[Section]:
    """Measure bandwidth in both directions; without a card, the section has no figures."""
    if not torch.cuda.is_available():
        return [Section("pinned", _TITLE, "Not measured: this machine has no card that PyTorch can use.", [])]
    nbytes = 1 << (28 if quick else 32)
    on_card = torch.empty(nbytes, dtype=torch.uint8, device="cuda:0")
    own = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    tensors = {f"actor.{index}": part for index, part in enumerate(on_card.chunk(_TENSORS))}
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rlhfd-bench-") as folder:
        path = Path(folder) / "weights"
        publisher, version = WeightsPublisher(path, tensors, slots=2), iter(range(1, 1 << 30))
        reader = WeightsReader(path)
        # The first copies page-lock the slots.
        for _ in range(2):
            publisher.publish(next(version), tensors)
            reader.fetch(tensors)
        work = {
            ("from the card", "the card's own page-locked memory"): lambda: own.copy_(on_card),
            ("from the card", "a publish, with its fingerprint"): lambda: publisher.publish(next(version), tensors),
            ("to the card", "the card's own page-locked memory"): lambda: on_card.copy_(own),
            ("to the card", "a fetch, with its fingerprint"): lambda: reader.fetch(tensors),
        }
        ways = {way: functools.partial(once, copy, on_card=True) for way, copy in work.items()}
        found = {way: Sample.of(values) for way, values in interleaved(ways, 3 if quick else 7).items()}
        publisher.close()
        reader.close()
    rows = [
        (direction, name, str(Sample.of(nbytes / 1e9 / value for value in taken.values)),
         str(found[direction, "the card's own page-locked memory"].over(taken)))
        for (direction, name), taken in found.items()
    ]  # fmt: skip
    text = (
        f"{nbytes >> 20:,} MiB at a time in {_TENSORS} tensors, the slots page-locked before. A share is relative "
        "to the card's own memory in that round."
    )
    header = ("direction", "way", "GB/s", "share")
    return [Section("pinned", _TITLE, text, [Table(header, sorted(rows))], torch.cuda.get_device_name())]
