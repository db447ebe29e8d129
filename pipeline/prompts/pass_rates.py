"""Rows of prompts with the share of their responses that passed, for `prompts.pass_rate_column`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config.prompts import PromptsConfig
from pipeline.errors import ConfigError
from pipeline.prompts.files import files_of
from pipeline.prompts.lines import LineRows
from pipeline.prompts.source import OpenedPart, parts_of
from pipeline.prompts.tables import without_nulls
from pipeline.storage.files import replacing


def refuse_unwritable(prompts: PromptsConfig, path: Path) -> None:
    """Refuse a file that `write_pass_rates` cannot write, before the pass rates are measured.

    Raises:
        ConfigError: If it is one of the files of the prompts, whose rows without a result would be lost.
        OSError: If no file can be made in its folder.
    """
    for file in files_of(prompts.files[0]):
        if path.exists() and file.exists() and path.samefile(file):
            raise ConfigError(f"--pass-rates: {path} is the file of the prompts itself, give a new one")
    with _temporary(path).open("wb"):
        _temporary(path).unlink()


def write_pass_rates(prompts: PromptsConfig, rates: Mapping[int, float], path: Path, *, column: str) -> int:
    """Write the rows of one source as JSON lines, each with its pass rate; rows without one are left out.

    Args:
        prompts: The section, of one source.
        rates: From the index of a row among all rows of the source to its pass rate, 0 to 1.
        path: The file to write; an earlier one is replaced in one step.
        column: Name of the column of the pass rate; one that the rows have is overwritten.

    Returns:
        The number of rows left out.

    Raises:
        ConfigError: If the source cannot be read.
        OSError: If the file cannot be written.
    """
    (part,) = parts_of(prompts)
    with (
        contextlib.closing(OpenedPart(part, filtered=False)) as opened,
        replacing(path, temporary=_temporary(path)) as descriptor,
        # Half of a surrogate pair, which a further column may hold, is written as JSON escapes it.
        open(descriptor, "w", closefd=False, encoding="utf-8", errors="backslashreplace") as file,
    ):
        for index in range(len(opened)):
            if index in rates:
                rows, at = opened.rows_at(index)
                row = rows.record(at)
                if not isinstance(rows, LineRows):
                    # In a line a key that is null is there, for a chat template too; in a table it is a key that lacks.
                    for name in filter(None, (part.names.prompt, part.names.tools)):
                        row = _without_nulls(row, name)
                file.write(json.dumps({**row, column: rates[index]}, ensure_ascii=False) + "\n")
        return len(opened) - len(rates)


def _without_nulls(record: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a row whose column, by its name or by a path with dots, has no keys that are null."""
    head, _, rest = name.partition(".")
    if name in record:
        return {**record, name: without_nulls(record[name])}
    return {**record, head: _without_nulls(record[head], rest)} if isinstance(record.get(head), dict) else record


def _temporary(path: Path) -> Path:
    # Not with another suffix: the user may have a file of that name.
    return path.with_name(f".{path.name}.new")
