"""The module whose import started a thread: the number of threads is compared around each import of a new module.

Only an import that starts a thread in the forkserver is of interest, and the roles' libraries have 3,000 modules: the
watch costs some 0.1 s of their 6 s.
"""

from __future__ import annotations

import os
import sys
from importlib import _bootstrap
from typing import Any

_imports: Any = _bootstrap
"""Python's own import; each import of a module that is not there calls `_find_and_load`."""


class ImportWatch:
    """Within a ``with`` block: the modules that were being imported as a thread began."""

    def __init__(self) -> None:
        self._running: list[str] = []
        self._found: dict[int, tuple[str, ...]] = dict.fromkeys(_threads(), ())
        self._import = _imports._find_and_load

    def __enter__(self) -> ImportWatch:
        _imports._find_and_load = self._watched
        return self

    def __exit__(self, *_: object) -> None:
        _imports._find_and_load = self._import

    def starter_of(self, thread: int) -> str:
        """Return the module that started a thread, with its importers; "" if the thread was there before the block."""
        module, *importers = reversed(self._found.get(thread, ()) or [""])
        packages = dict.fromkeys(name.partition(".")[0] for name in importers)
        packages.pop(module.partition(".")[0], None)
        return f"{module} (imported by {', '.join(packages)})" if packages else module

    def _watched(self, name: str, *others: Any) -> Any:
        if name in sys.modules:
            # As half of the calls of `importlib.import_module`.
            return self._import(name, *others)
        self._look()
        self._running.append(name)
        try:
            return self._import(name, *others)
        finally:
            self._look()
            self._running.pop()

    def _look(self) -> None:
        for thread in _threads():
            self._found.setdefault(thread, tuple(self._running))


def _threads() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/task")]
