"""The memory limit of this process's control groups: of a container, of a job of Slurm, of a systemd unit.

Files in /dev/shm count for it. The kernel kills a process that allocates beyond it, whatever the file system has free.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_MEMORY = Path("/proc/meminfo")
# Version 2 and version 1.
_LIMITS = ("memory.max", "memory.limit_in_bytes")
# Pages that are not given back: all others are of files on disk. Version 1 has the sums of a hierarchy by other names.
_HELD = (("total_rss", "total_shmem"), ("anon", "shmem"))


def memory_groups() -> list[Path]:
    """Return the folders of this process's control groups for memory, its own first, then those above it."""
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        return []
    own = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    found = []
    for root, path in ((_ROOT, own.get("", "/")), (_ROOT / "memory", own.get("memory", "/"))):
        # In a container the group may be the root of the file system, and its path be known outside alone.
        group = root / path.lstrip("/")
        found += [folder for folder in (group, *group.parents) if folder.is_relative_to(root)]
    return found


def memory_limit_bytes() -> int | None:
    """Return the least limit of the groups; None without one."""
    return min((limit for group in memory_groups() if (limit := _limit(group)) is not None), default=None)


def memory_room_bytes() -> int | None:
    """Return the bytes that may still be allocated in the groups, swap included; None without a limit."""
    rooms = [
        limit - held
        for group in memory_groups()
        if (limit := _limit(group)) is not None and (held := _held(group)) is not None
    ]
    return max(0, min(rooms)) + _swap_room_bytes() if rooms else None


def _swap_room_bytes() -> int:
    """Return the free swap of the machine that the groups may use: in a container it is often none."""
    rooms = [_fields(_MEMORY).get("SwapFree:", 0) * 1024]
    for group in memory_groups():
        with contextlib.suppress(OSError, ValueError):
            # No such file, as in version 1, or "max".
            most_bytes = int((group / "memory.swap.max").read_text())
            rooms.append(most_bytes - int((group / "memory.swap.current").read_text()))
    return max(0, min(rooms))


def _limit(group: Path) -> int | None:
    for name in _LIMITS:
        try:
            limit = int((group / name).read_text())
        except (OSError, ValueError):
            # No such file, or "max".
            continue
        if limit < _fields(_MEMORY).get("MemTotal:", 0) * 1024:
            return limit
    return None


def _held(group: Path) -> int | None:
    fields = _fields(group / "memory.stat")
    return next((sum(fields[name] for name in names) for names in _HELD if names[0] in fields), None)


def _fields(path: Path) -> dict[str, int]:
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}
