"""An instance's folder in shared memory: its files, its creation, takeover and removal.

arena         ledger and experiences            weights       published policy versions
training*     optimizer states, one a rank      config.json   the effective configuration, for the children
metrics       the slab                          paused        exists while no tickets are issued
*.sock        ZeroMQ and control sockets        *.lock        one trainer rank each
run.json      the id of the run               card            locks: turns on a card (`pipeline.storage.card_turns`)
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import logging
import os
import secrets
import shutil
import stat
from pathlib import Path
from typing import Final

import msgspec

from pipeline.config.changes import told
from pipeline.config.identity import identity_of, run_dir
from pipeline.config.schema import Config
from pipeline.errors import ConfigError, LedgerError
from pipeline.runtime.latest_checkpoint import saved_version
from pipeline.runtime.run_folder import DIFFERENCES, differences_to, read_note
from pipeline.runtime.transport import trainer_name
from pipeline.storage.arena import PAGE_BYTES, Arena
from pipeline.storage.files import UNREADABLE, no_room
from pipeline.storage.layout import LedgerLayout, LedgerMemory
from pipeline.storage.weights_header import is_whole, newest_version

# The engine's ranks have a folder beside them (`pipeline.rollout.generation.vllm.ranks`).
_FILES: Final = ("arena", "weights", "training*", "metrics", "config.json", "*.sock", "*.lock")

log = logging.getLogger(__name__)


class RunId(msgspec.Struct, frozen=True):
    """The run of an arena: its id, the identity of its configuration, its folder; a start of the same run resumes it.

    The batches of an arena are numbered by the trainer's ranks: another number of ranks continues from the checkpoint.
    """

    run_id: str
    identity: str
    folder: str
    ranks: int

    def is_of(self, config: Config) -> bool:
        """Return whether this is the run of a configuration, with as many trainer ranks."""
        return (
            self.identity == identity_of(config)
            and self.folder == _folder_of(config)
            and self.ranks == config.trainer.world_size
        )


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
    def is_left(cls, folder: Path, config: Config) -> bool:
        """Return whether a killed supervisor of a configuration's run left the folder.

        Raises:
            ConfigError: If there is a folder in place of one of its files.
        """
        try:
            is_left = cls.open(folder).run.is_of(config)
        except (OSError, *UNREADABLE):
            return False
        for path in itertools.chain.from_iterable(map(folder.glob, _FILES)):
            if path.is_dir():
                raise ConfigError(f"{path} is a folder, where a daemon has a file: remove it")
        return is_left

    @classmethod
    def prepare(cls, folder: Path, config: Config, layout: LedgerLayout) -> Workspace:
        """Make the folder, or take over the folder of a killed supervisor of the same run.

        The caller holds the instance lock. Files of another run are removed. If this fails, a folder that it made is
        removed, a folder that it took over stays.

        Raises:
            ConfigError: If the arena does not fit into shared memory, or is too small for the configured batches; if
                shared memory cannot be written; if the folder holds steps of a killed run that are in no checkpoint,
                and that this start would not resume.
        """
        _make_own(folder)
        anew = config.trainer.resume == "never"
        workspace = None if anew else cls._left_behind(folder, config, layout)
        if workspace is None:
            _refuse_unsaved(folder, config)
        try:
            if workspace is None:
                workspace = cls._fresh(folder, config, layout)
            else:
                workspace._tell_changes(config)
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

    def _tell_changes(self, config: Config) -> None:
        """Log the keys that differ from those of the killed start; none where its configuration cannot be read."""
        with contextlib.suppress(OSError, *UNREADABLE):
            if changed := told(msgspec.json.decode(self.config_path.read_bytes(), type=dict), config):
                log.info("the configuration is another one than that of the killed start: changed:%s", changed)

    def _write_config(self, config: Config) -> None:
        # In place, into the file's own pages: other programs may have filled shared memory. No process reads it yet.
        descriptor = os.open(self.config_path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(config.model_dump_json().encode())
            file.truncate()

    @classmethod
    def _left_behind(cls, folder: Path, config: Config, layout: LedgerLayout) -> Workspace | None:
        try:
            found = cls.open(folder)
            arena = Arena(folder / "arena", payload=False)
        except (OSError, *UNREADABLE, LedgerError):
            return None
        is_same = found.run.is_of(config) and arena.layout == layout.identity
        version = LedgerMemory(arena.ledger, layout).totals().policy_version if is_same else 0
        arena.close()
        if not is_same:
            return None
        # Of an external trainer that lives on the ledger counts on; the built-in one would begin below its version.
        if version > 0 and config.trainer.kind == "builtin" and newest_version(found.weights_path) is None:
            log.error("the weights of the killed run are gone from shared memory, or cut off there, the run goes on "
                      "from its last checkpoint: version=%d path=%s", version, found.weights_path)  # fmt: skip
            return None
        for state in folder.glob("training*"):
            if not is_whole(state):
                log.error("the training state of the killed run was cut off in shared memory, the run goes on from its "
                          "last checkpoint: version=%d path=%s", version, state)  # fmt: skip
                state.unlink()
        # Sockets and locks of dead processes are useless, and ranks would wait for them at an old rendezvous: the
        # numbers of generations begin again. An external trainer lives on with its own: another process would get a
        # lock under a new inode. Those of a dead one do no harm, the next one takes both.
        in_use = {trainer_name(rank) for rank in range(config.trainer.world_size)}
        for pattern in ("*.sock", "*.lock", "*.new", "ranks-*"):
            for left in folder.glob(pattern):
                if config.trainer.kind != "external" or left.stem not in in_use:
                    left.unlink(missing_ok=True)
        return dataclasses.replace(found, taken_over=True)

    @classmethod
    def _fresh(cls, folder: Path, config: Config, layout: LedgerLayout) -> Workspace:
        if any(folder.iterdir()):
            log.warning("files of an earlier run in shared memory are removed: folder=%s", folder)
            # Not the files alone: the sockets of an external trainer that lives on lead into the folder (`connect`).
            shutil.rmtree(folder)
            _make_own(folder)
        Arena.create(
            folder / "arena",
            payload_bytes=config.buffer.arena_bytes,
            ledger_bytes=layout.nbytes,
            layout=layout.identity,
        )
        run = RunId(secrets.token_hex(4), identity_of(config), _folder_of(config), config.trainer.world_size)
        # Written last: a folder without it was never finished.
        (folder / "run.json").touch(mode=0o600)
        (folder / "run.json").write_bytes(msgspec.json.encode(run))
        return cls(folder, run)


def _folder_of(config: Config) -> str:
    return os.path.realpath(run_dir(config))


def _refuse_unsaved(folder: Path, config: Config) -> None:
    """Raise ConfigError if a folder holds steps that are in no checkpoint, unless this start removes their run."""
    newest = newest_version(folder / "weights")
    try:
        found = Workspace.open(folder)
        # It may be of another release.
        kind = msgspec.json.decode(found.config_path.read_bytes())["trainer"]["kind"]
    except (OSError, KeyError, TypeError, *UNREADABLE):
        return
    is_same = found.run.is_of(config)
    is_asked_to = config.trainer.resume == "never" and is_same
    if newest is None or is_asked_to or kind != "builtin":
        return
    run = Path(found.run.folder)
    saved = saved_version(run / "checkpoints")
    if newest.version > saved:
        unreadable = _why_unreadable(folder / "arena") if is_same else ""
        other_release = "with the release of rlhfd that ran it, if that was another one"
        how = other_release if is_same else f"as it was configured{_odd_settings(found.run, config)}"
        raise ConfigError(
            f"{folder} holds the run {run.name}, killed at policy version {newest.version}; its last checkpoint "
            f"is of version {saved}{unreadable}: start it once more {how}, to save it, or give these versions up: "
            f"rm -r {folder}"
        )


def _odd_settings(run: RunId, config: Config) -> str:
    """Return the first settings of a run that a configuration has not, in brackets; "" if they are not known."""
    odd = []
    if run.ranks != config.trainer.world_size:
        odd.append(f"trainer.world_size = {run.ranks}, not {config.trainer.world_size}")
    with contextlib.suppress(ConfigError):
        if (note := read_note(Path(run.folder))) is not None:
            odd += differences_to(note, config)
    return f" ({'; '.join(odd[:DIFFERENCES])})" if odd else ""


def _why_unreadable(arena: Path) -> str:
    """Return what is to be said of an arena that this release cannot take over."""
    reason = "it has the layout of another release"
    try:
        Arena(arena, payload=False).close()
    except (OSError, LedgerError) as error:
        reason = str(error)
    return f", and its arena cannot be read ({reason})"


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
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise no_room(folder.parent, PAGE_BYTES, "a folder") from error
        raise ConfigError(f"{folder} cannot be made: {error.strerror}") from error
    folder.chmod(0o700)
