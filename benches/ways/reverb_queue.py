"""reverb: a table that is a queue, in a server within the trainer's process; producers insert over gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import portpicker
import reverb

from benches.ways import QUEUED_BATCHES, Send
from benches.workload import ACTION_FIELDS, APPEND_ROWS, BATCH_ROWS, TOKEN_FIELDS, Arrays, rebatch

_PER_BATCH = BATCH_ROWS // APPEND_ROWS
_TEXT = sorted([*TOKEN_FIELDS, *ACTION_FIELDS, "reward"])


class Way:
    """The trainer, with the server."""

    def __init__(self) -> None:
        tables = [reverb.Table.queue(name, QUEUED_BATCHES * _PER_BATCH) for name in ("text", "images")]
        self._server = reverb.Server(tables, port=portpicker.pick_unused_port())
        self._client = reverb.Client(f"localhost:{self._server.port}")
        self._table = "text"

    def address(self) -> Any:
        return self._server.port

    def expect(self, shape: str) -> None:
        """Set the shape of the next appends."""
        self._table = "images" if shape == "vl" else "text"

    def batches(self) -> Iterator[Any]:
        while True:
            parts = []
            for sample in self._client.sample(self._table, num_samples=_PER_BATCH):
                # Without a signature the values come in the order of their names.
                names = _TEXT if self._table == "text" else sorted([*_TEXT, "pixel_values"])
                parts.append(dict(zip(names, sample[0].data, strict=True)))
            yield rebatch(parts)

    def close(self) -> None:
        self._server.stop()

    @staticmethod
    def sender(address: Any, index: int) -> Send:
        client = reverb.Client(f"localhost:{address}")

        def send(arrays: Arrays) -> None:
            client.insert(dict(arrays), {"images" if "pixel_values" in arrays else "text": 1.0})

        return send
