"""JSON lines files: an object a line, blank lines skipped."""

from __future__ import annotations

import array
import bisect
import codecs
import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.config.model_files import LFS_POINTER
from pipeline.config.prompts import CACHED_PREFIX
from pipeline.errors import ConfigError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_FORMAT_BYTES = 4096
# By the character between cells.
_TEXT_TABLES = {",": "CSV", "\t": "TSV", ";": "CSV with semicolons"}
_FORMATS = {b"\x1f\x8b": "compressed by gzip", b"PK\x03\x04": "a zip archive"}


class LineRows:
    """The objects of a file by number; keeps line offsets in memory (8 bytes a row), never texts.

    The file is held open, so that a file renamed into its place does not mix with it during a run.

    Attributes:
        path: The file.
        left_out: Columns that are not read: none.
    """

    left_out: tuple[str, ...] = ()

    def __init__(self, path: Path, *, field: str = "prompts.path") -> None:
        """Index the file's lines.

        Args:
            path: The JSON lines file.
            field: The configuration field that names the file, for the error; empty if none does.

        Raises:
            ConfigError: If the file cannot be read.
        """
        self.path = path
        self._offsets = array.array("q")
        # For each blank line, the index of the first row behind it: a few in most files.
        self._blanks = array.array("q")
        with _told(path, field), contextlib.ExitStack() as undone:
            # One descriptor for index and rows: another file may take the path between two.
            self._file = undone.enter_context(path.open("rb"))
            self._opened = self._stamp()
            for line_number, offset, _ in _lines_of(self._file):
                blanks = line_number - 1 - len(self._offsets) - len(self._blanks)
                self._blanks.extend([len(self._offsets)] * blanks)
                self._offsets.append(offset)
            undone.pop_all()

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._offsets)

    def line(self, index: int) -> int:
        """Return the number of a row's line, from 1."""
        return index + 1 + bisect.bisect_right(self._blanks, index)

    def record(self, index: int) -> dict[str, Any]:
        """Return a row, read from the file at this call.

        Raises:
            ConfigError: If the line is broken, or missing because the file was changed in place.
        """
        self._file.seek(self._offsets[index])
        try:
            return decoded(self._file.readline(), f"{self.path}:{self.line(index)}")
        except ConfigError as error:
            if self._stamp() == self._opened:
                raise
            raise ConfigError(
                f"{self.path} was written in place while it is in use, line {self.line(index)} is not where it was: "
                "put the former file back, or start again; mv puts another file into its place without harm"
            ) from error

    def _stamp(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _lines_of(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    offset = 0
    for line_number, line in enumerate(file, start=1):
        if line.strip(b" \t\r\n" if line_number > 1 else b" \t\r\n" + _BYTE_ORDER_MARK):
            yield line_number, offset, line
        offset += len(line)


@contextlib.contextmanager
def _told(path: Path, field: str) -> Iterator[None]:
    """Raise a ConfigError for a file that cannot be read."""
    try:
        yield
    except OSError as error:
        said = f"{field + ': ' if field else ''}cannot read {path}: {error.strerror}{_hub_advice(path, error)}"
        raise ConfigError(said) from error


def _hub_advice(path: Path, error: OSError) -> str:
    """Return the advice for a path that is the name of a data set: two words, and no such folder."""
    given = path.parts[-2:]
    is_name = len(given) == 2 and not path.suffix and not path.parent.exists()
    if not isinstance(error, FileNotFoundError) or not is_name:
        return ""
    return f"; for a data set of the hub that is in the local cache write {CACHED_PREFIX}{'/'.join(given)}"


def lines_at_most(path: Path) -> int:
    """Return an upper bound of the rows of a file: its lines."""
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b"")) + 1


def decoded(line: bytes, where: str) -> dict[str, Any]:
    """Return the object of a line; `where` is the file and line for errors.

    Raises:
        ConfigError: If the line is not one JSON object.
    """
    try:
        record = _decoder.decode(line.removeprefix(_BYTE_ORDER_MARK).rstrip().decode("utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}:{error.colno}: not JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}:{error.start + 1}: not UTF-8: {error.reason}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}:1: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ConfigError(f'{where}:1: {kind_of(record)}, but a line is an object like {{"prompt": "..."}}')
    return record


def kind_of(value: object) -> str:
    """Return the kind of a JSON value for a message, with its article."""
    kinds = {str: "a text", list: "a list", dict: "an object", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


def problem_of_format(path: Path) -> str:
    """Return the problem of a file of another format as a whole, in place of one for each of its lines."""
    if path.exists() and not path.is_file():
        # As <(zcat ...) of a shell is. Rows are read in another order, by several processes.
        return "a pipe or a device, which can be read once: write its lines into a file"
    try:
        with path.open("rb") as file:
            begin = file.read(_FORMAT_BYTES)
    except OSError:
        return ""
    if problem := _problem_of_bytes(path, begin):
        return problem
    begin = begin.removeprefix(_BYTE_ORDER_MARK).lstrip()
    for magic, name in _FORMATS.items():
        if begin.startswith(magic):
            return f'the file is {name}, not JSON lines: one object like {{"prompt": "..."}} a line'
    first = begin.partition(b"\n")[0].strip()
    if first.startswith(b"[") and (first == b"[" or first.startswith(b"[{")):
        return f"the file is one JSON array, not JSON lines: jq -c '.[]' {path.name} prints it as one object a line"
    if separator := _separator_of(first):
        return (
            f"the file is {_TEXT_TABLES[separator]}, not JSON lines: "
            f"pandas.read_csv(..., sep={separator!r}).to_json(..., "
            'orient="records", lines=True) writes it as one object a line'
        )
    if first == b"{":
        return f"an object over several lines, not JSON lines: jq -c . {path.name} prints it as one object a line"
    return ""


def text_of_file(path: Path, field: str) -> str:
    """Return the text of a whole file.

    Args:
        path: The file.
        field: The configuration field that names it, for the error.

    Raises:
        ConfigError: If it cannot be read, is not UTF-8, or is a pointer of Git LFS.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{field}: cannot read {path}: {error.strerror}") from error
    if problem := _problem_of_bytes(path, content):
        raise ConfigError(f"{field}: {problem}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{field}: {path} is not UTF-8: {error.reason} at byte {error.start:,}") from error


def json_of_file(path: Path, field: str, parse: Callable[[str], Any] = json.loads) -> Any:
    """Return the value of a JSON file.

    Args:
        path: The file.
        field: The configuration field that names it, for the error.
        parse: Returns the value of a JSON text, or raises ValueError.

    Raises:
        ConfigError: As `text_of_file`, or if it is not JSON.
    """
    text = text_of_file(path, field)
    try:
        return parse(text)
    except (ValueError, RecursionError) as error:
        separator = _separator_of(text.partition("\n")[0].encode())
        said = f"is {_TEXT_TABLES[separator]}, not JSON" if separator else f"is not JSON: {error}"
        raise ConfigError(f"{field}: {path} {said}") from error


def _problem_of_bytes(path: Path, begin: bytes) -> str:
    """Return the problem of a file that Git LFS has not fetched or that is not UTF-8, by its begin; else empty."""
    if begin.startswith(LFS_POINTER):
        return f"{path} is a pointer of Git LFS without the content: run git lfs pull in its folder"
    if encoding := _wide_encoding(begin):
        return f"the file is {encoding}, not UTF-8: iconv -f {encoding} -t UTF-8 {path.name} prints it as UTF-8"
    return ""


def _wide_encoding(begin: bytes) -> str:
    """Return UTF-32 or UTF-16 if the first bytes of a file are in it, with a byte order mark or without."""
    if begin.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "UTF-32"
    if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-16"
    if len(begin) < 2 or 0 not in begin[:2]:
        return ""
    return "UTF-16BE" if begin[0] == 0 else "UTF-16LE"


def _separator_of(first: bytes) -> str:
    """Return the character between the cells of a file's first line, if that is a header of names; else empty."""
    for separator in _TEXT_TABLES:
        cells = first.decode("utf-8", "replace").split(separator)
        if len(cells) > 1 and all(re.fullmatch(r"\s*\"?[^\W\d][\w .:-]*\"?\s*", cell) for cell in cells):
            return separator
    return ""


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


# json.loads would make one for each line.
_decoder = json.JSONDecoder(parse_constant=_refuse_constant)
