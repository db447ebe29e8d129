"""An instance's folder in shared memory: what lies in it, how it is made, taken over and removed.

arena         ledger and experiences            weights       published policy versions
metrics       the slab                          config.json   the effective configuration, for the children
*.sock        ZeroMQ and control sockets        *.lock        one trainer rank each
run.json      which run this is                 paused        there while no tickets are issued
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import logging
import os
import secrets
import shutil
import stat
from pathlib import Path

import msgspec

from pipeline.buffer.admission import Limits
from pipeline.config.schema import Config
from pipeline.config.sizes import EXTENT_OVERHEAD_BYTES
from pipeline.errors import ConfigError, LedgerError
from pipeline.runtime.messages import UNREADABLE
from pipeline.storage.arena import PAGE_BYTES, Arena, no_room
from pipeline.storage.records import LedgerLayout
from pipeline.storage.tables import MOST_LEASES

log = logging.getLogger(__name__)

_LEAST_EXTENTS = 256
_MOST_EXTENTS = 16384
_TYPICAL_ROW_BYTES = 256


class Run(msgspec.Struct, frozen=True):
    """Which run an arena belongs to: its id, and what must be equal for another start to go on with it."""

    run_id: str
    identity: str


@dataclasses.dataclass(frozen=True)
class Workspace:
    """The folder of one instance."""

    folder: Path
    run: Run
    taken_over: bool = False

    @property
    def arena_path(self) -> Path:
        """The arena's file."""
        return self.folder / "arena"

    @property
    def weights_path(self) -> Path:
        """The published weights; made by the first publish."""
        return self.folder / "weights"

    @property
    def metrics_path(self) -> Path:
        """The metrics slab."""
        return self.folder / "metrics"

    @property
    def config_path(self) -> Path:
        """The effective configuration as the children read it."""
        return self.folder / "config.json"

    @classmethod
    def open(cls, folder: str | Path) -> Workspace:
        """Return the workspace that a supervisor has prepared."""
        folder = Path(folder)
        return cls(folder, msgspec.json.decode((folder / "run.json").read_bytes(), type=Run))

    @classmethod
    def prepare(cls, folder: Path, config: Config) -> Workspace:
        """Make the folder, or take over what a killed supervisor of the same run left in it.

        The caller holds the instance lock. Whatever was left by another run is removed. If this fails, a folder that it
        made is removed, one that it took over stays.

        Raises:
            ConfigError: If the arena does not fit into shared memory, or is too small for the configured batches.
        """
        refuse_sizes(config)
        _make_own(folder)
        folder.chmod(0o700)
        layout = ledger_layout(config)
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
        """Write a configuration for the children beside the one that they read, to be renamed to `config_path`.

        Raises:
            OSError: If there is no room for it.
        """
        staged = self.folder / "config.json.new"
        staged.touch(mode=0o600)
        staged.write_text(config.model_dump_json())
        return staged

    def remove(self) -> None:
        """Remove the folder and all that is in it; what the run held is on disk by now."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def undo(self) -> None:
        """Leave things as `prepare` found them: a folder that it made is removed, one that it took over stays."""
        if not self.taken_over:
            self.remove()
            return
        log.warning(
            "what a killed supervisor left stays for the next start, "
            "`rlhfd start --fresh` removes it: run=%s folder=%s", self.run.run_id, self.folder,
        )  # fmt: skip

    def _write_config(self, config: Config) -> None:
        # Into the pages that a file taken over has: others may have left none. Nobody reads it yet.
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
        # Sockets and locks of the dead are of no use to anyone, and a meeting point of theirs would make ranks wait for
        # them: generations are counted anew.
        for pattern in ("*.sock", "*.lock", "*.new", "ranks-*"):
            for left in folder.glob(pattern):
                left.unlink(missing_ok=True)
        return dataclasses.replace(found, taken_over=True)

    @classmethod
    def _fresh(cls, folder: Path, config: Config, layout: LedgerLayout) -> Workspace:
        if any(folder.iterdir()):
            log.warning("what another run left in shared memory is removed: folder=%s", folder)
        for left in folder.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        Arena.create(
            folder / "arena",
            payload_bytes=config.buffer.arena_bytes,
            ledger_bytes=layout.nbytes,
            layout=layout.identity,
        )
        run = Run(secrets.token_hex(4), identity_of(config))
        # Written last: a folder without it was never finished.
        (folder / "run.json").touch(mode=0o600)
        (folder / "run.json").write_bytes(msgspec.json.encode(run))
        return cls(folder, run)


def _make_own(folder: Path) -> None:
    """Make the folder unless it is there; a link, or what somebody else made under its name, is not followed."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        if found.st_uid != os.geteuid():
            raise ConfigError(f"{folder} belongs to another user") from None
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"{folder} is not a directory") from None


def limits_of(config: Config) -> Limits:
    """Return what bounds the buffer under this configuration."""
    return Limits(
        sample_batch_size=config.sample_batch_size,
        rows_per_version=config.rows_per_version,
        group_size=config.group_size,
        prompts_per_ticket=config.prompts_per_ticket,
        max_staleness=config.buffer.max_staleness,
        limit_batches=config.buffer.limit,
        world_size=config.trainer.world_size,
        row_bytes=config.row_bytes,
        drop_stale=config.buffer.stale_policy == "drop",
    )


def capacity_items(config: Config) -> int:
    """Return how many rows may be reserved or ready at once: by the limit, or by the staleness bound."""
    staleness = (config.buffer.max_staleness + 1) * config.rows_per_version
    return min(config.buffer.limit * config.sample_batch_size, staleness) if config.buffer.limit else staleness


def ledger_layout(config: Config) -> LedgerLayout:
    """Return a ledger with a record for as many extents as the arena could hold of short rows.

    `buffer.row_bytes` has no say: rows without images are short whatever the room, and a run that goes on with more
    room must find the ledger it left.
    """
    rows = config.prompts_per_ticket * config.group_size
    extents = config.buffer.arena_bytes // (rows * _TYPICAL_ROW_BYTES)
    return LedgerLayout(extents=min(max(extents, _LEAST_EXTENTS), _MOST_EXTENTS), rows_per_extent=rows)


def refuse_sizes(config: Config) -> None:
    """Raise ConfigError when memory of these sizes could not hold what the configuration asks for."""
    refuse_small_arena(config, limits_of(config))
    refuse_many_leases(config)


def refuse_small_arena(config: Config, limits: Limits) -> None:
    """Raise ConfigError when the arena could not hold one batch for each rank and one ticket beside them."""
    rows = limits.sample_batch_size * limits.world_size + limits.prompts_per_ticket * limits.group_size
    needed_bytes = rows * limits.row_bytes + 2 * EXTENT_OVERHEAD_BYTES
    if config.buffer.arena_bytes < needed_bytes:
        given = config.buffer.row_bytes
        kind = f"of {config.rollout.max_length} tokens" if given is None else f"of buffer.row_bytes = {given:,} B"
        raise ConfigError(
            f"buffer.arena_bytes: {config.buffer.arena_bytes:,} B cannot hold a batch a rank and a ticket: "
            f"{rows} rows {kind} take up to {needed_bytes:,} B"
        )


def refuse_many_leases(config: Config) -> None:
    """Raise ConfigError when the ranks would hold more batches at once than the ledger has leases for."""
    trainer = config.trainer
    leases = (trainer.gradient_accumulation_steps * trainer.publish_every + 1) * trainer.world_size
    if leases > MOST_LEASES:
        raise ConfigError(
            f"trainer.publish_every: {trainer.world_size} ranks would hold {leases:,} batches at once, "
            f"{trainer.gradient_accumulation_steps} x {trainer.publish_every} to a version; at most {MOST_LEASES:,}"
        )


def identity_of(config: Config) -> str:
    """Return a digest of everything that makes two runs the same run: models, prompts, seed, algorithm and batches."""
    parts = (
        config.daemon.seed, config.model.model_dump_json(), config.prompts.model_dump_json(), config.rollout.algorithm,
        config.rollout.num_generations, config.rollout.max_length, config.sample_batch_size, config.prompts_per_ticket,
        config.trainer.world_size, config.trainer.kind, config.buffer.arena_bytes,
    )  # fmt: skip
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
