"""The further numbers of reward functions: a function may return a dict with "reward" and numbers beside it.

a row a call   {"reward": 1.0, "format": 0.5}
all rows       a list of such dicts, or a dict of lists with one element a row; a number in place of a list is of each

A number has the name ``LABEL.NAME``, of its function and of its key, as a column of an experience's `info` with the
prefix "number.", NaN in a row without it. It is no part of the reward.
"""

from __future__ import annotations

import collections
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from pipeline.errors import RewardError
from pipeline.experience.ragged import RaggedRows
from pipeline.progress import Telemetry
from pipeline.telemetry.metrics import MOST_NUMBERS
from pipeline.telemetry.number_names import COLUMN, NumberNames, packed

REWARD: Final = "reward"
"""Key of the reward in a dict."""
PREFIX: Final = "number."
"""Begins the names in `info`: ``number.LABEL.NAME``."""

_MOST_KEYS: Final = 64
_MOST_CHARACTERS: Final = 64
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9_.-]+")

log = logging.getLogger(__name__)


class Scored(NamedTuple):
    """A reward and the numbers beside it, of any type."""

    reward: Any
    numbers: Mapping[str, Any]


def split(result: Any) -> Scored:
    """Return the reward and the further numbers of what a function returned for a row.

    Raises:
        RewardError: If a dict has no reward.
    """
    if isinstance(result, Scored):
        return result
    if not isinstance(result, Mapping):
        return Scored(result, {})
    if REWARD not in result:
        raise RewardError(f'the dict has no "{REWARD}", its keys are {_keys(result)}')
    return Scored(result[REWARD], {key: value for key, value in result.items() if key != REWARD})


def scored(reward: float, numbers: Mapping[Any, Any]) -> Scored:
    """Return a score with the numbers of a row, NaN for one that is not finite; None is no number, and is left out."""
    given = [(_text(key)[:200], value) for key, value in numbers.items() if value is not None]
    return Scored(reward, {key: _finite(value) for key, value in given[:_MOST_KEYS]})


def of_rows(results: Any, rows: int) -> Any:
    """Return a dict of columns as one `Scored` a row; any other result of a call for all rows as it is.

    A further column that has not one element a row is no number of any row.

    Raises:
        RewardError: If there is no reward.
    """
    if not isinstance(results, Mapping):
        return results
    reward, numbers = split(results)
    columns, rewards = {key: _column(values, rows) for key, values in numbers.items()}, list(reward)
    # The caller refuses another number of rewards than rows.
    if len(rewards) != rows:
        return rewards
    return [Scored(one, {key: values[row] for key, values in columns.items()}) for row, one in enumerate(rewards)]


def _column(values: Any, rows: int) -> Sequence[Any]:
    if getattr(values, "shape", None) == () or not hasattr(values, "__len__"):
        return [values] * rows
    return list(values) if len(values) == rows and not isinstance(values, str) else [math.nan] * rows


def _finite(value: Any) -> float:
    """Return a number in float32, in which a row holds it; NaN for anything else."""
    try:
        number = math.nan if isinstance(value, str | bytes | bytearray) else float(value)
    # The value may be of any type.
    except Exception:  # noqa: BLE001
        return math.nan
    return number if abs(number) <= torch.finfo(torch.float32).max else math.nan


def _text(key: Any) -> str:
    # A lone surrogate cannot be sent.
    return str(key).encode("utf-8", "replace").decode()


def _keys(result: Mapping[Any, Any]) -> str:
    return ", ".join(_text(key)[:_MOST_CHARACTERS] for key in list(result)[:8]) or "none"


class FurtherNumbers:
    """Names the numbers of rows, and says once which of them cannot be kept, with the cause.

    Args:
        labels: The name of each function; without them a number is named by its key.
        telemetry: Told of each number that is left out.
    """

    def __init__(self, labels: Sequence[str], telemetry: Telemetry) -> None:
        self._labels = list(labels)
        self._telemetry = telemetry
        self._names: dict[tuple[int, str], str] = {}
        self._counts = collections.Counter[tuple[str, str]]()

    def of_row(self, functions: Iterable[Mapping[str, float]]) -> dict[str, float]:
        """Return the finite numbers of a row by name.

        Args:
            functions: The numbers of each function by key.
        """
        found: dict[str, float] = {}
        for at, numbers in enumerate(functions):
            for key, value in numbers.items():
                if not (name := self._name(at, key)):
                    self._left_out(f"{self._label(at)}{key}", "name")
                elif math.isfinite(value):
                    found[name] = value
                else:
                    self._left_out(name, "invalid")
        return found

    def _label(self, at: int) -> str:
        return f"{self._labels[at]}." if at < len(self._labels) else ""

    def _name(self, at: int, key: str) -> str:
        """Return the name of a function's key; empty if it has none: there are too many, or another key has it."""
        if (known := self._names.get((at, key))) is not None:
            return known
        clean = _NO_NAME.sub("_", f"{self._label(at)}{key}")[-2 * _MOST_CHARACTERS :]
        if len(self._names) >= MOST_NUMBERS or clean in self._names.values():
            return ""
        self._names[at, key] = clean
        return clean

    def _left_out(self, name: str, reason: str) -> None:
        self._telemetry.count("number_left_out", reason)
        # Keys may be of any number: those behind the first ones are counted together.
        shown = name if len(self._counts) < 4 * MOST_NUMBERS else "others"
        self._counts[shown, reason] += 1
        count = self._counts[shown, reason]
        if count == 1 and reason == "invalid":
            log.warning("a further number of a reward is no finite number, the reward stands: name=%s", shown)
        elif count == 1:
            log.warning(
                "a further number of a reward is left out: name=%s: at most %d names, each of one key", shown,
                MOST_NUMBERS,
            )  # fmt: skip
        elif math.log10(count).is_integer():
            log.warning("a further number of a reward left out again: name=%s times=%d", shown, count)


def columns_of(rows: Sequence[Mapping[str, float]]) -> dict[str, Tensor]:
    """Return a column of `info` for each number that a row has, ``(B,)`` float32, NaN in rows without it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {f"{PREFIX}{name}": torch.tensor([row.get(name, math.nan) for row in rows]) for name in names}


def pack(rows: RaggedRows, names: NumberNames) -> RaggedRows:
    """Return rows with one column of fixed shape in `info` in place of those of numbers.

    All rows of a batch have the same fields, and a function may return other numbers at any time: the extents of a run
    whose functions may return numbers have the one column always (`pipeline.telemetry.number_names`).
    """
    prefix = f"info.{PREFIX}"
    columns = {name.removeprefix(prefix): values for name, values in rows.columns.items() if name.startswith(prefix)}
    for name in columns:
        rows = rows.without(f"{prefix}{name}")
    return rows.with_info(COLUMN, packed(columns, names, len(rows)))
