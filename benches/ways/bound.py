"""The bound: a plain copy in, a plain copy out and the touch, running free. No messages, so nothing can go faster."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import shared_memory
from typing import Any

import numpy as np

from benches.ways import POOL, QUEUED_BATCHES, Send
from benches.workload import APPEND_ROWS, BATCH_ROWS, SHAPES, Arrays, appends

# Holds what may be queued, but of images, of which it holds three batches.
_RING_BYTES = 64 << 20
_SLOTS = QUEUED_BATCHES * BATCH_ROWS // APPEND_ROWS


class Way:
    """Both sides go round in a ring of as many appends as others may queue; neither looks at the other."""

    is_checked = False

    def __init__(self) -> None:
        self._memory = shared_memory.SharedMemory(create=True, size=_RING_BYTES)
        self._ring = np.frombuffer(self._memory.buf, np.uint8)
        # The first touch of a page is paid before, as by every process that maps an arena.
        self._ring[:] = 0
        self._sizes: dict[str, list[int]] = {}
        self._shape = ""

    def address(self) -> Any:
        return self._memory.name

    def expect(self, shape: str) -> None:
        """Be told what comes, for nobody else says it."""
        self._shape = shape
        if shape not in self._sizes:
            self._sizes[shape] = [append.nbytes for append in appends(SHAPES[shape], POOL)]

    def batches(self) -> Iterator[Any]:
        place = 0
        # Made once: a fresh one each time would pay for its pages, which a way that uses memory again does not.
        outs = [np.zeros(_RING_BYTES, np.uint8) for _ in range(2)]
        while True:
            sizes = self._sizes[self._shape]
            # The true bytes of two appends, flat: what is copied is what is touched.
            nbytes = (sizes[place % POOL] + sizes[(place + 1) % POOL]) // 8 * 8
            start = place // 2 % QUEUED_BATCHES * nbytes % (_RING_BYTES - nbytes)
            out = outs[place // 2 % 2][:nbytes]
            out[:] = self._ring[start : start + nbytes]
            place += 2
            yield {"flat": out}

    def close(self) -> None:
        del self._ring
        self._memory.close()
        self._memory.unlink()

    @staticmethod
    def sender(address: Any, index: int) -> Send:
        memory = shared_memory.SharedMemory(address)
        ring = np.frombuffer(memory.buf, np.uint8)
        ring[:] = 0
        flat: dict[int, Any] = {}
        place = index * _SLOTS // 2

        def send(arrays: Arrays) -> None:
            nonlocal place
            if id(arrays) not in flat:
                nbytes = int(16 * arrays["attention_mask"].sum() + 17 * arrays["action_mask"].sum() + 4 * APPEND_ROWS)
                nbytes += arrays["pixel_values"].nbytes if "pixel_values" in arrays else 0
                flat[id(arrays)] = np.zeros(nbytes, np.uint8)
            source = flat[id(arrays)]
            start = place % _SLOTS * len(source) % (_RING_BYTES - len(source))
            ring[start : start + len(source)] = source
            place += 1

        kept.append(memory)
        return send


# A mapping goes with its last reference.
kept: list[shared_memory.SharedMemory] = []
