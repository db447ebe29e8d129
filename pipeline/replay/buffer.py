"""A replay buffer between processes of one machine: any number of producers, any number of consumers.

    buffer = DetachedReplayBuffer(sample_batch_size=8, limit=16)
    # in producers                           # in consumers
    buffer.append(experience)                batch = buffer.sample(to_device="cuda:0")

It uses the daemon's arena, ledger and sockets. Rows lie in shared memory, without their padding, and are copied twice:
by the process that appends them and by the process that takes them. A small server process without torch writes the
ledger; the process that made the buffer (the owner) starts and restarts the server, and the server ends with the owner.

Once `append` has returned, the death of its process loses nothing; a process that dies in `append` leaves no row. A
batch whose consumer dies in `sample` goes to another consumer. So each row is delivered once, after a kill of any
process but the owner.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from pipeline.errors import (
    BufferClosedError,
    DeadlineError,
    DecodeError,
    FieldError,
    RlhfdError,
    ShapeError,
    UnreachableError,
)
from pipeline.experience import codec
from pipeline.experience.batching import make_experience_batch, split_experience_batch
from pipeline.experience.checks import check_finite, check_kinds, check_travels
from pipeline.experience.extent_format import ExtentHeader
from pipeline.experience.types import BufferItem, Experience
from pipeline.replay.client import CALL_S, ROWS_PER_EXTENT, Link, LinkPool, Settings, make_folder, sweep, write_private
from pipeline.replay.rows import RowKind, counted_alike, kinds_of, rows_on_cpu
from pipeline.replay.server import ReplayServer
from pipeline.runtime.messages import Ack, Ask, Books, Damaged, Failed, Lease, Sealed, Ticket, WantBatch, WantRoom
from pipeline.storage.arena import Arena

# The redo log has room for one transaction that ends a batch of this many appends of one row.
_MOST_BATCH_ROWS = 8192

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ReplayStats:
    """The number of rows in each state: ``sealed = delivered + dropped + ready + leased``.

    Attributes:
        sealed: Rows appended so far.
        delivered: Rows returned by `sample` so far.
        dropped: Rows removed without delivery so far: cleared, or found damaged.
        ready: Rows ready for delivery.
        leased: Rows that a consumer is copying.
        batches: Batches ready for delivery, full ones and flushed ones.
        free_bytes: Free bytes of the arena.
    """

    sealed: int
    delivered: int
    dropped: int
    ready: int
    leased: int
    batches: int
    free_bytes: int


class DetachedReplayBuffer:
    """A queue of experience in shared memory that yields batches of `sample_batch_size` rows, the oldest first.

    The object can be handed to other processes - pickled by multiprocessing or torch.multiprocessing, inherited by a
    fork, or found again with `attach(path)` - and used there by any number of threads. The object made by the
    constructor owns the buffer: when it is closed, or its process ends, the buffer ends in every process.

    Attributes:
        sample_batch_size: Rows of a batch.
        limit: Batches at which producers wait, 0 for as many as the arena holds.
        timeout_s: Longest wait, in seconds, of a call without a `timeout_s` of its own; None for no limit.
        path: Folder in shared memory by which another process finds the buffer.

    Examples:
        A buffer that batches rows into groups of 8; producer and consumer are in one process here:

        >>> experience = Experience(
        ...     sequences=torch.arange(24).reshape(8, 3),
        ...     action_log_probs=torch.full((8, 2), -0.5),
        ...     reward=torch.arange(8.0),
        ...     attention_mask=torch.ones(8, 3, dtype=torch.int64),
        ...     action_mask=torch.ones(8, 2, dtype=torch.bool),
        ... )
        >>> buffer = DetachedReplayBuffer(sample_batch_size=8, limit=16)
        >>> buffer.append(experience)
        >>> buffer.get_length()
        1
        >>> batch = buffer.sample(to_device="cpu")
        >>> batch.reward
        tensor([0., 1., 2., 3., 4., 5., 6., 7.])
        >>> buffer.close()
    """

    def __init__(
        self, sample_batch_size: int, limit: int = 0, *, arena_bytes: int = 256 << 20, timeout_s: float | None = None
    ) -> None:
        """Make a buffer and start its server.

        Args:
            sample_batch_size: Rows of a batch.
            limit: Full batches in the queue at which `append` waits until one is taken; 0 for no limit but the arena.
                An append is never split, so the last append may exceed the limit.
            arena_bytes: Shared memory for the rows, allocated at once, together with the ledger's: 18 MB, more for
                a `sample_batch_size` above 1,024, 138 MB for 8,192. While the arena is full, `append` waits.
            timeout_s: Longest wait of `append` and `sample`, in seconds; None for no limit.

        Raises:
            FieldError: If a number is out of range.
            ConfigError: If shared memory has no room for the arena.
        """
        _check_int("sample_batch_size", sample_batch_size, 1, _MOST_BATCH_ROWS)
        _check_int("limit", limit, 0, sys.maxsize)
        _check_int("arena_bytes", arena_bytes, 1, sys.maxsize)
        _check_wait(timeout_s)
        sweep()
        settings = Settings(sample_batch_size, limit, os.getpid())
        folder, lock = make_folder(settings, arena_bytes)
        server = ReplayServer(folder, lock)
        self._server: ReplayServer | None = server
        self._open(folder, settings, timeout_s)

    @classmethod
    def attach(cls, path: str | os.PathLike[str], *, timeout_s: float | None = None) -> DetachedReplayBuffer:
        """Return the buffer at `path`, made by another process of this user.

        Args:
            path: The attribute `path` of the buffer.
            timeout_s: Longest wait of `append` and `sample`, in seconds; None for no limit.

        Returns:
            Another object for the same buffer; it does not own the buffer.

        Raises:
            BufferClosedError: If there is no buffer at `path`.
            FieldError: If `timeout_s` is negative.
        """
        _check_wait(timeout_s)
        buffer = cls.__new__(cls)
        buffer._server = None
        buffer._open(Path(path), Settings.read(Path(path)), timeout_s)
        return buffer

    def _open(self, folder: Path, settings: Settings, timeout_s: float | None) -> None:
        self.sample_batch_size = settings.sample_batch_size
        self.limit = settings.limit
        self.timeout_s = timeout_s
        self.path = folder
        self._links = LinkPool(folder, settings.owner_pid)
        # Runs with the end of the object or of the interpreter; in a forked child it ends nothing of the parent's.
        self._end = weakref.finalize(self, _disconnect, self._links, self._server)
        try:
            self._arena = Arena(folder / "arena")
        except FileNotFoundError:
            raise BufferClosedError(f"replay buffer {folder.name}: closed by its owner") from None
        self._arena.populate()
        self._kinds: dict[str, RowKind] = {}
        self._readers: dict[int, codec.ExtentReader] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(DetachedReplayBuffer.attach, timeout_s=self.timeout_s), (str(self.path),)

    def __repr__(self) -> str:
        return f"DetachedReplayBuffer({self.sample_batch_size}, limit={self.limit}, path={str(self.path)!r})"

    # Producers.

    def append(self, experience: Experience, *, timeout_s: float | None = None) -> None:
        """Add the rows of a batch; once this returns they survive the death of this process.

        All rows are added, or none. More than `ROWS_PER_EXTENT` (1,024) rows are added as several appends of at most
        that many; an error at a later one says how many rows are added by then.

        Args:
            experience: A batch on any device, padded or packed; it is not changed. All rows of a buffer have the same
                fields. Without an `attention_mask` every column counts as a token. Token ids must be integers; labels,
                references, grids and all values of `info` must be tensors, not the lists or other objects that
                `split_experience_batch` takes. Scores ``(B, 1)`` are one number a row; with a single action column they
                are one number an action. Use ``(B,)`` if rows of one action are appended alone.
            timeout_s: Longest wait for room, in seconds; None for the buffer's `timeout_s`, `math.inf` for no limit.

        Raises:
            ArenaFullError: If the rows do not fit, and never will; the message has the sizes.
            BufferClosedError: If the buffer is closed.
            DeadlineError: If there is no room in time.
            FieldError: If a field or a value of `info` is not a tensor, a field differs from the rows before in dtype
                or shape, a number under the action mask is NaN or infinite, or `experience` is not an `Experience`.
            ShapeError: If there is no row, or fields disagree on their shape.
        """
        if not isinstance(experience, Experience):
            raise FieldError(f"append takes an Experience, not a {type(experience).__name__}; rows go into extend")
        # Checked here, not by the codec alone: a large or packed batch is batched anew below, by laxer rules.
        check_travels(experience)
        if isinstance(experience.sequences, list):
            self.extend(split_experience_batch(experience), timeout_s=timeout_s)
            return
        deadline_s = self._deadline(timeout_s)
        experience = rows_on_cpu(experience)
        if len(experience.sequences) <= ROWS_PER_EXTENT:
            self._write(experience, deadline_s)
            return
        items = split_experience_batch(experience)
        for start in range(0, len(items), ROWS_PER_EXTENT):
            try:
                self._write(make_experience_batch(items[start : start + ROWS_PER_EXTENT]), deadline_s)
            except RlhfdError as error:
                if not start:
                    raise
                raise type(error)(f"the first {start:,} of {len(items):,} rows are added: {error}") from error

    def extend(self, items: Sequence[BufferItem], *, timeout_s: float | None = None) -> None:
        """Add rows, padded or not, of equal or different lengths; otherwise as `append`.

        Args:
            items: At least one row. Under a name of `info` all have numbers, or all tensors of one shape and dtype.
            timeout_s: As in `append`.

        Raises:
            ShapeError: If there are no items, or the fields of an item disagree on its length.
            FieldError: If rows have different fields, or a value that cannot be stored.
        """
        if not items:
            raise ShapeError("extend: no items")
        check_kinds(items)
        if all(item.attention_mask is None for item in items):
            items = [
                dataclasses.replace(item, attention_mask=torch.ones_like(item.sequences, dtype=torch.int64))
                for item in items
            ]
        self.append(make_experience_batch(items), timeout_s=timeout_s)

    def _write(self, experience: Experience, deadline_s: float) -> None:
        """Add a batch on the CPU with an attention mask, of at most the rows of one extent; errors as for `append`."""
        encoding = codec.Encoding(experience)
        check_finite(vars(experience))
        rows, nbytes = encoding.header.rows, encoding.nbytes
        with self._links.take() as link:
            ticket = link.ask(lambda own: WantRoom(*own, rows, nbytes, deadline_s), Ticket, deadline_s)
            link.ticket = ticket.ticket
            try:
                # Not before: an append that gets no room does not determine the schema.
                self._check_kind(encoding.header)
                encoded = encoding.write(self._arena.extent(ticket.offset, ticket.nbytes))
            except Exception as error:
                link.end(Failed(link.name, ticket.ticket, str(error), retry=False))
                raise
            link.end(Sealed(link.name, ticket.ticket, rows, encoded.nbytes, encoded.checksum, 0, 0))

    def _check_kind(self, header: ExtentHeader) -> None:
        for part, kind in kinds_of(header).items():
            if part not in self._kinds:
                self._kinds[part] = self._first_kind(part, kind)
            if kind != self._kinds[part]:
                raise FieldError(kind.difference(self._kinds[part]))

    def _first_kind(self, part: str, kind: RowKind) -> RowKind:
        """Return the schema that the first append of all processes has recorded, which may be this one."""
        try:
            write_private(self.path / f"{part}.kind", msgspec.json.encode(kind))
            return msgspec.json.decode((self.path / f"{part}.kind").read_bytes(), type=RowKind)
        except FileNotFoundError:
            raise BufferClosedError(f"replay buffer {self.path.name}: closed by its owner") from None

    # Consumers.

    def sample(
        self, worker_rank: int = 0, to_device: str | torch.device = "cpu", *, timeout_s: float | None = None
    ) -> Experience:
        """Take the oldest `sample_batch_size` rows, or a flushed batch; wait until there is one.

        The rows count as delivered once they are copied to `to_device`; if this process dies before, another consumer
        gets them. The consumer that has waited longest is served first.

        Args:
            worker_rank: Names the consumer in errors; any rank gets the next batch.
            to_device: Device of the tensors; a CUDA device is fed from page-locked memory.
            timeout_s: Longest wait, in seconds; None for the buffer's `timeout_s`, `math.inf` for no limit.

        Returns:
            Rows padded on the left to the longest of them; an `ExperienceVL` if vision rows were appended.

        Raises:
            BufferClosedError: If the buffer is closed, before or during the wait.
            DeadlineError: If there is no batch in time; nothing is taken.
            DecodeError: If the memory of these rows is damaged; they are dropped and counted.
        """
        deadline_s = self._deadline(timeout_s)
        device = torch.device(to_device)
        with self._links.take() as link:
            try:
                lease = link.ask(lambda own: WantBatch(*own, deadline_s), Lease, deadline_s)
            except DeadlineError as error:
                raise DeadlineError(f"no batch for worker {worker_rank} in time: {error}") from None
            link.lease = lease.lease
            experience = self._gather(link, lease, device)
            link.end(Ack(link.name, lease.lease))
            return experience

    def __iter__(self) -> Iterator[Experience]:
        """Yield batches until the buffer is closed; `close(drain_s=...)` delivers the remaining rows first."""
        while True:
            try:
                experience = self.sample()
            except BufferClosedError:
                return
            yield experience

    def _gather(self, link: Link, lease: Lease, device: torch.device) -> Experience:
        known, readers, damaged, reason = self._readers, {}, [], ""
        for part in lease.parts:
            try:
                readers[part.ticket] = known.get(part.ticket) or codec.ExtentReader(
                    self._arena.extent(part.offset, part.nbytes), checksum=part.checksum
                )
            except DecodeError as error:
                damaged.append(part.ticket)
                reason = str(error)
        # The remaining rows of the last extent are in the next batch: its reader is kept.
        self._readers = readers
        try:
            if damaged:
                raise DecodeError(reason)
            parts = [(readers[part.ticket], part.rows) for part in lease.parts]
            experience = codec.gather_padded(counted_alike(parts), pin_memory=device.type == "cuda")
        except (DecodeError, FieldError) as error:
            tickets = damaged or [part.ticket for part in lease.parts]
            link.end(Damaged(link.name, lease.lease, tickets, str(error)))
            raise DecodeError(f"{len(tickets)} of {len(lease.parts)} appends are unusable: {error}") from error
        if device.type != "cpu":
            experience.to_device(device)
        return experience

    # The queue.

    def get_length(self) -> int:
        """Return the number of batches ready for delivery: full ones, and flushed ones."""
        return self.stats().batches

    def stats(self) -> ReplayStats:
        """Return the number of rows in each state."""
        totals = self._ask("stats")
        return ReplayStats(
            totals.sealed, totals.trained, totals.dropped, totals.ready, totals.leased, totals.batches,
            totals.free_bytes,
        )  # fmt: skip

    def flush(self) -> int:
        """Make all ready rows available, the last batch smaller if need be.

        Returns:
            The number of ready rows that no earlier call has made available.
        """
        return self._ask("flush").rows

    def clear(self) -> int:
        """Drop all ready rows and return their number; rows being appended or sampled are kept."""
        return self._ask("clear").rows

    def _ask(self, call: Literal["stats", "flush", "clear", "drain"], *, deadline_s: float | None = None) -> Books:
        until_s = time.monotonic() + CALL_S if deadline_s is None else deadline_s
        with self._links.take() as link:
            answer = link.ask(lambda own: Ask(*own, call, until_s), Books, until_s)
            link.done()
            return answer

    # The end.

    def close(self, *, drain_s: float = 0.0) -> None:
        """End the buffer if this object owns it, otherwise disconnect this object from it.

        The buffer ends in every process: a call of `append` or `sample` that waits, and every later call, raises
        BufferClosedError.

        Args:
            drain_s: For the owner only: refuse appends, flush, and wait at most this many seconds until every row is
                taken. The remaining rows are dropped with the buffer.
        """
        if self._links.closed:
            return
        if self._owned and drain_s > 0:
            try:
                self._ask("drain", deadline_s=time.monotonic() + drain_s)
            except (DeadlineError, BufferClosedError, UnreachableError) as error:
                # Also of a server that was given up: the folder goes in any case.
                log.warning("replay buffer closed before it was empty: %s", error)
        self._end()
        self._readers = {}
        self._arena.close()

    @property
    def _owned(self) -> bool:
        return self._server is not None and self._server.owner_pid == os.getpid()

    def __enter__(self) -> DetachedReplayBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _deadline(self, timeout_s: float | None) -> float:
        _check_wait(timeout_s)
        wait_s = self.timeout_s if timeout_s is None else timeout_s
        return math.inf if wait_s is None else time.monotonic() + wait_s


def _check_int(name: str, number: int, least: int, most: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
        raise FieldError(f"{name} must be an int from {least} to {most:,}, got {number!r}")


def _check_wait(timeout_s: float | None) -> None:
    if timeout_s is not None and not timeout_s >= 0:
        raise FieldError(f"timeout_s must be None or a number of seconds, got {timeout_s!r}")


def _disconnect(links: LinkPool, server: ReplayServer | None) -> None:
    links.close()
    if server is not None:
        server.close()
