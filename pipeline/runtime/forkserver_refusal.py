"""The last refusal of a forkserver, on disk: a start under the same conditions does not repeat the vain attempt."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from pipeline.runtime import role_libraries
from pipeline.storage.files import UNREADABLE, replacing

_FILE = "forkserver-refusal.json"
# Variables of a session or an invocation. A further variable makes another attempt, which costs seconds; one too few
# here would keep a refusal whose cause has gone.
_PASSING: Final = (
    "_", "COLUMNS", "CREDENTIALS_DIRECTORY", "INVOCATION_ID", "JOURNAL_STREAM", "LINES", "OLDPWD",
    "PWD", "RLHFD_PARENT", "SHLVL", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "SYSTEMD_EXEC_PID", "TERM", "TMUX",
    "TMUX_PANE", "WINDOWID", "XDG_SESSION_ID",
)  # fmt: skip
_AT_THE_START = ("sitecustomize.py", "usercustomize.py")


class _Record(msgspec.Struct, frozen=True):
    conditions: str
    reason: str


class ForkserverRefusal:
    """The refusal that is remembered in a state directory.

    Args:
        state_dir: The state directory.
    """

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / _FILE

    def recall(self, conditions: str) -> str:
        """Return the reason of a refusal under these conditions (`conditions_of`); "" if there was none."""
        try:
            found = msgspec.json.decode(self.path.read_bytes(), type=_Record)
        except (OSError, *UNREADABLE):
            return ""
        return found.reason if found.conditions == conditions else ""

    def remember(self, conditions: str, reason: str) -> None:
        """Keep a refusal for the next start; a folder that cannot be written costs that start its attempt."""
        with contextlib.suppress(OSError), replacing(self.path) as descriptor:
            os.write(descriptor, msgspec.json.encode(_Record(conditions, reason)))


def conditions_of(environment: Mapping[str, str], model: str) -> str:
    """Return a digest of all that may decide whether a forkserver can serve.

    That is the interpreter, the installed packages, the programs that run at Python's start, the variables, the type of
    the model and the code that decides.

    Args:
        environment: Variables of the forkserver.
        model: Directory of the actor.
    """
    variables = {name: value for name, value in environment.items() if name not in _PASSING}
    places = [Path(place) for place in sys.path if place]
    files = [file for place in places for file in (*sorted(place.glob("*.pth")), *map(place.joinpath, _AT_THE_START))]
    # Other folders on the path change for other reasons: runs may be kept there.
    installed = [place for place in places if next(place.glob("*.dist-info"), None) is not None]
    code = [Path(__file__).with_name(name) for name in ("forking.py", "forkserver_process.py", "role_libraries.py")]
    conditions = [
        [sys.executable, sys.version, os.path.exists("/dev/nvidiactl")],
        sorted(variables.items()),
        [(str(path), *_stamp(path)) for path in (*installed, *files, *code)],
        role_libraries.model_type(model),
    ]
    return hashlib.sha256(json.dumps(conditions).encode()).hexdigest()


def _stamp(path: Path) -> tuple[int, ...]:
    """Return size and time of change; a folder's time is that of the last package put into it."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size
