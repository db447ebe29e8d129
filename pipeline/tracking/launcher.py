"""The processes of the trackers, one each: started, watched and restarted beside the run, which depends on none."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from pipeline.config.advice import without_password
from pipeline.config.identity import run_dir
from pipeline.config.schema import Config
from pipeline.runtime.child_process import child_environment
from pipeline.telemetry.slab import SlotWriter
from pipeline.tracking.records import tracking_dir, write_settings

_MOST_DELAY_S: Final = 60.0
_HEALTHY_S: Final = 300.0
_LOOK_S: Final = 1.0
_END_S: Final = 15.0
_LOG_BYTES: Final = 1 << 20
_TAIL_BYTES: Final = 16 << 10

log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Slot:
    """The place of one tracker's process.

    Attributes:
        due_s: Monotonic time of the next start.
        delay_s: Wait before the start after the next death.
        started_s: Monotonic time of the last start.
        written_ns: Time of the tracker's note of its progress.
        moved_s: Monotonic time at which that was seen to change.
    """

    name: str
    delay_s: float
    child: subprocess.Popen[bytes] | None = None
    due_s: float = 0.0
    started_s: float = 0.0
    written_ns: int = 0
    moved_s: float = 0.0


class Trackers:
    """Starts a process for each of `metrics.tracker`; every method returns at once but `close`.

    Args:
        config: The instance's configuration.
        writer: The supervisor's slot.
        start: Starts the process of a tracker with its output in a file; for tests.
        clock: Monotonic seconds.

    Attributes:
        config: May be replaced by a configuration with other time limits.
    """

    def __init__(
        self,
        config: Config,
        writer: SlotWriter,
        *,
        start: Callable[[str, int], subprocess.Popen[bytes]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._folder = tracking_dir(run_dir(config))
        self._start_process = start or self._executed
        self._clock = clock
        names: list[str] = [*config.metrics.tracker]
        self._slots = [_Slot(name, config.daemon.restart_delay_s) for name in names]
        self._up = {name: writer.gauge("rlhfd_tracker_up", tracker=name) for name in names}
        self._starts = {name: writer.counter("rlhfd_tracker_starts_total", tracker=name) for name in names}
        self._looked_s = -_LOOK_S

    @property
    def pids(self) -> Sequence[int]:
        """The processes that this object reaps."""
        return [slot.child.pid for slot in self._slots if slot.child is not None]

    def tick(self) -> None:
        """Start the processes that are due, plan the restart of those that have ended, kill those that hang."""
        now_s = self._clock()
        if not self._slots or now_s - self._looked_s < _LOOK_S:
            return
        # A gap is a pause of this process, in which the trackers may have been stopped too: no hang of theirs.
        is_continued = now_s - self._looked_s > max(_LOOK_S, self.config.daemon.hang_timeout_s / 2)
        self._looked_s = now_s
        for slot in self._slots:
            slot.moved_s = now_s if is_continued else slot.moved_s
            if slot.child is None or slot.child.poll() is None:
                # Not of one that has just ended: its last line is wanted.
                self._bound_log(slot.name)
            if slot.child is None and now_s >= slot.due_s:
                self._start(slot, now_s)
            elif slot.child is not None and (code := slot.child.poll()) is not None:
                self._ended(slot, code, now_s)
            elif slot.child is not None and self._hangs(slot, now_s):
                log.warning("tracker %s hangs, it is killed and started again; the run goes on", slot.name)
                _kill(slot.child, signal.SIGKILL)
            self._up[slot.name].set(float(slot.child is not None))

    def close(self, timeout_s: float = _END_S) -> None:
        """Let the trackers send the rest, and end them; one that takes longer is killed."""
        for slot in self._slots:
            if slot.child is not None:
                _kill(slot.child, signal.SIGTERM)
        deadline_s = time.monotonic() + timeout_s
        for slot in self._slots:
            if slot.child is None:
                continue
            try:
                slot.child.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("tracker %s has not ended within %g s, it is killed; its next process sends the rest",
                            slot.name, timeout_s)  # fmt: skip
            _kill(slot.child, signal.SIGKILL)
            slot.child.wait()
            slot.child = None

    def _start(self, slot: _Slot, now_s: float) -> None:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_settings(run_dir(self.config), self.config)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            output = os.open(self._log_of(slot.name), flags, 0o600)
            try:
                slot.child = self._start_process(slot.name, output)
            finally:
                os.close(output)
        except OSError as error:
            log.warning("tracker %s cannot be started: %s", slot.name, error)
            self._delay(slot, now_s)
            return
        slot.started_s = now_s
        self._starts[slot.name].inc()

    def _ended(self, slot: _Slot, code: int, now_s: float) -> None:
        assert slot.child is not None
        # Helpers of the library are in its group.
        _kill(slot.child, signal.SIGKILL)
        slot.child = None
        if now_s - slot.started_s > _HEALTHY_S:
            slot.delay_s = self.config.daemon.restart_delay_s
        log.warning("tracker %s has ended (%d), restart in %.1f s, the run goes on: %s",
                    slot.name, code, slot.delay_s, self._last_line(slot.name))  # fmt: skip
        self._delay(slot, now_s)

    def _delay(self, slot: _Slot, now_s: float) -> None:
        slot.due_s, slot.delay_s = now_s + slot.delay_s, min(2 * slot.delay_s, _MOST_DELAY_S)

    def _hangs(self, slot: _Slot, now_s: float) -> bool:
        """Return whether the tracker's note of its progress, written once a second, has not changed for the limit."""
        limit_s = self.config.daemon.hang_timeout_s
        try:
            written_ns = (self._folder / f"{slot.name}.json").stat().st_mtime_ns
        except OSError:
            written_ns = 0
        if written_ns != slot.written_ns:
            slot.written_ns, slot.moved_s = written_ns, now_s
        return limit_s > 0 and now_s - max(slot.moved_s, slot.started_s) > limit_s

    def _log_of(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _bound_log(self, name: str) -> None:
        """Empty a large log, to whose end the tracker appends."""
        with contextlib.suppress(OSError):
            if self._log_of(name).stat().st_size > _LOG_BYTES:
                os.truncate(self._log_of(name), 0)

    def _last_line(self, name: str) -> str:
        try:
            with self._log_of(name).open("rb") as file:
                start = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
                file.seek(start)
                lines = file.read(_TAIL_BYTES).decode(errors="replace").splitlines()
        except OSError:
            return "it printed nothing"
        # In a line whose begin is cut off a password could not be found.
        found = next((line for line in reversed(lines[start > 0 :]) if line.strip()), None)
        return without_password(found) if found else "its last line is too long" if start else "it printed nothing"

    def _executed(self, name: str, output: int) -> subprocess.Popen[bytes]:
        folder, project = str(Path(run_dir(self.config)).absolute()), self.config.metrics.tracker_project
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "pipeline.tracking.process", folder, name, project],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=child_environment(gpu="", threads=1),
            start_new_session=True,
        )


def _kill(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a process and, if it is SIGKILL, to all of its group."""
    try:
        if number is signal.SIGKILL:
            os.killpg(child.pid, number)
        else:
            child.send_signal(number)
    except ProcessLookupError:
        pass
