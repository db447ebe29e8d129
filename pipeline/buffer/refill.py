"""Dynamic sampling with refill: groups without a training signal are dropped, and prompts issued in their place.

The rows of a group whose rewards are all equal have advantage 0 (DAPO, arXiv:2503.14476 section 3.2). With `max_refill`
above 0 such groups are dropped as they are sealed. The bounds of `pipeline.buffer.admission` then have room for as many
other prompts, until the batch is full, or until the prompts issued in place of dropped ones since the newest version
are `max_refill` times those of a version; from then on groups without signal are kept.

With `max_staleness = 0` prompts are issued in rounds, without refill too, where a prompt may be set aside or a row have
no reward: the prompts of a version, then as many as rows are missing once all of these are sealed, and so on. So the
prompts of each ticket, and whether its groups are dropped, follow from prompts and rewards alone and not from the order
in which tickets end: kills and the number of workers change no bit. The state of a round is in the ledger's totals.
With staleness a prompt is issued as soon as there is room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.storage.ledger import Ledger

if TYPE_CHECKING:
    from pipeline.buffer.admission import Limits
    from pipeline.runtime.messages import Sealed


def has_rounds(limits: Limits) -> bool:
    """Return whether prompts are issued in rounds."""
    return limits.max_staleness == 0


def room_of_round(ledger: Ledger, limits: Limits, room: int) -> int:
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


def is_allowed(ledger: Ledger, limits: Limits) -> bool:
    """Return whether groups without signal are dropped now, with room for prompts in their place."""
    prompts = limits.rows_per_version // limits.group_size
    # The first round of a version is in place of nothing.
    refilled = ledger.totals.refilled - (prompts if has_rounds(limits) else 0)
    return limits.max_refill > 0 and refilled < limits.max_refill * prompts


def filtered_rows(sealed: Sealed, ledger: Ledger, limits: Limits) -> list[int]:
    """Return the rows of a ticket that are dropped because they carry no signal."""
    if not sealed.flat or not is_allowed(ledger, limits):
        return []
    size = limits.group_size
    return [row for group in sealed.flat for row in range(group * size, (group + 1) * size)]
