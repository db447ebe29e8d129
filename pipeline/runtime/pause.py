"""`rlhfd pause` and `rlhfd resume`: whether the buffer issues tickets, as a file in the instance's folder.

The buffer looks at it several times a second, and at its start, so that a new one knows before it says a word. It goes
with the folder: the next start after a killed supervisor is still paused, the next start after a stop is not.
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
    """The file; any process of the instance may look, the supervisor alone writes."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "paused"

    def is_on(self) -> bool:
        """Whether no tickets are to be issued."""
        return self._path.exists()

    async def turn(self, on: bool, seen: Callable[[], bool | None]) -> bool:
        """Ask for it, or no longer, and wait until the buffer has said that so it is.

        Args:
            on: Whether to pause.
            seen: What the buffer said last; None while there is none.

        Returns:
            Whether it is so now; else it is as soon as there is a buffer.

        Raises:
            OSError: If the file cannot be made.
        """
        if on != self.is_on():
            log.info("paused: no tickets are issued until `rlhfd resume`" if on else "resumed: tickets are issued")
        if on:
            self._path.touch(mode=0o600)
        else:
            self._path.unlink(missing_ok=True)
        until_s = time.monotonic() + _SEEN_TIMEOUT_S
        while seen() is (not on) and time.monotonic() < until_s:
            await asyncio.sleep(_POLL_S)
        return seen() is on
