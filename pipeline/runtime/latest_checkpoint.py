"""Which checkpoint is the last, and whether a start goes on from it; in JSON, and without torch.

    state_dir/checkpoints/latest.json          `Latest`, replaced in one rename
    state_dir/checkpoints/step-000070/         what `pipeline.trainer.checkpoints` writes

`latest.json` is always about the run that is under way or ended last: a run that starts anew removes it before it
publishes its first weights.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from pipeline.config.schema import Config, identity_of
from pipeline.errors import ConfigError
from pipeline.storage.files import UNREADABLE, replacing


class Latest(msgspec.Struct, frozen=True):
    """The last whole checkpoint.

    Attributes:
        identity: Of its run's configuration (`pipeline.config.schema.identity_of`).
        step: Optimizer steps taken.
        version: Policy version of its weights.
        position: First prompt that may still be missing from it.
        complete: Whether its run had taken all of its steps.
        path: Its folder, from this file's on.
        run: Tells the checkpoints of one run, however often it was started, from another's.
        fingerprint: Of its weights as published, in hexadecimal.
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
    """Return the folder of all checkpoints."""
    return Path(config.daemon.state_dir) / "checkpoints"


def read_latest(root: Path) -> Latest | None:
    """Return which checkpoint is the last, None if there is none.

    Raises:
        ConfigError: If the file cannot be read.
    """
    path = root / "latest.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Latest)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"{path}: {error}; remove it, or start anew with `rlhfd start --fresh`") from error


def write_latest(root: Path, latest: Latest) -> None:
    """Note which checkpoint is the last; it lies on the disk when this returns."""
    # One name: what a kill leaves half written is written anew.
    with (
        replacing(root / "latest.json", temporary=root / ".latest.new", mode=0o666, flush=True) as descriptor,
        open(descriptor, "wb", closefd=False) as file,
    ):
        file.write(msgspec.json.format(msgspec.json.encode(latest)) + b"\n")


def forget_latest(root: Path) -> None:
    """Note that there is none of this run yet; the folders stay."""
    (root / "latest.json").unlink(missing_ok=True)


def why_anew(config: Config, latest: Latest) -> str:
    """Return why a start does not go on from the last checkpoint; "" if it does."""
    if config.trainer.resume == "never":
        return "asked to"
    if latest.identity != identity_of(config):
        return "another run's: models, prompts, seed, algorithm or sizes differ"
    if 0 < config.trainer.max_steps <= latest.step:
        return f"it took all of trainer.max_steps={config.trainer.max_steps}"
    return ""
