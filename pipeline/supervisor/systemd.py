"""The instance as a systemd service: readiness, the line of `systemctl status`, the watchdog, time for the shutdown."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from pipeline.runtime.run_start import StartProgress
from pipeline.supervisor.live import steps, workers

_STATUS_INTERVAL_S = 1.0
# During start and shutdown, systemd's own time limit is extended by this much every second; a hung loop stops that.
_STEP_S = 30.0
_BUFFER_SILENT_S = 10.0

log = logging.getLogger(__name__)


class Service:
    """Reports the instance's state to the service manager; without one it does nothing.

    systemd restarts a service whose WATCHDOG=1 does not come in time. The loop that calls `tick` sends it, and only
    while the buffer has a heartbeat: the supervisor itself watches and replaces the other processes.
    """

    def __init__(
        self, notifier: Notifier, *, status: Callable[[], Mapping[str, Any]], is_buffer_silent: Callable[[float], bool]
    ) -> None:
        """Report through `notifier`.

        Args:
            notifier: The connection to systemd.
            status: Returns the status of the instance.
            is_buffer_silent: Returns whether the buffer has had no heartbeat for that many seconds.
        """
        self._notifier = notifier
        self._status = status
        self._is_buffer_silent = is_buffer_silent
        self._silent_s = min(_BUFFER_SILENT_S, notifier.watchdog_s / 2)
        self._is_ready = self._is_stopping = self._is_withheld = False
        self._extended_s = self._shown_s = self._answered_s = -1e9
        self._shown = ""

    def tick(self, now_s: float, *, is_ending: bool, has_failed: bool) -> None:
        """Send the notifications that are due.

        Args:
            now_s: Monotonic time.
            is_ending: Whether the instance drains.
            has_failed: Whether it drains because of a failure.
        """
        if not self._notifier.is_connected:
            return
        status = self._status()
        # An orderly shutdown before the instance was ready is no failed start, which systemd would restart.
        if not self._is_ready and status["state"] != "starting" and not has_failed:
            # In one message: whoever waits for the service reads no line of its start.
            text = status_line(status)
            if self._notifier.send(READY=1, STATUS=text):
                self._is_ready = True
                self._shown, self._shown_s = text, now_s
        if is_ending and not self._is_stopping:
            self._is_stopping = self._notifier.send(STOPPING=1)
        if (is_ending or not self._is_ready) and now_s - self._extended_s >= _STATUS_INTERVAL_S:
            self._extended_s = now_s
            self._notifier.send(EXTEND_TIMEOUT_USEC=int(_STEP_S * 1e6))
        self._show(now_s, status_line(status))
        self._answer(now_s)

    def _show(self, now_s: float, text: str) -> None:
        if text != self._shown and now_s - self._shown_s >= _STATUS_INTERVAL_S and self._notifier.send(STATUS=text):
            self._shown, self._shown_s = text, now_s

    def _answer(self, now_s: float) -> None:
        if not self._notifier.watchdog_s or now_s - self._answered_s < self._notifier.watchdog_s / 4:
            return
        is_silent = self._is_buffer_silent(self._silent_s)
        if is_silent != self._is_withheld:
            self._is_withheld = is_silent
            if is_silent:
                log.error("systemd's watchdog is not answered while the buffer is silent: limit_s=%.1f", self._silent_s)
            else:
                log.warning("the buffer moves again, systemd's watchdog is answered")
        if not is_silent and self._notifier.send(WATCHDOG=1):
            self._answered_s = now_s


def status_line(status: Mapping[str, Any]) -> str:
    """Return the line for `systemctl status`."""
    parts = [f"step {steps(status, ' of ')}"]
    if status["reward_mean"] is not None:
        parts.append(f"reward {status['reward_mean']:.4f}")
    if status["tokens_per_s"] is not None:
        parts.append(f"{status['tokens_per_s']:,.0f} tokens/s")
    parts.append(f"workers {workers(status, ' of ')}")
    return f"{status['state']}: {', '.join(parts)}"


class ExtendedStart(StartProgress):
    """Extends systemd's time limit while a start makes progress.

    Args:
        notifier: The connection to systemd.
        now_s: Returns monotonic time.
    """

    def __init__(self, notifier: Notifier, now_s: Callable[[], float]) -> None:
        super().__init__()
        self._notifier, self._now_s = notifier, now_s
        self._sent_s = -1e9

    def progress(self, **numbers: Any) -> None:
        """Extend the limit, at most once a second."""
        super().progress()
        if self._now_s() - self._sent_s >= _STATUS_INTERVAL_S:
            self._sent_s = self._now_s()
            self._notifier.send(EXTEND_TIMEOUT_USEC=int(_STEP_S * 1e6))


class Notifier:
    """The connection to the service manager (sd_notify); without one, `send` does nothing.

    Attributes:
        watchdog_s: Longest time between two WATCHDOG=1 that the service manager allows; 0 if it expects none.
    """

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self.watchdog_s = watchdog_s if address else 0.0

    @classmethod
    def from_environ(cls, environ: MutableMapping[str, str]) -> Notifier:
        """Return the environment's notifier and remove it there: a child must not report for the service."""
        address, pid, usec = (environ.pop(name, "") for name in ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"))
        is_ours = usec.isdigit() and pid in ("", str(os.getpid()))
        return cls(address, int(usec) / 1e6 if is_ours else 0.0)

    @property
    def is_connected(self) -> bool:
        """Whether there is a service manager."""
        return bool(self._address)

    def send(self, **fields: object) -> bool:
        """Send fields such as ``READY=1, STATUS="step 3"``; return False if they could not be sent now."""
        if not self._address:
            return True
        # A newline in a value would begin another field.
        lines = (f"{name}={' '.join(str(value).splitlines())}" for name, value in fields.items())
        try:
            with socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            ) as sender:
                sender.sendto("\n".join(lines).encode(), self._address)
        except OSError:
            return False
        return True
