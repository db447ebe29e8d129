"""The codec's loops over rows, compiled by numba where it is installed (`rlhfd[fast]`).

They have the results of the NumPy code that they stand in for. Without numba, and for arrays that are not of the usual
kinds, nothing is done, and the caller goes NumPy's way.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pipeline.experience.extent_format import Array

log = logging.getLogger(__name__)


class Kernels(NamedTuple):
    """The functions of `pipeline.experience.row_loops`, compiled. They check no bounds: their callers do."""

    find_spans: Callable[[Array, Array, Array, Array], bool]
    fill_int64: Callable[[Array, Array], None]
    fill_bool: Callable[[Array, Array], None]
    copy_rows: Callable[[Array, Array, Array, Array, Array, int], None]
    copy_windows: Callable[[Array, Array, Array, int], None]


@functools.cache
def kernels() -> Kernels | None:
    """Return the compiled loops; None without numba, if its compiler is turned off, or if it fails."""
    # Looked at first: the import and the loops take half a second.
    if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0" or importlib.util.find_spec("numba") is None:
        return None
    # It logs each instruction that it compiles, at debug.
    logging.getLogger("numba").setLevel(logging.WARNING)
    try:
        # Fails with a numpy that this numba does not support.
        from pipeline.experience import row_loops

        compiled = row_loops.compiled()
    except (ImportError, OSError, RuntimeError) as error:
        log.warning("numba cannot be used, the codec's loops are NumPy's: %s", error)
        return None
    if compiled is None:
        return None
    found = Kernels(*compiled)
    if not _is_right(found):
        # A cache that several versions wrote at once could hold other code.
        log.error("numba's code is wrong, the codec's loops are NumPy's; remove its cache: NUMBA_CACHE_DIR, or "
                  "__pycache__ beside %s", __file__)  # fmt: skip
        return None
    log.info("the codec's loops are compiled by numba")
    return found


def _is_right(compiled: Kernels) -> bool:
    """Return whether the loops have the known results for a small batch: two rows, of 2 and 3 tokens, 1 and 2 actions.

    The second row's action mask has a hole.
    """
    mask = np.array([[0, 1, 1, 0], [0, 1, 1, 1]])
    action_mask = np.array([[0, 1, 0], [1, 0, 1]], np.uint8)
    # No memory that may hold the results already.
    spans, facts = np.zeros((3, 2), np.int64), np.zeros(3, np.bool_)
    has_spans = compiled.find_spans(mask, action_mask, spans, facts)
    starts, filled, flags = np.array([1, 0]), np.full((2, 2), 7), np.full((2, 2), 7, np.uint8)
    compiled.fill_int64(filled, starts)
    compiled.fill_bool(flags, starts)
    values, out = np.arange(12, dtype=np.int16).reshape(1, 2, 6), np.full((1, 3, 4), 7, np.int16)
    places = np.array([1, 0]), np.array([0, 2])
    compiled.copy_rows(values.view(np.uint8), places[0], out.view(np.uint8), places[1], np.array([3, 4]), 2)
    windows = np.full((2, 3), 7, np.int16)
    compiled.copy_windows(values.reshape(-1).view(np.uint8), np.array([2, 9]), windows.view(np.uint8), 2)
    found = [spans.tolist(), facts.tolist(), filled.tolist(), flags.tolist(), out.tolist(), windows.tolist()]
    return has_spans and found == [
        [[2, 3], [1, 3], [3, 4]], [True, False, False], [[0, 1], [1, 1]], [[0, 1], [1, 1]],
        [[[0, 9, 10, 11], [7, 7, 7, 7], [2, 3, 4, 5]]], [[0, 0, 1], [6, 7, 8]],
    ]  # fmt: skip


def find_spans(mask: Array, action_mask: Array) -> tuple[list[list[int]], list[bool]] | None:
    """Return the spans of a batch's rows, as `pipeline.experience.row_spans.Spans` defines them.

    Args:
        mask: Attention mask (B, S).
        action_mask: (B, A).

    Returns:
        Tokens, actions and end of each row; and whether the attention mask and the action mask are full, and whether
        all rows end together. None without numba, for masks that are not int64 and bool in contiguous memory, and for a
        batch with an error.
    """
    if mask.dtype != np.int64 or action_mask.dtype != np.bool_ or not mask.size or len(mask) != len(action_mask):
        return None
    if not (mask.flags.c_contiguous and action_mask.flags.c_contiguous) or (compiled := kernels()) is None:
        return None
    spans, facts = np.empty((3, len(mask)), np.int64), np.empty(3, np.bool_)
    if not compiled.find_spans(mask, action_mask.view(np.uint8), spans, facts):
        return None
    return spans.tolist(), facts.tolist()


def fill_mask(mask: Array, starts: Array) -> bool:
    """Write ones from each row's start on, and zeros before it; return whether it is done.

    Args:
        mask: (B, columns); filled if it is int64 or bool, and contiguous.
        starts: (B,) int64.
    """
    if mask.dtype not in (np.int64, np.bool_) or not mask.flags.c_contiguous or (compiled := kernels()) is None:
        return False
    if mask.dtype == np.int64:
        compiled.fill_int64(mask, starts)
    else:
        compiled.fill_bool(mask.view(np.uint8), starts)
    return True


def copy_rows(values: Array, source_rows: Array, out: Array, target_rows: Array, lengths: Array) -> None:
    """Copy rows that end in the last column of a group, and zero the columns before them; only with `kernels`.

    Args:
        values: (fields, rows of the group, its columns); each row contiguous.
        source_rows: Rows of the group, int64, in its bounds.
        out: (fields, B, columns), of the same dtype; each row contiguous.
        target_rows: Their rows in the batch, int64, in its bounds.
        lengths: Columns of each row, int64; at most those of `values` and of `out`.
    """
    compiled = kernels()
    assert compiled is not None
    size = out.itemsize
    compiled.copy_rows(values.view(np.uint8), source_rows, out.view(np.uint8), target_rows, lengths, size)


def copy_windows(source: Array, stops: Array, out: Array) -> None:
    """Copy the values before each stop into a row, and zero the columns for which there are none; only with `kernels`.

    Args:
        source: (B, columns), contiguous.
        stops: Places in its memory behind the last value of each row, int64, in its bounds.
        out: (rows, width), of the same dtype; each row contiguous.
    """
    compiled = kernels()
    assert compiled is not None
    compiled.copy_windows(source.reshape(-1).view(np.uint8), stops, out.view(np.uint8), out.itemsize)
