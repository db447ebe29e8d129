"""The module whose import started a thread: the number of threads is compared around the body of each module.

Only an import that starts a thread in the forkserver is of interest, and the roles' libraries have 3,000 modules: the
watch costs some 0.1 s of their 6 s.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any


class ImportWatch(MetaPathFinder):
    """Within a ``with`` block: the modules whose bodies ran as a thread began."""

    def __init__(self) -> None:
        self._running: list[str] = []
        self._found: dict[int, tuple[str, ...]] = dict.fromkeys(_threads(), ())

    def __enter__(self) -> ImportWatch:
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)

    def starter_of(self, thread: int) -> str:
        """Return the module that started a thread, with its importers; "" if the thread was there before the block."""
        module, *importers = reversed(self._found.get(thread, ()) or [""])
        packages = dict.fromkeys(name.partition(".")[0] for name in importers)
        packages.pop(module.partition(".")[0], None)
        return f"{module} (imported by {', '.join(packages)})" if packages else module

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec that the other finders find, with a loader that is watched."""
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            if find is not None and (spec := find(name, path, target)) is not None:
                if hasattr(spec.loader, "exec_module") and hasattr(spec.loader, "create_module"):
                    spec.loader = _WatchedLoader(spec.loader, self)
                return spec  # type: ignore[no-any-return]
        return None

    def begin(self, name: str) -> None:
        """Note that the body of a module, or the creation of one in C, begins."""
        self._look()
        self._running.append(name)

    def end(self) -> None:
        """Note that the innermost of these has ended."""
        self._look()
        self._running.pop()

    def _look(self) -> None:
        for thread in _threads():
            self._found.setdefault(thread, tuple(self._running))


class _WatchedLoader:
    """A loader around another one, whose place the other one takes again as soon as the module's body begins."""

    def __init__(self, loader: Any, watch: ImportWatch) -> None:
        self._loader = loader
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        self._watch.begin(spec.name)
        spec.loader = self._loader
        try:
            module: ModuleType | None = self._loader.create_module(spec)
        finally:
            spec.loader = self  # type: ignore[assignment]
            self._watch.end()
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._watch.begin(module.__name__)
        try:
            self._loader.exec_module(module)
        finally:
            self._watch.end()


def _threads() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/task")]
