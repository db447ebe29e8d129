"""An instance's folder in shared memory: its files, its creation, takeover and removal.

arena         ledger and experiences            weights       published policy versions
metrics       the slab                          config.json   the effective configuration, for the children
*.sock        ZeroMQ and control sockets        *.lock        one trainer rank each
run.json      the id of the run                 paused        exists while no tickets are issued
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import secrets
import shutil
import stat
from pathlib import Path

import msgspec

from pipeline.config.identity import identity_of
from pipeline.config.schema import Config
from pipeline.errors import ConfigError, LedgerError
from pipeline.storage.arena import PAGE_BYTES, Arena
from pipeline.storage.files import UNREADABLE, no_room
from pipeline.storage.layout import LedgerLayout

log = logging.getLogger(__name__)


class RunId(msgspec.Struct, frozen=True):
    """The run of an arena: its id, and the identity of its configuration; a start of the same identity resumes it."""

    run_id: str
    identity: str


@dataclasses.dataclass(frozen=True)
class Workspace:
    """The folder of one instance."""

    folder: Path
    run: RunId
    taken_over: bool = False

    @property
    def arena_path(self) -> Path:
        """The arena's file."""
        return self.folder / "arena"

    @property
    def weights_path(self) -> Path:
        """The published weights; the first publish makes the file."""
        return self.folder / "weights"

    @property
    def metrics_path(self) -> Path:
        """The metrics slab."""
        return self.folder / "metrics"

    @property
    def config_path(self) -> Path:
        """The effective configuration, read by the children."""
        return self.folder / "config.json"

    @classmethod
    def open(cls, folder: str | Path) -> Workspace:
        """Return the workspace that a supervisor has prepared in `folder`."""
        folder = Path(folder)
        return cls(folder, msgspec.json.decode((folder / "run.json").read_bytes(), type=RunId))

    @classmethod
    def prepare(cls, folder: Path, config: Config, layout: LedgerLayout) -> Workspace:
        """Make the folder, or take over the folder of a killed supervisor of the same run.

        The caller holds the instance lock. Files of another run are removed. If this fails, a folder that it made is
        removed, a folder that it took over stays.

        Raises:
            ConfigError: If the arena does not fit into shared memory, or is too small for the configured batches.
        """
        _make_own(folder)
        folder.chmod(0o700)
        anew = config.trainer.resume == "never"
        workspace = None if anew else cls._left_behind(folder, identity_of(config), layout)
        try:
            if workspace is None:
                workspace = cls._fresh(folder, config, layout)
            workspace._write_config(config)
        except BaseException as error:
            full = isinstance(error, OSError) and error.errno == errno.ENOSPC
            refusal = no_room(folder, PAGE_BYTES, "a file") if full else None
            if workspace is None:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                workspace.undo()
            if refusal is not None:
                raise refusal from error
            raise
        return workspace

    def stage_config(self, config: Config) -> Path:
        """Write a new configuration for the children beside the current one; the caller renames it to `config_path`.

        Raises:
            OSError: If shared memory has no room for it.
        """
        staged = self.folder / "config.json.new"
        staged.touch(mode=0o600)
        staged.write_text(config.model_dump_json())
        return staged

    def remove(self) -> None:
        """Remove the folder with its files; the state of the run is on disk by then."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def undo(self) -> None:
        """Undo `prepare`: a folder that it made is removed, a folder that it took over stays."""
        if not self.taken_over:
            self.remove()
            return
        log.warning(
            "the state of a killed supervisor stays for the next start, "
            "`rlhfd start --fresh` removes it: run=%s folder=%s", self.run.run_id, self.folder,
        )  # fmt: skip

    def _write_config(self, config: Config) -> None:
        # In place, into the file's own pages: other programs may have filled shared memory. No process reads it yet.
        descriptor = os.open(self.config_path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(config.model_dump_json().encode())
            file.truncate()

    @classmethod
    def _left_behind(cls, folder: Path, identity: str, layout: LedgerLayout) -> Workspace | None:
        try:
            found = cls.open(folder)
            arena = Arena(folder / "arena", payload=False)
        except (OSError, *UNREADABLE, LedgerError):
            return None
        arena.close()
        if found.run.identity != identity or arena.layout != layout.identity:
            return None
        # Sockets and locks of dead processes are useless, and ranks would wait for them at an old rendezvous: the
        # numbers of generations begin again.
        for pattern in ("*.sock", "*.lock", "*.new", "ranks-*"):
            for left in folder.glob(pattern):
                left.unlink(missing_ok=True)
        return dataclasses.replace(found, taken_over=True)

    @classmethod
    def _fresh(cls, folder: Path, config: Config, layout: LedgerLayout) -> Workspace:
        if any(folder.iterdir()):
            log.warning("files of another run in shared memory are removed: folder=%s", folder)
        for left in folder.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        Arena.create(
            folder / "arena",
            payload_bytes=config.buffer.arena_bytes,
            ledger_bytes=layout.nbytes,
            layout=layout.identity,
        )
        run = RunId(secrets.token_hex(4), identity_of(config))
        # Written last: a folder without it was never finished.
        (folder / "run.json").touch(mode=0o600)
        (folder / "run.json").write_bytes(msgspec.json.encode(run))
        return cls(folder, run)


def _make_own(folder: Path) -> None:
    """Make the folder unless it exists; a link, or a file or folder of another user, is refused."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        if found.st_uid != os.geteuid():
            raise ConfigError(f"{folder} belongs to another user") from None
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"{folder} is not a directory") from None
