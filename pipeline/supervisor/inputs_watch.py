"""The files of a run while it goes on: code of rewards, prompts, templates, models.

A process that runs has loaded its code and read its files once; one that takes its place, as after a reward that took
too long, reads them as they are then. Where they have changed, processes of one run work by different ones.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Final

from pipeline.config.schema import Config
from pipeline.runtime.run_inputs import inputs_of

_INTERVAL_S: Final = 30.0
_MOST_SHARE: Final = 0.01

log = logging.getLogger(__name__)


class InputsWatch:
    """Looks at the files of a run once in 30 s, and warns of each that is not as at the start.

    A thread of its own looks: files may be large, and those of a network's disk may never answer. It is at work for a
    hundredth of the time at most.

    Args:
        config: The configuration, its paths absolute; the files of its start have been read (`run_inputs.note`).
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._before = self._inputs()
        if not self._before:
            log.warning("the run's files cannot be read now: no change of them will be noticed while it goes on")
        self._changed: set[str] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="inputs", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop looking; a look that hangs stays, its daemon thread keeps no process alive."""
        self._stopped.set()

    def look(self) -> None:
        """Compare the files with those of the start, and log what has changed since the last look."""
        if not (now := self._inputs()):
            return
        # One that cannot be compared now, as a file that was removed, stays as it was found before.
        was = self._changed
        changed = {
            name for name, before in self._before.items() if (now[name] != before if name in now else name in was)
        }
        if names := sorted(changed - self._changed):
            log.warning("changed while the run goes on: %s; processes that run work as before, a new one (as after "
                        "a timeout) by the change: put it back, or restart", ", ".join(names))  # fmt: skip
        if names := sorted(self._changed - changed):
            log.info("as at the start again: %s", ", ".join(names))
        self._changed = changed

    def _inputs(self) -> Mapping[str, str]:
        try:
            return inputs_of(self._config)
        except OSError as error:
            log.debug("the run's files are not compared: %s", error)
            return {}

    def _watch(self) -> None:
        interval_s = _INTERVAL_S
        while not self._stopped.wait(interval_s):
            began_s = time.monotonic()
            self.look()
            # A folder of prompts may hold files that change all the time, such as checkpoints.
            interval_s = max(_INTERVAL_S, (time.monotonic() - began_s) / _MOST_SHARE)
