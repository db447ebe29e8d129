"""Positions of keys and values agree with tomllib's result, for any layout of the text."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.toml_positions import KeyPath, line_and_column, scan, syntax_errors

TRICKY = "ab01 _-.\"'#=[]{},\\\té→\n"
DATES = ["1979-05-27T07:32:00Z", "1979-05-27 07:32:00", "07:32:00"]
SCALARS = ["1", "0x1F", "1_000", "1e3", "-inf", "true", "false", *DATES]


class Writer:
    """Writes TOML and records the position of each key and value."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.text = ""
        self.keys: dict[KeyPath, int] = {}
        self.values: dict[KeyPath, int] = {}
        self.names = 0

    def choose(self, *choices: str) -> str:
        return self.draw(st.sampled_from(choices))

    def gap(self) -> None:
        self.text += self.choose("", " ", "\t", "  ")

    def lines(self) -> None:
        self.text += self.choose("", "\n", " # ] } \" '''\n", "\n\n\t")

    def name(self) -> str:
        self.names += 1
        return self.draw(st.text(TRICKY, max_size=3)) + str(self.names)

    def write_key(self, name: str) -> int:
        start = len(self.text)
        forms = [json.dumps(name)]
        if re.fullmatch(r"[A-Za-z0-9_-]+", name):
            forms.append(name)
        if not re.search(r"['\n]", name):
            forms.append(f"'{name}'")
        self.text += self.choose(*forms)
        return start

    def write_keys(self, names: list[str]) -> int:
        """Write a dotted key; return where its last part starts."""
        start = 0
        for number, name in enumerate(names):
            if number:
                self.gap()
                self.text += "."
                self.gap()
            start = self.write_key(name)
        return start

    def write_pair(self, table: KeyPath, depth: int) -> None:
        names = [self.name() for _ in range(self.draw(st.integers(1, 3)))]
        path = (*table, *names)
        self.keys[path] = self.write_keys(names)
        self.gap()
        self.text += "="
        self.gap()
        self.write_value(path, depth)

    def write_value(self, path: KeyPath, depth: int) -> None:
        self.values[path] = len(self.text)
        kind = self.choose("scalar", "string", *(("array", "table") if depth else ()))
        if kind == "scalar":
            self.text += self.choose(*SCALARS)
        elif kind == "string":
            self.write_string()
        else:
            count = self.draw(st.integers(0, 3))
            self.text += "[" if kind == "array" else "{"
            for number in range(count):
                # Before TOML 1.1 an inline table is one line without a comma at its end.
                self.lines() if kind == "array" else self.gap()
                self.write_value((*path, number), depth - 1) if kind == "array" else self.write_pair(path, depth - 1)
                self.lines() if kind == "array" else self.gap()
                if number < count - 1 or (kind == "array" and self.draw(st.booleans())):
                    self.text += ","
            self.lines() if kind == "array" else self.gap()
            self.text += "]" if kind == "array" else "}"

    def write_string(self) -> None:
        content = self.draw(st.text(TRICKY, max_size=8))
        forms = [json.dumps(content), json.dumps(content, ensure_ascii=False)]
        if "'" not in content and "\n" not in content:
            forms.append(f"'{content}'")
        if "'''" not in content:
            forms.append(f"'''{content}'''")
        escaped = content.replace("\\", "\\\\")
        if '"""' not in content:
            forms += [f'"""{escaped}"""', f'"""\n{escaped}\\\n  """']
        self.text += self.choose(*forms)

    def write_document(self) -> None:
        arrays: dict[tuple[str, ...], int] = {}
        table: KeyPath = ()
        for _ in range(self.draw(st.integers(0, 4))):
            self.lines()
            kind = self.choose("pair", "pair", "table", "array", "again")
            if kind == "pair":
                self.write_pair(table, 2)
            else:
                again = kind == "again" and arrays
                names = list(self.draw(st.sampled_from(sorted(arrays)))) if again else [self.name(), self.name()]
                brackets = 2 if again or kind == "array" else 1
                self.text += "[" * brackets
                self.gap()
                start = self.write_keys(names)
                self.gap()
                self.text += "]" * brackets
                table = array = tuple(names)
                if brackets == 2:
                    arrays[array] = arrays.get(array, -1) + 1
                    table = (*array, arrays[array])
                self.keys[table] = start
            self.gap()
            self.text += self.choose("\n", " # [x] 'y\n")


@st.composite
def documents(draw: st.DrawFn) -> Writer:
    writer = Writer(draw)
    writer.write_document()
    return writer


def paths_in(value: Any, path: KeyPath = ()) -> set[KeyPath]:
    entries = dict(value if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    return {(*path, key) for key in entries}.union(*(paths_in(inner, (*path, key)) for key, inner in entries.items()))


@given(documents())
def test_every_key_and_value_is_where_it_was_written(document: Writer) -> None:
    data = tomllib.loads(document.text)

    marks, repeats = scan(document.text)

    assert set(marks) == paths_in(data)
    assert {path: marks[path].key for path in document.keys} == document.keys
    assert {path: marks[path].value for path in document.values} == document.values
    assert not repeats


@given(st.text("ab=.[]{}\"'#,\\\n 1", max_size=30))
def test_text_that_is_no_toml_gives_an_error_at_a_place_within_it(text: str) -> None:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        errors = syntax_errors(text, str(error))
        assert errors
        for line, column, _ in errors:
            lines = text.split("\n")
            assert 1 <= line <= len(lines) and 1 <= column <= len(lines[line - 1]) + 1
    else:
        scan(text)


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        ("a = 1\na = 2\n", [(2, 1, "a is set twice, first in line 1")]),
        (
            "[t]\na = 1\n\n[t]\nb = 2\na = 3",
            [(4, 2, "t is set twice, first in line 1"), (6, 1, "t.a is set twice, first in line 2")],
        ),
        ("t = [1]\n[[t]]\na = 1\n[[t]]\na = 2\n", [(2, 3, "t is set twice, first in line 1")]),
        ("t.a = 1\nt.'a' = 2", [(2, 3, "t.a is set twice, first in line 1")]),
        ("t = {a = 1, b = 2, a = 3}", [(1, 20, "t.a is set twice, first in line 1")]),
        ("a = [1,\n  2", [(1, 5, "list is not closed, a ] is missing")]),
        ("a = 1 2", [(1, 7, "expected newline or end of document after a statement")]),
        ("a = rlhfd", [(1, 5, "invalid value: a text is in quotes, true and false are in small letters")]),
        ("a = ", [(1, 4, "invalid value: a text is in quotes, true and false are in small letters")]),
        ("= 1", [(1, 1, "invalid statement: a line is key = value, [section] or # comment")]),
        ('a = "x', [(1, 7, "unterminated string")]),
    ],
)
def test_syntax_errors_name_line_and_column(text: str, errors: list[tuple[int, int, str]]) -> None:
    with pytest.raises(tomllib.TOMLDecodeError) as refused:
        tomllib.loads(text)

    assert syntax_errors(text, str(refused.value)) == errors


def test_columns_count_characters_from_one() -> None:
    assert line_and_column("é = 1\n→→x", 0) == (1, 1)
    assert line_and_column("é = 1\n→→x", 8) == (2, 3)
