"""All prompts of a configuration, read once, with all broken rows named."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from pipeline.config.types import BUILTIN_PREFIX
from pipeline.errors import ConfigError
from pipeline.prompts.files import files_of, open_rows
from pipeline.prompts.rows import MissingColumnError, suggested
from pipeline.prompts.source import AnyPrompts, OpenedPart, Part, nothing_wanted, parts_of
from pipeline.prompts.tables import table_kind
from pipeline.prompts.types import JsonValue, Message

_ERRORS_SHOWN = 20


class FileRow(NamedTuple):
    """A row for a note: its location ``file:line:1``, its prompt and its answer."""

    location: str
    prompt: str | list[Message]
    answer: JsonValue


def check(prompts: AnyPrompts) -> int:
    """Read all rows once, in bounded memory, and refuse the prompts if any row is broken.

    Args:
        prompts: The section of the configuration, or the path of one file. The embedded task is not read.

    Returns:
        The number of prompts, at least 1 of each source.

    Raises:
        ConfigError: If a file cannot be read or a source has no prompt. If rows are broken, the message names the first
            20 of them, as ``prompts.jsonl:7:1: problem``; a column that no row has is one line.
    """
    problems: list[str] = []
    count = 0
    for part in parts_of(prompts):
        if part.source.path.startswith(BUILTIN_PREFIX):
            continue
        try:
            count += _checked(part)
        except ConfigError as error:
            problems += str(error).splitlines()
    if problems:
        raise ConfigError("\n".join(problems))
    return count


def file_rows(prompts: AnyPrompts) -> Iterator[FileRow]:
    """Yield each row in the order of the files.

    Raises:
        ConfigError: If a file cannot be read, or at a broken row.
    """
    for part in parts_of(prompts):
        if part.source.path.startswith(BUILTIN_PREFIX):
            continue
        with contextlib.closing(OpenedPart(part, filtered=False)) as opened:
            for rows in opened.files:
                for at in range(len(rows)):
                    row = opened.read(rows, at)
                    yield FileRow(f"{rows.path}:{rows.line(at)}:1", row.prompt, row.answer)


def left_out(prompts: AnyPrompts) -> list[str]:
    """Return the columns of bytes that are not read, each with its file."""
    found = []
    for part in parts_of(prompts):
        for path in () if part.source.path.startswith(BUILTIN_PREFIX) else files_of(part.source, field=part.field):
            if table_kind(path):
                with contextlib.closing(open_rows(path, field=part.field)) as rows:
                    found += [f"{name} of {path}" for name in rows.left_out]
    return found


def _checked(part: Part) -> int:
    """Return the number of prompts of a source."""
    errors: list[ConfigError] = []
    taken = total = broken = missing = 0
    with contextlib.closing(OpenedPart(part, filtered=False)) as opened:
        for rows in opened.files:
            for at in range(len(rows)):
                total += 1
                try:
                    taken += part.takes(opened.read(rows, at))
                except ConfigError as error:
                    broken += 1
                    missing += isinstance(error, MissingColumnError) and error.column not in error.found
                    if broken <= _ERRORS_SHOWN:
                        errors.append(error)
        name = str(opened.files[0].path if len(opened.files) == 1 else part.source.path)
    if broken and missing == total and isinstance(first := errors[0], MissingColumnError):
        key = "prompts.sources" if part.field == "prompts.sources" else f"prompts.{first.key}"
        raise ConfigError(
            f'{key}: no column "{first.column}" in {name}, which has {", ".join(first.found) or "none"}'
            f"{suggested(first.column, first.found)}"
        )
    lines = list(map(str, errors))
    if broken > _ERRORS_SHOWN:
        lines.append(f"{name}: {broken - _ERRORS_SHOWN} more broken lines")
    if lines:
        raise ConfigError("\n".join(lines))
    if not taken:
        raise ConfigError(f"{name}:1:1: {nothing_wanted(part)}")
    return taken
