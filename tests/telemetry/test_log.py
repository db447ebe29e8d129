from __future__ import annotations

import io
import json
import logging
import math
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.telemetry import log as logs

log = logging.getLogger("pipeline.example")


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = [*root.handlers], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


class Captured:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._text = ""

    def getvalue(self) -> str:
        self._text += self._capsys.readouterr().err
        return self._text


@pytest.fixture
def stderr(capsys: pytest.CaptureFixture[str]) -> Captured:
    return Captured(capsys)


def objects(stream: Captured) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_text_line_names_time_level_process_and_logger(stderr: Captured) -> None:
    logs.configure("trainer-0")
    record = logging.makeLogRecord(
        {
            "name": "pipeline.models.weights.store",
            "levelname": "INFO",
            "levelno": logging.INFO,
            "msg": "weights published: version=%d nbytes=%d",
            "args": (3, 4096),
            "created": 1_000_000_000.25,
            "msecs": 250.0,
        }
    )

    logging.getLogger().handle(record)

    assert stderr.getvalue() == (
        "2001-09-09T01:46:40.250Z INFO trainer-0 pipeline.models.weights.store: "
        "weights published: version=3 nbytes=4096\n"
    )


def test_json_keeps_names_and_types_of_fields(stderr: Captured) -> None:
    logs.configure("rollout-1", json=True)

    log.warning("prompt set aside: line=%d reason=%s mean=%.3f", 7, "too long, by far", 0.5)

    (line,) = objects(stderr)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "process": "rollout-1",
        "logger": "pipeline.example",
        "event": "prompt set aside",
        "line": 7,
        "reason": "too long, by far",
        "mean": 0.5,
    }


@pytest.mark.parametrize(
    ("message", "values", "event"),
    [
        ("draining: %s", ("SIGTERM received",), "draining: SIGTERM received"),
        ("%s ended: code=%d", ("rollout-0", 1), "rollout-0 ended: code=1"),
        ("share is %d%% now: used=%d of %d", (10, 1, 10), "share is 10% now: used=1 of 10"),
        ("rate=%d without an event", (3,), "rate=3 without an event"),
        ("100% done", (), "100% done"),
        ("by name: %(a)s", ({"a": 1},), "by name: 1"),
    ],
)
def test_message_that_is_not_event_and_fields_is_all_event(
    stderr: Captured, message: str, values: tuple[object, ...], event: str
) -> None:
    logs.configure("supervisor", json=True)

    log.error(message, *values)

    (line,) = objects(stderr)
    assert line["event"] == event
    assert line.keys() == {"time", "level", "process", "logger", "event"}


def test_extra_values_are_fields_in_both_forms(stderr: Captured) -> None:
    for json_lines in (False, True):
        logs.configure("buffer", json=json_lines)
        log.info("lease expired", extra={"lease": 3, "holder": "trainer 0"})

    text, parsed = stderr.getvalue().splitlines()
    assert text.endswith('pipeline.example: lease expired lease=3 holder="trainer 0"')
    assert json.loads(parsed)["holder"] == "trainer 0"


def test_field_cannot_overwrite_what_every_line_has(stderr: Captured) -> None:
    logs.configure("supervisor", json=True)

    log.info("ready: process=%s event=%d", "rollout-0", 1)

    (line,) = objects(stderr)
    assert (line["process"], line["event"]) == ("supervisor", "ready")
    assert (line["process_"], line["event_"]) == ("rollout-0", 1)


def test_an_attribute_that_a_library_gives_each_record_is_no_field(stderr: Captured) -> None:
    """Ray sets such a factory when it is imported."""

    def stamped(*arguments: Any, **keywords: Any) -> logging.LogRecord:
        record = logging.LogRecord(*arguments, **keywords)
        record.timestamp_ns = 1
        return record

    previous = logging.getLogRecordFactory()
    logging.setLogRecordFactory(stamped)
    try:
        for json_lines in (False, True):
            logs.configure("supervisor", json=json_lines)
            log.info("ready: at=%d", 5, extra={"more": 6})
    finally:
        logging.setLogRecordFactory(previous)

    text, parsed = stderr.getvalue().splitlines()
    assert text.endswith("ready: at=5 more=6")
    assert json.loads(parsed).keys() == {"time", "level", "process", "logger", "event", "at", "more"}


def test_json_holds_no_nan_and_writes_unknown_values_as_text(stderr: Captured) -> None:
    logs.configure("supervisor", json=True)

    log.info("loss: value=%s limit=%s where=%s", math.nan, math.inf, {1})

    line = json.loads(stderr.getvalue(), parse_constant=pytest.fail)
    assert (line["value"], line["limit"], line["where"]) == ("nan", "inf", "{1}")


def test_message_with_line_breaks_stays_one_record(stderr: Captured) -> None:
    logs.configure("supervisor")

    log.info("child said: %s", "one\r\n2001-01-01T00:00:00.000Z ERROR supervisor pipeline: forged")

    assert len(stderr.getvalue().splitlines()) == 1


def test_exception_keeps_its_traceback(stderr: Captured) -> None:
    for json_lines in (False, True):
        logs.configure("supervisor", json=json_lines)
        try:
            raise ZeroDivisionError("by nothing")
        except ZeroDivisionError:
            log.exception("failed")

    *text, parsed = stderr.getvalue().splitlines()
    assert text[0].endswith("pipeline.example: failed") and text[-1] == "ZeroDivisionError: by nothing"
    assert json.loads(parsed)["exception"].endswith("ZeroDivisionError: by nothing")


def test_records_below_the_level_are_left_out(stderr: Captured) -> None:
    logs.configure("supervisor", level="warning")

    log.info("unseen")
    log.warning("seen")

    assert stderr.getvalue().splitlines()[0].endswith("seen")
    assert len(stderr.getvalue().splitlines()) == 1


def test_configuring_again_replaces_the_first_time(stderr: Captured) -> None:
    logs.configure("supervisor")
    logs.configure("rollout-0")

    log.info("once")

    assert stderr.getvalue().count("once") == 1
    assert "rollout-0" in stderr.getvalue()


def test_lines_go_to_what_standard_error_is_now(stderr: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    logs.configure("supervisor")
    replaced = io.StringIO()
    monkeypatch.setattr(sys, "stderr", replaced)

    log.info("here")

    assert stderr.getvalue() == ""
    assert "here" in replaced.getvalue()


def test_warnings_are_logged(stderr: Captured) -> None:
    logs.configure("supervisor")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("old habit", DeprecationWarning, stacklevel=1)

    assert "WARNING supervisor py.warnings: " in stderr.getvalue()
    assert "old habit" in stderr.getvalue()


def test_warnings_and_worse_are_counted_by_level(stderr: Captured) -> None:
    logs.configure("supervisor", level="error")
    counted: list[str] = []
    logs.count_warnings(lambda level: pytest.fail("replaced"))
    logs.count_warnings(counted.append)
    logging.getLogger().setLevel(logging.DEBUG)

    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
        log.log(level, "message")

    assert counted == ["warning", "error", "critical"]
