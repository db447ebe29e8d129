"""`rlhfd pause` and `rlhfd resume`: whether the buffer issues tickets, as a file in the instance's folder.

The buffer checks it several times a second, and at its start before its first message. The file is removed with the
folder: the next start after a killed supervisor is still paused, the next start after a stop is not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

_SEEN_TIMEOUT_S = 3.0
_POLL_S = 0.05

log = logging.getLogger(__name__)


class Pause:
    """The file; every process of the instance may read it, the supervisor alone writes it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "paused"

    def is_on(self) -> bool:
        """Return whether no tickets are to be issued."""
        return self._path.exists()

    async def turn(self, on: bool, seen: Callable[[], bool | None]) -> bool:
        """Pause or resume, and wait for the buffer's confirmation.

        Args:
            on: Whether to pause.
            seen: Returns the buffer's last reported state; None without a buffer.

        Returns:
            Whether the buffer has confirmed; else the change takes effect as soon as a buffer runs.

        Raises:
            OSError: If the file cannot be made.
        """
        is_change = on != self.is_on()
        if on:
            self._path.touch(mode=0o600)
        else:
            self._path.unlink(missing_ok=True)
        if is_change:
            log.info("paused: no tickets are issued until `rlhfd resume`" if on else "resumed: tickets are issued")
        until_s = time.monotonic() + _SEEN_TIMEOUT_S
        while seen() is (not on) and time.monotonic() < until_s:
            await asyncio.sleep(_POLL_S)
        return seen() is on
