"""The process that listens on a TCP port of this machine, from /proc."""

from __future__ import annotations

import contextlib
from pathlib import Path

_LISTENS = "0A"
_SHOWN_CHARACTERS = 80


def port_holder(port: int) -> str:
    """Return pid and command of the process that listens on a port, as ``pid 7 (python serve.py)``.

    Args:
        port: The port, of any address.

    Returns:
        The process; "a process of another user" if its files may not be read; empty if no process listens.
    """
    inodes = set[str]()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(fields[9])
    if not inodes:
        return ""
    links = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        # A process may end meanwhile, or be another user's.
        with contextlib.suppress(OSError):
            if any(str(descriptor.readlink()) in links for descriptor in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f"pid {process.name} ({command[:_SHOWN_CHARACTERS]})"
    return "a process of another user"
