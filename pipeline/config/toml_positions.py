"""Positions of keys and values in a TOML text, which tomllib does not return; places of errors of an invalid text."""

from __future__ import annotations

import re
import tomllib
from typing import NamedTuple, TypeAlias

KeyPath: TypeAlias = "tuple[str | int, ...]"

_GAP = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
# A multi-line string may end in up to two quotes of its own right before its three closing quotes.
_STRING = re.compile(r'"""(?:\\.|[^\\])*?"{3,5}|' r"'''.*?'{3,5}|" r'"(?:\\.|[^"\\\n])*"|' r"'[^'\n]*'", re.DOTALL)
_SYNTAX_ERROR = re.compile(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", re.DOTALL)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BARE_VALUE = re.compile(r"[^,\]}#\n]+")


class Mark(NamedTuple):
    """Offsets into the text: of a key's last part, and of its value; for a table's header both are the key's."""

    key: int
    value: int


class Positions(NamedTuple):
    """The result of `scan`.

    Attributes:
        marks: Marks by path; elements of arrays, and of arrays of tables, by their number.
        repeats: Paths that occur twice in the text, each with the offset of the later key.
    """

    marks: dict[KeyPath, Mark]
    repeats: list[tuple[KeyPath, int]]


def scan(text: str) -> Positions:
    r"""Find every key and value.

    Args:
        text: TOML that tomllib accepts, or refuses only for keys that repeat; lines end in ``\n``.

    Raises:
        ValueError: If the text is not TOML; not every such text is detected.
    """
    return _Scanner(text).scan()


def line_and_column(text: str, offset: int) -> tuple[int, int]:
    """Return line and column, both from 1, the column in characters, of an offset into the text."""
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)


def syntax_errors(text: str, message: str) -> list[tuple[int, int, str]]:
    """Return the errors of a text that tomllib refused: all keys that are set twice, or else its first error.

    Args:
        text: As in `scan`.
        message: The message of tomllib.

    Returns:
        Line, column and message of each error, at least one.
    """
    try:
        marks, repeats = scan(text)
    except (ValueError, RecursionError):
        marks, repeats = {}, []
    if repeats:
        return [
            (
                *line_and_column(text, offset),
                f"{'.'.join(map(str, path))} is set twice, first in line {line_and_column(text, marks[path].key)[0]}",
            )
            for path, offset in repeats
        ]
    match = _SYNTAX_ERROR.fullmatch(message)
    error = match[1] if match else message
    offset = len(text)
    if match and match[2]:
        offset = sum(map(len, text.splitlines(keepends=True)[: int(match[2]) - 1])) + int(match[3]) - 1
    offset, message = _place(text, offset, error[:1].lower() + error[1:])
    return [(*line_and_column(text, offset), message)]


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._marks: dict[KeyPath, Mark] = {}
        self._repeats: list[tuple[KeyPath, int]] = []
        self._headers: set[KeyPath] = set()
        self._tables_in_array: dict[KeyPath, int] = {}

    def scan(self) -> Positions:
        table: KeyPath = ()
        while self._skip_gap() < len(self._text):
            if self._text[self._at] == "[":
                table = self._header()
            else:
                self._pair(table)
        return Positions(self._marks, self._repeats)

    def _header(self) -> KeyPath:
        brackets = 2 if self._text.startswith("[[", self._at) else 1
        self._at += brackets
        *parents, (name, offset) = self._keys()
        self._at += brackets
        path = (*self._enter((), parents), name)
        if brackets == 2:
            if path in self._marks and path not in self._tables_in_array:
                # A list of names above tables of the same name, such as those of reward functions.
                self._repeats.append((path, offset))
            number = self._tables_in_array[path] = self._tables_in_array.get(path, -1) + 1
            self._marks.setdefault(path, Mark(offset, offset))
            path = (*path, number)
        elif path in self._headers:
            self._repeats.append((path, offset))
        self._headers.add(path)
        self._marks.setdefault(path, Mark(offset, offset))
        return path

    def _pair(self, table: KeyPath) -> None:
        *parents, (name, offset) = self._keys()
        self._expect("=")
        path = (*self._enter(table, parents), name)
        self._skip_gap()
        if path in self._marks:
            self._repeats.append((path, offset))
        self._marks.setdefault(path, Mark(offset, self._at))
        self._value(path)

    def _enter(self, path: KeyPath, keys: list[tuple[str, int]]) -> KeyPath:
        for name, offset in keys:
            path = (*path, name)
            self._marks.setdefault(path, Mark(offset, offset))
            if path in self._tables_in_array:
                path = (*path, self._tables_in_array[path])
        return path

    def _keys(self) -> list[tuple[str, int]]:
        keys = []
        while True:
            start = self._skip_gap()
            if bare := _BARE_KEY.match(self._text, start):
                self._at, name = bare.end(), bare[0]
            else:
                name = tomllib.loads("key = " + self._take(_STRING))["key"]
            keys.append((name, start))
            if not self._text.startswith(".", self._skip_gap()):
                return keys
            self._at += 1

    def _value(self, path: KeyPath) -> None:
        opening = self._text[self._at : self._at + 1]
        if opening == "[":
            self._elements(path)
        elif opening == "{":
            self._at += 1
            while not self._text.startswith("}", self._skip_gap()):
                self._pair(path)
                self._skip_comma()
            self._at += 1
        else:
            self._take(_STRING if opening in "\"'" else _BARE_VALUE)

    def _elements(self, path: KeyPath) -> None:
        self._at += 1
        number = 0
        while not self._text.startswith("]", self._skip_gap()):
            self._marks.setdefault((*path, number), Mark(self._at, self._at))
            self._value((*path, number))
            self._skip_comma()
            number += 1
        self._at += 1

    def _skip_gap(self) -> int:
        match = _GAP.match(self._text, self._at)
        self._at = match.end() if match else self._at
        return self._at

    def _skip_comma(self) -> None:
        if self._text.startswith(",", self._skip_gap()):
            self._at += 1

    def _expect(self, character: str) -> None:
        if not self._text.startswith(character, self._skip_gap()):
            raise ValueError(f"no {character} at offset {self._at}")
        self._at += 1

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise ValueError(f"no key or value at offset {self._at}")
        self._at = match.end()
        return match[0]


_HEADER = re.compile(r"\[+[\w.-]+\]+\s*(#|$)", re.MULTILINE)
_NEVER_CLOSED = (
    ("unclosed array", r"=\s*(\[)", "list is not closed, a ] is missing"),
    ("unclosed inline table", r"=\s*(\{)", "table is not closed, a } is missing"),
    ('expected "\'"', r"[=\[,]\s*(')[^'\n]*$", "string is not closed, a ' is missing at the end of the line"),
    ("expected \"'''\"", r"(''')", "string is not closed, ''' is missing"),
    ("unterminated string", r'(""")', 'string is not closed, """ is missing'),
)


def _place(text: str, offset: int, error: str) -> tuple[int, str]:
    """Return the place to show for a syntax error, and the error in words of a configuration.

    Args:
        text: The whole file.
        offset: Offset of the error in tomllib; the end of the text if a bracket or quote is never closed.
        error: The message of tomllib, without the place.
    """
    offset, error = _opening(text, offset, error)
    if text.lstrip().startswith("{"):
        return offset, f"{error}: this looks like JSON, a configuration is TOML"
    if error.startswith(("expected '='", "invalid statement")):
        return offset, f"{error}: a line is key = value, [section] or # comment"
    if error == "invalid value":
        return offset, f"{error}: a text is in quotes, true and false are in small letters"
    return offset, f"{error}: it was set above" if error == "cannot overwrite a value" else error


def _opening(text: str, offset: int, error: str) -> tuple[int, str]:
    """Return the offset of a bracket or quote that is never closed, and its error; any other error unchanged."""
    if error.startswith("illegal character '\\n'"):
        start = text.rfind("\n", 0, offset) + 1
        return text.find('"', start), 'string is not closed, a " is missing at the end of the line'
    if error in ("invalid value", "unclosed array") and _HEADER.match(text, text.rfind("\n", 0, offset) + 1):
        # A section's header within a list: the list was never closed.
        text, error = text[: text.rfind("\n", 0, offset)], "unclosed array"
    elif offset < len(text.rstrip()):
        return offset, error
    for begins, pattern, message in _NEVER_CLOSED:
        if error == begins and (found := list(re.finditer(pattern, text, re.MULTILINE))):
            # Of one-line quotes the first match is at fault, of all others the last one.
            return found[0 if begins == 'expected "\'"' else -1].start(1), message
    # At the end of the text, not on the empty line after it.
    return len(text.rstrip()), error
