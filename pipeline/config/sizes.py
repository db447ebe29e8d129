"""How much room experience takes at most, for those who reserve it and never see a tensor."""

from __future__ import annotations

# Header of an extent: fields, groups and vision fields, and some numbers a row, which `row_bytes_bound` counts itself.
EXTENT_OVERHEAD_BYTES = 8192


def row_bytes_bound(max_length: int) -> int:
    """Return the most bytes a text row of `max_length` tokens takes in an extent, its share of the header included.

    Two int64 columns, seven float32 and one bool a token, and 256 B for scalars, lengths and alignment. What pixels
    take on top nobody knows beforehand: `buffer.row_bytes` says it.
    """
    return max_length * (2 * 8 + 7 * 4 + 1) + 256


def extent_bytes_bound(rows: int, row_bytes: int) -> int:
    """Return the room to reserve for an append of `rows` rows."""
    return rows * row_bytes + EXTENT_OVERHEAD_BYTES
