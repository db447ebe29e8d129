"""The producer's side of a `DetachedReplayBuffer`: a batch is written into an extent; the seal adds its rows."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pipeline.errors import ArenaFullError, BufferClosedError, FieldError
from pipeline.experience import codec
from pipeline.experience.checks import check_finite
from pipeline.experience.extent_format import ExtentHeader, read_header
from pipeline.experience.types import Experience
from pipeline.replay.client import LinkPool, write_private
from pipeline.replay.rows import RowKind, bytes_bound, kinds_of
from pipeline.runtime.messages import Failed, Sealed, Ticket, WantRoom
from pipeline.storage.arena import Arena


class RowWriter:
    """Writes batches into the arena of a buffer; for any number of threads."""

    def __init__(self, arena: Arena, links: LinkPool, folder: Path) -> None:
        """Store the arguments; nothing is written yet.

        Args:
            arena: The buffer's arena.
            links: The links to the buffer's server.
            folder: The buffer's folder; the first append of all processes records the schema of the rows in it.
        """
        self._arena = arena
        self._links = links
        self._folder = folder
        self._kinds: dict[str, RowKind] = {}

    def write(self, experience: Experience, deadline_s: float) -> None:
        """Add the rows of a batch, all or none; wait for room.

        Args:
            experience: A batch on the CPU, padded, with an attention mask, with at most the rows of one extent.
            deadline_s: Monotonic time at which the wait for room ends.

        Raises:
            ArenaFullError: If the rows do not fit, and never will.
            BufferClosedError: If the buffer is closed.
            DeadlineError: If there is no room in time; nothing is added.
            FieldError: If a field cannot be stored, or differs from the rows before in dtype or shape.
            ShapeError: If fields disagree on their shape.
        """
        nbytes, is_bound = bytes_bound(experience), True
        if nbytes > self._arena.payload_bytes:
            nbytes, is_bound = _encoded_bytes(experience, nbytes), False
        while True:
            try:
                self._write(experience, nbytes, deadline_s)
                return
            except _TooSmallError:
                nbytes *= 2
            except ArenaFullError:
                # Padding takes no room: the encoded size may be much smaller than the bound.
                if not is_bound or (encoded_bytes := _encoded_bytes(experience, nbytes)) == nbytes:
                    raise
                nbytes, is_bound = encoded_bytes, False

    def _write(self, experience: Experience, nbytes: int, deadline_s: float) -> None:
        rows = len(experience.sequences)
        with self._links.take() as link:
            ticket = link.ask(lambda own: WantRoom(*own, rows, nbytes, deadline_s), Ticket, deadline_s)
            link.ticket = ticket.ticket
            memory = self._arena.extent(ticket.offset, ticket.nbytes)
            try:
                encoded = codec.encode(experience, memory)
                check_finite(vars(experience))
                self._check_kind(read_header(memory[: encoded.nbytes])[0])
            except Exception as error:
                link.end(Failed(link.name, ticket.ticket, str(error), retry=False))
                if isinstance(error, ArenaFullError):
                    raise _TooSmallError from error
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
            write_private(self._folder / f"{part}.kind", msgspec.json.encode(kind))
            return msgspec.json.decode((self._folder / f"{part}.kind").read_bytes(), type=RowKind)
        except FileNotFoundError:
            raise BufferClosedError(f"replay buffer {self._folder.name}: closed by its owner") from None


def _encoded_bytes(experience: Experience, most_bytes: int) -> int:
    """Return the size of an experience in the arena; `most_bytes` if raw images make it larger than that."""
    try:
        return codec.encode(experience, memoryview(bytearray(most_bytes)), checksum=False).nbytes
    except ArenaFullError:
        return most_bytes


class _TooSmallError(Exception):
    """The reserved room does not hold the append: the size of raw images is known only once they are encoded."""
