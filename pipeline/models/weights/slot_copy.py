"""Copies of tensors into and out of a slot of shared memory, with a fingerprint.

A slot is copied and hashed block by block, so that a block is hashed while it is still in the cache. A large slot is
copied by several threads, because one core does not saturate the memory bus. The fingerprint is the xxh3-64 of the
blocks' xxh3-64 digests, in order.

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

_BLOCK_BYTES = 1 << 20
_THREADS_FROM_BYTES = 1 << 25
_MAX_THREADS = 4

_Digests = Callable[[Callable[[int], int], Sequence[int]], list[int]]
"""Calls a function with each of these blocks; returns the results in their order."""


class _Segment(NamedTuple):
    """The part of a tensor in one block: its bytes in the slot, and its start in the tensor."""

    name: str
    start: int
    end: int
    tensor_start: int

    @property
    def in_tensor(self) -> slice:
        return slice(self.tensor_start, self.tensor_start + self.end - self.start)


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
        self._memory = memory
        self._driver = process_driver() if driver is None else driver
        self._is_kept = is_kept
        self._is_locked = False
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8).numpy()
        self._blocks = [
            (start, min(start + _BLOCK_BYTES, len(memory))) for start in range(0, len(memory), _BLOCK_BYTES)
        ]

    def write(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Copy tensors in, from any device, and return the fingerprint of the slot.

        Raises:
            WeightsError: If a tensor is missing or of another shape; the slot is then unchanged.
        """
        given = self._matching(tensors, "expected", self.views)
        plain, on_card, other = self._by_way(given)
        for name in other:
            self.views[name].copy_(given[name].detach())

        with CardCopies(self._driver) as copies, self._threads() as digests:
            for name, tensor in on_card.items():
                # Converted on the card, if at all.
                as_published = tensor.detach().to(self.views[name].dtype).contiguous()
                copies.begin(name, self.views[name], as_published)

            def copied(index: int) -> int:
                for segment in self._segments[index]:
                    copies.wait(segment.name)
                    if (source := plain.get(segment.name)) is not None:
                        self._bytes[segment.start : segment.end] = source[segment.in_tensor]
                return self._digest(index)

            return combined(digests(copied, range(len(self._blocks))))

    def read(self, into: Mapping[str, torch.Tensor], *, partial: bool = False) -> int:
        """Copy tensors out, to any device, and return the fingerprint of the slot's bytes.

        No copy is in flight afterwards: the caller reads the slot's sequence next.

        Args:
            into: Targets by name.
            partial: Whether a tensor without a target is not copied.

        Returns:
            The fingerprint, of copied tensors and others.

        Raises:
            WeightsError: If a target is of another shape, or missing, unless `partial`.
        """
        views = {name: view for name, view in self.views.items() if name in into} if partial else self.views
        targets = self._matching(into, "published as", views)
        plain, on_card, other = self._by_way(targets)

        def copied(index: int) -> int:
            for segment in self._segments[index]:
                if (target := plain.get(segment.name)) is not None:
                    target[segment.in_tensor] = self._bytes[segment.start : segment.end]
            return self._digest(index)

        with torch.no_grad(), CardCopies(self._driver) as copies, self._threads() as digests:
            for name, target in on_card.items():
                held = self._same_layout(name, target)
                copies.begin(name, held, self.views[name])
                if held.data_ptr() != target.data_ptr():
                    copies.begin(name, target, held)
            for name in other:
                targets[name].copy_(self.views[name])
            return combined(digests(copied, range(len(self._blocks))))

    def close(self) -> None:
        """Undo the page lock; no copy is under way."""
        if self._is_locked:
            self._is_locked = False
            self._driver.unregister(self._bytes.ctypes.data)

    @property
    def blocks(self) -> int:
        """Number of blocks, each with a digest of its own."""
        return len(self._blocks)

    def digests(self, indices: Sequence[int]) -> list[int]:
        """Return the digests of these blocks, as they are now; `combined` makes a fingerprint of all digests."""
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
        return xxhash.xxh3_64_intdigest(self._memory[start:end])

    def _same_layout(self, name: str, target: torch.Tensor) -> torch.Tensor:
        """Return the target, or, if a copy of bytes is no copy of the tensor, memory beside it on its device."""
        if target.dtype == self.views[name].dtype and target.is_contiguous():
            return target.detach()
        return torch.empty(target.shape, dtype=self.views[name].dtype, device=target.device)

    @contextlib.contextmanager
    def _threads(self) -> Iterator[_Digests]:
        threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        if len(self._memory) < _THREADS_FROM_BYTES or threads == 1:
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
        self, tensors: Mapping[str, torch.Tensor], expected: str, views: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        found = {}
        for name, view in views.items():
            tensor = tensors.get(name)
            if tensor is None or tensor.shape != view.shape:
                shape = "missing" if tensor is None else tuple(tensor.shape)
                raise WeightsError(f"{name}: {shape}, {expected} {tuple(view.shape)}")
            found[name] = tensor
        return found

    def _by_way(self, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, torch.Tensor], list[str]]:
        """Return flat arrays of the tensors that are copied as bytes, those on a card, and the names of all others.

        The first tensor on a card makes the slot page-locked.
        """
        plain: dict[str, Any] = {}
        on_card: dict[str, torch.Tensor] = {}
        other = []
        for name, tensor in tensors.items():
            if not tensor.numel():
                continue
            if self._driver.holds(tensor):
                on_card[name] = tensor
            elif (flat := self._flat_bytes(name, tensor)) is not None:
                plain[name] = flat
            else:
                other.append(name)
        if on_card and self._is_kept and not self._is_locked:
            self._is_locked = self._driver.register(self._bytes.ctypes.data, len(self._memory))
        return plain, on_card, other

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
                segments[index].append(_Segment(name, first, last, first - begin))
        return segments


def combined(digests: list[int]) -> int:
    """Return the fingerprint of blocks with these digests.

    The fingerprint is below 2**63, so that it fits a signed 64-bit integer of any reader.
    """
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(digests)}Q", *digests)) >> 1
