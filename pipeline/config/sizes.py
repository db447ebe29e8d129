"""Upper bounds on the bytes of experience, for processes that reserve room and never load a tensor."""

from __future__ import annotations

# Header of an extent: fields, groups and vision fields, and some numbers per row, which `row_bytes_bound` includes.
EXTENT_OVERHEAD_BYTES = 8192


def row_bytes_bound(max_length: int) -> int:
    """Return an upper bound on the bytes of a text row of `max_length` tokens, its share of the header included.

    Per token two int64 columns, seven float32 and one bool; per row 256 B for scalars, lengths and alignment. The bytes
    of pixels are not known beforehand: `buffer.row_bytes` sets them.
    """
    return max_length * (2 * 8 + 7 * 4 + 1) + 256


def extent_bytes_bound(rows: int, row_bytes: int) -> int:
    """Return the room to reserve for an append of `rows` rows."""
    return rows * row_bytes + EXTENT_OVERHEAD_BYTES
