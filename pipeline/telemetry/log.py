"""Logging: an event, then its fields; one line a record, as text or as JSON.

    log.info("weights published: version=%d nbytes=%d", version, nbytes)

    2026-11-21T07:30:01.250Z INFO trainer-0 pipeline.models.weights.store: weights published: version=3 nbytes=3440640
    {"time": "2026-11-21T07:30:01.250Z", "level": "info", "process": "trainer-0",
     "logger": "pipeline.models.weights.store", "event": "weights published", "version": 3, "nbytes": 3440640}

In JSON the fields of such a message keep their names and types; any other message is an event as a whole. Values passed
by `extra=` are fields too.
"""

from __future__ import annotations

import json as json_module
import logging
import math
import re
import sys
import time
from collections.abc import Callable
from typing import TextIO

_PLACEHOLDER = re.compile(r"%(?!%)")
_FIELD = re.compile(r"(\w+)=%[-+ #0-9.]*[a-z]\b")
_ADDED = {"message", "asctime", "taskName", "color_message"}


def configure(process: str, *, level: str = "info", json: bool = False, stderr: bool = True) -> None:
    """Send the records of this process to its standard error; a second call replaces the first one's handler.

    Args:
        process: Name of the process, such as ``rollout-0``.
        level: Lowest level that is shown: debug, info, warning or error.
        json: Whether a line is a JSON object.
        stderr: False if another handler writes the records to the same place.
    """
    root = logging.getLogger()
    for handler in [*root.handlers]:
        if isinstance(handler, _StderrHandler):
            root.removeHandler(handler)
    if stderr:
        handler = _StderrHandler()
        handler.setFormatter(JsonFormatter(process) if json else TextFormatter(process))
        root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(True)


def count_warnings(count: Callable[[str], None]) -> None:
    """Call `count` with the level of every record at warning or above: ``warning``, ``error`` or ``critical``.

    Calls come one at a time, from any thread that logs.
    """
    root = logging.getLogger()
    for handler in [*root.handlers]:
        if isinstance(handler, _CountingHandler):
            root.removeHandler(handler)
    root.addHandler(_CountingHandler(count))


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the present value of ``sys.stderr``: the terminal's live panel replaces it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class _CountingHandler(logging.Handler):
    def __init__(self, count: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._count = count

    def emit(self, record: logging.LogRecord) -> None:
        level = "critical" if record.levelno >= logging.CRITICAL else "error" if record.levelno >= logging.ERROR else ""
        self._count(level or "warning")


class TextFormatter(logging.Formatter):
    """One readable line a record; a traceback follows on lines of its own."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line."""
        fields = "".join(f" {name}={_quoted(value)}" for name, value in _extra(record).items())
        message = _one_line(record.getMessage())
        line = f"{_utc(record)} {record.levelname} {self._process} {record.name}: {message}{fields}"
        trace = self._trace(record)
        return f"{line}\n{trace}" if trace else line

    def _trace(self, record: logging.LogRecord) -> str:
        parts = [self.formatException(record.exc_info)] if record.exc_info and record.exc_info[0] else []
        return "\n".join([*parts, *([record.stack_info] if record.stack_info else [])])


class JsonFormatter(TextFormatter):
    """One JSON object a record, on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line."""
        event, fields = _event_and_fields(record)
        head = {
            "time": _utc(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "event": event,
        }
        # A field cannot overwrite a standard member of the same name.
        taken = {f"{name}_" if name in head else name: _plain(value) for name, value in fields.items()}
        trace = self._trace(record)
        return json_module.dumps({**head, **taken, **({"exception": trace} if trace else {})}, ensure_ascii=False)


def _event_and_fields(record: logging.LogRecord) -> tuple[str, dict[str, object]]:
    """Split a message of the form ``event: a=%d b=%s``; any other message is the event as a whole."""
    extra = _extra(record)
    template, values = str(record.msg), record.args
    names = _FIELD.findall(template)
    if not isinstance(values, tuple) or not names or len(names) != len(values):
        return record.getMessage(), extra
    event, separator, fields = template.partition(": ")
    others = _FIELD.sub("", fields).strip(" ,")
    if not separator or others or len(_PLACEHOLDER.findall(template)) != len(names):
        return record.getMessage(), extra
    return event.replace("%%", "%"), {**dict(zip(names, values, strict=True)), **extra}


def _extra(record: logging.LogRecord) -> dict[str, object]:
    # Of a record that is made now: Ray's factory, for one, gives each record an attribute more.
    standard = vars(logging.makeLogRecord({})).keys() | _ADDED
    return {name: value for name, value in vars(record).items() if name not in standard}


def _plain(value: object) -> object:
    """Return a value that JSON can hold; NaN and infinity become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _quoted(value: object) -> str:
    text = str(value)
    return json_module.dumps(text, ensure_ascii=False) if not text or set(text) & set(' "=\n\t') else text


def _one_line(text: str) -> str:
    """Return the text on one line, so that it is not taken for several records."""
    return text.replace("\r", r"\r").replace("\n", r"\n")


def _utc(record: logging.LogRecord) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.msecs):03d}Z"
