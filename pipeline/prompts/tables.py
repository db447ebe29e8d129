"""Parquet and Arrow files, read with pyarrow: rows as the JSON values that a line of a JSON lines file would have.

Arrow files, those of `datasets` among them, are mapped into memory. Of a Parquet file the row groups of the last reads
are kept decoded. Null in a message of a chat is a key that the message lacks, because every row of a table has all of
its keys; numbers that are no JSON (NaN) are null; times are texts in ISO 8601, decimals texts. Columns of bytes are
left out, except for those of images, which are refused as in a line of JSON.
"""

from __future__ import annotations

import bisect
import collections
import datetime
import decimal
import math
from pathlib import Path
from typing import Any

from pipeline.config.user_modules import install_command
from pipeline.errors import ConfigError

_PARQUET, _ARROW_FILE, _ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
_KEPT_BYTES = 256 << 20
# A text that is not UTF-8, a date after the year 9999, nanoseconds, a time zone that is not installed; of a damaged
# Arrow file a text of less than no bytes.
_UNREADABLE = ValueError, ArithmeticError, LookupError, NotImplementedError, SystemError


def table_kind(path: Path) -> str:
    """Return "Parquet" or "Arrow", by the first bytes of a file; empty for any other file."""
    if not path.is_file():
        # A pipe would be waited for, and lose its first bytes.
        return ""
    try:
        with path.open("rb") as file:
            begin = file.read(len(_ARROW_FILE))
    except OSError:
        return ""
    if begin.startswith(_PARQUET):
        return "Parquet"
    return "Arrow" if begin.startswith((_ARROW_FILE, _ARROW_STREAM)) else ""


class _Table:
    """Rows of a table by number, from 0.

    Attributes:
        path: The file.
        left_out: Columns that hold bytes, which are not read.
    """

    def __init__(self, path: Path, schema: Any) -> None:
        self.path = path
        self._names = [field.name for field in schema if _is_json(field.type)]
        self.left_out = tuple(field.name for field in schema if field.name not in self._names)
        if found := [name for name in ("images", "videos") if name in self.left_out]:
            raise ConfigError(
                f"{path}:1:1: the column {found[0]} holds bytes, and would be left out: images are files, and the "
                "column their paths (docs/images.md)"
            )
        if twice := [name for name, count in collections.Counter(self._names).items() if count > 1]:
            raise ConfigError(f'{path}:1:1: several columns have the name "{twice[0]}"')

    def line(self, index: int) -> int:
        """Return the number of a row, from 1."""
        return index + 1

    def _record(self, table: Any, row: int, index: int) -> dict[str, Any]:
        try:
            (record,) = table.slice(row, 1).to_pylist()
        except _UNREADABLE as error:
            raise ConfigError(f"{self.path}:{self.line(index)}:1: a value cannot be read: {error}") from error
        return {name: _json(value) for name, value in record.items()}


class ArrowRows(_Table):
    """Rows of an Arrow file, or of an Arrow stream in a file, such as those of `datasets`."""

    def __init__(self, path: Path) -> None:
        """Map the file.

        Raises:
            ConfigError: If pyarrow is not installed, the file is damaged, images are bytes, or columns share a name.
        """
        pyarrow = _pyarrow(path, "Arrow")
        try:
            mapped = pyarrow.memory_map(str(path))
            with path.open("rb") as file:
                is_stream = file.read(len(_ARROW_STREAM)) == _ARROW_STREAM
            opened = pyarrow.ipc.open_stream(mapped) if is_stream else pyarrow.ipc.open_file(mapped)
            table = opened.read_all()
            super().__init__(path, table.schema)
        # Of a name that is not UTF-8 too.
        except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
            raise ConfigError(f"{path}:1:1: not an Arrow file: {error}") from error
        self._table = table.select(self._names)

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._table.num_rows)

    def record(self, index: int) -> dict[str, Any]:
        """Return a row.

        Raises:
            ConfigError: If Python cannot hold one of its values.
        """
        return self._record(self._table, index, index)

    def close(self) -> None:
        """Release the mapping."""
        self._table = None


class ParquetRows(_Table):
    """Rows of a Parquet file."""

    def __init__(self, path: Path) -> None:
        """Open the file and read its footer.

        Raises:
            ConfigError: If pyarrow is not installed, the file is damaged, images are bytes, or columns share a name.
        """
        pyarrow = _pyarrow(path, "Parquet")
        from pyarrow.parquet import ParquetFile

        self._errors = OSError, pyarrow.ArrowException
        try:
            self._file = ParquetFile(str(path))
        except self._errors as error:
            raise ConfigError(f"{path}:1:1: not a Parquet file: {error}") from error
        super().__init__(path, self._file.schema_arrow)
        self._stops: list[int] = []
        metadata = self._file.metadata
        for group in range(metadata.num_row_groups):
            self._stops.append((self._stops[-1] if self._stops else 0) + metadata.row_group(group).num_rows)
        self._kept: collections.OrderedDict[int, Any] = collections.OrderedDict()
        self._kept_bytes = 0

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._stops[-1] if self._stops else 0

    def record(self, index: int) -> dict[str, Any]:
        """Return a row.

        Raises:
            ConfigError: If its row group is damaged, or Python cannot hold one of its values.
        """
        group = bisect.bisect_right(self._stops, index)
        if group not in self._kept:
            try:
                self._kept[group] = self._file.read_row_group(group, columns=self._names)
            except self._errors as error:
                # Of several lines.
                problem = " ".join(str(error).split())
                raise ConfigError(f"{self.path}:{index + 1}:1: not Parquet: {problem}") from error
            # The size of a table costs more than the rest of a read: it is asked for once a table, not at each row.
            self._kept_bytes += self._kept[group].nbytes
            while len(self._kept) > 1 and self._kept_bytes > _KEPT_BYTES:
                self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes
        self._kept.move_to_end(group)
        return self._record(self._kept[group], index - (self._stops[group - 1] if group else 0), index)

    def close(self) -> None:
        """Close the file."""
        self._kept.clear()
        self._kept_bytes = 0
        self._file.close()


def _pyarrow(path: Path, kind: str) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        advice = f"read with pyarrow: {install_command('pyarrow')}"
        raise ConfigError(f"{path}:1:1: the file is {kind}, {advice}") from error
    return pyarrow


def _is_json(kind: Any) -> bool:
    """Return whether the values of an Arrow type are JSON values, or become some."""
    import pyarrow.types as types

    if types.is_struct(kind):
        return all(_is_json(kind.field(place).type) for place in range(kind.num_fields))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_json(kind.value_type)
    if types.is_dictionary(kind):
        return _is_json(kind.value_type)
    return bool(
        types.is_null(kind) or types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)
        or types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
        or types.is_decimal(kind) or types.is_date(kind) or types.is_timestamp(kind) or types.is_time(kind)
    )  # fmt: skip


def _json(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return None
        case decimal.Decimal():
            return str(value)
        case datetime.date() | datetime.time():
            return value.isoformat()
        case list():
            return [_json(one) for one in value]
        case dict():
            return {name: _json(one) for name, one in value.items()}
    return value


def without_nulls(value: Any) -> Any:
    """Return a list of chat messages without the keys that are null, in all of its objects."""
    match value:
        case list():
            return [without_nulls(one) for one in value]
        case dict():
            return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return value
