"""A kill by the OOM killer is distinguished from any other SIGKILL, if the kernel counts it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.supervisor import fleet
from tests.support.slabs import ROOT

_PROGRAM = """
import os, signal, subprocess, sys
from pipeline.supervisor import fleet

def ended(code):
    return -subprocess.run([sys.executable, "-c", code]).returncode, fleet.kill_count()

print(fleet.kill_count())
print(*ended("import os; os.kill(os.getpid(), 9)"))
print(*ended("room = bytearray(512 << 20); room[::4096] = bytes([1]) * len(room[::4096])"))
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of 128 MiB; without one a skip, or in CI a failure."""
    own = {line.split(":", 2)[1]: line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines()}
    parent = Path("/sys/fs/cgroup") / ("memory" + own["memory"] if "memory" in own else own.get("", "/").lstrip("/"))
    group = parent / f"rlhfd-test-{os.getpid()}"
    try:
        group.mkdir()
        limit = "memory.limit_in_bytes" if "memory" in own else "memory.max"
        (group / limit).write_text(str(128 << 20))
    except OSError as error:
        if group.exists():
            group.rmdir()
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no control group of one's own here: {error}")
    yield group
    group.rmdir()


def test_a_kill_for_lack_of_memory_is_counted_and_another_is_not(group: Path) -> None:
    enter = f"import os; open('{group}/cgroup.procs', 'w').write(str(os.getpid()))\n"

    lines = subprocess.check_output([sys.executable, "-P", "-c", enter + _PROGRAM], cwd=ROOT, text=True).splitlines()

    assert lines == ["0", "9 0", "9 1"]


def test_without_a_count_of_a_control_group_the_machines_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pipeline.storage.control_groups._ROOT", tmp_path)
    monkeypatch.setattr(fleet, "_VMSTAT", tmp_path / "vmstat")
    assert fleet.kill_count() is None

    (tmp_path / "vmstat").write_text("pgfault 12\noom_kill 3\n")
    assert fleet.kill_count() == 3, "those of the whole machine"
