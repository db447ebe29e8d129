"""Copies of tensors into and out of a slot of shared memory, with a fingerprint.

A slot is copied and hashed block by block, so that a block is hashed while it is still in the cache. A large slot is
copied by several threads, because one core does not saturate the memory bus. The fingerprint is the xxh3-64 of the
blocks' xxh3-64 digests, in order. A rank writes and reads its own ranges of the tensors, whole ones if it is alone.

Tensors on a card are copied straight between the card and the slot, which is page-locked at the first of these copies
(`pipeline.models.weights.pinned`). All are begun at once. Meanwhile threads hash the blocks: in a write each block once
its tensors have arrived, in a read at once. The card then reads a slot a second time beside the digest, so that the
caller compares the slot's sequence before and after: unchanged, both have read the same bytes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import xxhash

from pipeline.errors import WeightsError
from pipeline.models.weights.pinned import CardCopies, CudaDriver, process_driver
from pipeline.models.weights.shards import Shard, as_shards

_BLOCK_BYTES = 1 << 20
_THREADS_FROM_BYTES = 1 << 25
_CONVERTED_ELEMENTS = 1 << 24
_MAX_THREADS = 4

_Digests = Callable[[Callable[[int], int], Sequence[int]], list[int]]
"""Calls a function with each of these blocks; returns the results in their order."""


class _Segment(NamedTuple):
    """The part of a tensor in one block: its bytes in the slot and in the tensor."""

    name: str
    in_slot: slice
    in_tensor: slice


class _Span(NamedTuple):
    """A rank's bytes of a tensor, from `start` to `end`; `array` is their memory if a copy of bytes copies them."""

    start: int
    end: int
    is_whole: bool
    array: Any = None

    def covers(self, segment: _Segment) -> bool:
        """Return whether all of a segment is this rank's."""
        return self.is_whole or (self.start <= segment.in_tensor.start and segment.in_tensor.stop <= self.end)

    def common(self, segment: _Segment) -> tuple[slice, slice]:
        """Return the bytes of a segment that are this rank's, in the slot and in `array`."""
        if self.is_whole:
            return segment.in_slot, segment.in_tensor
        offset = segment.in_slot.start - segment.in_tensor.start
        first = max(segment.in_tensor.start, self.start)
        last = max(first, min(segment.in_tensor.stop, self.end))
        return slice(first + offset, last + offset), slice(first - self.start, last - self.start)


class Slot:
    """The bytes of one slot, and the tensors in it.

    Args:
        memory: The whole slot.
        views: The tensors over `memory` by name, in the order of their offsets.
        driver: Carries out copies from and to a card; None for the process's driver.
        is_kept: Whether the slot is copied again and again, so that it is worth page-locking.
    """

    def __init__(
        self,
        memory: memoryview,
        views: Mapping[str, torch.Tensor],
        *,
        driver: CudaDriver | None = None,
        is_kept: bool = True,
    ) -> None:
        self.views = dict(views)
        self.memory = memory
        self._driver = process_driver() if driver is None else driver
        self._is_kept = is_kept
        self._is_locked = False
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8).numpy()
        self._blocks = [
            (start, min(start + _BLOCK_BYTES, len(memory))) for start in range(0, len(memory), _BLOCK_BYTES)
        ]

    def write(self, tensors: Mapping[str, torch.Tensor | Shard]) -> list[int]:
        """Copy tensors in, or a rank's shards of them, from any device.

        Returns:
            The digest of each block, 0 for a block that other ranks write to as well; `combined` makes a fingerprint of
            all.

        Raises:
            WeightsError: If a tensor is missing or of another shape; the slot is then unchanged.
        """
        given = self._matching(tensors, "expected", self.views)
        spans, on_card, other = self._by_way(given)
        for name in other:
            self._part(name, given[name]).copy_(given[name].local.detach())

        with CardCopies(self._driver) as copies, self._threads() as digests:
            for name in on_card:
                local, part = given[name].local.detach(), self._part(name, given[name])
                if local.dtype == part.dtype and local.is_contiguous():
                    copies.begin(name, part, local)
                    continue
                # Converted on the card, in parts: the memory of one is that of the next, in the order of the stream.
                rows = max(1, _CONVERTED_ELEMENTS * len(local) // local.numel()) if local.dim() else 0
                for target, source in zip(*(one.split(rows) if rows else (one,) for one in (part, local)), strict=True):
                    copies.begin(name, target, source.to(part.dtype).contiguous())

            is_whole = all(span.is_whole for span in spans.values())

            def copied(index: int) -> int:
                segments = self._segments[index]
                for segment in segments:
                    copies.wait(segment.name)
                    if (source := spans[segment.name]).array is not None:
                        in_slot, in_source = source.common(segment)
                        self._bytes[in_slot] = source.array[in_source]
                is_own = is_whole or all(spans[segment.name].covers(segment) for segment in segments)
                return self._digest(index) if is_own else 0

            return digests(copied, range(len(self._blocks)))

    def read(self, into: Mapping[str, torch.Tensor | Shard], *, partial: bool = False) -> int:
        """Copy tensors out, or a rank's shards of them, to any device; return the fingerprint of the slot's bytes.

        No copy is in flight afterwards: the caller reads the slot's sequence next.

        Args:
            into: Targets by name.
            partial: Whether a tensor without a target is not copied.

        Returns:
            The fingerprint, of copied bytes and others.

        Raises:
            WeightsError: If a target is of another shape, or missing, unless `partial`.
        """
        views = {name: view for name, view in self.views.items() if name in into} if partial else self.views
        targets = self._matching(into, "published as", views)
        spans, on_card, other = self._by_way(targets)

        def copied(index: int) -> int:
            for segment in self._segments[index]:
                if (target := spans.get(segment.name)) is not None and target.array is not None:
                    in_slot, in_target = target.common(segment)
                    target.array[in_target] = self._bytes[in_slot]
            return self._digest(index)

        with torch.no_grad(), CardCopies(self._driver) as copies, self._threads() as digests:
            for name in on_card:
                target = targets[name].local
                held = self._same_layout(name, target)
                copies.begin(name, held, self._part(name, targets[name]))
                if held.data_ptr() != target.data_ptr():
                    copies.begin(name, target, held)
            for name in other:
                targets[name].local.copy_(self._part(name, targets[name]))
            return combined(digests(copied, range(len(self._blocks))))

    def close(self) -> None:
        """Undo the page lock; no copy is under way."""
        if self._is_locked:
            self._is_locked = False
            self._driver.unregister(self._bytes.ctypes.data)

    def digests(self, indices: Sequence[int]) -> list[int]:
        """Return the digests of these blocks, as they are now."""
        with self._threads() as digests:
            return digests(self._digest, indices)

    def fingerprint_during(self, load: Callable[[Mapping[str, torch.Tensor]], None]) -> int:
        """Call `load` with the tensors in the slot, and return the slot's fingerprint, taken meanwhile.

        The caller compares the slot's sequence before and after: the bytes read twice are then the same ones.
        """
        with self._threads() as digests, ThreadPoolExecutor(1) as beside:
            found = beside.submit(digests, self._digest, range(len(self._blocks)))
            load(self.views)
            return combined(found.result())

    def _digest(self, index: int) -> int:
        start, end = self._blocks[index]
        return xxhash.xxh3_64_intdigest(self.memory[start:end])

    def _same_layout(self, name: str, target: torch.Tensor) -> torch.Tensor:
        """Return the target, or, if a copy of bytes is no copy of the tensor, memory beside it on its device."""
        if target.dtype == self.views[name].dtype and target.is_contiguous():
            return target.detach()
        return torch.empty(target.shape, dtype=self.views[name].dtype, device=target.device)

    @contextlib.contextmanager
    def _threads(self) -> Iterator[_Digests]:
        threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        if len(self.memory) < _THREADS_FROM_BYTES or threads == 1:
            yield lambda block, indices: [block(index) for index in indices]
            return
        with ThreadPoolExecutor(threads) as pool:

            def digests(block: Callable[[int], int], indices: Sequence[int]) -> list[int]:
                # Every n-th block, not a contiguous part: all threads end at nearly the same time.
                parts = pool.map(lambda part: [block(index) for index in indices[part::threads]], range(threads))
                found = [0] * len(indices)
                for part, values in enumerate(parts):
                    found[part::threads] = values
                return found

            yield digests

    def _matching(
        self, tensors: Mapping[str, torch.Tensor | Shard], expected: str, views: Mapping[str, torch.Tensor]
    ) -> dict[str, Shard]:
        shards, found = as_shards(tensors), dict[str, Shard]()
        for name, view in views.items():
            shard = shards.get(name)
            if shard is None or shard.shape != tuple(view.shape):
                raise WeightsError(
                    f"{name}: {'missing' if shard is None else shard.shape}, {expected} {tuple(view.shape)}"
                )
            found[name] = shard
        return found

    def _by_way(self, shards: Mapping[str, Shard]) -> tuple[dict[str, _Span], list[str], list[str]]:
        """Return this rank's bytes of the tensors, the names of tensors on a card, and of others not copied as bytes.

        The first tensor on a card makes the slot page-locked.
        """
        spans: dict[str, _Span] = {}
        on_card, other = list[str](), list[str]()
        for name, shard in shards.items():
            view = self.views[name]
            first, last = (place * view.element_size() for place in (shard.elements.start, shard.elements.stop))
            span = _Span(first, last, shard.local.numel() == view.numel())
            if not shard.local.numel():
                pass
            elif self._driver.holds(shard.local):
                on_card.append(name)
            elif (flat := self._flat_bytes(name, shard.local)) is not None:
                span = span._replace(array=flat)
            else:
                other.append(name)
            spans[name] = span
        if on_card and self._is_kept and not self._is_locked:
            self._is_locked = self._driver.register(self._bytes.ctypes.data, len(self.memory))
        return spans, on_card, other

    def _part(self, name: str, shard: Shard) -> torch.Tensor:
        """Return a rank's part of a tensor in the slot."""
        return self.views[name].reshape(-1)[shard.elements].view(shard.local.shape)

    def _flat_bytes(self, name: str, tensor: torch.Tensor) -> Any:
        """Return the tensor's memory as a flat array; None unless a copy of its bytes is a copy of the tensor."""
        if tensor.device.type != "cpu" or tensor.dtype != self.views[name].dtype or not tensor.is_contiguous():
            return None
        return tensor.detach().reshape(-1).view(torch.uint8).numpy()

    @functools.cached_property
    def _segments(self) -> list[list[_Segment]]:
        """For each block the parts of the tensors that overlap it."""
        segments: list[list[_Segment]] = [[] for _ in self._blocks]
        for name, view in self.views.items():
            if not view.numel():
                continue
            begin = int(view.data_ptr() - self._bytes.ctypes.data)
            end = begin + view.numel() * view.element_size()
            for index in range(begin // _BLOCK_BYTES, -(-end // _BLOCK_BYTES)):
                first, last = max(begin, self._blocks[index][0]), min(end, self._blocks[index][1])
                segments[index].append(_Segment(name, slice(first, last), slice(first - begin, last - begin)))
        return segments


def combined(digests: Sequence[int]) -> int:
    """Return the fingerprint of blocks with these digests.

    The fingerprint is below 2**63, so that it fits a signed 64-bit integer of any reader.
    """
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(digests)}Q", *digests)) >> 1
