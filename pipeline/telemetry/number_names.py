"""The names of the further numbers of reward functions, in the order of their places: one file of a run.

A function returns numbers by names that only its calls tell. The first process that meets a name appends it to the
file; its place stays for the life of the run. A row has the numbers in one column of `MOST_NUMBERS` places and, last,
the set of places that it has, as a float32 that holds whole numbers up to 2^24: all rows have the same fields so.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pipeline.storage.files import lock_where_possible
from pipeline.telemetry.metrics import MOST_NUMBERS

COLUMN: Final = "reward_numbers"
"""Name of the column in `info`."""
_FILE: Final = "reward-numbers.jsonl"

Array = npt.NDArray[np.float32]
log = logging.getLogger(__name__)


class NumberNames:
    """The names of a run, from its folder: reads the file when it has grown, and appends to it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE
        self._size = 0
        self._names: list[str] = []
        self._refused: set[str] = set()
        self._has_told = False

    @property
    def names(self) -> list[str]:
        """The names in the order of their places; those read before, while the file cannot be read."""
        with contextlib.suppress(OSError):
            self._read()
        return self._names

    def _read(self) -> list[str]:
        if self._path.stat().st_size != self._size:
            text = self._path.read_bytes()
            # A process that was killed may have left a part of a line.
            lines = text.split(b"\n")[:-1]
            self._size = len(text)
            self._names = [_name(line, place) for place, line in enumerate(lines[:MOST_NUMBERS])]
        return self._names

    def place(self, name: str) -> int | None:
        """Return the place of a name, which is appended if it is new; None if all places are taken: said once.

        Also None as long as the file cannot be written, by a full disk: a row is worth more than its further numbers.
        """
        if name in self._names:
            return self._names.index(name)
        if name in self._refused:
            return None
        try:
            place = self._append(name)
        except OSError as error:
            if not self._has_told:
                self._has_told = True
                log.warning("further numbers of rewards are left out: first=%s error=%s", name, error)
            return None
        if place is None:
            self._refused.add(name)
            log.warning("a further number of a reward is left out: name=%s: the run has %d names", name, MOST_NUMBERS)
        return place

    def _append(self, name: str) -> int | None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab+") as file:
            lock_where_possible(file)
            self._size = -1
            if name not in (names := self._read()) and len(names) < MOST_NUMBERS:
                file.seek(0)
                os.ftruncate(file.fileno(), file.read().rfind(b"\n") + 1)
                file.write(json.dumps(name).encode() + b"\n")
                file.flush()
                self._size = -1
                names = self._read()
        return names.index(name) if name in names else None


def _name(line: bytes, place: int) -> str:
    """Return the name in a line; of a damaged one, as after a crash of the machine, one of its place."""
    try:
        return str(json.loads(line))
    except (ValueError, RecursionError):
        return f"number-{place + 1}"


def packed(columns: Mapping[str, Any], names: NumberNames, rows: int) -> Array:
    """Return the column of numbers, ``(rows, MOST_NUMBERS + 1)``.

    Args:
        columns: Numbers by name, ``(rows,)``, NaN in rows without one.
        names: The names of the run.
        rows: Number of rows.
    """
    found = np.zeros((rows, MOST_NUMBERS + 1), np.float32)
    for name, values in columns.items():
        if (place := names.place(name)) is not None:
            given = np.isfinite(values)
            found[:, place] = np.where(given, values, 0.0)
            found[:, -1] += given * np.float32(1 << place)
    return found


def sums_of(column: Array) -> tuple[list[float], list[float]]:
    """Return the sum of each place over rows, and the number of rows that have it."""
    has = column[:, -1:].astype(np.int64) >> np.arange(MOST_NUMBERS) & 1
    # A row without a number has 0 in its place.
    return column[:, :-1].sum(axis=0, dtype=np.float64).tolist(), has.sum(axis=0).astype(float).tolist()


def numbers_of(row: Array, names: NumberNames) -> dict[str, float]:
    """Return the numbers of one row of the column by name."""
    has = int(row[-1])
    return {name: float(row[place]) for place, name in enumerate(names.names) if has >> place & 1}
