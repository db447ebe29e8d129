"""ZeroMQ with raw bytes: a small header, then the memory of each array, sent without a copy."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import zmq

from benches.ways import QUEUED_BATCHES, Send
from benches.workload import APPEND_ROWS, BATCH_ROWS, Arrays, rebatch

_PER_BATCH = BATCH_ROWS // APPEND_ROWS
# Of the producer's pipe and the consumer's.
_APPENDS_A_PIPE = QUEUED_BATCHES * _PER_BATCH // 2


class Way:
    """The consumer's PULL socket."""

    def __init__(self, appends_a_pipe: int = _APPENDS_A_PIPE) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._socket: Any = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, appends_a_pipe)
        self._socket.setsockopt(zmq.RCVTIMEO, 60_000)
        self._socket.bind(f"ipc://{self._folder.name}/pull")

    def address(self) -> Any:
        return f"ipc://{self._folder.name}/pull"

    def batches(self) -> Iterator[Any]:
        while True:
            yield rebatch([self.receive() for _ in range(_PER_BATCH)])

    def receive(self) -> Arrays:
        """Return the next append, its arrays over the memory of the message."""
        header, *frames = self._socket.recv_multipart(copy=False)
        kinds = json.loads(header.bytes)
        return {
            name: np.frombuffer(frame.buffer, dtype).reshape(shape)
            for (name, dtype, shape), frame in zip(kinds, frames, strict=True)
        }

    def close(self) -> None:
        self._socket.close(linger=0)
        self._folder.cleanup()

    @staticmethod
    def connect(address: Any, appends_a_pipe: int = _APPENDS_A_PIPE) -> Any:
        """Return a producer's socket."""
        socket = zmq.Context.instance().socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, appends_a_pipe)
        socket.setsockopt(zmq.SNDTIMEO, 60_000)
        socket.connect(address)
        return socket

    @staticmethod
    def sender(address: Any, index: int) -> Send:
        return Way.sending(Way.connect(address))

    @staticmethod
    def sending(socket: Any) -> Send:
        """Return the function that sends an append through a socket."""

        def send(arrays: Arrays) -> None:
            kinds = [(name, value.dtype.str, value.shape) for name, value in arrays.items()]
            socket.send_multipart([json.dumps(kinds).encode(), *arrays.values()], copy=False)

        return send
