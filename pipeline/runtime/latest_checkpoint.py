"""The latest checkpoint, and whether a start resumes from it; in JSON, and without torch.

    runs/NAME/checkpoints/latest.json          `Latest`, replaced in one rename
    runs/NAME/checkpoints/step-000070/         a checkpoint (`pipeline.trainer.checkpoints`)
    runs/NAME/checkpoints/best                 a link to the checkpoint of the best evaluation

Each run has a folder of its own (`pipeline.runtime.run_folder`): `latest.json` and the checkpoints are of one run.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from pipeline.config.identity import identity_of, run_dir
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.storage import sealed_json
from pipeline.storage.files import flush_folder, write_whole

_BEST = "best"
REPLACED = ".replaced."
"""In the name of a checkpoint that is moved away for another one of its step, before the pid."""


class Latest(msgspec.Struct, frozen=True):
    """The last whole checkpoint.

    Attributes:
        identity: Identity of its run's configuration (`pipeline.config.identity.identity_of`).
        step: Optimizer steps taken.
        version: Policy version of its weights.
        position: First prompt that may still be missing from it.
        complete: Whether its run had taken all of its steps.
        path: Folder of the checkpoint, relative to the folder of this file.
        run: Id of the run, the same through all its starts.
        fingerprint: Fingerprint of its weights as published, in hexadecimal.
    """

    identity: str
    step: int
    version: int
    position: int
    complete: bool
    path: str
    run: str = ""
    fingerprint: str = ""


def checkpoints_dir(config: Config) -> Path:
    """Return the folder of a run's checkpoints."""
    return run_dir(config) / "checkpoints"


def read_latest(root: Path) -> Latest | None:
    """Return the latest checkpoint, None if there is none.

    Raises:
        ConfigError: If the file cannot be read.
    """
    advice = "remove it, or start anew with `rlhfd start --fresh`"
    return sealed_json.read(root / "latest.json", Latest, advice)


def readable_latest(root: Path) -> Latest | None:
    """Return the latest checkpoint, None if there is none that can be read."""
    with contextlib.suppress(ConfigError):
        return read_latest(root)
    return None


def saved_version(root: Path) -> int:
    """Return the policy version of the latest checkpoint, 0 if there is none that can be read."""
    latest = readable_latest(root)
    return 0 if latest is None else latest.version


def write_latest(root: Path, latest: Latest) -> None:
    """Write the note of the latest checkpoint; it is flushed to disk at the return."""
    # A constant name: the unfinished file of a killed process is replaced.
    write_whole(root / "latest.json", sealed_json.encode(latest), root / ".latest.new", mode=0o666)


def forget_latest(root: Path) -> None:
    """Remove the note: this run has no checkpoint yet; the folders stay."""
    (root / "latest.json").unlink(missing_ok=True)


def best_checkpoint(root: Path) -> Path | None:
    """Return the folder of the best checkpoint; None without one, also if it was moved aside."""
    link = root / _BEST
    return root / link.readlink().name if link.is_symlink() and link.is_dir() else None


def mark_best(root: Path, folder: Path) -> None:
    """Make a checkpoint of this folder the best one, in one rename.

    Raises:
        OSError: If the link cannot be written.
    """
    made = root / f".{_BEST}.new"
    made.unlink(missing_ok=True)
    made.symlink_to(folder.name, target_is_directory=True)
    made.rename(root / _BEST)
    flush_folder(root)


def put_back_replaced(root: Path) -> None:
    """Put back each checkpoint that was moved away for one of the same step, which a kill left unfinished.

    Several processes may do so at once.

    Raises:
        OSError: If one cannot be put back.
    """
    for moved in root.glob(f".step-*{REPLACED}*"):
        target = root / moved.name.partition(REPLACED)[0].removeprefix(".")
        if not target.exists():
            # Without it another process has put it back.
            with contextlib.suppress(FileNotFoundError):
                moved.rename(target)


def why_anew(config: Config, latest: Latest) -> str:
    """Return the reason why a start does not resume from the latest checkpoint, "" if it does."""
    if config.trainer.resume == "never":
        return "asked to"
    if latest.identity != identity_of(config):
        return "another run's: models, prompts, seed, algorithm or sizes differ"
    return ""
