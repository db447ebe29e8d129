"""Copies of tensors into and out of a slot of shared memory, with a fingerprint.

A slot is copied and hashed block by block, so that a block is hashed while it is still in the cache. A large slot is
copied by several threads, because one core does not saturate the memory bus. The fingerprint is the xxh3-64 of the
blocks' xxh3-64 digests, in order.

Tensors on a GPU are copied through the ring of page-locked buffers (`pipeline.models.weights.pinned`), a piece of the
slot of one buffer's size at a time. The GPU copies the next pieces while threads copy and hash the present one, and
each piece is waited for once: the number of synchronizations grows linearly with the size of the slot.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import xxhash

from pipeline.errors import WeightsError
from pipeline.models.weights.pinned import PinnedRing, RingBuffer, process_ring

_BLOCK_BYTES = 1 << 20
_THREADS_FROM_BYTES = 1 << 25
_MAX_THREADS = 4

_Digests = Callable[[Callable[[int], int], Sequence[int]], list[int]]
"""Calls a function with each of these blocks; returns the results in their order."""


class _Segment(NamedTuple):
    """The part of a tensor in one block or piece: its bytes in the slot, and its start in the tensor."""

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
        ring: Carries the copies of tensors on a GPU; None for the process's ring.
    """

    def __init__(
        self, memory: memoryview, views: Mapping[str, torch.Tensor], *, ring: PinnedRing | None = None
    ) -> None:
        self.views = dict(views)
        self._memory = memory
        self._ring = process_ring() if ring is None else ring
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8).numpy()
        self._blocks = _pieces(len(memory), _BLOCK_BYTES)

    def write(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Copy tensors in, from any device, and return the fingerprint of the slot.

        Raises:
            WeightsError: If a tensor is missing or of another shape; the slot is then unchanged.
        """
        given = self._matching(tensors, "expected", self.views)
        plain, on_gpu, other = self._by_way(given)
        for name in other:
            self.views[name].copy_(given[name].detach())

        def copy(index: int) -> None:
            for segment in self._segments[index]:
                if (source := plain.get(segment.name)) is not None:
                    self._bytes[segment.start : segment.end] = source[segment.in_tensor]

        with self._threads() as digests:
            return combined(self._write_pieces(on_gpu, copy, digests))

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
        plain, on_gpu, other = self._by_way(targets)

        def copy(index: int) -> None:
            for segment in self._segments[index]:
                if (target := plain.get(segment.name)) is not None:
                    target[segment.in_tensor] = self._bytes[segment.start : segment.end]

        with self._threads() as digests, torch.no_grad():
            for name in other:
                targets[name].copy_(self.views[name])
            return combined(self._read_pieces(on_gpu, copy, digests))

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

    def _write_pieces(
        self, on_gpu: Mapping[str, torch.Tensor], copy: Callable[[int], None], digests: _Digests
    ) -> list[int]:
        """Call `copy` with each block, and copy the tensors on a GPU; return the blocks' digests."""
        if not on_gpu:
            return digests(lambda index: self._copied_and_hashed(copy, index), range(len(self._blocks)))
        ring, found, begun = self._ring, list[int](), 0
        flat: dict[str, torch.Tensor] = {}
        with ring.held():
            for number, (start, end) in enumerate(self._pieces):
                while begun < min(number + ring.buffers, len(self._pieces)):
                    self._fill(ring.buffer(begun), begun, on_gpu, flat)
                    begun += 1
                buffer = ring.buffer(number)
                buffer.wait()
                found += digests(
                    functools.partial(self._block_from, buffer, start, on_gpu.keys(), copy), _blocks_of(start, end)
                )
        return found

    def _read_pieces(
        self, on_gpu: Mapping[str, torch.Tensor], copy: Callable[[int], None], digests: _Digests
    ) -> list[int]:
        """Call `copy` with each block, and copy the tensors on a GPU; return the blocks' digests."""
        if not on_gpu:
            return digests(lambda index: self._copied_and_hashed(copy, index), range(len(self._blocks)))
        ring, found = self._ring, list[int]()
        flat: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        with ring.held():
            for number, (start, end) in enumerate(self._pieces):
                buffer = ring.buffer(number)
                buffer.wait()
                found += digests(
                    functools.partial(self._block_into, buffer, start, on_gpu.keys(), copy), _blocks_of(start, end)
                )
                self._empty(buffer, number, on_gpu, flat)
        return found

    def _fill(
        self,
        buffer: RingBuffer,
        number: int,
        on_gpu: Mapping[str, torch.Tensor],
        flat: dict[str, torch.Tensor],
    ) -> None:
        """Begin the copies of one piece from the GPU; `flat` keeps the bytes of a tensor that the next piece needs."""
        for segment in self._piece_segments[number]:
            if (tensor := on_gpu.get(segment.name)) is None:
                continue
            if segment.tensor_start == 0:
                # Converted on the GPU, if at all: the buffers hold bytes.
                as_published = tensor.detach().to(self.views[segment.name].dtype)
                flat[segment.name] = as_published.contiguous().reshape(-1).view(torch.uint8)
            source = flat[segment.name]
            buffer.copy_in(segment.start - self._pieces[number][0], source[segment.in_tensor])
            if segment.in_tensor.stop == len(source):
                del flat[segment.name]
        buffer.record()

    def _empty(
        self,
        buffer: RingBuffer,
        number: int,
        on_gpu: Mapping[str, torch.Tensor],
        flat: dict[str, tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Begin the copies of one piece to the GPU; `flat` keeps the targets that the next piece needs."""
        for segment in self._piece_segments[number]:
            if (target := on_gpu.get(segment.name)) is None:
                continue
            if segment.tensor_start == 0:
                held = self._same_layout(segment.name, target)
                flat[segment.name] = held, held.reshape(-1).view(torch.uint8)
            held, into = flat[segment.name]
            buffer.copy_out(segment.start - self._pieces[number][0], into[segment.in_tensor])
            if segment.in_tensor.stop == len(into):
                if held.data_ptr() != target.data_ptr():
                    self._ring.convert(target, held)
                del flat[segment.name]
        buffer.record()

    def _block_from(
        self, buffer: RingBuffer, piece_start: int, on_gpu: Collection[str], copy: Callable[[int], None], index: int
    ) -> int:
        for segment in self._segments[index]:
            if segment.name in on_gpu:
                place = slice(segment.start - piece_start, segment.end - piece_start)
                self._bytes[segment.start : segment.end] = buffer.array[place]
        return self._copied_and_hashed(copy, index)

    def _block_into(
        self, buffer: RingBuffer, piece_start: int, on_gpu: Collection[str], copy: Callable[[int], None], index: int
    ) -> int:
        if not any(segment.name in on_gpu for segment in self._segments[index]):
            return self._copied_and_hashed(copy, index)
        copy(index)
        start, end = self._blocks[index]
        copied = buffer.array[start - piece_start : end - piece_start]
        copied[:] = self._bytes[start:end]
        # The digest is of the copied bytes: a publisher may overwrite the slot meanwhile.
        return xxhash.xxh3_64_intdigest(copied)

    def _copied_and_hashed(self, copy: Callable[[int], None], index: int) -> int:
        copy(index)
        return self._digest(index)

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
        """Return flat arrays of the tensors that are copied as bytes, those on a GPU, and the names of all others."""
        plain: dict[str, Any] = {}
        on_gpu: dict[str, torch.Tensor] = {}
        other = []
        for name, tensor in tensors.items():
            if not tensor.numel():
                continue
            if self._ring.holds(tensor):
                on_gpu[name] = tensor
            elif (flat := self._flat_bytes(name, tensor)) is not None:
                plain[name] = flat
            else:
                other.append(name)
        return plain, on_gpu, other

    def _flat_bytes(self, name: str, tensor: torch.Tensor) -> Any:
        """Return the tensor's memory as a flat array; None unless a copy of its bytes is a copy of the tensor."""
        if tensor.device.type != "cpu" or tensor.dtype != self.views[name].dtype or not tensor.is_contiguous():
            return None
        return tensor.detach().reshape(-1).view(torch.uint8).numpy()

    @functools.cached_property
    def _segments(self) -> list[list[_Segment]]:
        """For each block the parts of the tensors that overlap it."""
        return self._segments_of(self._blocks)

    @functools.cached_property
    def _pieces(self) -> list[tuple[int, int]]:
        """The pieces of the slot that pass through the ring; each is whole blocks."""
        return _pieces(len(self._memory), self._ring.buffer_bytes // _BLOCK_BYTES * _BLOCK_BYTES)

    @functools.cached_property
    def _piece_segments(self) -> list[list[_Segment]]:
        """For each piece the parts of the tensors in it."""
        return self._segments_of(self._pieces)

    def _segments_of(self, pieces: list[tuple[int, int]]) -> list[list[_Segment]]:
        segments: list[list[_Segment]] = [[] for _ in pieces]
        nbytes = pieces[0][1] - pieces[0][0]
        for name, view in self.views.items():
            if not view.numel():
                continue
            begin = int(view.data_ptr() - self._bytes.ctypes.data)
            end = begin + view.numel() * view.element_size()
            for index in range(begin // nbytes, -(-end // nbytes)):
                first, last = max(begin, pieces[index][0]), min(end, pieces[index][1])
                segments[index].append(_Segment(name, first, last, first - begin))
        return segments


def combined(digests: list[int]) -> int:
    """Return the fingerprint of blocks with these digests.

    The fingerprint is below 2**63, so that it fits a signed 64-bit integer of any reader.
    """
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(digests)}Q", *digests)) >> 1


def _pieces(nbytes: int, piece_bytes: int) -> list[tuple[int, int]]:
    return [(start, min(start + piece_bytes, nbytes)) for start in range(0, nbytes, piece_bytes)]


def _blocks_of(start: int, end: int) -> range:
    return range(start // _BLOCK_BYTES, -(-end // _BLOCK_BYTES))
