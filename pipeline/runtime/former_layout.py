"""The state directory of earlier releases, which held one run: each of its parts moves to the folder of its run, once.

    state_dir/checkpoints/                  step-000070/ to the run of its own description, whichever run that is
    state_dir/spool/IDENTITY.safetensors    at the start of the run of that identity; journal/ likewise
    state_dir/samples/, quarantine/, history.msgpack    to the run of `latest.json`, else to the run that starts

Each move is one rename on one file system. A kill in between leaves the rest for the next start. Nothing is replaced: a
part whose place is taken stays where it is.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from pipeline.config.identity import default_name, identity_of, runs_dir
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.runtime.latest_checkpoint import Latest, read_latest, write_latest
from pipeline.runtime.run_folder import (
    CheckpointHead,
    RunFolder,
    RunNote,
    heads_in,
    newest_of,
    read_note,
    write_note,
)

log = logging.getLogger(__name__)


def adopt(config: Config) -> None:
    """Move the parts of an earlier release into the folders of their runs.

    Args:
        config: The configuration that starts; its run's folder exists.

    Raises:
        ConfigError: If a part cannot be moved.
    """
    state, own = Path(config.daemon.state_dir), RunFolder(config).path
    try:
        owners = {identity_of(config): own}
        latest = _adopt_checkpoints(state, owners)
        for name in ("spool", "journal"):
            _move(state / name / f"{identity_of(config)}.safetensors", own / name)
        last = own if latest is None else owners.get(latest.identity, own)
        for name in ("samples", "quarantine", "history.msgpack"):
            _move(state / name, last)
        for name in ("checkpoints", "spool", "journal"):
            # A folder that still holds something stays.
            with contextlib.suppress(OSError):
                (state / name).rmdir()
    except OSError as error:
        raise ConfigError(
            f"daemon.state_dir: the files of an earlier release cannot be moved to {runs_dir(state)}: {error}"
        ) from error


def _adopt_checkpoints(state: Path, owners: dict[str, Path]) -> Latest | None:
    """Move each checkpoint to the folder of its run; return the record of the latest, if there is one."""
    former = state / "checkpoints"
    try:
        latest = read_latest(former)
    except ConfigError as error:
        log.warning("%s", error)
        latest = None
    for folder, head in list(heads_in(former)):
        if head.identity not in owners:
            owners[head.identity] = _made(state, folder, head)
        _move(folder, owners[head.identity] / "checkpoints")
    for identity, owner in owners.items():
        _record(owner / "checkpoints", identity, latest)
    if not any(former.glob("step-*")):
        # Last: a kill before leaves the record of the checkpoint that the run continues from.
        for name in ("latest.json", ".latest.new"):
            (former / name).unlink(missing_ok=True)
    return latest


def _made(state: Path, folder: Path, head: CheckpointHead) -> Path:
    """Return the folder of the run of a checkpoint, made if it is missing."""
    algorithm, actor = head.setting("rollout", "algorithm"), head.setting("model", "actor")
    owner = runs_dir(state) / default_name(algorithm or "run", actor, head.identity)
    owner.mkdir(mode=0o700, parents=True, exist_ok=True)
    if read_note(owner) is None:
        written_s = folder.stat().st_mtime
        write_note(owner, RunNote(owner.name, head.identity, written_s, written_s, algorithm, actor))
    return owner


def _record(checkpoints: Path, identity: str, latest: Latest | None) -> None:
    """Record a run's latest checkpoint: that of the former record, else the newest; an existing record stays."""
    if (checkpoints / "latest.json").exists():
        return
    heads = list(heads_in(checkpoints))
    if latest is not None and latest.identity == identity and checkpoints.is_dir():
        write_latest(checkpoints, latest)
    elif heads:
        folder, head = newest_of(heads)
        write_latest(checkpoints, head.latest(folder))


def _move(path: Path, into: Path) -> None:
    if not path.exists():
        return
    target = into / path.name
    if target.exists():
        log.warning("a file of an earlier release stays, its place is taken: path=%s place=%s", path, target)
        return
    into.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.rename(target)
    log.info("moved to the folder of its run: path=%s -> %s", path, target)
