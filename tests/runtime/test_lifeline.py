"""The end of what a process has started: its orphans go, those that it spares and those from before stay."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import subprocess, time
from subprocess import DEVNULL
from pathlib import Path
from pipeline.runtime.lifeline import adopt_orphans, end_descendants

def program():
    return subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=DEVNULL, stderr=DEVNULL)

def left_behind():
    return int(subprocess.run(["sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $!"], stdout=subprocess.PIPE).stdout)

older = program()
adopt_orphans()
spared, own, orphan = program(), program(), left_behind()
began_s = time.monotonic()
end_descendants([spared.pid])
assert time.monotonic() - began_s < 2.0, "it waits for none that lives on"
assert [Path(f"/proc/{pid}").exists() for pid in (own.pid, orphan)] == [False] * 2, "dead, and reaped"
assert [one.poll() for one in (older, spared)] == [None] * 2
spared.kill()
end_descendants()
assert not Path(f"/proc/{spared.pid}").exists() and older.poll() is None
older.kill()
older.wait()
end_descendants()
"""


def test_orphans_are_ended_and_children_that_are_spared_or_older_live_on() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr
