"""The log of a run beside the terminal: in systemd's journal, or else in a log file of bounded size."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import threading
from pathlib import Path

from pipeline.config.schema import Config
from pipeline.telemetry import journald, log_file, log_lines
from pipeline.telemetry import log as logs
from pipeline.telemetry.journald import Journal
from pipeline.telemetry.log import JsonFormatter, TextFormatter
from pipeline.telemetry.log_file import LogFile

JOURNAL = "journal:"
"""Prefix of the destination of a log that is a unit's journal and not a file."""

_MOST_FIELDS = 32

log = logging.getLogger(__name__)


class RunLog(logging.Handler):
    """Keeps this process's records and its children's output; a context manager.

    Attributes:
        destination: Path of the log file, or ``journal:`` and the unit; empty if the file cannot be made.
        is_journal: Whether lines go to the journal.
    """

    def __init__(self, config: Config, process: str) -> None:
        super().__init__()
        daemon = config.daemon
        self._name, self._process = daemon.name, process
        self._level, self._as_json = daemon.log_level, daemon.log_format == "json"
        self._file: LogFile | None = None
        self._journal: Journal | None = None
        self._lost_reported = 0
        # Children's lines come from the loop's thread, records from any.
        self._writing = threading.RLock()
        self.destination = ""
        self.setFormatter(JsonFormatter(process) if self._as_json else TextFormatter(process))
        if journald.is_standard_error(os.environ) and (unit := journald.own_unit()):
            self._journal, self.destination = Journal(), f"{JOURNAL}{unit}"
        else:
            path = log_file.path_in(Path(daemon.state_dir))
            try:
                self._file, self.destination = LogFile(path), str(path.absolute())
            except OSError as error:
                log.warning("no log file: path=%s error=%s", path, error.strerror)
        self.is_journal = self._journal is not None

    def __enter__(self) -> RunLog:
        """Keep the records of this process from here on."""
        if self.is_journal:
            # Standard error is the journal too: no line may appear twice.
            logs.configure(self._process, level=self._level, json=self._as_json, stderr=False)
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop keeping records and close the log."""
        logging.getLogger().removeHandler(self)
        # A thread may be writing a line: into a descriptor that is another file's by then.
        with self._writing:
            for end in (self._file, self._journal):
                if end is not None:
                    end.close()
            self._file = self._journal = None

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record of this process; if the journal does not accept it, write it to standard error."""
        try:
            text = self.format(record)
        except (TypeError, ValueError, KeyError):
            # Arguments that do not fit the message, as a library may pass: logging tells of it, the caller goes on.
            self.handleError(record)
            return
        if not self.keep(self._process, text, os.getpid()) and self.is_journal:
            with contextlib.suppress(OSError):
                sys.stderr.write(text + "\n")

    def keep(self, process: str, text: str, pid: int) -> bool:
        """Keep a line.

        Args:
            process: Process that wrote the line, such as ``rollout-0``.
            text: The line; a record with a traceback has more lines below it.
            pid: Pid of that process.

        Returns:
            Whether the journal accepted the line, so that it need not be shown on standard error.
        """
        with self._writing:
            if self._journal is not None:
                return self._to_journal(self._journal, process, text, pid)
            if self._file is not None and self._file.append(log_lines.stored(text, process, as_json=self._as_json)):
                self._report_lost(self._file)
            return False

    def _to_journal(self, journal: Journal, process: str, text: str, pid: int) -> bool:
        line = log_lines.parse(text, process)
        role, dash, index = process.rpartition("-")
        first = itertools.islice(line.fields.items(), _MOST_FIELDS)
        fields = {f"RLHFD_{name.upper()}": value for name, value in first if name.isascii()}
        # Our own fields come last: a field of a message cannot replace them.
        fields |= {
            "MESSAGE": line.message,
            "PRIORITY": str(log_lines.LEVELS[line.level]),
            "SYSLOG_IDENTIFIER": f"{self._name}-{process}",
            "RLHFD_NAME": self._name,
            "RLHFD_ROLE": role if dash else process,
            "RLHFD_PID": str(pid),
        }
        if dash:
            fields["RLHFD_WORKER"] = index
        if line.logger:
            fields |= {"RLHFD_LOGGER": line.logger, "RLHFD_EVENT": line.event}
        if not journal.send(fields):
            return False
        self._report_lost(journal)
        return True

    def _report_lost(self, end: Journal | LogFile) -> None:
        """Log the number of missing lines, once lines can be kept again."""
        if missing := end.lost - self._lost_reported:
            self._lost_reported = end.lost
            log.warning("lines of the log were lost: lines=%d", missing)
