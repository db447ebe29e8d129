"""The rows that `rlhfd try-reward` scores: of a file, or prompts of the configuration with given responses."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.prompts.lines import LineRows, problem_of_format
from pipeline.prompts.rows import row_of
from pipeline.prompts.source import PromptSource
from pipeline.prompts.tables import table_kind
from pipeline.prompts.types import Prompt

_ERRORS_SHOWN = 20


@dataclasses.dataclass(frozen=True)
class Row:
    """A prompt with a response to be scored.

    Attributes:
        location: File and line of the row, or the prompt's number.
        is_cut: Whether the response was cut at the length limit: no stop token follows it.
    """

    location: str
    prompt: Prompt
    response: str
    is_cut: bool = False


def of_file(path: Path) -> list[Row]:
    """Return the rows of a JSON lines file: ``prompt``, ``response``, and if wanted ``answer`` and ``cut``.

    Raises:
        ConfigError: If the file cannot be read, has no row or broken lines; the message has a line for each.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: give a file of JSON lines")
    problem = f"the file is {kind}, not JSON lines" if (kind := table_kind(path)) else problem_of_format(path)
    if problem:
        raise ConfigError(f"{path}:1:1: {problem}")
    rows: list[Row] = []
    problems: list[str] = []
    with contextlib.closing(LineRows(path, field="")) as lines:
        for index in range(len(lines)):
            try:
                rows.append(_row(lines.record(index), f"{path}:{lines.line(index)}", len(rows)))
            except ConfigError as error:
                problems.append(str(error))
    if len(problems) > _ERRORS_SHOWN:
        problems[_ERRORS_SHOWN:] = [f"{path}: {len(problems) - _ERRORS_SHOWN} more broken lines"]
    if problems:
        raise ConfigError("\n".join(problems))
    if not rows:
        raise ConfigError(f'{path}:1:1: no row in the file; a row is {{"prompt": "...", "response": "..."}}')
    return rows


def of_prompts(config: Config, responses: Sequence[str], count: int) -> Iterator[Row]:
    """Yield a row for each of the first prompts of the run and each response.

    Raises:
        ConfigError: If the prompts cannot be read.
    """
    with contextlib.closing(PromptSource(config.prompts, config.daemon.seed)) as source:
        for position in range(min(count, len(source))):
            prompt = source.at(position)
            for response in responses:
                yield Row(f"prompt {prompt.index}", prompt, response)


def is_broken(text: str) -> bool:
    """Return whether a text holds half of a surrogate pair, as an argument that is no UTF-8 does."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _row(record: Mapping[str, Any], where: str, index: int) -> Row:
    prompt, answer, images, columns, *_ = row_of(record, where)
    if images:
        raise ConfigError(f"{where}:1: a row with images cannot be scored here")
    response, is_cut = record.get("response"), record.get("cut", False)
    if not isinstance(response, str):
        named = f'no key "response" among {", ".join(sorted(record))}' if response is None else "response is no text"
        raise ConfigError(f"{where}:1: {named}")
    if not isinstance(is_cut, bool):
        raise ConfigError(f"{where}:1: cut is neither true nor false")
    if is_broken(response):
        raise ConfigError(f"{where}:1: response holds half of a surrogate pair, which no tokenizer takes")
    others = {key: value for key, value in columns.items() if key not in ("response", "cut")}
    return Row(where, Prompt(index, 0, index, prompt, answer, columns=others), response, is_cut)
