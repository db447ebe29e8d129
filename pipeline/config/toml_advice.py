"""Corrections of a line that is not valid TOML; each correction has been parsed before it is shown."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator

_PAIR = re.compile(r"(\s*)(?:export\s+)?([\w.\"'-]+)(\s*(?::=|==|=|:)\s*|\s+)(.*?)\s*")
_HEADER = re.compile(r"\[+[\w.-]+\]+\s*(#|$)", re.MULTILINE)
_WORDS = {
    "yes": "true", "on": "true", "no": "false", "off": "false", "nan": "nan", "infinity": "inf", "true": "true",
    "false": "false",
}  # fmt: skip
_NOTHING = ("none", "null", "nil", "undefined", "~")
_NEVER_CLOSED = (
    ("unclosed array", r"=\s*(\[)", "list is not closed, a ] is missing"),
    ("unclosed inline table", r"=\s*(\{)", "table is not closed, a } is missing"),
    ('expected "\'"', r"[=\[,]\s*(')[^'\n]*$", "string is not closed, a ' is missing at the end of the line"),
    ("expected \"'''\"", r"(''')", "string is not closed, ''' is missing"),
    ("unterminated string", r'(""")', 'string is not closed, """ is missing'),
)
_TYPOGRAPHIC = str.maketrans("“”„‘’", '"""\'\'')


def advise(text: str, offset: int, error: str) -> tuple[int, str]:
    """Return the place to show for a syntax error, and the error with the probable correction.

    Args:
        text: The whole file.
        offset: Offset of the error in tomllib; the end of the text if a bracket or quote is never closed.
        error: The message of tomllib, without the place.
    """
    offset, error = _opening(text, offset, error)
    start = text.rfind("\n", 0, offset) + 1
    line = text[start:].partition("\n")[0]
    if _value_of(line).lower() in _NOTHING:
        return offset, f"{error}: TOML has no such value, leave the key out"
    for candidate in _candidates(line):
        if candidate.strip() != line.strip() and _is_toml(candidate):
            return offset, f"{error}, did you mean {candidate.strip()}"[:200] + "?"
    if text.lstrip().startswith("{"):
        return offset, f"{error}: this looks like JSON, a configuration is TOML"
    if error.startswith(("expected '='", "invalid statement")):
        return offset, f"{error}: a line is key = value, [section] or # comment"
    if error == "cannot overwrite a value":
        return offset, f"{error}: it was set above"
    if text[offset : offset + 1] == "\r":
        return offset, f"{error}: a carriage return alone ends no line"
    return offset, error if _value_of(line) or error != "invalid value" else "value is missing"


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


def _value_of(line: str) -> str:
    match = _PAIR.fullmatch(line.partition("#")[0])
    return match[4] if match else ""


def _candidates(line: str) -> Iterator[str]:
    """Yield lines that may have been meant, the likeliest first."""
    for comment in ("//", ";", "--"):
        before, mark, after = line.partition(comment)
        if mark:
            yield f"{before}#{after}" if after or not before.strip() else before
    header = line.partition("#")[0].strip()
    if match := re.fullmatch(r"\[+\s*([\w.-]+)\s*\]*|([\w.-]+)\s*\]+", header):
        yield f"[{match[1] or match[2]}]"
    if match := re.fullmatch(r"([\w-]+):", header):
        yield f"[{match[1]}]"
    if match := re.fullmatch(r"\[([\w-]+)\]\s*\.\s*(.*)", header):
        yield f"{match[1]}.{match[2]}"
    if match := re.fullmatch(r"[-*]\s+(.*)", header):
        yield from (match[1], *_candidates(match[1]))
    # Text after a # is a comment only if it is not within quotes; both readings are tried.
    for body in (line.partition("#")[0], line):
        if match := _PAIR.fullmatch(body):
            for value in _values(match[4]):
                yield f"{match[1]}{match[2]} = {value}"


def _values(value: str) -> Iterator[str]:
    yield value
    plain = value.translate(_TYPOGRAPHIC)
    yield plain
    yield _WORDS.get(value.lower(), value)
    yield value.rstrip(",; ")
    if "\\" in value:
        yield "'" + value.strip("\"'") + "'"
    yield re.sub(r"(?<=\d),(?=\d{3}\b)", "_", value) if re.fullmatch(r"[\d,]+", value) else value
    yield re.sub(r"^([+-]?)(\.\d)", r"\g<1>0\2", value)
    yield re.sub(r"^([+-]?\d+\.)$", r"\g<1>0", value)
    yield re.sub(r"^([+-]?)0+(?=\d)", r"\1", value)
    yield re.sub(r",\s*([\]}])", r" \1", value).replace("  ", " ")
    yield re.sub(r",(\s*,)+", ",", value)
    yield re.sub(r"(?<=[\w\"'])\s+(?=[\w\"'])", ", ", value) if value.startswith("[") else value
    yield re.sub(r"\b(True|False)\b", lambda match: match[0].lower(), value)
    if value and not set(value) & set("\"'[]{}\n") and value not in ("-", "="):
        yield f'"{value}"' if "\\" not in value else f"'{value}'"


def _is_toml(line: str, parse: Callable[[str], object] = tomllib.loads) -> bool:
    try:
        parse(line)
    except (tomllib.TOMLDecodeError, RecursionError):
        return False
    return True
