"""A row as prompt, answer, images and further columns.

The prompt is a string or a list of chat messages, the answer any JSON value, or left out. ``"images": ["a.png", ...]``
are paths from the file's own folder: one for each ``{"type": "image"}`` in the messages, or all in front of the text.
Further keys are columns that reward functions get by name.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.errors import ConfigError, counted
from pipeline.prompts.lines import kind_of
from pipeline.prompts.tables import without_nulls
from pipeline.prompts.types import JsonValue, Message

# json.dumps would make one for each row.
_encoder = json.JSONEncoder(ensure_ascii=False)
# Names of the prompt's column in common data sets.
_USUAL_NAMES = ("question", "problem", "query", "instruction", "input", "text", "messages")


class ColumnNames(NamedTuple):
    """The names of a row's columns; a dot enters a column of objects.

    Attributes:
        prompt: Column of the prompt.
        answer: Column of the answer, which every row must have; None: "answer", in the rows that have one.
        tools: Column of the tools, in the rows that have some.
        pass_rate: Column of the pass rate, which every row must have; None: it is not read.
    """

    prompt: str = "prompt"
    answer: str | None = None
    tools: str | None = None
    pass_rate: str | None = None


class Row(NamedTuple):
    """The parts of a row; see `pipeline.prompts.types.Prompt`. `pass_rate` is 0 to 1, None where it is not read."""

    prompt: str | list[Message]
    answer: JsonValue
    images: list[str]
    columns: dict[str, JsonValue]
    tools: list[JsonValue] | None = None
    pass_rate: float | None = None

    @property
    def characters(self) -> int:
        """Characters of the prompt, those of all texts of a chat."""
        if isinstance(self.prompt, str):
            return len(self.prompt)
        return sum(_characters(message.get("content")) for message in self.prompt)


class MissingColumnError(ConfigError):
    """A row lacks a column that it must have.

    Attributes:
        key: The key of ``[prompts]`` that names the column.
        column: The column.
        found: The columns that the row has.
    """

    def __init__(
        self, message: str, *, bare: str = "", key: str = "", column: str = "", found: Sequence[str] = ()
    ) -> None:
        super().__init__(message, bare=bare)
        self.key, self.column, self.found = key, column, found


def row_of(
    record: Mapping[str, Any],
    where: str,
    names: ColumnNames = ColumnNames(),  # noqa: B008 - a constant
    *,
    is_table: bool = False,
) -> Row:
    """Return the parts of a row.

    Args:
        record: The row's columns.
        where: File and line of the row, for errors.
        names: The names of the columns.
        is_table: Whether the row is of a table, where a null in a message or tool is a key that it lacks.

    Raises:
        MissingColumnError: If the row lacks a column that it must have.
        ConfigError: If a part is not of its form.
    """
    prompt, has_prompt = _column(record, names.prompt)
    if not has_prompt:
        raise _missing(record, where, "prompt_column", names.prompt)
    tools = _column(record, names.tools)[0] if names.tools else None
    if is_table:
        prompt, tools = without_nulls(prompt), without_nulls(tools)
    answer, _ = _column(record, names.answer or "answer")
    if names.answer is not None and answer is None:
        raise _missing(record, where, "answer_column", names.answer)
    pass_rate = _column(record, names.pass_rate)[0] if names.pass_rate else None
    if names.pass_rate is not None and pass_rate is None:
        raise _missing(record, where, "pass_rate_column", names.pass_rate)
    images = record.get("images") or []
    tools, problem_of_tools = _tools(tools, names.tools)
    problem = (
        _problem_of_prompt(prompt)
        or _problem_of_images(record, prompt)
        or _problem_of_text([prompt, answer, images])
        or problem_of_tools
        or _problem_of_pass_rate(pass_rate, names.pass_rate)
    )
    if problem:
        raise ConfigError(f"{where}:1: {problem}")
    own = {names.prompt, names.answer or "answer", names.tools, "images", "videos"}
    columns = {key: value for key, value in record.items() if key not in own}
    return Row(prompt, answer, images, columns, tools, pass_rate)


def suggested(column: str, found: Sequence[str]) -> str:
    """Return the end of a message about a column that is not there: its likely name; empty if none is found."""
    usual = [name for name in _USUAL_NAMES if name in found] if column == "prompt" else []
    close = difflib.get_close_matches(column, found, n=1) or usual
    return f', did you mean "{close[0]}"?' if close else ""


def _missing(record: Mapping[str, Any], where: str, key: str, column: str) -> MissingColumnError:
    found = sorted(record)
    if column in record:
        message = f'{where}:1: "{column}" is null'
    else:
        message = f'{where}:1: no key "{column}" among {", ".join(found) or "no keys"}{suggested(column, found)}'
    return MissingColumnError(message, key=key, column=column, found=found)


def _column(record: Mapping[str, Any], name: str) -> tuple[Any, bool]:
    """Return a column and whether the row has it; a name with dots is a column of that name, or enters objects."""
    if name in record:
        return record[name], True
    value: Any = record
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return None, False
        value = value[part]
    return value, True


def _tools(value: Any, name: str | None) -> tuple[list[JsonValue] | None, str]:
    """Return the tools of a row, a list or its JSON as a text, and their problem."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            return None, f"{name} is not JSON: {error}"
    if value is not None and not isinstance(value, list):
        return None, f"{name} is {kind_of(value)}, not a list of functions"
    return value or None, ""


def _problem_of_pass_rate(value: object, name: str | None) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "" if 0 <= value <= 1 else f"{name} is {value}, not a number from 0 to 1"
    return "" if value is None else f"{name} is {kind_of(value)}, not a number from 0 to 1"


def _characters(content: object) -> int:
    if isinstance(content, str):
        return len(content)
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return sum(len(text) for text in texts if isinstance(text, str))


def _problem_of_prompt(prompt: object) -> str | None:
    if isinstance(prompt, str):
        return None if prompt.strip() else "prompt is empty"
    if not isinstance(prompt, list):
        return f"prompt is {kind_of(prompt)}, not a text or a list of chat messages"
    if not prompt:
        return "prompt is an empty list"
    for number, message in enumerate(prompt, start=1):
        if not isinstance(message, dict):
            return f"message {number} is {kind_of(message)}, not an object"
        if not isinstance(message.get("role"), str) or not message["role"]:
            return f'message {number} has no "role"'
        if not isinstance(message.get("content"), str | list) and "tool_calls" not in message:
            return f'message {number} has no "content"'
    return None


def _problem_of_images(record: Mapping[str, Any], prompt: object) -> str | None:
    images = record.get("images") or []
    if record.get("videos"):
        return '"videos" are not read from a prompt file, only "images" are'
    if not isinstance(images, list):
        return f"images is {kind_of(images)}, not a list of paths"
    for number, image in enumerate(images, start=1):
        if not isinstance(image, str) or not image or "\0" in image:
            return f"image {number} is {kind_of(image) if image else 'empty'}, not a path"
    if isinstance(prompt, list):
        parts = sum(_image_parts(message) for message in prompt)
        if parts != len(images):
            return f'{counted(len(images), "image")} for {counted(parts, "part")} of "type": "image" in the messages'
    return None


def _image_parts(message: Message) -> int:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return sum(isinstance(part, dict) and part.get("type") == "image" for part in parts)


def _problem_of_text(texts: list[Any]) -> str | None:
    # A lone surrogate is valid in JSON, but no tokenizer takes it.
    try:
        _encoder.encode(texts).encode("utf-8")
    except UnicodeEncodeError as error:
        return f"prompt, answer or image holds half of a surrogate pair: {error.object[error.start]!r}"
    return None
