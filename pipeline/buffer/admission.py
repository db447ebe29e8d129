"""Who may go on: the pure rules that bound the buffer and the staleness of what it holds.

A version is trained on `rows_per_version` rows. With v the newest version and K = `max_staleness`, a ticket is issued
only while

    reserved + ready + rows leased or trained for versions >= v  +  new rows  <=  (K + 1) * rows_per_version

(a lease number that lost its rows counts for nothing until another batch takes it);
so whatever is in the pipeline fits into the batches up to version v + K. It stays so because a batch takes the oldest
versions first, and waits while, for any version u, the rows of u and older that it leaves behind, a slow rollout's
included, would no longer fit into the batches up to version u + K. Both rules together guarantee the bound; with K = 0
they fix each batch's rows, so that a run gives the same experiences whatever the number of workers.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal, Protocol

from pipeline.runtime.messages import Faulty, Sealed
from pipeline.storage.ledger import Ledger
from pipeline.storage.records import Chosen, ExtentRecord, held_rows, ready_rows
from pipeline.storage.tables import PromptRange, between


class Prompted(Protocol):
    """An extent, in the ledger or on disk: how many rows came of which prompts."""

    @property
    def position(self) -> int:
        """First prompt position."""

    @property
    def prompts(self) -> int:
        """Prompts of the ticket."""

    @property
    def rows(self) -> int:
        """Rows that came of them."""


Refusal = Literal["", "early", "rolled_back", "fingerprint", "invalid"]


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
    ahead = (totals.leases - totals.trained_through - len(ledger.vacant)) * limits.sample_batch_size
    room = (limits.max_staleness + 1) * limits.rows_per_version - held - ahead
    if 0 < room < limits.group_size and not ledger.reserved and held < limits.sample_batch_size:
        # Part of a group left untrained (quarantine): without one prompt too many the batch would never fill.
        room = limits.group_size
    if room < limits.group_size:
        return 0, "staleness"
    if limits.limit_batches:
        room = min(room, limits.limit_batches * limits.sample_batch_size - held)
    if room < limits.group_size or not ledger.has_free_slot():
        return 0, "full"
    prompts = min(limits.prompts_per_ticket, room // limits.group_size)
    return min(prompts, ledger.redo[0].prompts) if ledger.redo else prompts, ""


def stale_rows(ledger: Ledger, limits: Limits) -> Chosen:
    """Return ready rows that the next batch could only train beyond the staleness bound."""
    oldest = version_of_lease(ledger, limits, ledger.next_lease()) - limits.max_staleness
    stale = itertools.takewhile(lambda record: record.policy_version < oldest, ledger.index.ready())
    return [(record, ready_rows(record)) for record in stale]


def next_batch(ledger: Ledger, limits: Limits) -> Chosen | None:
    """Return the rows of the next batch, oldest version and prompts first, or None while it must wait."""
    if ledger.ready < limits.sample_batch_size:
        return None
    chosen = ledger.index.oldest_rows(limits.sample_batch_size)
    left_behind = dict(ledger.index.ready_rows)
    for record, rows in chosen:
        left_behind[record.policy_version] -= len(rows)
    under_way = ledger.index.reserved_rows
    for version, count in under_way.items():
        left_behind[version] = left_behind.get(version, 0) + count
    # Waiting helps only where a rollout is under way.
    return chosen if not under_way or _fits_later(ledger, limits, left_behind, min(under_way)) else None


def _fits_later(ledger: Ledger, limits: Limits, left_behind: dict[int, int], slow: int) -> bool:
    """Whether rows left behind by the next batch, counted by version, can all be trained within the bound.

    Versions below `slow`, the oldest one a rollout is under way for, are as they are.
    """
    totals, rows = ledger.totals, 0
    for version in sorted(left_behind):
        rows += left_behind[version]
        versions = version + limits.max_staleness - totals.policy_version + 1
        last_lease = totals.trained_through + versions * limits.batches_per_version
        free = max(0, last_lease - totals.leases) + sum(lease < last_lease for lease in ledger.vacant)
        room = max(0, free - 1) * limits.sample_batch_size
        if version >= slow and rows > room:
            return False
    return True


def rolled_back_rows(ledger: Ledger) -> Chosen:
    """Return ready rows that were written by weights which are rolled back."""
    newest, versions = ledger.totals.policy_version, ledger.versions
    if not any(version > newest or versions.is_marked(version) for version in ledger.index.ready_rows):
        return []
    return [
        (record, rows)
        for record in ledger.index.ready()
        if record.policy_version > newest or versions.rolled_back(record.policy_version, record.fingerprint)
        if (rows := ready_rows(record))
    ]


def prompts_of(record: Prompted, rows: list[int], group_size: int) -> PromptRange:
    """Return the prompts that rows of an extent came of; all of the ticket's if some of them gave no rows."""
    if record.rows != record.prompts * group_size:
        return PromptRange(record.position, record.prompts)
    first, last = rows[0] // group_size, rows[-1] // group_size
    return PromptRange(record.position + first, last - first + 1)


def uncovered_position(ledger: Ledger, lease: int) -> int:
    """Return a position before which every prompt is trained, dropped or in a lease up to `lease`."""
    lowest = ledger.index.lowest_position()
    later = (record.position for number, chosen in ledger.leases().items() if number > lease for record, _ in chosen)
    under_way = [] if lowest is None else [lowest]
    return min([ledger.totals.position, *(run.position for run in ledger.redo), *under_way, *later])


def undone(ledger: Ledger, position: int, group_size: int) -> list[PromptRange]:
    """Return the prompts from a position on that were issued and of which nothing is held; none if it is negative."""
    held = [*ledger.redo, *(PromptRange(record.position, record.prompts) for record in ledger.reserved_extents())]
    held += [prompts_of(record, rows, group_size) for record in ledger.sealed_extents() if (rows := held_rows(record))]
    return between(held, position, ledger.totals.position) if position >= 0 else []


def is_possible(said: Sealed | Faulty, record: ExtentRecord) -> bool:
    """Tell whether what a worker says of a ticket's experience can be true."""
    fits = 0 < said.rows <= record.rows and 0 < said.nbytes <= record.nbytes
    return fits and 0 <= said.checksum < 1 << 64 and 0 <= said.policy_version < 1 << 62


def refusal(sealed: Sealed, record: ExtentRecord, ledger: Ledger) -> Refusal:
    """Return why a ticket's experience must not come in, or not yet; nothing if it may.

    ``early``: by weights newer than the newest that are known here; word of them may be under way. ``rolled_back``: by
    weights that are void. ``fingerprint``: by weights that nobody published. ``invalid``: of an impossible size.
    """
    if not is_possible(sealed, record):
        return "invalid"
    if ledger.versions.knows(sealed.policy_version, sealed.fingerprint):
        return ""
    if ledger.versions.rolled_back(sealed.policy_version, sealed.fingerprint):
        return "rolled_back"
    return "early" if sealed.policy_version > ledger.totals.policy_version else "fingerprint"
