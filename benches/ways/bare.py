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
_MOST_PRODUCERS = 2
_SLOTS = QUEUED_BATCHES * _PER_BATCH
_SLOT_BYTES = 12 << 20

# An append's producer and slot, and name, type, shape and place of each array there.
_Append = tuple[int, int, list[tuple[str, str, tuple[int, ...], int]]]
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Append).decode
_decode_batch = msgspec.msgpack.Decoder(list[_Append]).decode
_decode_slots = msgspec.msgpack.Decoder(list[tuple[int, int]]).decode


class Way:
    """The trainer, and the hub before it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._memory = shared_memory.SharedMemory(create=True, size=_SLOTS * _SLOT_BYTES)
        self._room: Any = np.ndarray(self._memory.size, np.uint8, self._memory.buf)
        self._room[:] = 0
        self._hub = multiprocessing.get_context("spawn").Process(target=_serve, args=(self._folder.name,), daemon=True)
        self._hub.start()
        self.parts = {"buffer": self._hub.pid}
        self._mail = _listening(self._folder.name, "trainer")
        self._to_hub = _connected(self._folder.name, "hub")
        self._producers = 1

    def share(self, producers: int) -> None:
        """Be told how many producers share the room."""
        self._producers = producers

    def address(self) -> Any:
        return self._folder.name, self._memory.name, self._producers

    def batches(self) -> Iterator[Any]:
        while True:
            found = _decode_batch(self._mail.recv())
            yield rebatch([{name: self._view(*where) for name, *where in arrays} for _, _, arrays in found])
            self._to_hub.send_multipart([b"ack", _encode([(index, slot) for index, slot, _ in found])])

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
        folder, name, producers = address
        memory = shared_memory.SharedMemory(name)
        room: Any = np.ndarray(memory.size, np.uint8, memory.buf)
        room[:] = 0
        mail, to_hub = _listening(folder, f"worker-{index}"), _connected(folder, "hub")
        free = list(range(index, _SLOTS, producers))

        def send(arrays: Arrays) -> None:
            while not free:
                free.extend(slot for _, slot in _decode_slots(mail.recv()))
            slot, described = free.pop(0), []
            start = slot * _SLOT_BYTES
            for name, value in arrays.items():
                room[start : start + value.nbytes] = value.reshape(-1).view(np.uint8)
                described.append((name, value.dtype.str, value.shape, start))
                start += -(-value.nbytes // 64) * 64
            to_hub.send_multipart([b"sealed", _encode((index, slot, described))])

        _kept.append(memory)
        return send


# Memory that is mapped as long as its process lives.
_kept: list[Any] = []


def _serve(folder: str) -> None:
    mail, trainer = _listening(folder, "hub"), _connected(folder, "trainer")
    workers = [_connected(folder, f"worker-{index}") for index in range(_MOST_PRODUCERS)]
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
                if mine := [place for place in slots if place[0] == index]:
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
