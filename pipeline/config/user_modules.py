"""Modules of the user, reward functions and engines: the folders where they are imported from, and a check of them.

Modules that are installed come first. Then the configuration file's folder is searched, then the folder of the start.
The children of an instance get the first of the two by a variable of their environment.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

FOLDER_VARIABLE = "_RLHFD_MODULES"
_IMPORT_TIMEOUT_S = 120.0


def folders(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the folders that are searched after the installed modules."""
    return list(dict.fromkeys([*filter(None, [environ.get(FOLDER_VARIABLE)]), os.getcwd()]))


def use_folder_of(config_path: Path | None) -> None:
    """Search the folder of a configuration file in this process and in its children; None: no further folder."""
    if config_path is not None:
        os.environ[FOLDER_VARIABLE] = str(config_path.absolute().parent)


def extend_path(places: Sequence[str] | None = None) -> None:
    """Append `folders`, or these places, to ``sys.path``; last, so that they shadow no installed module."""
    sys.path += [place for place in (folders() if places is None else places) if place not in sys.path]


def not_found(error: BaseException, module: str) -> str:
    """Return the searched folders, for the message about a module that does not exist; else an empty text."""
    name = getattr(error, "name", None) or ""
    if not isinstance(error, ModuleNotFoundError) or not (module == name or module.startswith(f"{name}.")):
        return ""
    return f"; looked in {' and '.join(folders())}, and among the installed modules"


def missing(name: str, places: Sequence[str]) -> str:
    """Return the problem of ``module:function`` if no file is found for its module; nothing is imported."""
    module = name.partition(":")[0]
    path: Sequence[str] | None = [*sys.path, *places]
    if module.partition(".")[0] in sys.builtin_module_names:
        return ""
    for depth, part in enumerate(parts := module.split("."), start=1):
        spec = PathFinder.find_spec(".".join(parts[:depth]) if depth == 1 else part, path)
        if spec is None:
            looked = f"looked in {' and '.join(places)}, and among the installed modules"
            meant = re.sub(r"\.py$", "", module)
            advice = f"did you mean {meant}:{name.partition(':')[2]}?" if meant != module else looked
            return f"cannot import {module}: there is no module {'.'.join(parts[:depth])}; {advice}"
        path = spec.submodule_search_locations
        if path is None and depth < len(parts):
            meant = f", did you mean {parts[0]}:{name.partition(':')[2]}?" if parts[depth:] == ["py"] else ""
            return f"cannot import {module}: {'.'.join(parts[:depth])} is a module, no package{meant}"
    return ""


def problems_of_import(names: Sequence[str], places: Sequence[str]) -> list[str]:
    """Import each ``module:function`` in a process of its own, with its output discarded; return the problems."""
    command = [sys.executable, "-P", "-m", __name__, json.dumps([list(names), list(places)])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return [f"{', '.join(names)}: not imported within {_IMPORT_TIMEOUT_S:g} s"]
    try:
        problems: list[str] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return [f"{', '.join(names)}: the import ended the process with exit code {done.returncode}"]
    return problems


def _problem_of(name: str) -> str:
    module_name, _, function = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    # User code may raise any exception at import.
    except Exception as error:  # noqa: BLE001
        kind = "" if isinstance(error, ImportError | SyntaxError) else f"{type(error).__name__}: "
        return f"cannot import {module_name}: {kind}{error}"
    return "" if callable(getattr(module, function, None)) else f"{module_name} has no function {function}"


if __name__ == "__main__":
    wanted, searched = json.loads(sys.argv[1])
    extend_path(searched)
    found = [problem for each in wanted if (problem := _problem_of(each))]
    sys.stdout.write("\n" + json.dumps(found) + "\n")
