"""The producer's side of a `DetachedReplayBuffer`: a batch is written into an extent; the seal adds its rows."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pipeline.errors import BufferClosedError, FieldError
from pipeline.experience import codec
from pipeline.experience.checks import check_finite
from pipeline.experience.extent_format import ExtentHeader
from pipeline.experience.types import Experience
from pipeline.replay.client import LinkPool, write_private
from pipeline.replay.rows import RowKind, kinds_of
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
            write_private(self._folder / f"{part}.kind", msgspec.json.encode(kind))
            return msgspec.json.decode((self._folder / f"{part}.kind").read_bytes(), type=RowKind)
        except FileNotFoundError:
            raise BufferClosedError(f"replay buffer {self._folder.name}: closed by its owner") from None
