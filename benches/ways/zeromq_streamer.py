"""ZeroMQ with raw bytes through a process between the two, which holds the messages a dead consumer has not taken."""

from __future__ import annotations

import multiprocessing
from typing import Any

import zmq

from benches.ways import QUEUED_BATCHES, Send, zeromq_raw
from benches.workload import APPEND_ROWS, BATCH_ROWS

# Of the producer's pipe, the streamer's two and the consumer's.
_APPENDS_A_PIPE = QUEUED_BATCHES * BATCH_ROWS // APPEND_ROWS // 4


class Way(zeromq_raw.Way):
    """The consumer's PULL socket, and ZeroMQ's own streamer before it."""

    def __init__(self) -> None:
        super().__init__(_APPENDS_A_PIPE)
        self._streamer = multiprocessing.get_context("spawn").Process(
            target=_stream, args=(self.address(), super().address()), daemon=True
        )
        self._streamer.start()

    def address(self) -> Any:
        return f"ipc://{self._folder.name}/streamer"

    def close(self) -> None:
        self._streamer.kill()
        self._streamer.join()
        super().close()

    @staticmethod
    def sender(address: Any, index: int) -> Send:
        return Way.sending(Way.connect(address, _APPENDS_A_PIPE))


def _stream(source: str, sink: str) -> None:
    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.setsockopt(zmq.RCVHWM, _APPENDS_A_PIPE)
    push.setsockopt(zmq.SNDHWM, _APPENDS_A_PIPE)
    pull.bind(source)
    push.connect(sink)
    # Messages are moved in C, without a copy.
    zmq.proxy(pull, push)
