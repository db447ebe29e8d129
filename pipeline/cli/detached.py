"""`rlhfd start --detach`: an instance in a session of its own, watched until it is ready or has ended."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from pipeline.errors import ExitCode, NotRunningError, UnreachableError
from pipeline.runtime import control, lock

_POLL_S = 0.1
_ANSWER_TIMEOUT_S = 2.0
_PROGRAM = "from pipeline.cli.main import main; main(prog_name='rlhfd')"
_RUNNING = ("ready", "paused", "stuck")


def start(arguments: Sequence[str], runtime_dir: Path) -> int:
    """Start an instance that outlives this process and its terminal; return when it is ready or has ended.

    Its log lines and errors appear on standard error until then. An interrupt ends it.

    Args:
        arguments: Arguments of `rlhfd start`.
        runtime_dir: The instance's runtime directory.

    Returns:
        0 if it is ready; else its exit code, or `ExitCode.FAILED` if it was killed or interrupted.
    """
    child = subprocess.Popen(
        # -P: the working directory must not come first among the folders of modules, as it does not with bin/rlhfd.
        [sys.executable, "-P", "-c", _PROGRAM, "start", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # No file: it would grow as long as the instance runs, which has a log of its own.
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    is_interrupted = False
    while True:
        try:
            has_ended = child.poll() is not None
            _pass_on(child, wait_s=0.0 if has_ended else _POLL_S)
            if has_ended:
                failed = is_interrupted or child.returncode < 0
                if not failed and child.returncode == 0:
                    # The instance tells on its standard output, which nobody reads, why there was nothing to do.
                    click.echo("it has ended: its run is complete, or it was stopped; `rlhfd runs` shows which")
                return int(ExitCode.FAILED) if failed else child.returncode
            if not is_interrupted and (record := _ready_record(runtime_dir, child.pid)) is not None:
                _print_hints(record, runtime_dir)
                return int(ExitCode.OK)
        except KeyboardInterrupt:
            is_interrupted = True
            child.send_signal(signal.SIGTERM)


def _pass_on(child: subprocess.Popen[bytes], *, wait_s: float) -> None:
    """Write to standard error what the instance has written; wait for the first of it."""
    assert child.stderr is not None
    while select.select([child.stderr], [], [], wait_s)[0]:
        data = os.read(child.stderr.fileno(), 1 << 16)
        if not data:
            # The end of the instance follows within milliseconds, unless its standard error was closed on purpose.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(wait_s)
            return
        click.echo(data.decode(errors="replace"), err=True, nl=False)
        wait_s = 0.0


def _ready_record(runtime_dir: Path, pid: int) -> lock.InstanceRecord | None:
    try:
        record = lock.find(runtime_dir)
        if record.pid != pid:
            return None
        state = control.request(record, "status", _ANSWER_TIMEOUT_S).get("state")
    except (NotRunningError, UnreachableError):
        return None
    return record if state in _RUNNING else None


def _print_hints(record: lock.InstanceRecord, runtime_dir: Path) -> None:
    option = f" --runtime-dir {shlex.quote(str(runtime_dir))}"
    click.echo(f"rlhfd runs: pid {record.pid}" + (f", {record.url}/" if record.url else ""))
    click.echo(f"  rlhfd attach{option}    its live panel")
    click.echo(f"  rlhfd stop{option}      shuts it down")
    if not record.log:
        click.echo("no log is kept: its file could not be made, as the line above says", err=True)
