"""rlhfd's `DetachedReplayBuffer`: a class for scripts, each row delivered once after any kill but the owner's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benches.ways import QUEUED_BATCHES, Send
from benches.ways.daemon import arrays_of, experience_of
from benches.workload import BATCH_ROWS, SHAPES, Arrays
from pipeline.experience.types import Experience
from pipeline.replay.buffer import DetachedReplayBuffer


class Way:
    """The process that made the buffer, and samples it."""

    def __init__(self) -> None:
        # Rows with images and rows without cannot share a buffer.
        self._buffers = [
            DetachedReplayBuffer(BATCH_ROWS, limit=QUEUED_BATCHES, arena_bytes=nbytes, timeout_s=60.0)
            for nbytes in (64 << 20, 256 << 20)
        ]
        self._has_images = False

    def address(self) -> Any:
        return self._buffers

    def expect(self, shape: str) -> None:
        """Set the shape of the next appends."""
        self._has_images = SHAPES[shape].patches > 0

    def batches(self) -> Iterator[Any]:
        while True:
            yield arrays_of(self._buffers[self._has_images].sample())

    def close(self) -> None:
        for buffer in self._buffers:
            buffer.close()

    @staticmethod
    def sender(address: Any, index: int) -> Send:
        made: dict[int, tuple[Arrays, Experience]] = {}

        def send(arrays: Arrays) -> None:
            if id(arrays) not in made:
                made[id(arrays)] = (arrays, experience_of(arrays))
            address["pixel_values" in arrays].append(made[id(arrays)][1])

        return send
