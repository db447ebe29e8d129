"""TransferQueue: rows as columns in its storage actors, and a controller that lists the rows a task has not had yet."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import ray
import torch
import transfer_queue
from tensordict import TensorDict

from benches.ways import QUEUED_BATCHES, Send
from benches.ways.coati import join, split
from benches.workload import ACTION_FIELDS, APPEND_ROWS, BATCH_ROWS, TOKEN_FIELDS, Arrays

_PARTITION = "train"
_PER_BATCH = BATCH_ROWS // APPEND_ROWS
_FIELDS = [*TOKEN_FIELDS, *ACTION_FIELDS, "reward"]


class Way:
    """The trainer: asks for a batch's rows, fetches them, and clears them."""

    def __init__(self) -> None:
        ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 28)
        transfer_queue.init()
        self._client: Any = transfer_queue.get_client()
        # It has no bound in batches of its own: a semaphore for each row that may wait.
        self._room = ray.remote(num_cpus=0, name="room", namespace="bench")(_Room).remote()

    def address(self) -> Any:
        return ray.get_runtime_context().gcs_address

    def batches(self) -> Iterator[Any]:
        while True:
            # Its controller looks for rows only every five seconds: it is called once they are ready.
            ray.get(self._room.batch.remote())
            meta = self._client.get_meta(
                data_fields=_FIELDS, batch_size=BATCH_ROWS, partition_id=_PARTITION, task_name="trainer"
            )
            columns = self._client.get_data(meta)
            rows = [{name: columns[name][row] for name in _FIELDS} for row in range(BATCH_ROWS)]
            batch = join(rows)
            self._client.clear_samples(meta)
            ray.get(self._room.leave.remote())
            yield {name: value.numpy() for name, value in batch.items()}

    def close(self) -> None:
        transfer_queue.close()
        ray.shutdown()

    @staticmethod
    def sender(address: Any, index: int) -> Send:
        ray.init(address=address, namespace="bench", log_to_driver=False)
        transfer_queue.init()
        room = ray.get_actor("room")

        def send(arrays: Arrays) -> None:
            ray.get(room.enter.remote())
            items = split({name: torch.from_numpy(value) for name, value in arrays.items()})
            columns = {
                name: torch.stack([item[name] for item in items])
                if items[0][name].ndim == 0
                else torch.nested.as_nested_tensor([item[name].clone() for item in items], layout=torch.jagged)
                for name in _FIELDS
            }
            transfer_queue.kv_batch_put(
                keys=[uuid.uuid4().hex for _ in items],
                partition_id=_PARTITION,
                fields=TensorDict(columns, batch_size=len(items)),
            )
            room.came.remote()

        return send


class _Room:
    """Admits as many appends as `QUEUED_BATCHES` batches have, and signals every two of them."""

    def __init__(self) -> None:
        import asyncio

        self._room = asyncio.Semaphore(_PER_BATCH * QUEUED_BATCHES)
        self._come = asyncio.Semaphore(0)

    async def enter(self) -> None:
        await self._room.acquire()

    async def leave(self) -> None:
        for _ in range(_PER_BATCH):
            self._room.release()

    async def came(self) -> None:
        self._come.release()

    async def batch(self) -> None:
        for _ in range(_PER_BATCH):
            await self._come.acquire()
