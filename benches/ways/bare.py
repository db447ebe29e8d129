"""Three processes and plain copies: rlhfd's messages and its shared memory with nothing else done.

No ledger, no lease, no checksum, no trimming of padding, no recovery: what any design of worker, buffer and trainer
over ZeroMQ and NumPy pays before it keeps a single promise.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator
from multiprocessing import shared_memory
from typing import Any

import msgspec
import numpy as np
import zmq

from benches.ways import QUEUED_BATCHES, Send
from benches.workload import APPEND_ROWS, BATCH_ROWS, Arrays, rebatch

_PER_BATCH = BATCH_ROWS // APPEND_ROWS
_PRODUCERS = 2
# Each producer has half of the room, but of images, of which less may be queued.
_SLOTS = QUEUED_BATCHES * _PER_BATCH // _PRODUCERS
_SLOT_BYTES = 12 << 20

# An append's slot, and name, type, shape and place of each array there.
_Append = tuple[int, list[tuple[str, str, tuple[int, ...], int]]]
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Append).decode
_decode_batch = msgspec.msgpack.Decoder(list[_Append]).decode
_decode_slots = msgspec.msgpack.Decoder(list[int]).decode


class Way:
    """The trainer, and the hub before it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._memory = shared_memory.SharedMemory(create=True, size=_PRODUCERS * _SLOTS * _SLOT_BYTES)
        self._room: Any = np.ndarray(self._memory.size, np.uint8, self._memory.buf)
        self._room[:] = 0
        self._hub = multiprocessing.get_context("spawn").Process(target=_serve, args=(self._folder.name,), daemon=True)
        self._hub.start()
        self.parts = {"buffer": self._hub.pid}
        self._mail = _listening(self._folder.name, "trainer")
        self._to_hub = _connected(self._folder.name, "hub")

    def address(self) -> Any:
        return self._folder.name, self._memory.name

    def batches(self) -> Iterator[Any]:
        while True:
            found = _decode_batch(self._mail.recv())
            yield rebatch([{name: self._view(*where) for name, *where in arrays} for _, arrays in found])
            self._to_hub.send_multipart([b"ack", _encode([slot for slot, _ in found])])

    def _view(self, dtype: str, shape: tuple[int, ...], start: int) -> Any:
        stop = start + int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self._room[start:stop].view(dtype).reshape(shape)

    def close(self) -> None:
        self._hub.kill()
        self._hub.join()
        self._mail.close(linger=0)
        self._to_hub.close(linger=0)
        del self._room
        self._memory.close()
        self._memory.unlink()
        self._folder.cleanup()

    @staticmethod
    def sender(address: Any, index: int) -> Send:
        folder, name = address
        memory = shared_memory.SharedMemory(name)
        room: Any = np.ndarray(memory.size, np.uint8, memory.buf)
        room[:] = 0
        mail, to_hub = _listening(folder, f"worker-{index}"), _connected(folder, "hub")
        free = list(range(index * _SLOTS, (index + 1) * _SLOTS))

        def send(arrays: Arrays) -> None:
            while not free:
                free.extend(_decode_slots(mail.recv()))
            slot, described = free.pop(0), []
            start = slot * _SLOT_BYTES
            for name, value in arrays.items():
                room[start : start + value.nbytes] = value.reshape(-1).view(np.uint8)
                described.append((name, value.dtype.str, value.shape, start))
                start += -(-value.nbytes // 64) * 64
            to_hub.send_multipart([b"sealed", _encode((slot, described))])

        _kept.append(memory)
        return send


# Memory that is mapped as long as its process lives.
_kept: list[Any] = []


def _serve(folder: str) -> None:
    mail, trainer = _listening(folder, "hub"), _connected(folder, "trainer")
    workers = [_connected(folder, f"worker-{index}") for index in range(_PRODUCERS)]
    ready: list[_Append] = []
    while True:
        word, data = mail.recv_multipart()
        if word == b"sealed":
            ready.append(_decode(data))
            if len(ready) == _PER_BATCH:
                trainer.send(_encode(ready))
                ready.clear()
        else:
            slots = _decode_slots(data)
            for index, worker in enumerate(workers):
                if mine := [slot for slot in slots if slot // _SLOTS == index]:
                    worker.send(_encode(mine))


def _listening(folder: str, name: str) -> Any:
    socket: Any = zmq.Context.instance().socket(zmq.PULL)
    socket.setsockopt(zmq.RCVTIMEO, 60_000 if name != "hub" else -1)
    socket.bind(f"ipc://{folder}/{name}")
    return socket


def _connected(folder: str, name: str) -> Any:
    socket: Any = zmq.Context.instance().socket(zmq.PUSH)
    socket.connect(f"ipc://{folder}/{name}")
    return socket
