r"""The protocol of systemd's journal: an entry is one datagram of fields, so that a line keeps its writer and level.

MESSAGE=weights published: version=3\n      a value without newlines
MESSAGE\n<length, 64 bit LE><bytes>\n       any value
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

SOCKET = "/run/systemd/journal/socket"
# For an entry above the limit of a datagram the protocol requires a sealed file: too costly for a log line.
_MOST_BYTES = 48 << 10


def is_standard_error(environ: Mapping[str, str]) -> bool:
    """Return whether standard error goes to the journal; an inherited JOURNAL_STREAM alone does not count."""
    try:
        found = os.fstat(2)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def own_unit(cgroups: str | None = None) -> str:
    """Return the systemd service of this process, such as ``rlhfd@b.service``; empty if it runs in none."""
    text = Path("/proc/self/cgroup").read_text() if cgroups is None else cgroups
    names = [part for line in text.splitlines() for part in line.split("/") if part.endswith(".service")]
    return names[-1] if names else ""


class Journal:
    """A client of journald's socket. It never blocks: an entry without room is counted as lost."""

    def __init__(self, path: str = SOCKET) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
        self.lost = 0

    def send(self, fields: Mapping[str, object]) -> bool:
        """Write an entry; return whether it was sent."""
        try:
            self._socket.sendto(encode(fields), self._path)
        except OSError:
            self.lost += 1
            return False
        return True

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def encode(fields: Mapping[str, object]) -> bytes:
    """Return an entry's datagram; values are cut if all of them together would not fit."""
    parts = []
    for name, value in fields.items():
        data = str(value).encode(errors="replace")[: _MOST_BYTES // len(fields) if name != "MESSAGE" else _MOST_BYTES]
        if b"\n" in data:
            parts.append(name.encode() + b"\n" + struct.pack("<Q", len(data)) + data + b"\n")
        else:
            parts.append(name.encode() + b"=" + data + b"\n")
    return b"".join(parts)
