"""The words of a shell script's commands, with its variables and arrays filled in. Nothing is executed.

A value of a variable or an array is certain where each run of the command has it. One that a branch sets (``if``,
``case``, a loop, a function, ``&&``) is certain within that branch alone, or where the others give the same.
"""

from __future__ import annotations

import ast
import itertools
import operator
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from pipeline.errors import ConfigError

_VARIABLE: Final = re.compile(r"\$(?:\{(\w+)(?::?-((?:\$\{[^}]*\}|[^}])*))?\}|(\w+)|\(\(((?:[^()]|\([^()]*\))*)\)\))")
_ARRAY: Final = re.compile(r"\$\{(\w+)\[[@*]\]\}")
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_ARITHMETIC: Final[dict[type, Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    # Of whole numbers, as the shell divides those of one sign.
    ast.Div: operator.floordiv,
}
_OPENING: Final = ("if", "for", "while", "until", "case", "select", "{")
_CLOSING: Final = ("fi", "done", "esac", "}")
_ANOTHER: Final = ("else", "elif")
_BLANKS: Final = re.compile(r"(?:[ \t]|\\\n)+|#[^\n]*")
_DOCUMENT: Final = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_OPERATOR: Final = re.compile(r"\d*>>?(?:&\d)?|&>|<|;;|&&|\|\||[;&|()]")
_ENDS_OF_WORDS: Final = frozenset(" \t\n;&|()<>")
_BEFORE_COMMANDS: Final = (
    "then", "do", "else", "elif", "if", "while", "until", "!",
    "export", "declare", "local", "readonly", "typeset", "env",
)  # fmt: skip
"""Words behind which a command or an assignment begins."""

Block = tuple[int, ...]
"""The branches around a command, by their numbers, the outermost first."""


class Word(NamedTuple):
    """A word of a command, or the end of one.

    Attributes:
        text: The word without its quotes, filled in; empty at the end of a command.
        is_certain: Whether each run of the command has it.
        end: What ends the command: a new line, an operator such as ``|``; empty for a word.
    """

    text: str
    is_certain: bool = True
    end: str = ""


class _Branch(NamedTuple):
    """A part of the script that not each run executes; one behind ``&&`` or ``||`` ends with its line."""

    number: int
    ends_with_line: bool


class _Set(NamedTuple):
    """A value that a variable or an array has from some place on, and the block of this place."""

    block: Block
    value: str | list[Word]


def words(path: Path, text: str) -> list[Word]:
    """Return the words of a script's commands, in their order, and the ends of the commands.

    Args:
        path: The file, for errors.
        text: The script; lines that end in a backslash go on.

    Raises:
        ConfigError: If quotes do not end; the message has the line.
    """
    return _Script().words(_tokens(path, text.replace("\r\n", "\n")))


class _Script:
    """A script that is read from its beginning to its end."""

    def __init__(self) -> None:
        self._sets: dict[str, list[_Set]] = {}
        self._branches: list[_Branch] = []
        self._count = 0

    def words(self, tokens: Iterator[tuple[str, str]]) -> list[Word]:
        """Return the words of commands; arrays are no words, but for where they are used."""
        found: list[Word] = []
        is_first = True
        for raw, end in tokens:
            if end:
                self._end(end)
                is_first = True
                found.append(Word("", end=end))
                continue
            if raw.endswith("=(") and (match := _ASSIGNMENT.fullmatch(raw[:-1])):
                elements = [
                    word for inner, other in _up_to_bracket(tokens) if not other for word in self._expanded(inner)
                ]
                before = self._elements(match[1]) if match[2] else []
                self._set(match[1], [*before, *elements])
                continue
            if is_first or raw == "{":
                self._follow(raw)
            match = _ASSIGNMENT.fullmatch(raw) if is_first else None
            is_first = raw == "{" or (is_first and (match is not None or raw in _BEFORE_COMMANDS or raw[0:1] == "-"))
            if match:
                before_it = f"${{{match[1]}:-}}" if match[2] else ""
                self._set(match[1], self._filled(before_it + match[3]))
            found += self._expanded(raw)
        return found

    @property
    def _block(self) -> Block:
        return tuple(branch.number for branch in self._branches)

    def _open(self, *, ends_with_line: bool = False) -> None:
        self._count += 1
        self._branches.append(_Branch(self._count, ends_with_line))

    def _close(self) -> None:
        while self._branches and self._branches.pop().ends_with_line:
            pass

    def _follow(self, word: str) -> None:
        """Enter or leave a branch by the first word of a command."""
        if word in _ANOTHER or word in _CLOSING:
            self._close()
        if word in _ANOTHER or word in _OPENING:
            self._open()

    def _end(self, end: str) -> None:
        """Enter or leave a branch at the end of a command."""
        is_list = bool(self._branches) and self._branches[-1].ends_with_line
        if end in ("&&", "||") and not is_list:
            self._open(ends_with_line=True)
        elif end in ("\n", ";") and is_list:
            self._branches.pop()
        elif end == ";;":
            self._close()
            self._open()

    def _set(self, name: str, value: str | list[Word]) -> None:
        self._sets.setdefault(name, []).append(_Set(self._block, value))

    def _possible(self, name: str) -> tuple[list[_Set], bool]:
        """Return the values that a name may have here, and whether it has one of them in each run."""
        found: list[_Set] = []
        has_one = False
        for one in self._sets.get(name, []):
            if self._block[: len(one.block)] == one.block:
                found, has_one = [], True
            found.append(one)
        return found, has_one

    def _value(self, name: str) -> str | None:
        """Return the value of a variable; None where it is not certain."""
        possible, has_one = self._possible(name)
        values = {one.value for one in possible if isinstance(one.value, str)}
        return values.pop() if has_one and len(values) == 1 else None

    def _elements(self, name: str) -> list[Word]:
        """Return the words that an array may have."""
        possible, has_one = self._possible(name)
        lists = [one.value for one in possible if isinstance(one.value, list)]
        if has_one and len(lists) == 1:
            return lists[0]
        found: dict[str, Word] = {}
        for word in (word for one in lists for word in one):
            in_all = has_one and all(word in one for one in lists)
            found.setdefault(word.text, word._replace(is_certain=word.is_certain and in_all))
        return list(found.values())

    def _expanded(self, raw: str) -> list[Word]:
        """Return a word filled in, or the words of the array or of the variable that it stands for."""
        match = _ARRAY.fullmatch(raw)
        if match and match[1] in self._sets:
            return self._elements(match[1])
        match = _VARIABLE.fullmatch(raw)
        value = None if match is None else self._value(match[1] or match[3] or "")
        if value is not None and ("$(" in value or "`" in value):
            return [Word(value)]
        try:
            return [Word(self._filled(raw))] if value is None else [*map(Word, shlex.split(value))]
        except ValueError:
            return [Word(self._filled(raw))]

    def _filled(self, text: str) -> str:
        """Return a text with the variables of the script filled in; those that are not certain keep their ``$``."""

        def value(match: re.Match[str]) -> str:
            if match[4] is not None:
                return self._computed(match[4]) or match[0]
            name, otherwise = match[1] or match[3], match[2]
            known = self._value(name)
            if known or (known is not None and otherwise is None):
                return known
            if (known is None and name in self._sets) or (otherwise is None and name != "HOME"):
                return match[0]
            return "~" if otherwise is None else self._filled(otherwise.strip("\"'"))

        return _VARIABLE.sub(value, text)

    def _computed(self, expression: str) -> str:
        """Return the number of an expression of whole numbers; empty where it is not known."""
        named = re.sub(r"(?<![\w$\{])([A-Za-z_]\w*)", r"$\1", expression)
        try:
            return str(_number(ast.parse(self._filled(named).strip(), mode="eval").body))
        except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
            return ""


def _number(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_number(inner)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _ARITHMETIC:
            return _ARITHMETIC[type(sign)](_number(left), _number(right))
    raise ValueError


def _up_to_bracket(tokens: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    return itertools.takewhile(lambda token: token[1] != ")", tokens)


def _tokens(path: Path, text: str) -> Iterator[tuple[str, str]]:
    """Yield the words of a script, without quotes, and the operators and new lines between them."""
    at = 0
    documents: list[str] = []
    while at < len(text):
        if text[at] == "\n":
            at += 1
            yield "", "\n"
            for word in documents:
                end = re.compile(rf"^[ \t]*{word}[ \t]*$", re.MULTILINE).search(text, at)
                # Its lines are those of one command, such as `read -d '' options <<EOF`.
                body = text[at:] if end is None else text[at : end.start()]
                yield from (token for token in _tokens(path, body) if token[1] != "\n")
                at = len(text) if end is None else end.end()
            documents = []
        elif match := _BLANKS.match(text, at):
            at = match.end()
        elif match := _DOCUMENT.match(text, at):
            documents.append(match[2])
            at = match.end()
        elif match := _OPERATOR.match(text, at):
            at = match.end()
            yield "", match[0]
        else:
            word, at = _word(path, text, at)
            yield word, ""


def _word(path: Path, text: str, at: int) -> tuple[str, int]:
    """Return the word that begins at a place, and where it ends; one that begins an array ends with ``=(``."""
    found, begin, is_quoted = "", at, False
    while at < len(text) and (is_quoted or text[at] not in _ENDS_OF_WORDS):
        sign, end = text[at], at + 1
        if sign == '"':
            is_quoted = not is_quoted
        elif sign == "\\":
            end += 1
            if text[at + 1 : end] == "\n" and not is_quoted:
                break
            keeps = is_quoted and text[at + 1 : end] not in ('"', "\\", "$", "`")
            found += "" if text[at + 1 : end] == "\n" else text[at:end] if keeps else text[at + 1 : end]
        elif sign == "'" and not is_quoted:
            end = text.find("'", end) + 1
            found += text[at + 1 : end - 1]
        elif sign == "`":
            end = text.find("`", end) + 1
            found += text[at:end]
        elif sign == "$" and text[end : end + 1] in ("(", "{"):
            end = _bracket_end(text, end)
            found += text[at:end]
        else:
            found += sign
        if not end:
            break
        at = end
    else:
        if not is_quoted:
            is_array = text[at : at + 1] == "(" and found.endswith("=") and _ASSIGNMENT.fullmatch(found)
            return (f"{found}(", at + 1) if is_array else (found, at)
    if text[at : at + 2] == "\\\n" and not is_quoted:
        return found, at
    line = text.count("\n", 0, begin) + 1
    raise ConfigError(f"{path}:{line}: no closing quotation, for a word that begins here")


def _bracket_end(text: str, at: int) -> int:
    """Return where the bracket ends that opens at a place, inner ones included; 0 if it does not."""
    opening, closing, depth = text[at], {"(": ")", "{": "}"}[text[at]], 0
    for place in range(at, len(text)):
        depth += {opening: 1, closing: -1}.get(text[place], 0)
        if not depth:
            return place + 1
    return 0
