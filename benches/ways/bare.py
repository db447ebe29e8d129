"""Three processes and plain copies: rlhfd's messages and its blocks in shared memory, without any other work.

No ledger, no lease, no checksum, no trimming of padding, no recovery, no torch: the cost of any design of worker,
buffer and trainer over ZeroMQ and NumPy before it gives a single guarantee. Fields of one dtype are one block, messages
are answered together, batches are made in reused memory.
"""

from __future__ import annotations

import multiprocessing
import struct
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing import shared_memory
from typing import Any, NamedTuple

import numpy as np
import zmq

from benches.ways import QUEUED_BATCHES, Send
from benches.workload import APPEND_ROWS, BATCH_ROWS, PATCH_VALUES, Arrays

_PER_BATCH = BATCH_ROWS // APPEND_ROWS
_MOST_PRODUCERS = 2
_SLOTS = QUEUED_BATCHES * _PER_BATCH
# An append of any shape; of large ones there are 8 rows, of others up to 52 KiB a row.
_SLOT_BYTES = max(12 << 20, APPEND_ROWS * (52 << 10))
_FLOATS = ("action_log_probs", "base_action_log_probs", "kl", "advantages")

# An append's producer and slot, columns of its sequences and of its actions, patches; a slot that is free again.
_APPEND = struct.Struct("<5H")
_FREE = struct.Struct("<2H")


class Blocks(NamedTuple):
    """Rows in memory: sequences and their mask, the float32 fields per action, the actions' mask, rewards, pixels."""

    tokens: Any
    actions: Any
    mask: Any
    reward: Any
    pixels: Any

    @classmethod
    def at(cls, memory: Any, start: int, rows: int, columns: int, actions: int, patches: int) -> Blocks:
        """Return the blocks laid out from `start` on, those with fewer bytes per value last."""
        blocks = []
        for shape, dtype in (
            ((2, rows, columns), np.int64),
            ((4, rows, actions), np.float32),
            ((patches, PATCH_VALUES), np.float32),
            ((rows,), np.float32),
            ((rows, actions), np.bool_),
        ):
            blocks.append(np.ndarray(shape, dtype, memory, start))
            start += blocks[-1].nbytes
        tokens, floats, pixels, reward, mask = blocks
        return cls(tokens, floats, mask, reward, pixels)


class Way:
    """The trainer, and the hub before it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._memory = shared_memory.SharedMemory(create=True, size=_SLOTS * _SLOT_BYTES)
        _touch(self._memory)
        self._hub = multiprocessing.get_context("spawn").Process(target=_serve, args=(self._folder.name,), daemon=True)
        self._hub.start()
        self.parts = {"buffer": self._hub.pid}
        self._mail = _listening(self._folder.name, "trainer")
        self._to_hub = _connected(self._folder.name, "hub")
        self._producers = 1

    def share(self, producers: int) -> None:
        """Set the number of producers that share the room."""
        self._producers = producers

    def address(self) -> Any:
        return self._folder.name, self._memory.name, self._producers

    def batches(self) -> Iterator[Any]:
        # The present batch, and the one before it.
        outs = deque(np.empty(2 * _SLOT_BYTES, np.uint8) for _ in range(2))
        while True:
            appends = [*_APPEND.iter_unpack(self._mail.recv())]
            for first in range(0, len(appends), _PER_BATCH):
                chosen = appends[first : first + _PER_BATCH]
                outs.rotate()
                yield self._gather(chosen, outs[0])
                self._to_hub.send(b"".join(_FREE.pack(*append[:2]) for append in chosen))

    def _gather(self, appends: Sequence[Any], out: Any) -> Arrays:
        parts = [Blocks.at(self._memory.buf, slot * _SLOT_BYTES, APPEND_ROWS, *sizes) for _, slot, *sizes in appends]
        columns, actions = max(append[2] for append in appends), max(append[3] for append in appends)
        batch = Blocks.at(out, 0, BATCH_ROWS, columns, actions, sum(append[4] for append in appends))
        row = patch = 0
        for part in parts:
            rows, patches = slice(row, row + APPEND_ROWS), slice(patch, patch + len(part.pixels))
            for block, value in ((batch.tokens, part.tokens), (batch.actions, part.actions), (batch.mask, part.mask)):
                padding = block.shape[-1] - value.shape[-1]
                block[..., rows, padding:] = value
                if padding:
                    block[..., rows, :padding] = 0
            batch.reward[rows] = part.reward
            batch.pixels[patches] = part.pixels
            row, patch = rows.stop, patches.stop
        made = dict(zip(_FLOATS, batch.actions, strict=True))
        made |= {"sequences": batch.tokens[0], "attention_mask": batch.tokens[1]}
        made |= {"action_mask": batch.mask, "reward": batch.reward}
        return made | ({"pixel_values": batch.pixels} if len(batch.pixels) else {})

    def close(self) -> None:
        self._hub.kill()
        self._hub.join()
        self._mail.close(linger=0)
        self._to_hub.close(linger=0)
        self._memory.unlink()
        self._folder.cleanup()

    @staticmethod
    def sender(address: Any, index: int) -> Send:
        folder, name, producers = address
        memory = shared_memory.SharedMemory(name)
        _touch(memory)
        mail, to_hub = _listening(folder, f"worker-{index}"), _connected(folder, "hub")
        free = deque(range(index, _SLOTS, producers))

        def send(arrays: Arrays) -> None:
            while not free:
                free.extend(slot for _, slot in _FREE.iter_unpack(mail.recv()))
            slot, pixels = free.popleft(), arrays.get("pixel_values")
            sizes = arrays["sequences"].shape[1], arrays["kl"].shape[1], 0 if pixels is None else len(pixels)
            blocks = Blocks.at(memory.buf, slot * _SLOT_BYTES, APPEND_ROWS, *sizes)
            blocks.tokens[0], blocks.tokens[1] = arrays["sequences"], arrays["attention_mask"]
            for block, field in zip(blocks.actions, _FLOATS, strict=True):
                block[...] = arrays[field]
            blocks.mask[...], blocks.reward[...] = arrays["action_mask"], arrays["reward"]
            if pixels is not None:
                blocks.pixels[...] = pixels
            to_hub.send(_APPEND.pack(index, slot, *sizes))

        _kept.append(memory)
        return send


# Memory that stays mapped for the life of its process.
_kept: list[Any] = []


def _touch(memory: Any) -> None:
    np.ndarray(memory.size, np.uint8, memory.buf)[:] = 0


def _serve(folder: str) -> None:
    mail, trainer = _listening(folder, "hub"), _connected(folder, "trainer")
    workers = [_connected(folder, f"worker-{index}") for index in range(_MOST_PRODUCERS)]
    ready: list[bytes] = []
    while True:
        freed: dict[int, bytes] = {}
        for data in _all_mail(mail):
            # An append from a worker is longer than a trainer's message that frees one.
            if len(data) == _APPEND.size:
                ready.append(data)
                continue
            for producer, slot in _FREE.iter_unpack(data):
                freed[producer] = freed.get(producer, b"") + _FREE.pack(producer, slot)
        if whole := len(ready) // _PER_BATCH * _PER_BATCH:
            trainer.send(b"".join(ready[:whole]))
            del ready[:whole]
        for producer, slots in freed.items():
            workers[producer].send(slots)


def _all_mail(mail: Any) -> Iterator[bytes]:
    """Yield the messages that have arrived, at least one."""
    yield mail.recv()
    while True:
        try:
            yield mail.recv(zmq.NOBLOCK)
        except zmq.Again:
            return


def _listening(folder: str, name: str) -> Any:
    socket: Any = zmq.Context.instance().socket(zmq.PULL)
    socket.setsockopt(zmq.RCVTIMEO, 60_000 if name != "hub" else -1)
    socket.bind(f"ipc://{folder}/{name}")
    return socket


def _connected(folder: str, name: str) -> Any:
    socket: Any = zmq.Context.instance().socket(zmq.PUSH)
    socket.connect(f"ipc://{folder}/{name}")
    return socket
