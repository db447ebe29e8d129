"""Flow control: when a ticket may be issued and a batch leased; bounds buffer size and staleness.

A version is trained on `rows_per_version` rows. With v the newest version and K = `max_staleness`, a ticket is issued
only while

    reserved + ready + rows leased or trained for versions >= v  +  new rows  <=  (K + 1) * rows_per_version

(a vacant lease number does not count until another batch takes it);
so all rows in the pipeline fit into the batches up to version v + K. This stays true because a batch takes the oldest
versions first. A batch also waits while, for any version u, the remaining rows of u and older, those of a slow rollout
included, would not fit into the batches up to version u + K. Both rules together guarantee the bound.

With K = 0 a batch also waits for every earlier prompt. All rows of a version come from the same weights then, and rows
that arrive early would otherwise take the place of earlier prompts in the version's first batch: another rank, or
another step, would train on them. So the rows of each batch are fixed, and a run gives the same experience with any
number of workers.

With `max_refill` above 0 there is refill (dynamic sampling, DAPO, arXiv:2503.14476 section 3.2): groups whose rewards
are all equal, of which each row has advantage 0, are dropped as they are sealed. The bounds then have room for as many
other prompts, until the batch is full, or until the prompts issued in place of dropped ones since the newest version
are `max_refill` times those of a version; from then on groups without signal are kept.

With `max_staleness = 0` prompts are issued in rounds, without refill too, where a prompt may be set aside or a row have
no reward: the prompts of a version, then as many as rows are missing once all of these are sealed, and so on. So the
prompts of each ticket, and whether its groups are dropped, follow from prompts and rewards alone and not from the order
in which tickets end: kills and the number of workers change no bit. The state of a round is in the ledger's totals.
With staleness a prompt is issued as soon as there is room.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal

from pipeline.runtime.messages import Faulty, Sealed
from pipeline.storage.extent_file import SavedExtent
from pipeline.storage.ledger import Ledger
from pipeline.storage.records import Chosen, ExtentRecord, held_rows, ready_rows
from pipeline.storage.tables import PromptRange, between

Refusal = Literal["", "early", "rolled_back", "fingerprint", "invalid"]


@dataclasses.dataclass(frozen=True)
class Limits:
    """The bounds of the buffer.

    Attributes:
        sample_batch_size: Rows of a batch.
        rows_per_version: Rows trained between two published versions, over all ranks.
        group_size: Rows of one prompt (G).
        prompts_per_ticket: Most prompts of one ticket.
        max_staleness: Most versions between the one that wrote a row and the one that trains on it (K).
        limit_batches: Most batches reserved or ready, 0 for no bound but the arena's bytes.
        world_size: Trainer ranks; batch j goes to rank j mod `world_size`.
        row_bytes: Most bytes of one row in the arena.
        max_attempts: Most hand-outs of a ticket; after the last failure its prompts are set aside.
        ticket_timeout_s: Most time of one rollout.
        prompts_in_source: Prompts of one epoch, 0 if unknown: after that many prompts in a row without experience the
            buffer gives up.
        last_position: First prompt position of which no ticket is issued; 0: none.
        max_refill: Most prompts issued in place of groups without signal, as a multiple of those of a version; 0: such
            groups are kept.
    """

    sample_batch_size: int
    rows_per_version: int
    group_size: int
    prompts_per_ticket: int
    max_staleness: int
    limit_batches: int
    world_size: int
    row_bytes: int
    max_attempts: int = 3
    ticket_timeout_s: float = 600.0
    prompts_in_source: int = 0
    last_position: int = 0
    max_refill: int = 0

    @property
    def batches_per_version(self) -> int:
        """Batches trained between two published versions, over all ranks."""
        return self.rows_per_version // self.sample_batch_size


def version_of_lease(ledger: Ledger, limits: Limits, lease: int) -> int:
    """Return the version that trains on `lease`: below the newest version if that already includes it."""
    totals = ledger.totals
    return totals.policy_version + (lease - totals.trained_through) // limits.batches_per_version


def prompts_to_issue(ledger: Ledger, limits: Limits) -> tuple[int, str]:
    """Return the number of prompts of the next ticket, or 0 and the reason for the wait.

    Returns:
        Prompts, at most `prompts_per_ticket`, and a reason (``"full"``, ``"staleness"``, ``"ended"`` or ``""``).
    """
    if ledger.totals.policy_version < 0:
        return 0, "staleness"
    left = prompts_left(ledger, limits)
    if not left:
        return 0, "ended"
    room = _room_of_round(ledger, limits, room_in_bound(ledger, limits))
    if room < limits.group_size:
        return 0, "staleness"
    prompts = min(left, room // limits.group_size)
    if limits.limit_batches:
        fitting = (
            limits.limit_batches * limits.sample_batch_size - ledger.reserved - ledger.ready
        ) // limits.group_size
        if _lacks_rows(ledger, limits):
            fitting = max(1, fitting)
        if fitting < prompts and has_rounds(limits) and not is_settled(ledger, limits):
            # A part of them now, and of another size if a ticket or a batch had gone first.
            return 0, "full"
        prompts = min(prompts, fitting)
    if prompts < 1 or not ledger.has_free_slot():
        return 0, "full"
    return prompts, ""


def is_settled(ledger: Ledger, limits: Limits) -> bool:
    """Return whether no ticket is out and no batch can follow, unless prompts are issued."""
    return not ledger.reserved and (ledger.ready < limits.sample_batch_size or bool(ledger.redo))


def has_rounds(limits: Limits) -> bool:
    """Return whether prompts are issued in rounds."""
    return limits.max_staleness == 0


def _room_of_round(ledger: Ledger, limits: Limits, room: int) -> int:
    """Return the rows that the present round may still issue, or those of a new one, of the `room` that there is."""
    if not has_rounds(limits):
        return room
    left = ledger.totals.round_left * limits.group_size
    if not left and ledger.reserved:
        return 0
    return min(room, left or room)


def new_round(ledger: Ledger, limits: Limits, room: int) -> int:
    """Return the prompts of the round that the next ticket begins; 0 if it begins none."""
    return room // limits.group_size if has_rounds(limits) and not ledger.totals.round_left else 0


def _may_refill(ledger: Ledger, limits: Limits) -> bool:
    """Return whether groups without signal are dropped now, with room for prompts in their place."""
    prompts = limits.rows_per_version // limits.group_size
    # The first round of a version is in place of nothing.
    refilled = ledger.totals.refilled - (prompts if has_rounds(limits) else 0)
    return limits.max_refill > 0 and refilled < limits.max_refill * prompts


def filtered_rows(sealed: Sealed, ledger: Ledger, limits: Limits) -> list[int]:
    """Return the rows of a ticket that are dropped because they carry no signal."""
    if not sealed.flat or not _may_refill(ledger, limits):
        return []
    size = limits.group_size
    return [row for group in sealed.flat for row in range(group * size, (group + 1) * size)]


def prompts_left(ledger: Ledger, limits: Limits) -> int:
    """Return the prompts that the next ticket may have at most: 0 once those of all passes are issued."""
    position, most = ledger.totals.position, limits.prompts_per_ticket
    if ledger.redo:
        position, most = ledger.redo[0].position, min(most, ledger.redo[0].prompts)
    return max(0, min(most, limits.last_position - position)) if limits.last_position else most


def is_exhausted(ledger: Ledger, limits: Limits) -> bool:
    """Return whether no further batch can fill: no prompt is left or rolled out, and few rows are ready."""
    is_begun = limits.last_position > 0 and ledger.totals.policy_version >= 0
    return is_begun and not (
        ledger.reserved or prompts_left(ledger, limits) or ledger.ready >= limits.sample_batch_size
    )


def room_in_bound(ledger: Ledger, limits: Limits) -> int:
    """Return the rows that may be issued within the staleness bound; may be negative."""
    totals, held = ledger.totals, ledger.reserved + ledger.ready
    ahead = (totals.leases - totals.trained_through - len(ledger.vacant)) * limits.sample_batch_size
    room = (limits.max_staleness + 1) * limits.rows_per_version - held - ahead
    return limits.group_size if 0 < room < limits.group_size and _lacks_rows(ledger, limits) else room


def _lacks_rows(ledger: Ledger, limits: Limits) -> bool:
    """Return whether no batch fills unless prompts are issued.

    Where a part of a group was quarantined, room for one more group may be lacking: one prompt is issued all the same.
    """
    return not ledger.reserved and ledger.ready < limits.sample_batch_size


def stale_rows(ledger: Ledger, limits: Limits) -> Chosen:
    """Return the ready rows that would exceed the staleness bound in the next batch."""
    oldest = version_of_lease(ledger, limits, ledger.next_lease()) - limits.max_staleness
    stale = itertools.takewhile(lambda record: record.policy_version < oldest, ledger.index.ready())
    return [(record, ready_rows(record)) for record in stale]


def next_batch(ledger: Ledger, limits: Limits) -> Chosen | None:
    """Return the rows of the next batch, oldest version and prompts first; None while it must wait."""
    if ledger.ready < limits.sample_batch_size:
        return None
    chosen = ledger.index.oldest_rows(limits.sample_batch_size)
    if not limits.max_staleness and _earlier_prompts_follow(ledger, limits, chosen):
        return None
    left_behind = dict(ledger.index.ready_rows)
    for record, rows in chosen:
        left_behind[record.policy_version] -= len(rows)
    under_way = ledger.index.reserved_rows
    for version, count in under_way.items():
        left_behind[version] = left_behind.get(version, 0) + count
    # A wait helps only while a rollout is in flight.
    return chosen if not under_way or _fits_later(ledger, limits, left_behind, min(under_way)) else None


def _earlier_prompts_follow(ledger: Ledger, limits: Limits, chosen: Chosen) -> bool:
    """Return whether prompts before the last one of a batch are rolled out, or can be issued now."""
    last = max(record.position for record, _ in chosen)
    if any(record.position < last for record in ledger.index.reserved.values()):
        return True
    return bool(ledger.redo and ledger.redo[0].position < last and prompts_to_issue(ledger, limits)[0])


def is_ahead(ledger: Ledger, limits: Limits, record: ExtentRecord) -> bool:
    """Return whether prompts before those of a ticket are to be issued again, and its rows would take their place.

    A ticket that was out at a rollback leaves no room for all prompts whose training is undone. With K = 0 the next
    batch would have its rows in place of the last of theirs.
    """
    return not limits.max_staleness and bool(ledger.redo) and ledger.redo[0].position < record.position


def _fits_later(ledger: Ledger, limits: Limits, left_behind: dict[int, int], slow: int) -> bool:
    """Return whether the rows that remain after the next batch, counted by version, can be trained within the bound.

    Versions below `slow`, the oldest version with a rollout in flight, are not checked.
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
    """Return the ready rows that were written by weights that are rolled back."""
    newest, versions = ledger.totals.policy_version, ledger.versions
    if not any(version > newest or versions.is_marked(version) for version in ledger.index.ready_rows):
        return []
    return [
        (record, rows)
        for record in ledger.index.ready()
        if record.policy_version > newest or versions.rolled_back(record.policy_version, record.fingerprint)
        if (rows := ready_rows(record))
    ]


def prompts_of(record: ExtentRecord | SavedExtent, rows: list[int], group_size: int) -> PromptRange:
    """Return the prompts of rows of an extent; all of the ticket's prompts if some of them gave no rows."""
    if record.rows != record.prompts * group_size:
        return PromptRange(record.position, record.prompts)
    first, last = rows[0] // group_size, rows[-1] // group_size
    return PromptRange(record.position + first, last - first + 1)


def uncovered_position(ledger: Ledger, lease: int) -> int:
    """Return a position; every prompt before it is trained, dropped or in a lease up to `lease`."""
    lowest = ledger.index.lowest_position()
    later = (record.position for number, chosen in ledger.leases.items() if number > lease for record, _ in chosen)
    under_way = [] if lowest is None else [lowest]
    return min([ledger.totals.position, *(prompts.position for prompts in ledger.redo), *under_way, *later])


def undone(ledger: Ledger, position: int, group_size: int) -> list[PromptRange]:
    """Return the issued prompts from a position on without a row in the ledger; none if the position is negative."""
    held = [*ledger.redo, *(PromptRange(record.position, record.prompts) for record in ledger.reserved_extents())]
    held += [prompts_of(record, rows, group_size) for record in ledger.sealed_extents() if (rows := held_rows(record))]
    return between(held, position, ledger.totals.position) if position >= 0 else []


def is_possible(report: Sealed | Faulty, record: ExtentRecord) -> bool:
    """Return whether the sizes and numbers in a worker's report are possible for its ticket."""
    fits = 0 < report.rows <= record.rows and 0 < report.nbytes <= record.nbytes
    if isinstance(report, Sealed) and report.flat:
        groups = report.rows * record.prompts // record.rows
        fits &= report.flat == sorted(set(report.flat)) and report.flat[0] >= 0 and report.flat[-1] < groups
    return fits and 0 <= report.checksum < 1 << 64 and 0 <= report.policy_version < 1 << 62


def refusal(sealed: Sealed, record: ExtentRecord, ledger: Ledger) -> Refusal:
    """Return the reason to refuse or delay a ticket's experience; "" if it is accepted.

    ``early``: its weights are newer than the newest known version; their `Published` may be in flight.
    ``rolled_back``: its weights are rolled back. ``fingerprint``: its weights were never published. ``invalid``: its
    size is impossible.
    """
    if not is_possible(sealed, record):
        return "invalid"
    if ledger.versions.knows(sealed.policy_version, sealed.fingerprint):
        return ""
    if ledger.versions.rolled_back(sealed.policy_version, sealed.fingerprint):
        return "rolled_back"
    return "early" if sealed.policy_version > ledger.totals.policy_version else "fingerprint"
