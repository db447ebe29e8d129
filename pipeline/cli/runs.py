"""`rlhfd runs`: the runs of a state directory, what each is and where its model lies."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.options import finding, load, runtime_dir_of
from pipeline.errors import NotRunningError, RlhfdError, UnreachableError

if TYPE_CHECKING:
    from pipeline.runtime.lock import StateUser

_COLUMNS = ("run", "algorithm", "model", "step", "state", "last start", "checkpoint")
_ANSWER_TIMEOUT_S = 2.0


@click.command(short_help="List the runs: what each is, and where its model lies.")
@finding
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")
def runs(path: Path | None, runtime_dir: Path | None, as_json: bool) -> None:
    """List the runs of the state directory, the one that was started last at the end.

    The checkpoint is a folder that from_pretrained takes. `rlhfd start` continues a run if it gets the configuration of
    that run, `rlhfd start --from step-N` goes back to an earlier checkpoint of it.

    \b
    Examples:
      rlhfd runs
      rlhfd runs --json | jq -r '.[-1].checkpoint'
    """
    import json

    from pipeline.cli.status import table

    state_dir = state_dir_of(runtime_dir, path)
    entries = entries_of(state_dir)
    if as_json:
        click.echo(json.dumps(entries, indent=2))
    elif entries:
        click.echo("\n".join(table(_COLUMNS, [_row(entry) for entry in entries])))
    else:
        click.echo(f"no run in {state_dir}")


def entries_of(state_dir: Path) -> list[dict[str, Any]]:
    """Return the runs of a state directory as JSON objects, the one that was started last at the end."""
    from pipeline.runtime.checkpoint_note import heads_in
    from pipeline.runtime.lock import user_of
    from pipeline.runtime.run_folder import runs_of

    user, entries = user_of(state_dir), list[dict[str, Any]]()
    for run in runs_of(state_dir):
        is_running = user is not None and user.run == run.folder.name
        ended = "complete" if run.latest is not None and run.latest.complete else "stopped"
        entries.append({
            "name": run.folder.name,
            "state": "running" if is_running else ended,
            "algorithm": run.note.algorithm,
            "model": run.note.model,
            "step": (user and is_running and _step_of(user)) or (run.latest.step if run.latest else 0),
            "made_unix_s": run.note.made_unix_s,
            "started_unix_s": run.note.started_unix_s,
            "folder": str(run.folder),
            "checkpoint": str(run.checkpoint or ""),
            "checkpoints": [folder.name for folder, _ in heads_in(run.folder / "checkpoints")],
            "settings": run.note.settings,
        })  # fmt: skip
    return entries


def _step_of(user: StateUser) -> int:
    """Return the present step of a running instance; 0 if it does not tell.

    A state directory on a disk of several machines may be used by an instance on another one: here its runtime
    directory is missing, or another instance's.
    """
    from pipeline.runtime import control, lock

    try:
        record = lock.find(Path(user.runtime_dir))
        status = control.request(record, "status", _ANSWER_TIMEOUT_S)
    except RlhfdError:
        return 0
    return int(status.get("step") or 0) if (record.pid, status.get("run")) == (user.pid, user.run) else 0


def state_dir_of(directory: Path | None, path: Path | None) -> Path:
    """Return the running instance's state directory; if none runs, that of its unit or the configured one.

    Where none runs in a runtime directory that is not the configured one, and `path` is None, a line on standard error
    says whose runs are shown.

    Raises:
        UnreachableError: If one starts in it that does not use the configured state directory.
    """
    import json

    from pipeline.runtime import lock

    folder = runtime_dir_of(directory, path)
    try:
        shm_dir = Path(lock.find(folder).shm_dir)
        return Path(json.loads((shm_dir / "config.json").read_text())["daemon"]["state_dir"])
    except (NotRunningError, FileNotFoundError):
        # At its end an instance removes its shared memory before its lock.
        daemon = load(path, (), files=False).config.daemon
    except UnreachableError:
        # One that starts may read checkpoints for minutes, and holds the state directory meanwhile.
        state_dir = load(path, (), files=False).config.daemon.state_dir
        user = lock.user_of(state_dir)
        if user is None or user.runtime_dir != str(folder.absolute()):
            raise
        return state_dir
    if folder.absolute() == Path(daemon.runtime_dir).absolute():
        return daemon.state_dir
    from pipeline.cli.systemd_units import Unit

    if unit := Unit.of_runtime_dir(folder.absolute()):
        return unit.state_dir
    if path is None:
        shown = f"no instance runs in {folder}: these are the runs of {daemon.state_dir}, --config names those of"
        click.echo(f"{shown} another", err=True)
    return daemon.state_dir


def run_folder_of(directory: Path | None, path: Path | None, name: str) -> Path:
    """Return the folder of a run: the one of that name, else the running one, else the one that was started last.

    Raises:
        RlhfdError: If there is no run of that name.
    """
    from pipeline.config.identity import runs_dir
    from pipeline.runtime.lock import user_of
    from pipeline.runtime.run_folder import runs_of

    state_dir = state_dir_of(directory, path)
    names = [run.folder.name for run in runs_of(state_dir)]
    if name and name not in names:
        raise RlhfdError(f"no run {name} in {state_dir}; there are: {', '.join(names) or 'none'}")
    user = user_of(state_dir)
    running = [user.run] if user is not None and user.run in names else []
    return runs_dir(state_dir) / (name or next(iter([*running, *names[-1:]]), ""))


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    model = Path(entry["model"])
    shown = f"{model.parent.name}/{model.name}" if model.name == "model" else model.name
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry["started_unix_s"]))
    values = (entry["algorithm"], shown, f"{entry['step']:,}", entry["state"], started, entry["checkpoint"])
    return (entry["name"], *(value or "–" for value in values))
