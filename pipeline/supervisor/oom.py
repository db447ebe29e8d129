"""Whether the kernel's OOM killer struck in this process's control group, where its children are too."""

from __future__ import annotations

from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def kill_count() -> int:
    """Return how many processes it has killed so far; 0 where that cannot be told."""
    for path in _counters():
        try:
            fields = dict(line.split() for line in path.read_text().splitlines())
            return int(fields["oom_kill"])
        except (OSError, ValueError, KeyError):
            continue
    return 0


def _counters() -> list[Path]:
    """Return where the count may stand: version 2 of control groups, version 1, and both as a container shows them."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = {controllers: path.lstrip("/") for _, controllers, path in (line.split(":", 2) for line in lines)}
    unified, legacy = _CGROUPS / own.get("", ""), _CGROUPS / "memory" / own.get("memory", "")
    return [
        unified / "memory.events",
        legacy / "memory.oom_control",
        _CGROUPS / "memory.events",
        _CGROUPS / "memory" / "memory.oom_control",
    ]
