"""Who counts what the buffer does (`pipeline.buffer.metrics`)."""

from __future__ import annotations

from typing import Literal, Protocol

from pipeline.runtime.messages import FaultReason

TicketEnd = Literal["sealed", "reissued", "failed"]
LeaseEnd = Literal["acked", "nacked", "holder_died"]
Kept = Literal["kept", "full", "error"]
AsideReason = Literal["checksum", "killed_trainer", "fingerprint", "rolled_back", "invalid"] | FaultReason


class Observer(Protocol):
    """Told of everything worth counting."""

    def sealed(self, rows: int, staleness_versions: int) -> None:
        """Rows came in, written by a policy this many versions behind the newest."""

    def ticket_ended(self, result: TicketEnd) -> None:
        """A ticket was settled, or goes to another worker."""

    def leased(self, rows: int, age_s: float) -> None:
        """Rows that were sealed `age_s` ago went to a trainer."""

    def lease_ended(self, result: LeaseEnd, rows: int, duration_s: float) -> None:
        """A batch was trained, handed back, or lost its holder."""

    def set_aside(self, reason: AsideReason, rows: int) -> None:
        """Rows were refused before they came in, or quarantined after."""

    def quarantine_file(self, result: Kept) -> None:
        """A copy of quarantined rows was written, or had no room, or could not be written."""

    def duplicate(self) -> None:
        """A message said what was known already, or came from a dead peer."""
