"""The interface that counts the buffer's events; `pipeline.buffer.metrics` implements it."""

from __future__ import annotations

from typing import Literal, Protocol

from pipeline.runtime.messages import FaultReason

TicketEnd = Literal["sealed", "reissued", "failed"]
LeaseEnd = Literal["acked", "nacked", "holder_died"]
Kept = Literal["kept", "full", "error"]
AsideReason = Literal["checksum", "killed_trainer", "fingerprint", "rolled_back", "invalid", FaultReason]


class Observer(Protocol):
    """Counts the events of tickets, leases and rows."""

    def sealed(self, rows: int, staleness_versions: int) -> None:
        """Count rows of a seal; their policy version is this many versions behind the newest."""

    def ticket_ended(self, result: TicketEnd) -> None:
        """Count a ticket that was settled or reissued."""

    def leased(self, rows: int, age_s: float) -> None:
        """Count rows that were leased `age_s` after their seal."""

    def lease_ended(self, result: LeaseEnd, rows: int, duration_s: float) -> None:
        """Count a batch that was trained, handed back, or whose holder died."""

    def set_aside(self, reason: AsideReason, rows: int) -> None:
        """Count rows that were refused before their commit, or quarantined after it."""

    def quarantine_file(self, result: Kept) -> None:
        """Count a copy of quarantined rows that was written, had no room, or failed."""

    def duplicate(self) -> None:
        """Count a message that repeats an earlier one or comes from a dead peer."""
