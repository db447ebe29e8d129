"""What a service manager is told: sd_notify by hand, over the datagram socket that NOTIFY_SOCKET names."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping


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
