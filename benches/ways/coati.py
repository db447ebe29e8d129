"""coati's DetachedReplayBuffer as in ColossalAI: a trainer actor that batches rows, and a Ray queue.

Makers call the trainer's actor with an experience; it is split into rows, rows are padded and stacked to a batch of
`sample_batch_size`, which goes through a `ray.util.queue.Queue` back to the actor's own `sample`. Written after
coati.ray.detached_replay_buffer and coati.experience_buffer.utils, because the package itself needs a torch of 2023.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ray
import torch
from ray.util.queue import Queue

from benches.ways import QUEUED_BATCHES, Send
from benches.workload import BATCH_ROWS, Arrays

_AHEAD = 2


class Buffer:
    """The trainer's actor: `append` for makers, `sample` for the trainer."""

    def __init__(self) -> None:
        self._items = Queue(QUEUED_BATCHES, actor_options={"num_cpus": 0})
        self._collector: list[Any] = []

    def append(self, experience: dict[str, torch.Tensor]) -> None:
        """Split an experience into rows, and queue the batches that are full."""
        self._collector += split(experience)
        while len(self._collector) >= BATCH_ROWS:
            self._items.put(join(self._collector[:BATCH_ROWS]), block=True)
            self._collector = self._collector[BATCH_ROWS:]

    def queue(self) -> Any:
        """Return the queue that `sample` takes from."""
        return self._items


def split(experience: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Return the rows without their padding."""
    mask, rows = experience["attention_mask"], len(experience["sequences"])
    items = []
    for row in range(rows):
        start = int(mask[row].argmax())
        first = int(experience["action_mask"][row].long().argmax())
        item = {}
        for name, value in experience.items():
            if name == "pixel_values":
                item[name] = value[row * (len(value) // rows) : (row + 1) * (len(value) // rows)]
            elif value.ndim == 1:
                item[name] = value[row]
            else:
                item[name] = value[row, start if value.shape[1] == mask.shape[1] else first :]
        items.append(item)
    return items


def join(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return rows as one left-padded batch."""
    batch = {}
    for name in items[0]:
        values = [item[name] for item in items]
        if name == "pixel_values":
            batch[name] = torch.cat(values)
        elif values[0].ndim == 0:
            batch[name] = torch.stack(values)
        else:
            width = max(len(value) for value in values)
            batch[name] = torch.stack([torch.nn.functional.pad(value, (width - len(value), 0)) for value in values])
    return batch


class Way:
    """The trainer; it samples the batches that its buffer actor has queued."""

    def __init__(self) -> None:
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30)
        self._buffer = ray.remote(num_cpus=0, name="buffer", namespace="bench")(Buffer).remote()
        self._queue = ray.get(self._buffer.queue.remote())

    def address(self) -> Any:
        return ray.get_runtime_context().gcs_address

    def batches(self) -> Iterator[Any]:
        while True:
            batch = self._queue.get(block=True, timeout=60.0)
            yield {name: value.numpy() for name, value in batch.items()}

    def close(self) -> None:
        ray.shutdown()

    @staticmethod
    def sender(address: Any, index: int) -> Send:
        ray.init(address=address, namespace="bench", log_to_driver=False)
        buffer, under_way = ray.get_actor("buffer"), []

        def send(arrays: Arrays) -> None:
            under_way.append(buffer.append.remote({name: torch.from_numpy(value) for name, value in arrays.items()}))
            if len(under_way) > _AHEAD:
                ray.get(under_way.pop(0))

        return send
