"""`rlhfd ps` and `rlhfd attach`: all instances of this user on this machine, and the live panel of one of them."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.options import ask, finding, runtime_dir_of
from pipeline.errors import NotRunningError, RlhfdError, UnreachableError

if TYPE_CHECKING:
    from pipeline.supervisor.live import LiveView

_COLUMNS = ("pid", "state", "step", "reward", "up", "model", "runtime dir", "config")
_ANSWER_TIMEOUT_S = 2.0
_INTERVAL_S = 0.5


@click.command(short_help="List all your instances on this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def ps(as_json: bool) -> None:
    """List all instances of this user on this machine, wherever their runtime directories are.

    An instance that was killed is listed too: its rows and weights are in shared memory, and the next start in its
    runtime directory takes them over.

    \b
    Examples:
      rlhfd ps
      rlhfd ps --json | jq -r '.[].runtime_dir'
    """
    from pipeline.cli.status import table

    found = instances()
    if as_json:
        click.echo(json.dumps(found, indent=2))
    elif found:
        click.echo("\n".join(table(_COLUMNS, [_row(instance) for instance in found])))
    else:
        click.echo("no instance of yours is on this machine")


def instances() -> list[dict[str, Any]]:
    """Return one description an instance of this user, by runtime directory."""
    from pipeline.runtime import lock

    found = []
    for folder in lock.shm_directories():
        try:
            instance = _configured(json.loads((folder / "config.json").read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            # It is being made or removed at this moment, or is of another version.
            continue
        if lock.shm_directory(instance["runtime_dir"]) == folder:
            found.append(_asked(instance))
    return sorted(found, key=lambda instance: str(instance["runtime_dir"]))


def _configured(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of an instance that its configuration gives."""
    daemon = config["daemon"]
    return {
        "pid": None, "state": "killed", "step": None, "max_steps": config["trainer"]["max_steps"], "reward_mean": None,
        "uptime_s": None, "model": config["model"]["actor"], "runtime_dir": str(Path(daemon["runtime_dir"])),
        "config": "", "state_dir": daemon["state_dir"],
    }  # fmt: skip


def _asked(instance: dict[str, Any]) -> dict[str, Any]:
    """Return the description with the answer of the instance, if it runs and gives one."""
    from pipeline.runtime import control, lock

    runtime_dir = Path(instance["runtime_dir"])
    try:
        instance["pid"] = lock.holder(runtime_dir)
        if instance["pid"] is None:
            return instance
        instance["state"] = "no answer"
        answer = control.request(lock.find(runtime_dir), "status", _ANSWER_TIMEOUT_S)
    except RlhfdError:
        # Also where it has too many clients: the others are listed all the same.
        return instance
    return instance | {key: answer[key] for key in instance.keys() & answer.keys()}


def _row(instance: Mapping[str, Any]) -> tuple[str, ...]:
    from pipeline.cli.status import duration

    reward, step, most = instance["reward_mean"], instance["step"], instance["max_steps"]
    return (
        str(instance["pid"] or "–"),
        str(instance["state"]),
        "–" if step is None else f"{step:,}{f'/{most:,}' if most else ''}",
        "–" if reward is None else f"{reward:.4f}",
        duration(instance["uptime_s"]),
        "/".join(Path(instance["model"]).parts[-2:]),
        str(instance["runtime_dir"]),
        str(instance["config"] or "–"),
    )


@click.command(short_help="Show the live panel of a running instance; Ctrl-C leaves it running.")
@finding
def attach(path: Path | None, runtime_dir: Path | None) -> None:
    """Show what `rlhfd start` shows, of an instance that runs already: panel and log, or lines in a pipe.

    Ctrl-C leaves, and the instance goes on. At its end the command ends too, with exit code 0.

    \b
    Examples:
      rlhfd attach
      rlhfd attach --runtime-dir /run/rlhfd
      rlhfd attach | tee steps.txt
    """
    from pipeline.runtime import lock
    from pipeline.supervisor.live import LiveView

    status = ask("status", path, runtime_dir)
    log_place = lock.find(runtime_dir_of(runtime_dir, path)).log
    logging.basicConfig(format="%(message)s")
    view = LiveView()
    view.start()
    _follow(log_place, view)
    has_ended = False
    try:
        while not view.is_gone:
            view.update(status)
            time.sleep(_INTERVAL_S)
            try:
                status = ask("status", path, runtime_dir)
            except NotRunningError:
                has_ended = True
                break
            except UnreachableError:
                pass  # busy for a moment: the next answer is shown
    except KeyboardInterrupt:
        pass  # the way to leave
    finally:
        view.stop()
    if has_ended:
        click.echo("the instance has ended; `rlhfd logs` shows its last lines", err=True)
    elif not view.is_gone:
        click.echo(f"left; the instance goes on: pid {status.get('pid')}, `rlhfd stop` ends it", err=True)


def _follow(destination: str, view: LiveView) -> None:
    """Show new lines of a log file above the panel; the journal is left to journalctl."""
    from pipeline.telemetry import log_file

    def follow() -> None:
        try:
            for lines in log_file.read(Path(destination), 0, follow=True):
                for line in lines:
                    view.log(line)
        except OSError:
            return  # removed during the run

    if destination and not destination.startswith("journal:"):
        threading.Thread(target=follow, name="log", daemon=True).start()
