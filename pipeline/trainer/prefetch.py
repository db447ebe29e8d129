"""Leased batches, copied out of the arena: the one that is asked for, and for a card the next one while it is trained.

The copy to a card is made from page-locked memory on a stream of its own, so that neither the trainer nor the card's
computation waits for it.
"""

from __future__ import annotations

import concurrent.futures
from typing import NamedTuple

import numpy as np
import torch

from pipeline.errors import DecodeError
from pipeline.experience import codec
from pipeline.experience.types import Experience
from pipeline.runtime.messages import Lease
from pipeline.storage.arena import Arena


class Staged(NamedTuple):
    """A batch, or why it cannot be one: the damaged tickets, each with what is wrong."""

    experience: Experience | None
    damaged: dict[int, str]
    # Of the copy to a card, where one is under way.
    copied: torch.cuda.Event | None = None


class Staging:
    """Makes batches of leases; used by one thread."""

    def __init__(self, arena: Arena, *, verify_checksum: bool = True, ahead: bool | None = None) -> None:
        """Make batches of what lies in an arena.

        Args:
            arena: Mapped with its payload.
            verify_checksum: Whether each extent's checksum is looked at before its rows are used.
            ahead: Whether to make the next batch in the background; None for on a card, where a copy can run beside
                the computation. On a CPU it would take its cores.
        """
        self._arena = arena
        self._verify_checksum = verify_checksum
        self._ahead = ahead
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._next: tuple[int, torch.device, concurrent.futures.Future[Staged]] | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def wants_next(self, device: torch.device) -> bool:
        """Return whether a batch for this device is to be begun."""
        return self._next is None and (device.type == "cuda" if self._ahead is None else self._ahead)

    def begin(self, lease: Lease, device: torch.device) -> None:
        """Begin with the batch that will be taken next; one at a time."""
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="rlhfd-copy")
        self._next = lease.lease, device, self._thread.submit(self._make, lease, device)

    def take(self, lease: Lease, device: torch.device) -> Staged:
        """Return the batch of a lease, that was begun or not, for use on this thread's stream.

        Raises:
            FieldError: If extents of one batch have different fields.
        """
        begun, self._next = self._next, None
        if begun is not None and begun[:2] == (lease.lease, device):
            staged = begun[2].result()
        else:
            _forget(begun)
            staged = self._make(lease, device)
        if staged.copied is not None and staged.experience is not None:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(staged.copied)
            # Memory of the other stream: not to be given to its next copy while this one reads it.
            staged.experience.record_stream(stream)
        return staged

    def forget(self) -> None:
        """Drop what was begun; once this returns nothing of the arena is read."""
        begun, self._next = self._next, None
        _forget(begun)

    def close(self) -> None:
        """Drop what was begun, and end the thread."""
        self.forget()
        if self._thread is not None:
            self._thread.shutdown()

    def _make(self, lease: Lease, device: torch.device) -> Staged:
        readers, damaged = [], {}
        for part in lease.parts:
            memory = self._arena.extent(part.offset, part.nbytes)
            try:
                readers.append(codec.ExtentReader(memory, checksum=part.checksum if self._verify_checksum else 0))
            except DecodeError as error:
                damaged[part.ticket] = str(error)
        if damaged:
            return Staged(None, damaged)
        parts = [(reader, part.rows) for reader, part in zip(readers, lease.parts, strict=True)]
        versions = np.repeat([part.policy_version for part in lease.parts], [len(part.rows) for part in lease.parts])
        experience = codec.gather(parts, pin_memory=device.type == "cuda")
        experience.info = {**(experience.info or {}), "policy_version": torch.from_numpy(versions)}
        if device.type != "cuda":
            if device.type != "cpu":
                experience.to_device(device)
            return Staged(experience, {})
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        with torch.cuda.stream(self._streams[device]):
            # The page-locked tensors go back to torch, which keeps them until their copies are made.
            experience.to_device(device, non_blocking=True)
            return Staged(experience, {}, self._streams[device].record_event())


def _forget(begun: tuple[int, torch.device, concurrent.futures.Future[Staged]] | None) -> None:
    if begun is not None:
        concurrent.futures.wait([begun[2]])
