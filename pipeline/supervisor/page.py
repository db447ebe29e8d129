"""Data of the page's requests: the present state of the run, its history, and recorded rollouts."""

from __future__ import annotations

import collections
import contextlib
import logging
import secrets
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from pipeline.config.identity import run_dir
from pipeline.config.schema import Config
from pipeline.runtime.workspace import Workspace
from pipeline.supervisor.status import InstanceStatus
from pipeline.telemetry.history import FILE_NAME as HISTORY_FILE
from pipeline.telemetry.history import History, HistoryRecorder
from pipeline.telemetry.samples import SampleReader, folder_of

_SAVE_INTERVAL_S: Final = 10.0
_FRESH_S: Final = 0.5
_MOST_SAMPLES: Final = 100
_MOST_SAMPLE_BYTES: Final = 8 << 20

log = logging.getLogger(__name__)


class SampleFeed:
    """The newest rollouts of a run, each sent once to each viewer.

    Args:
        run_dir: Folder of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self._reader = SampleReader(folder_of(run_dir), newest=_MOST_SAMPLES)
        # A cursor of another daemon, or of an earlier start of this one, is not valid.
        self._feed = secrets.token_hex(4)
        self._kept: collections.deque[tuple[int, bytes]] = collections.deque()
        self._number = 0

    def since(self, cursor: str) -> bytes:
        """Return the newest rollouts recorded since the answer with this cursor, and the next cursor, as JSON."""
        # While the folder cannot be read there are none; they come with a later answer.
        with contextlib.suppress(OSError):
            for sample in self._reader.read():
                self._number += 1
                self._kept.append((self._number, msgspec.json.encode(sample)))
        total = sum(len(text) for _, text in self._kept)
        while len(self._kept) > _MOST_SAMPLES or total > _MOST_SAMPLE_BYTES:
            total -= len(self._kept.popleft()[1])
        feed, _, number = cursor.partition(".")
        # Python takes no number of more than 4,300 digits.
        after = int(number) if feed == self._feed and number.isdecimal() and len(number) < 20 else 0
        shown = [msgspec.Raw(text) for at, text in self._kept if at > after]
        return msgspec.json.encode({"cursor": f"{self._feed}.{self._number}", "samples": shown})


class PageData:
    """Answers the page's requests from the supervisor's loop, and keeps the history.

    Args:
        config: The instance's configuration.
        workspace: The instance's workspace, which names the run.
        status: The instance's status.
        is_local: Whether the page is reachable from this machine only.
    """

    def __init__(self, config: Config, workspace: Workspace, status: InstanceStatus, *, is_local: bool) -> None:
        self._config = config
        self._status = status
        self._history = History(run_dir(config) / HISTORY_FILE, workspace.run.identity)
        self._recorder = HistoryRecorder(self._history, is_external=config.trainer.kind == "external")
        self._saved_s = time.monotonic()
        self._is_failing = False
        self._now: dict[str, Any] = {}
        self._now_s = -_FRESH_S
        self._hidden = ""
        if not config.samples.per_minute:
            self._hidden = "No rollouts are kept: samples.per_minute is 0."
        elif not is_local and not config.samples.remote:
            self._hidden = "Rollouts are shown on the loopback address only, unless samples.remote is true."
        self._feed = SampleFeed(run_dir(config))

    def sample(self, now_s: float) -> None:
        """Add the supervisor's newest reading to the history."""
        reading, counts = self._status.reading, self._status.reading.conservation
        self._recorder.add(now_s, time.time(), reading, counts.ready_items if counts else 0)
        if now_s - self._saved_s >= _SAVE_INTERVAL_S:
            self._saved_s = now_s
            self.save()

    def save(self) -> None:
        """Write the history to disk; the first failure of several is logged."""
        try:
            self._history.save()
        except OSError as error:
            if not self._is_failing:
                log.warning("history not written, tried again every %g s: error=%s", _SAVE_INTERVAL_S, error)
            self._is_failing = True
            return
        self._is_failing = False

    def live(self, after_s: float) -> bytes:
        """Return the present state of the run, and the points of its history behind that of a Unix time, as JSON."""
        now_s = time.monotonic()
        if now_s - self._now_s >= _FRESH_S:
            # One reading serves all viewers.
            self._now_s, self._now = now_s, self._read()
        points = [point.shown() for point in self._history.points(after_s)]
        return msgspec.json.encode({**self._now, "history": points})

    def samples(self, cursor: str) -> bytes:
        """Return the newest rollouts recorded since an earlier answer, and the next cursor, as JSON."""
        return msgspec.json.encode({"hidden": self._hidden}) if self._hidden else self._feed.since(cursor)

    def _read(self) -> dict[str, Any]:
        why = self._status.watchdog.why()
        activity = {process["name"]: process["activity"] for process in why["processes"]}
        status = self._status.status(why)
        for process in status["processes"]:
            process["activity"] = activity.get(process["name"], "")
        return {
            "status": status,
            "why": why["sentences"],
            "group_size": self._config.group_size,
            "batch_rows": self._config.sample_batch_size,
        }
