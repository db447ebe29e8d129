"""Copies of tensors into and out of a slot of shared memory, with a fingerprint.

A slot is copied and hashed block by block, so that a block is hashed while it is still in the cache. A large slot is
copied by several threads, because one core does not saturate the memory bus. The fingerprint is the xxh3-64 of the
blocks' xxh3-64 digests, in order. GPU copies run concurrently with the hashing, at full speed if the slot is
page-locked (`pipeline.models.weights.pinned`).
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import xxhash

from pipeline.errors import WeightsError

_BLOCK_BYTES = 1 << 20
_THREADS_FROM_BYTES = 1 << 25
_MAX_THREADS = 4
_EVENT_BYTES = 1 << 26


class _Segment(NamedTuple):
    """The part of a tensor in one block: its bytes in the slot, and its start in the tensor."""

    name: str
    start: int
    end: int
    tensor_start: int


class Slot:
    """The bytes of one slot, and the tensors in it.

    Args:
        memory: The whole slot.
        views: The tensors over `memory` by name, in the order of their offsets.
    """

    def __init__(self, memory: memoryview, views: Mapping[str, torch.Tensor]) -> None:
        self.views = dict(views)
        self._memory = memory
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8).numpy()
        self._blocks = [
            (start, min(start + _BLOCK_BYTES, len(memory))) for start in range(0, len(memory), _BLOCK_BYTES)
        ]

    def write(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Copy tensors in, from any device, and return the fingerprint of the slot.

        Raises:
            WeightsError: If a tensor is missing or of another shape; the slot is then unchanged.
        """
        given = self._matching(tensors, "expected")
        plain = {name: flat for name, tensor in given.items() if (flat := self._flat_bytes(name, tensor)) is not None}
        copied: list[tuple[int, Any]] = []
        pending, issued = 0, 0
        for name, tensor in given.items():
            if name in plain:
                continue
            self.views[name].copy_(tensor.detach(), non_blocking=True)
            if tensor.is_cuda:
                # Offsets are in order: once the event has completed, all bytes before this one have been copied.
                place = self._end_of(name)
                pending, issued = pending + place - issued, place
                if pending >= _EVENT_BYTES:
                    copied.append((place, torch.cuda.current_stream(tensor.device).record_event()))
                    pending = 0
        if pending:
            last = next(tensor for tensor in reversed(given.values()) if tensor.is_cuda)
            copied.append((issued, torch.cuda.current_stream(last.device).record_event()))

        def block(index: int) -> int:
            for segment in self._segments[index]:
                if (source := plain.get(segment.name)) is not None:
                    length = segment.end - segment.start
                    self._bytes[segment.start : segment.end] = source[
                        segment.tensor_start : segment.tensor_start + length
                    ]
            self._wait_for(copied, self._blocks[index][1])
            return self._hash(index)

        return self._fingerprint(block)

    def read(self, into: Mapping[str, torch.Tensor]) -> int:
        """Copy all tensors out, to any device, and return the fingerprint of the copied bytes.

        Raises:
            WeightsError: If a target is missing or of another shape.
        """
        targets = self._matching(into, "published as")
        plain = {name: flat for name, target in targets.items() if (flat := self._flat_bytes(name, target)) is not None}
        devices = set()
        with torch.no_grad():
            for name, target in targets.items():
                if name not in plain:
                    target.copy_(self.views[name], non_blocking=True)
                    if target.is_cuda:
                        devices.add(target.device)

        def block(index: int) -> int:
            for segment in self._segments[index]:
                if (target := plain.get(segment.name)) is not None:
                    length = segment.end - segment.start
                    target[segment.tensor_start : segment.tensor_start + length] = self._bytes[
                        segment.start : segment.end
                    ]
            return self._hash(index)

        found = self._fingerprint(block)
        for device in devices:
            # The caller reads the slot's sequence next: no copy may still be in flight then.
            torch.cuda.current_stream(device).synchronize()
        return found

    def _fingerprint(self, block: Any) -> int:
        indices = range(len(self._blocks))
        threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        if len(self._memory) < _THREADS_FROM_BYTES or threads == 1:
            return combined([block(index) for index in indices])
        # Parts of equal size: each thread reads and writes its own range.
        bounds = [len(indices) * part // threads for part in range(threads + 1)]
        with ThreadPoolExecutor(threads) as pool:
            parts = pool.map(
                lambda part: [block(index) for index in indices[bounds[part] : bounds[part + 1]]], range(threads)
            )
            return combined([digest for part in parts for digest in part])

    def _hash(self, index: int) -> int:
        start, end = self._blocks[index]
        return xxhash.xxh3_64_intdigest(self._memory[start:end])

    def _matching(self, tensors: Mapping[str, torch.Tensor], expected: str) -> dict[str, torch.Tensor]:
        found = {}
        for name, view in self.views.items():
            tensor = tensors.get(name)
            if tensor is None or tensor.shape != view.shape:
                shape = "missing" if tensor is None else tuple(tensor.shape)
                raise WeightsError(f"{name}: {shape}, {expected} {tuple(view.shape)}")
            found[name] = tensor
        return found

    def _flat_bytes(self, name: str, tensor: torch.Tensor) -> Any:
        """Return the tensor's memory as a flat array; None unless a copy of its bytes is a copy of the tensor."""
        if tensor.device.type != "cpu" or tensor.dtype != self.views[name].dtype or not tensor.is_contiguous():
            return None
        return tensor.detach().reshape(-1).view(torch.uint8).numpy()

    def _end_of(self, name: str) -> int:
        view = self.views[name]
        return int(view.data_ptr() - self._bytes.ctypes.data) + view.numel() * view.element_size()

    @staticmethod
    def _wait_for(copied: list[tuple[int, Any]], end: int) -> None:
        """Wait until all bytes before `end` have been copied; events are in the order of their bytes."""
        for place, event in copied:
            event.synchronize()
            if place >= end:
                return

    @functools.cached_property
    def _segments(self) -> list[list[_Segment]]:
        """For each block the parts of the tensors that overlap it."""
        segments: list[list[_Segment]] = [[] for _ in self._blocks]
        for name, view in self.views.items():
            if not view.numel():
                continue
            end = self._end_of(name)
            begin = end - view.numel() * view.element_size()
            for index in range(begin // _BLOCK_BYTES, -(-end // _BLOCK_BYTES)):
                first, last = max(begin, self._blocks[index][0]), min(end, self._blocks[index][1])
                segments[index].append(_Segment(name, first, last, first - begin))
        return segments


def combined(digests: list[int]) -> int:
    """Return the fingerprint of blocks with these digests.

    The fingerprint is below 2**63, so that it fits a signed 64-bit integer of any reader.
    """
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(digests)}Q", *digests)) >> 1
