"""A line of a process's output as a record: process, level, message.

A line that `pipeline.telemetry.log` formatted, as text or as JSON, is parsed; any other line that a process prints is a
line of that process at level info. The writer of a line is known from its origin, never from its content.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field
from typing import Any

LEVELS = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
"""Levels, with their priority in syslog."""

_TEXT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (\w+) (\S+) ([\w.]+): (.*)", re.DOTALL)
_RAW = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z \w+ (\S+) ")
# A value extends to the next name: text lines quote values with blanks only if they were passed by `extra=`.
_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|.*?)(?= \w+=|$)')
_HEAD = ("time", "level", "process", "logger", "event", "exception")


@dataclass(frozen=True)
class Line:
    """One line.

    Attributes:
        message: The text without time, level and process.
        level: A key of `LEVELS`.
        logger: Module that logged the line; empty for a line that was printed.
        event: The message without its fields.
        fields: The ``name=value`` pairs after the event.
    """

    message: str
    level: str = "info"
    logger: str = ""
    event: str = ""
    fields: dict[str, str] = field(default_factory=dict)


def parse(text: str, process: str) -> Line:
    """Parse a line of `process`."""
    if text.startswith("{") and (record := _object(text)) is not None and record.get("process") == process:
        return _from_json(record)
    found = _TEXT.fullmatch(text)
    if found is None or found[2] != process or found[1].lower() not in LEVELS:
        return Line(text)
    level, _, logger, message = found.groups()
    first, _, _ = message.partition("\n")
    event, _, rest = first.partition(": ")
    fields = {}
    if _FIELD.match(rest):
        fields = {name: _unquoted(value) for name, value in _FIELD.findall(rest)}
    return Line(message, level.lower(), logger, event if fields else first, fields)


def stored(text: str, process: str, *, as_json: bool) -> str:
    """Return the line for a log file of several processes: with its time and its process."""
    if parse(text, process).logger:
        return text
    now_s = time.time()
    stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now_s))}.{int(now_s % 1 * 1000):03d}Z"
    if as_json:
        return json.dumps({"time": stamp, "level": "info", "process": process, "line": text}, ensure_ascii=False)
    return f"{stamp} INFO {process} | {text}"


def process_of(text: str) -> str:
    """Return the process that wrote a line of a log file; empty if the line continues the one before."""
    if text.startswith("{"):
        return str((_object(text) or {}).get("process", ""))
    found = _RAW.match(text)
    return found[1] if found else ""


def is_of(process: str, role: str) -> bool:
    """Return whether a process such as ``rollout-0`` matches `role`: ``rollout``, ``rollout-0``, or empty for all."""
    return not role or process == role or process.rpartition("-")[0] == role


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _from_json(record: dict[str, Any]) -> Line:
    event, level = str(record.get("event", "")), str(record.get("level", ""))
    fields = {name: str(value) for name, value in record.items() if name not in _HEAD}
    message = event + (": " if fields else "") + " ".join(f"{name}={value}" for name, value in fields.items())
    if trace := record.get("exception"):
        message += f"\n{trace}"
    return Line(message, level if level in LEVELS else "info", str(record.get("logger", "")), event, fields)


def _unquoted(value: str) -> str:
    if not value.startswith('"'):
        return value
    try:
        return str(json.loads(value))
    except ValueError:
        return value
