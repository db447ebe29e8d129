"""Log records of a process on another machine, which its gateway logs."""

from __future__ import annotations

import collections
import logging
import traceback
from collections.abc import Sequence
from typing import Final

_MOST_RECORDS: Final = 1000


class CarriedRecords(logging.Handler):
    """Keeps log records in a form that another process can log (`log_carried`)."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: collections.deque[logging.LogRecord] = collections.deque()
        self._left_out = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record, or count it as left out."""
        if len(self._kept) >= _MOST_RECORDS:
            self._left_out += 1
            return
        try:
            self._kept.append(_plain_record(record))
        except Exception:  # noqa: BLE001 - a record of user code may not be formattable: no reason to end a rollout
            self.handleError(record)

    def take(self) -> list[logging.LogRecord]:
        """Return the records since the last call, and a line that counts those left out."""
        records = [self._kept.popleft() for _ in range(len(self._kept))]
        if self._left_out:
            log, count, self._left_out = logging.getLogger(__name__), self._left_out, 0
            message, values = "records left out: count=%d", (count,)
            records.append(log.makeRecord(log.name, logging.WARNING, __file__, 0, message, values, None))
        return records


def _plain_record(record: logging.LogRecord) -> logging.LogRecord:
    plain = {name: value for name, value in vars(record).items() if _is_plain(value)}
    if isinstance(record.msg, str) and isinstance(record.args, tuple) and all(map(_is_plain, record.args)):
        # Formatted by the gateway: the fields of the message keep their names.
        record.getMessage()
        plain["args"] = record.args
    else:
        plain |= {"msg": record.getMessage(), "args": ()}
    if record.exc_info and record.exc_info[0]:
        plain["stack_info"] = "".join(traceback.format_exception(*record.exc_info)).rstrip()
    return logging.makeLogRecord(plain)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (str, int, float))


def log_carried(records: Sequence[logging.LogRecord]) -> None:
    """Log the records of another process in this one."""
    for record in records:
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)
