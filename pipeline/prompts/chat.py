"""Chat messages in the form that a chat template takes.

A content may be a text or a list of parts, the arguments of a tool call an object or its JSON as a text. A template
takes one of these forms or both, and prints the other one as Python does, or leaves it out, without an error. So each
template is asked once, with marked messages, and messages of the other form are converted: nothing in them is changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from pipeline.prompts.types import JsonValue, Message

_MARK = "q7Wd2"
_USER: Message = {"role": "user", "content": "x"}
# Nine letters and digits: some templates take no other one.
_CALL = "call12345"


class ChatForms:
    """The forms that one chat template takes.

    Args:
        apply: Renders messages as a text.
    """

    def __init__(self, apply: Callable[[list[Message]], Any]) -> None:
        self._apply = apply
        self._takes: dict[tuple[str, str], bool] = {}

    def adapted(self, messages: list[Message]) -> list[Message]:
        """Return the messages in the form that the template takes; those that it takes in no form as they are."""
        given = [self._with_arguments(self._with_content(_without_null_keys(message))) for message in messages]
        return self._without_printed_none(given)

    def _with_content(self, message: Message) -> Message:
        content, role = message.get("content"), str(message["role"])
        if isinstance(content, str):
            if not content or self._shows(role, "text") or not self._shows(role, "parts"):
                return message
            return {**message, "content": [{"type": "text", "text": content}]}
        if (text := text_of(content)) is None or self._shows(role, "parts") or not self._shows(role, "text"):
            return message
        return {**message, "content": text}

    def _with_arguments(self, message: Message) -> Message:
        calls = message.get("tool_calls")
        if not isinstance(calls, list):
            return message
        return {**message, "tool_calls": [self._call_with_arguments(call) for call in calls]}

    def _call_with_arguments(self, call: JsonValue) -> JsonValue:
        if not isinstance(call, dict):
            return call
        if isinstance(inner := call.get("function"), dict):
            return {**call, "function": self._call_with_arguments(inner)}
        given = call.get("arguments")
        if isinstance(given, str):
            try:
                found = json.loads(given)
            except ValueError:
                return call
            if not isinstance(found, dict) or self._shows("call", "text") or not self._shows("call", "object"):
                return call
            return {**call, "arguments": found}
        if isinstance(given, dict) and not self._shows("call", "object") and self._shows("call", "text"):
            return {**call, "arguments": json.dumps(given, ensure_ascii=False)}
        return call

    def _without_printed_none(self, messages: list[Message]) -> list[Message]:
        """Return the messages, a null content as an empty text if the template prints it as None."""
        if all(message.get("content", "") is not None for message in messages):
            return messages
        empty = [message if message.get("content", "") is not None else {**message, "content": ""}
                 for message in messages]  # fmt: skip
        given, without = self._rendered(messages), self._rendered(empty)
        prints = without is not None and (given is None or given.count("None") > without.count("None"))
        return empty if prints else messages

    def _shows(self, role: str, form: str) -> bool:
        """Return whether the template renders a message, or a call, of this form as it should."""
        if (role, form) not in self._takes:
            self._takes[role, form] = self._shows_call(form) if role == "call" else self._shows_content(role, form)
        return self._takes[role, form]

    def _shows_content(self, role: str, form: str) -> bool:
        content: JsonValue = _MARK if form == "text" else [{"type": "text", "text": _MARK}]
        message: Message = {"role": role, "content": content}
        chats = [[message]]
        if role == "assistant":
            chats = [[_USER, message, _USER]]
        elif role in ("system", "developer"):
            chats = [[message, _USER]]
        elif role == "tool":
            arguments: JsonValue = {} if self._shows("call", "object") else "{}"
            answer = {**message, "name": "f", "tool_call_id": _CALL}
            chats = [[_USER, call, answer] for call in _calling(arguments)]
        # Some templates write the text of a tool as JSON.
        printed = [f"'{_MARK}'"] if (role, form) == ("tool", "text") else [f"'{_MARK}'", f'"{_MARK}"']
        return any(_MARK in text and not any(wrong in text for wrong in printed) for text in self._all_rendered(chats))

    def _shows_call(self, form: str) -> bool:
        as_text = json.dumps({"key": _MARK})
        answer: Message = {"role": "tool", "name": "f", "tool_call_id": _CALL, "content": "y"}
        calls = _calling({"key": _MARK} if form == "object" else as_text)
        # The last one is the text of an object inside the braces of another one.
        wrong = '\\"key', "'key'", "{" + as_text
        return any(
            _MARK in text and not any(each in text for each in wrong)
            for text in self._all_rendered([[_USER, call, answer] for call in calls])
        )

    def _all_rendered(self, chats: Iterable[list[Message]]) -> Iterator[str]:
        return (text for messages in chats if (text := self._rendered(messages)) is not None)

    def _rendered(self, messages: list[Message]) -> str | None:
        try:
            text = self._apply(messages)
        # A template is foreign code.
        except Exception:  # noqa: BLE001
            return None
        return text if isinstance(text, str) else None


def _without_null_keys(message: Message) -> Message:
    """Return a message without keys that are null, as transformers 5.23 does itself; a null content stays."""
    if None not in message.values():
        return message
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _calling(arguments: JsonValue) -> list[Message]:
    """Return a message with a call, in each form that its content may have: some templates take one alone."""
    call: JsonValue = {"type": "function", "id": _CALL, "function": {"name": "f", "arguments": arguments}}
    contents: list[JsonValue] = ["", None, [{"type": "text", "text": "x"}]]
    return [{"role": "assistant", "content": content, "tool_calls": [call]} for content in contents]


def text_of(content: object) -> str | None:
    """Return the text of a content that is a text, or parts that are all texts; None for another one."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        return None
    texts = [part if isinstance(part, str) else _text_of_part(part) for part in content]
    return None if None in texts else "".join(cast("list[str]", texts))


def _text_of_part(part: object) -> str | None:
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    return None
