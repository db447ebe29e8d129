"""torch.multiprocessing's queue, which passes each tensor as a piece of shared memory of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.multiprocessing

from benches.ways import QUEUED_BATCHES, Send
from benches.workload import APPEND_ROWS, BATCH_ROWS, Arrays, rebatch

_PER_BATCH = BATCH_ROWS // APPEND_ROWS


class Way:
    """The consumer; tensors arrive by the file system, by name."""

    strategy = "file_system"

    def __init__(self) -> None:
        torch.multiprocessing.set_sharing_strategy(self.strategy)
        context = torch.multiprocessing.get_context("spawn")
        self._queue: Any = context.Queue(QUEUED_BATCHES * _PER_BATCH)

    def address(self) -> Any:
        return self.strategy, self._queue

    def batches(self) -> Iterator[Any]:
        while True:
            parts = [self._queue.get(timeout=60.0) for _ in range(_PER_BATCH)]
            yield rebatch([{name: value.numpy() for name, value in part.items()} for part in parts])

    @staticmethod
    def sender(address: Any, index: int) -> Send:
        strategy, queue = address
        torch.multiprocessing.set_sharing_strategy(strategy)

        def send(arrays: Arrays) -> None:
            # A maker's tensors are new each time; the queue moves its tensors into shared memory.
            queue.put({name: torch.from_numpy(value).clone() for name, value in arrays.items()}, timeout=60.0)

        return send
