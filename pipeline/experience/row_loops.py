"""The codec's loops over rows, for numba to compile; `pipeline.experience.row_kernels` imports them if it is installed.

Each is compiled for one signature: numba's cache of a function with several is not safe against processes that fill it
at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from numba import types

from pipeline.experience.extent_format import Array

# A copy of a row that numba compiles takes three times as long.
_memcpy: Any = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))
_memset: Any = types.ExternalFunction("memset", types.intp(types.intp, types.int32, types.intp))


def compiled() -> list[Callable[..., Any]] | None:
    """Return the loops of this module compiled, in the order of `Kernels`, from numba's cache if they are in it.

    None if numba's compiler is turned off, by a variable or its file.

    Raises:
        RuntimeError: If numba cannot compile them.
    """
    if numba.config.DISABLE_JIT:
        return None
    try:
        try:
            return _compiled(cache=True)
        except (OSError, RuntimeError):
            # The folder of the cache cannot be written: each process compiles for itself.
            return _compiled(cache=False)
    except numba.core.errors.NumbaError as error:
        raise RuntimeError(str(error)) from error


def _compiled(*, cache: bool) -> list[Callable[..., Any]]:
    rows, bytes_of_rows = types.int64[::1], types.uint8[:, :, :]
    read = types.Array(types.uint8, 3, "A", readonly=True)
    signatures = {
        find_spans: types.boolean(types.int64[:, ::1], types.uint8[:, ::1], types.int64[:, ::1], types.boolean[::1]),
        fill_int64: types.void(types.int64[:, ::1], rows),
        fill_bool: types.void(types.uint8[:, ::1], rows),
        copy_rows: types.void(read, rows, bytes_of_rows, rows, rows, types.int64),
        copy_windows: types.void(types.Array(types.uint8, 1, "C", readonly=True), rows, types.uint8[:, :], types.int64),
    }
    return [numba.njit(signature, cache=cache, nogil=True)(loop) for loop, signature in signatures.items()]


def find_spans(mask: Array, action_mask: Array, spans: Array, facts: Array) -> bool:
    """Find the spans of rows; return whether there are any without an error.

    Args:
        mask: Attention mask (B, S), int64.
        action_mask: (B, A), uint8, as many rows.
        spans: (3, B) int64, to fill: tokens, actions and end of each row.
        facts: (3,) bool, to fill: whether each mask is 1 on exactly its spans, and whether all rows end together.
    """
    rows, width = mask.shape
    columns = action_mask.shape[1]
    shift = width - columns
    facts[:] = True
    for row in range(rows):
        # Sums over whole rows become vector instructions; the ends are searched only through the padding.
        total, bits, taken = 0, 0, 0
        for value in mask[row]:
            total += value
            bits |= value
        for action in action_mask[row]:
            taken += action != 0
        start = 0
        while start < width and mask[row, start] == 0:
            start += 1
        if start == width:
            return False
        end = width
        while mask[row, end - 1] == 0:
            end -= 1
        first, stop = columns, 0
        if taken:
            first, stop = 0, columns
            while action_mask[row, first] == 0:
                first += 1
            while action_mask[row, stop - 1] == 0:
                stop -= 1
        if stop + shift > end:
            return False
        actions = max(end - max(start, first + shift), 0)
        spans[0, row], spans[1, row], spans[2, row] = end - start, actions, end
        facts[0] &= bits == 1 and total == end - start
        facts[1] &= first + shift >= start and taken == actions
        facts[2] &= end == spans[2, 0]
    return True


def fill_int64(mask: Array, starts: Array) -> None:
    """Write ones from each row's start on, and zeros before it, into (B, columns) int64."""
    for row in range(len(starts)):
        mask[row, : starts[row]] = 0
        mask[row, starts[row] :] = 1


def fill_bool(mask: Array, starts: Array) -> None:
    """Do the same for (B, columns) uint8."""
    for row in range(len(starts)):
        mask[row, : starts[row]] = 0
        mask[row, starts[row] :] = 1


def copy_rows(values: Array, source_rows: Array, out: Array, target_rows: Array, lengths: Array, itemsize: int) -> None:
    """Copy rows that end in the last column of a group, and zero the columns before them.

    Args:
        values: (fields, rows of the group, bytes of its columns).
        source_rows: Rows of the group, int64.
        out: (fields, B, bytes of its columns).
        target_rows: Their rows in the batch, int64.
        lengths: Columns of each row, int64.
        itemsize: Bytes of a column.
    """
    for field in range(len(values)):
        source, target = values[field], out[field]
        for place in range(len(lengths)):
            nbytes = lengths[place] * itemsize
            to, padding, first = target[target_rows[place]], out.shape[2] - nbytes, values.shape[2] - nbytes
            _memset(to.ctypes.data, 0, padding)
            _memcpy(to[padding:].ctypes.data, source[source_rows[place], first:].ctypes.data, nbytes)


def copy_windows(source: Array, stops: Array, out: Array, itemsize: int) -> None:
    """Copy the values before each stop into a row, and zero the columns for which there are none.

    Args:
        source: (bytes of the values,).
        stops: (rows,) int64, each in 0 ... values.
        out: (rows, bytes of its columns); each row contiguous.
        itemsize: Bytes of a value.
    """
    for place in range(len(stops)):
        stop, to = stops[place] * itemsize, out[place]
        padding = max(out.shape[1] - stop, 0)
        _memset(to.ctypes.data, 0, padding)
        _memcpy(to[padding:].ctypes.data, source[stop - out.shape[1] + padding :].ctypes.data, out.shape[1] - padding)
