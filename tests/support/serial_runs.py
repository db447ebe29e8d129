"""Runs in one process (``--serial``), one after another, each in a fork of a process that has loaded the libraries.

So a run of a few small steps takes a second, and a test can afford many.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from tests.support.daemon import clean_environment

ENDED = re.compile(r"training ended: steps=(\d+) weights=(\w+) experiences=(\w+)")
_SERVER = """
import json, os, signal, sys
import pipeline.serial
from pipeline.cli.main import main
for line in sys.stdin:
    job = json.loads(line)
    pid = os.fork()
    if pid == 0:
        output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(job["folder"])
        sys.path.insert(0, job["folder"])
        exec(job["before"])
        os._exit(main(["start", "--serial", *(word for item in job["sets"] for word in ("--set", item))]) or 0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Run(NamedTuple):
    """A run that has ended: its exit code, or minus the signal, and its output."""

    code: int
    output: str

    @property
    def end(self) -> tuple[str, str, str]:
        """Steps, fingerprint of the weights and digest of the experience."""
        assert self.code == 0, self.output
        found: list[tuple[str, str, str]] = ENDED.findall(self.output)
        assert found, self.output
        return found[-1]


class SerialRuns:
    """A context manager; `run` takes one run to its end."""

    def __enter__(self) -> SerialRuns:
        """Start the process."""
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            env={**clean_environment(), "PYTHONPATH": str(Path(__file__).parents[2])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process."""
        self._server.communicate()

    def run(self, folder: Path, *sets: str, before: str = "") -> Run:
        """Run in a folder that holds state and runtime directory, and modules.

        Args:
            folder: The folder.
            sets: Settings ``section.key=value``.
            before: Code that the process executes before the start.
        """
        assert self._server.stdin is not None and self._server.stdout is not None
        own = [f"daemon.runtime_dir={folder / 'run'}", f"daemon.state_dir={folder / 'state'}"]
        output = folder / "serial.out"
        job = {"folder": os.fspath(folder), "sets": [*own, *sets], "output": os.fspath(output), "before": before}
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        return Run(int(self._server.stdout.readline()), output.read_text())
