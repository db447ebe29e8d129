"""A wire between a rank and its `ShardService`, both in this process: what arrives is a copy, its arrays read-only."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.errors import RlhfdError
from pipeline.trainer.sharding.remote import RemoteShards, ShardService
from tests.models.weights.test_versions import Killed


def sent(value: Any) -> Any:
    """Return the copy of a value that arrives on another machine."""
    buffers: list[pickle.PickleBuffer] = []
    content = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(content, buffers=[bytes(buffer) for buffer in buffers])


class Wire:
    """Calls a service; rank or gateway dies before one of the calls.

    Attributes:
        calls: The methods called so far.
        counted: Bytes by their label.
        dies: Number of the call that nobody answers.
    """

    def __init__(self, service: ShardService) -> None:
        self.service = service
        self.calls: list[str] = []
        self.counted: dict[str, int] = {}
        self.dies = -1
        self.changes: Callable[[Any], Any] = lambda value: value

    def ask(self, method: str, *arguments: Any) -> Any:
        if len(self.calls) == self.dies:
            raise Killed
        self.calls.append(method)
        found = sent(self.service.answer(method, self.changes(sent(arguments))))
        if isinstance(found, RlhfdError):
            raise found
        return self.changes(found)

    def count(self, data: str, nbytes: int) -> None:
        self.counted[data] = self.counted.get(data, 0) + nbytes


def far_shards(weights_path: Path, rank: int) -> RemoteShards:
    """Return the way of a rank on another machine to the files beside `weights_path`."""
    wire = Wire(ShardService(weights_path, rank, weight_slots=3))
    return RemoteShards(wire.ask, wire.count)
