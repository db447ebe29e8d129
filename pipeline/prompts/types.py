"""A prompt and its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
Message: TypeAlias = dict[str, JsonValue]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One element of the endless sequence.

    Attributes:
        position: Number in the sequence, from 0.
        epoch: Number of passes over all prompts of its source before this one.
        index: Number of the prompt in its source, from 0, blank lines not counted.
        prompt: The text, or the chat messages.
        answer: Argument ``gt_answer`` of the reward functions; None if the file has none.
        images: Paths of the prompt's images, in the prompt's order.
        file: Path of the file; empty if the prompt is from no file.
        line: Number of its line or row, from 1.
        columns: The further columns of the prompt's row, for the reward functions that name them.
        tools: Functions that the chat template offers, from the row's own column; None if it has none.
    """

    position: int
    epoch: int
    index: int
    prompt: str | list[Message]
    answer: JsonValue
    images: tuple[str, ...] = ()
    file: str = ""
    line: int = 0
    columns: Mapping[str, JsonValue] = field(default_factory=dict)
    tools: list[JsonValue] | None = None

    @property
    def location(self) -> str:
        """File and line, as ``prompts.jsonl:37``; empty if the prompt is from no file."""
        return f"{self.file}:{self.line}" if self.file else ""

    @property
    def named(self) -> str:
        """The prompt at the start of a message: its location, or its number."""
        return f"{self.location}: the prompt" if self.file else f"prompt {self.index}"
