"""TorchRL: a replay buffer over memory-mapped storage that processes share.

It has no queue between processes: the storage is a ring of fixed width, semaphores of multiprocessing count the full
places, and the ring holds the lengths; the trainer reads two places and pads.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from multiprocessing import get_context
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

from benches.ways import QUEUED_BATCHES, Send
from benches.workload import ACTION_FIELDS, APPEND_ROWS, BATCH_ROWS, PATCH_VALUES, SHAPES, TOKEN_FIELDS, Arrays, rebatch

_PER_BATCH = BATCH_ROWS // APPEND_ROWS
_PLACES = QUEUED_BATCHES * _PER_BATCH


class Way:
    """The trainer, with a storage for each shape."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        context = get_context("spawn")
        self._free, self._full = context.Semaphore(_PLACES), context.Semaphore(0)
        self._place, self._lock = context.Value("q", 0), context.Lock()
        self._storages = {name: _storage(self._folder.name, name) for name in SHAPES}
        self._next = 0
        self._shape = ""

    def address(self) -> Any:
        return self._free, self._full, self._place, self._lock, self._storages

    def expect(self, shape: str) -> None:
        """Set the shape of the next appends."""
        self._shape = shape

    def batches(self) -> Iterator[Any]:
        while True:
            parts = []
            for _ in range(_PER_BATCH):
                if not self._full.acquire(timeout=60.0):
                    raise TimeoutError("no append")
                place = self._storages[self._shape].get(self._next % _PLACES)
                self._next += 1
                tokens, actions = (int(number) for number in place["widths"])
                part = {}
                for name, value in place.items():
                    width = tokens if name in TOKEN_FIELDS else actions if name in ACTION_FIELDS else None
                    if name not in ("widths", "index"):
                        part[name] = value[:, -width:].numpy() if width else value.numpy()
                parts.append(part)
            batch = rebatch(parts)
            for _ in range(_PER_BATCH):
                self._free.release()
            yield batch

    def close(self) -> None:
        self._folder.cleanup()

    @staticmethod
    def sender(address: Any, index: int) -> Send:
        free, full, next_place, lock, storages = address
        widths = {name: storages[name].get(0)["sequences"].shape[1] for name in storages}

        def send(arrays: Arrays) -> None:
            tokens, actions = arrays["sequences"].shape[1], arrays["action_mask"].shape[1]
            fits = [
                name
                for name, width in widths.items()
                if tokens <= width and (name == "vl") == ("pixel_values" in arrays)
            ]
            shape = min(fits, key=widths.__getitem__)
            if not free.acquire(timeout=60.0):
                raise TimeoutError("no room")
            with lock:
                place = next_place.value
                next_place.value += 1
                into = storages[shape].get(place % _PLACES)
                for name, value in arrays.items():
                    out = into[name]
                    (out[:, -value.shape[1] :] if name in (*TOKEN_FIELDS, *ACTION_FIELDS) else out).copy_(
                        torch.from_numpy(value)
                    )
                into["widths"].copy_(torch.tensor([tokens, actions]))
            full.release()

        return send


def _storage(folder: str, name: str) -> Any:
    shape, rows = SHAPES[name], APPEND_ROWS
    place = {
        **{field: torch.zeros(rows, shape.tokens, dtype=torch.int64) for field in TOKEN_FIELDS},
        **{
            field: torch.zeros(rows, shape.actions, dtype=torch.bool if field == "action_mask" else torch.float32)
            for field in ACTION_FIELDS
        },
        "reward": torch.zeros(rows),
        "widths": torch.zeros(2, dtype=torch.int64),
    }
    if shape.patches:
        place["pixel_values"] = torch.zeros(rows * shape.patches, PATCH_VALUES)
    storage = LazyMemmapStorage(_PLACES, scratch_dir=f"{folder}/{name}")
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=1)
    one = TensorDict({key: value.unsqueeze(0) for key, value in place.items()}, [1])
    for _ in range(_PLACES):
        buffer.extend(one)
    return storage
