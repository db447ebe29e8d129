"""The instance as a systemd service: ready, the line of `systemctl status`, the watchdog, and time to end in order."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, MutableMapping

from pipeline.supervisor.snapshot import Snapshot

_STATUS_INTERVAL_S = 1.0
# While it starts or ends, systemd's own limit is pushed on by this much again and again: a loop that hangs stops that.
_STEP_S = 30.0
_BUFFER_SILENT_S = 10.0

log = logging.getLogger(__name__)


class Service:
    """Tells the service manager how the instance fares; without one, nothing.

    systemd restarts a service whose WATCHDOG=1 does not come in time. It is sent by the loop that calls `tick`, and
    only while the buffer answers: the other processes are watched, and replaced, by the supervisor itself.
    """

    def __init__(
        self, notifier: Notifier, *, snapshot: Callable[[], Snapshot], is_buffer_silent: Callable[[float], bool]
    ) -> None:
        """Speak through `notifier`.

        Args:
            notifier: The way to systemd.
            snapshot: What the instance does.
            is_buffer_silent: Whether the buffer has not moved for so many seconds.
        """
        self._notifier = notifier
        self._snapshot = snapshot
        self._is_buffer_silent = is_buffer_silent
        self._silent_s = min(_BUFFER_SILENT_S, notifier.watchdog_s / 2)
        self._is_ready = self._is_stopping = self._is_withheld = False
        self._extended_s = self._shown_s = self._answered_s = -1e9
        self._shown = ""

    def tick(self, now_s: float, *, is_ending: bool, has_failed: bool) -> None:
        """Tell what is to be told now.

        Args:
            now_s: Monotonic time.
            is_ending: Whether the instance drains.
            has_failed: Whether it does so for a failure.
        """
        if not self._notifier.is_heard:
            return
        shot = self._snapshot()
        # An end in order before it was ready is no failed start, which systemd would restart.
        if not self._is_ready and shot.state != "starting" and not has_failed:
            self._is_ready = self._notifier.tell(READY=1)
        if is_ending and not self._is_stopping:
            self._is_stopping = self._notifier.tell(STOPPING=1)
        if (is_ending or not self._is_ready) and now_s - self._extended_s >= _STATUS_INTERVAL_S:
            self._extended_s = now_s
            self._notifier.tell(EXTEND_TIMEOUT_USEC=int(_STEP_S * 1e6))
        self._show(now_s, status_line(shot))
        self._answer(now_s)

    def _show(self, now_s: float, text: str) -> None:
        if text != self._shown and now_s - self._shown_s >= _STATUS_INTERVAL_S and self._notifier.tell(STATUS=text):
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
        if not is_silent and self._notifier.tell(WATCHDOG=1):
            self._answered_s = now_s


def status_line(shot: Snapshot) -> str:
    """Return what `systemctl status` shows."""
    parts = [f"step {shot.step:,}" + (f" of {shot.max_steps:,}" if shot.max_steps else "")]
    if shot.reward_mean is not None:
        parts.append(f"reward {shot.reward_mean:.4f}")
    if shot.tokens_per_s is not None:
        parts.append(f"{shot.tokens_per_s:,.0f} tokens/s")
    parts.append(f"workers {shot.workers_ready} of {shot.workers_total}")
    return f"{shot.state}: {', '.join(parts)}"


class Notifier:
    """The way to the service manager; without one, `tell` does nothing.

    Attributes:
        watchdog_s: Seconds within which it wants to hear WATCHDOG=1 again and again; 0 if it does not.
    """

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self.watchdog_s = watchdog_s if address else 0.0

    @classmethod
    def take(cls, environ: MutableMapping[str, str]) -> Notifier:
        """Return the one that the environment names, and remove it there: a child must not speak for the whole."""
        address, pid, usec = (environ.pop(name, "") for name in ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"))
        is_ours = usec.isdigit() and pid in ("", str(os.getpid()))
        return cls(address, int(usec) / 1e6 if is_ours else 0.0)

    @property
    def is_heard(self) -> bool:
        """Whether there is anybody to tell."""
        return bool(self._address)

    def tell(self, **fields: object) -> bool:
        """Send fields such as ``READY=1, STATUS="step 3"``; return False where that could not be done now."""
        if not self._address:
            return True
        # A newline within a value would begin another field.
        lines = (f"{name}={' '.join(str(value).splitlines())}" for name, value in fields.items())
        try:
            with socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            ) as sender:
                sender.sendto("\n".join(lines).encode(), self._address)
        except OSError:
            return False
        return True
