"""Transport of appends as large as a ticket: the contest of `benches.transport` with 64 and with 256 rows an append."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from benches.contest import BARE, BOUND, DAEMON, OWN, PICKLE, RAGGED, RAW, TORCHRL, running
from benches.report import Section, Table
from benches.transport import contest, floor_table, floors, table

_ROWS = (64, 256)
# The fastest ways of the contest with 8 rows.
_WAYS = (BOUND, BARE, DAEMON, RAGGED, OWN, RAW, PICKLE, TORCHRL)
_ASKED = {BARE: 0.6, RAW: 1.5}


def run(*, quick: bool) -> Sequence[Section]:
    """Measure small and medium rows, with one producer and with two."""
    tables: list[Table] = []
    notes: list[str] = []
    ratios: list[tuple[str, str, str]] = []
    for append_rows, producers in itertools.product(_ROWS[:1] if quick else _ROWS, (1,) if quick else (1, 2)):
        with running(_WAYS, producers, append_rows) as (runners, failed):
            notes += [f"{title} did not run with {append_rows} rows: {reason}." for title, reason in failed.items()]
            for shape in ("small",) if quick else ("small", "medium"):
                named = f"{shape}, {append_rows} rows an append"
                results = contest(runners, shape, 0.5, 2 if quick else 5)
                tables.append(table(results, named, producers))
                ratios += floors(results, _ASKED, named, producers)
                notes += [f"{way.title} failed at {named}." for way in runners if way not in results]
    return [
        Section(
            "tickets", "Transport of appends as large as a ticket", "\n".join([_TEXT, *notes]),
            [*tables, floor_table(ratios)],
        )
    ]  # fmt: skip


_TEXT = """The contest of *transport* between its fastest ways, with appends of 64 and 256 rows and batches of 128 and
512. At most 8 batches are queued.
"""
