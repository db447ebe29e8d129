"""ZeroMQ in its most common use: the arrays pickled."""

from __future__ import annotations

from typing import Any

from benches.ways import Send, zeromq_raw
from benches.workload import Arrays


class Way(zeromq_raw.Way):
    """The consumer's PULL socket."""

    def receive(self) -> Arrays:
        arrays: Arrays = self._socket.recv_pyobj()
        return arrays

    @staticmethod
    def sender(address: Any, index: int) -> Send:
        send: Send = zeromq_raw.Way.connect(address).send_pyobj
        return send
