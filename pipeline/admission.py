"""Who may go on: the pure rules that bound the buffer and the staleness of what it holds.

A version is trained on `rows_per_version` rows. With v the newest version and K = `max_staleness`, a ticket is issued
only while

    reserved + ready + rows leased or trained for versions >= v  +  new rows  <=  (K + 1) * rows_per_version

so whatever is in the pipeline fits into the batches up to version v + K. It stays so because a batch takes the oldest
versions first, and waits while, for any version u, the rows of u and older that it leaves behind, a slow rollout's
included, would no longer fit into the batches up to version u + K. Both rules together guarantee the bound; with K = 0
they fix each batch's rows, so that a run gives the same experiences whatever the number of workers.
"""

from __future__ import annotations

import dataclasses

from pipeline.ledger import Ledger
from pipeline.ledger_records import ExtentRecord, ItemState


@dataclasses.dataclass(frozen=True)
class Limits:
    """What bounds the buffer.

    Attributes:
        sample_batch_size: Rows of a batch.
        rows_per_version: Rows trained between two published versions, over all ranks.
        group_size: Rows of one prompt (G).
        prompts_per_ticket: Most prompts of one ticket.
        max_staleness: Versions a row may be old when it is trained (K).
        limit_batches: Most batches reserved or ready, 0 for no bound but the arena's bytes.
        world_size: Trainer ranks; batch j goes to rank j mod `world_size`.
        row_bytes: Most bytes one row takes in the arena.
        drop_stale: Whether rows beyond the bound are dropped rather than trained.
    """

    sample_batch_size: int
    rows_per_version: int
    group_size: int
    prompts_per_ticket: int
    max_staleness: int
    limit_batches: int
    world_size: int
    row_bytes: int
    drop_stale: bool = True

    @property
    def batches_per_version(self) -> int:
        """Batches trained between two published versions, over all ranks."""
        return self.rows_per_version // self.sample_batch_size


def version_of_lease(ledger: Ledger, limits: Limits, lease: int) -> int:
    """Return the version that trains on `lease`: below the newest one if that already includes it."""
    totals = ledger.totals
    return totals.policy_version + (lease - totals.trained_through) // limits.batches_per_version


def prompts_to_issue(ledger: Ledger, limits: Limits) -> tuple[int, str]:
    """Return how many prompts the next ticket may have, or 0 and what it waits for.

    Returns:
        Prompts, at most `prompts_per_ticket`, and a reason (``"full"``, ``"staleness"`` or ``""``).
    """
    totals = ledger.totals
    if totals.policy_version < 0:
        return 0, "staleness"
    held = ledger.reserved + ledger.ready
    ahead = (totals.leases - totals.trained_through) * limits.sample_batch_size
    fresh = (limits.max_staleness + 1) * limits.rows_per_version - held - ahead
    if fresh < limits.group_size:
        return 0, "staleness"
    room = fresh
    if limits.limit_batches:
        room = min(room, limits.limit_batches * limits.sample_batch_size - held)
    if room < limits.group_size or not ledger.has_free_slot():
        return 0, "full"
    return min(limits.prompts_per_ticket, room // limits.group_size), ""


def stale_rows(ledger: Ledger, limits: Limits) -> list[tuple[ExtentRecord, list[int]]]:
    """Return ready rows that the next batch could only train beyond the staleness bound."""
    oldest = version_of_lease(ledger, limits, ledger.totals.leases) - limits.max_staleness
    return [
        (record, rows)
        for record in ledger.sealed_extents()
        if record.policy_version < oldest and (rows := ready_rows(record))
    ]


def next_batch(ledger: Ledger, limits: Limits) -> list[tuple[ExtentRecord, list[int]]] | None:
    """Return the rows of the next batch, oldest version and ticket first, or None while it must wait."""
    if ledger.ready < limits.sample_batch_size:
        return None
    chosen, missing = [], limits.sample_batch_size
    left_behind: dict[int, int] = {}
    for record in ledger.reserved_extents():
        left_behind[record.policy_version] = left_behind.get(record.policy_version, 0) + record.rows
    slow = min(left_behind, default=None)
    for record in sorted(ledger.sealed_extents(), key=lambda record: (record.policy_version, record.ticket)):
        rows = ready_rows(record)
        if missing and rows:
            chosen.append((record, rows[:missing]))
        left = max(0, len(rows) - missing)
        missing = max(0, missing - len(rows))
        left_behind[record.policy_version] = left_behind.get(record.policy_version, 0) + left
    # Waiting helps only where a rollout is under way.
    return chosen if slow is None or _fits_later(ledger, limits, left_behind, slow) else None


def _fits_later(ledger: Ledger, limits: Limits, left_behind: dict[int, int], slow: int) -> bool:
    """Whether rows left behind by the next batch, counted by version, can all be trained within the bound.

    Versions below `slow`, the oldest one a rollout is under way for, are as they are.
    """
    totals, rows = ledger.totals, 0
    for version in sorted(left_behind):
        rows += left_behind[version]
        versions = version + limits.max_staleness - totals.policy_version + 1
        last_lease = totals.trained_through + versions * limits.batches_per_version
        room = max(0, last_lease - totals.leases - 1) * limits.sample_batch_size
        if version >= slow and rows > room:
            return False
    return True


def ready_rows(record: ExtentRecord) -> list[int]:
    """Return the rows of a sealed extent that wait for a batch."""
    return [row for row, item in enumerate(record.items) if item.state is ItemState.READY]
