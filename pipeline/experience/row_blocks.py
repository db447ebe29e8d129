"""Blocks of rows, copied as a whole: out of a padded batch into an extent, and out of extents into a batch.

A row of at most `SHORT_ROW_TOKENS` columns is copied in a block with the others of its group, padding included, by one
call a field; a longer one is copied alone, without padding. On the way into a batch the padding is zeroed by the copy
itself: each value is combined with a mask of its row, which is a window of one line of zeros and ones. With numba each
row is copied alone, and its padding zeroed, whatever its length (`pipeline.experience.row_kernels`).

    line                0 0 0 0 0 0 | 1 1 1 1 1 1
    row with padding 2        0 0     1 1 1 1         the window of 6 that begins 2 before the middle
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from pipeline.experience import row_kernels
from pipeline.experience.extent_format import Array, GroupHeader, index_of

SHORT_ROW_BYTES = 1 << 14
SHORT_ROW_TOKENS = SHORT_ROW_BYTES // 8

Places = slice | list[int]


class BatchRows:
    """The rows of a batch in its columns of tokens, or in those of actions; all end in the last column.

    Attributes:
        width: Columns of the batch: the length of its longest row.
        has_padding: Whether padding is undefined after the copies so far, and `zero_padding` must follow them.
        factor: The batch's own int64 mask of ones, (B, width), once it is filled; int64 values are multiplied by it.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        """Take the tokens, or actions, of each row."""
        self.width = max(lengths)
        self.has_padding = False
        self.factor: Array | None = None
        self._lengths = np.array(lengths, np.int64)
        self._starts = self.width - self._lengths
        self._is_short = self.width <= SHORT_ROW_TOKENS
        self._bits: dict[int, Array] = {}

    def fill_mask(self, mask: Array, *, is_final: bool = True) -> None:
        """Write ones in place of the tokens, and zeros in place of the padding, in all rows of a mask.

        Args:
            mask: (B, width).
            is_final: Whether no row of it is written again.
        """
        if row_kernels.fill_mask(mask, self._starts):
            return
        if not self._is_short:
            mask[...] = 1
            self.has_padding = True
            return
        mask[...] = _windows_of_line(self._starts, self.width, "?", 1)
        if is_final and mask.dtype == np.int64:
            self.factor = mask

    def copy(self, values: Array, sources: Places, out: Array, targets: Places) -> None:
        """Copy rows of a group.

        Args:
            values: (fields, rows of the group, its columns), as in the extent.
            sources: Rows of the group.
            out: (fields, B, width), the batch.
            targets: Their places in the batch.
        """
        rows, stored = values.shape[1:]
        if row_kernels.kernels() is not None:
            # Indexed by the places, so that they are in bounds.
            of_group, of_batch = np.arange(rows)[sources], np.arange(len(self._lengths))[targets]
            row_kernels.copy_rows(values, of_group, out, of_batch, self._lengths[targets])
            return
        # A group may be wider than this batch: columns beyond the batch's width are its padding.
        width = min(stored, self.width)
        first = self.width - width
        part = values[:, sources, stored - width :]
        if not self._is_short:
            out[:, targets, first:] = part
            self.has_padding = True
            return
        combine: np.ufunc
        if self.factor is not None and out.dtype == np.int64:
            combine, mask = np.multiply, self.factor
        else:
            # Bits, because padding may be NaN.
            combine, mask = np.bitwise_and, self._bits_of(out.itemsize)
        part, out = part.view(mask.dtype), out.view(mask.dtype)
        if isinstance(targets, slice):
            combine(part, mask[targets, first:], out=out[:, targets, first:])
        else:
            out[:, targets, first:] = combine(part, mask[targets, first:])
        if first:
            out[:, targets, :first] = 0

    def _bits_of(self, itemsize: int) -> Array:
        """Return words of `itemsize` bytes, (B, width): all bits of a token, none of padding."""
        if (found := self._bits.get(itemsize)) is None:
            found = self._bits[itemsize] = _windows_of_line(self._starts, self.width, f"i{itemsize}", -1)
        return found

    def zero_padding(self, stacks: Sequence[Array]) -> None:
        """Zero the padding of long rows, in arrays (fields, B, width)."""
        for row, columns in enumerate(self._starts.tolist()):
            if columns:
                for stack in stacks:
                    stack[:, row, :columns] = 0


@functools.cache
def _line(kind: str, one: int) -> Array:
    line = np.zeros(2 * SHORT_ROW_TOKENS, kind)
    line[SHORT_ROW_TOKENS:] = one
    return line


def _windows_of_line(starts: Array, width: int, kind: str, one: int) -> Array:
    """Return (B, width): `one` from each row's start on, 0 before it."""
    line = _line(kind, one)
    step = line.itemsize
    return np.ndarray((width + 1, width), line.dtype, line, SHORT_ROW_TOKENS * step, (-step, step))[starts]


def places_of(group: GroupHeader, chosen: list[int], start: int) -> tuple[Places, Places] | None:
    """Return the places of the chosen rows in their group and in the batch; None if the group has none of them."""
    if group.rows == chosen:
        return slice(None), slice(start, start + len(chosen))
    place_of = {row: place for place, row in enumerate(group.rows)}
    found = [(place_of[row], start + place) for place, row in enumerate(chosen) if row in place_of]
    if not found:
        return None
    return index_of([source for source, _ in found]), index_of([target for _, target in found])


def write_windows(out: Array, sources: Sequence[Array], rows: list[int], stops: Array) -> None:
    """Write rows that end in different columns, or rows that are no neighbours.

    The columns before a row's own are those before it in memory, of this row or of the one before.

    Args:
        out: (fields, rows, width), in an extent.
        sources: Arrays (B, columns), one a field; contiguous, of one shape, at least `width` columns.
        rows: Rows of the sources.
        stops: The column behind the last of each row.
    """
    width = out.shape[2]
    if not width:
        return
    columns = sources[0].shape[1]
    # Behind the last value of each row, in the memory of its field; a row without values may end before it.
    ends = np.maximum(stops, 0) + [row * columns for row in rows]
    if row_kernels.kernels() is not None:
        for target, source in zip(out, sources, strict=True):
            row_kernels.copy_windows(source, ends, target)
        return
    starts = ends - width
    # Before the first row of a source there is no memory.
    early = [place for place, start in enumerate(starts.tolist()) if start < 0]
    if early:
        starts[early] = 0
    for target, source in zip(out, sources, strict=True):
        step = source.itemsize
        windows = np.ndarray((source.size - width + 1, width), source.dtype, source, 0, (step, step))
        target[...] = windows[starts]
        for place in early:
            end = int(ends[place])
            target[place, : width - end] = 0
            target[place, width - end :] = source.reshape(-1)[:end]
