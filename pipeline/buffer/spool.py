"""The spool: the untrained rows of a stopped run, on disk until its next start.

    runs/NAME/spool/IDENTITY.safetensors    extents (see `pipeline.storage.extent_file`); in its metadata: its number,
                                            the next prompt position, prompts to be issued again, published versions
    runs/NAME/journal/IDENTITY.safetensors  a snapshot during a run, same format (see `pipeline.buffer.snapshot`)

An orderly shutdown writes the spool; the next start of the same run restores it before it serves any peer. Each extent
goes into the ledger by itself, the number of the spool last. A buffer killed in between is continued by its successor:
an extent that is in the ledger is known by its ticket, and a spool whose file was not yet removed by its number.

A snapshot is restored if there is neither a spool nor an arena in which the run continued: after a crash of the
machine. Snapshot and checkpoint are of different moments, and rows in the checkpoint must not be trained again. So a
snapshot is valid only if exactly the checkpoint's weights, by version and fingerprint, had been published when it was
written: then it has no row that is in the checkpoint. Training after the checkpoint is undone. Its prompts, that is all
prompts from the checkpoint's position on without a row in the snapshot, are issued again. The file stays until the next
snapshot replaces it, because the machine may crash again before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path

import msgspec

from pipeline.buffer import admission
from pipeline.config.identity import identity_of, run_dir
from pipeline.config.schema import Config
from pipeline.errors import ArenaFullError, DecodeError
from pipeline.progress import Telemetry
from pipeline.runtime.latest_checkpoint import Latest, checkpoints_dir, read_latest, why_anew
from pipeline.storage import extent_file
from pipeline.storage.allocator import Extent, ExtentAllocator
from pipeline.storage.arena import Arena
from pipeline.storage.extent_file import ExtentFile, SavedExtent
from pipeline.storage.files import not_taken
from pipeline.storage.ledger import Ledger
from pipeline.storage.records import LAYOUT_VERSION, Chosen
from pipeline.storage.tables import PromptRange, between

log = logging.getLogger(__name__)

_TOTALS = "totals"


class SpoolTotals(msgspec.Struct, frozen=True):
    """The metadata of a spool; `layout` is the layout of its extents."""

    number: int
    position: int
    policy_version: int
    redo: list[PromptRange]
    versions: list[tuple[int, int]]
    refilled: int
    round_left: int
    layout: int

    def include(self, latest: Latest) -> bool:
        """Return whether a checkpoint's weights had been published when the spool was written."""
        known = (f"{fingerprint:016x}" for version, fingerprint in self.versions if version == latest.version)
        return latest.version <= self.policy_version and latest.fingerprint in known


def metadata_of(ledger: Ledger, cut: list[PromptRange]) -> dict[str, str]:
    """Return the metadata of a spool of a ledger's extents; `cut` are the prompts of tickets in flight."""
    totals, redo, versions = ledger.totals, [*ledger.redo, *cut], ledger.versions.entries()
    round_left = totals.round_left + sum(prompts.prompts for prompts in cut)
    spooled = SpoolTotals(
        number=random.getrandbits(62), position=totals.position, policy_version=totals.policy_version, redo=redo,
        versions=versions, refilled=totals.refilled, round_left=round_left, layout=LAYOUT_VERSION,
    )  # fmt: skip
    return {_TOTALS: msgspec.json.encode(spooled).decode()}


def snapshot_path(config: Config) -> Path:
    """Return the path of a run's snapshot."""
    return run_dir(config) / "journal" / f"{identity_of(config)}{extent_file.SUFFIX}"


class Spool:
    """The spool of one run; the buffer owns it."""

    def __init__(self, config: Config, arena: Arena, telemetry: Telemetry = Telemetry.none()) -> None:
        """Compute the paths; no file is read or written.

        Args:
            config: Configuration of the run.
            arena: The arena; its payload need not be mapped.
            telemetry: Told of progress while the spool is written.
        """
        self._config = config
        self._arena = arena
        self._telemetry = telemetry
        self.path = run_dir(config) / "spool" / f"{identity_of(config)}{extent_file.SUFFIX}"
        self.snapshot_path = snapshot_path(config)

    # The end of a run.

    def write(self, ledger: Ledger, chosen: Chosen) -> None:
        """Write ready rows, and the prompts that are to be issued again.

        Raises:
            OSError: If the file cannot be written.
        """
        nbytes = extent_file.save(self.path, self._arena, chosen, metadata_of(ledger, []), self._telemetry)
        log.info("undelivered experiences spooled: rows=%d bytes=%d path=%s",
                 sum(len(rows) for _, rows in chosen), nbytes, self.path)  # fmt: skip

    # The start of a run.

    def take_in(self, ledger: Ledger, now_s: float, damaged: Callable[[int], None]) -> None:
        """Restore the state of the run's end: from its spool, or its snapshot, or else from its checkpoint's position.

        Args:
            ledger: Fresh, or left by a killed instance.
            now_s: Monotonic time, recorded as the time of the seal.
            damaged: Called with the number of spooled rows that cannot be read.
        """
        for path in (self.path, self.snapshot_path):
            # A disk that is read-only by now refuses this even if there is none; the ledger goes on without it.
            with contextlib.suppress(OSError):
                path.with_suffix(".new").unlink()
        # No rows are made before the first version: rows in the ledger are then from a partly restored file.
        lived = ledger.totals.policy_version >= 0
        latest = self._latest(lived)
        is_fresh = ledger.totals.position == 0
        file = self._load(self.path, damaged)
        if file is not None:
            # It is newer than any snapshot.
            self.snapshot_path.unlink(missing_ok=True)
        elif not lived:
            file = self._snapshot(latest, damaged)
        if file is None:
            if is_fresh and latest is not None and latest.position > 0:
                ledger.resume(position=latest.position, redo=[], versions=[], spool=0)
                log.info("prompts go on from the checkpoint: position=%d", latest.position)
            return
        spooled = _totals_of(file)
        if ledger.totals.spool == spooled.number:
            self._done(file)
            return
        is_spool, is_builtin = file.path == self.path, self._config.trainer.kind == "builtin"
        if is_spool and is_fresh and latest is None and spooled.policy_version > 0 and is_builtin:
            log.warning("spool removed, there is no checkpoint to go on from: rows=%d path=%s",
                        sum(len(extent.chosen) for extent in file.extents), self.path)  # fmt: skip
            self.path.unlink()
            return
        if spooled.layout == LAYOUT_VERSION:
            lost = self._restore(file, ledger, now_s)
        else:
            # Their bytes would pass the checksum and be read as other values.
            lost = file.extents
            log.error("rows of another release's layout not taken in, their prompts come again: rows=%d layout=%d",
                      sum(len(extent.chosen) for extent in lost), spooled.layout)  # fmt: skip
        redo = [*spooled.redo, *(self._prompts(extent) for extent in lost)]
        refilled, round_left = spooled.refilled, spooled.round_left
        if not is_spool or (not lived and latest is not None and latest.version < spooled.policy_version):
            # If no checkpoint was written at the shutdown, the training since the last one is undone as well.
            redo += self._undone(file, spooled, 0 if latest is None else latest.position)
            refilled = round_left = 0
        versions = spooled.versions if ledger.totals.policy_version < 0 else []
        ledger.resume(
            position=spooled.position, redo=redo, versions=versions, spool=spooled.number,
            refilled=refilled, round_left=round_left,
        )  # fmt: skip
        log.info("%s taken in: rows=%d position=%d prompts_again=%d", file.path.parent.name, ledger.ready,
                 spooled.position, sum(prompts.prompts for prompts in redo))  # fmt: skip
        if lost:
            damaged(sum(len(extent.chosen) for extent in lost))
            self._set_aside(file.path)
        else:
            self._done(file)

    def _done(self, file: ExtentFile) -> None:
        """Remove a restored file, except a snapshot that the next one replaces."""
        if file.path == self.path or not self._config.buffer.journal_interval_s:
            file.path.unlink()

    def _latest(self, lived: bool) -> Latest | None:
        """Return the checkpoint that the trainer resumes from; without one, remove spool and snapshot."""
        reason = "asked to"
        # A run that began anew goes on without its checkpoints, also after one whose record cannot be read.
        if self._config.trainer.resume != "never":
            # An external trainer keeps its checkpoints elsewhere; a checkpoint here is another run's.
            is_builtin = self._config.trainer.kind == "builtin"
            latest = read_latest(checkpoints_dir(self._config)) if is_builtin else None
            if latest is None or not (reason := why_anew(self._config, latest)):
                return latest
        for path in (self.path,) if lived else (self.path, self.snapshot_path):
            if path.exists():
                log.warning("%s removed, the run starts anew: %s: path=%s", path.parent.name, reason, path)
                path.unlink()
        return None

    def _snapshot(self, latest: Latest | None, damaged: Callable[[int], None]) -> ExtentFile | None:
        """Return the snapshot if it is valid with the checkpoint; without one the run starts from version 0."""
        file = self._load(self.snapshot_path, damaged)
        if file is None or latest is None:
            return file
        spooled = _totals_of(file)
        if spooled.include(latest):
            return file
        log.warning("journal removed, its rows may be in the checkpoint: rows=%d version=%d checkpoint=%d path=%s",
                    sum(len(extent.chosen) for extent in file.extents), spooled.policy_version, latest.version,
                    file.path)  # fmt: skip
        file.path.unlink()
        return None

    def _undone(self, file: ExtentFile, spooled: SpoolTotals, position: int) -> list[PromptRange]:
        """Return the prompts from a position on without a row in a file: their training is undone."""
        return between([*spooled.redo, *map(self._prompts, file.extents)], position, spooled.position)

    def _load(self, path: Path, damaged: Callable[[int], None]) -> ExtentFile | None:
        try:
            file = extent_file.load(path)
            _totals_of(file)
            return file
        except FileNotFoundError:
            return None
        except (DecodeError, KeyError, msgspec.DecodeError) as error:
            log.error("%s not readable: %s", path.parent.name, error)
            damaged(0)
            self._set_aside(path)
            return None

    def _restore(self, file: ExtentFile, ledger: Ledger, now_s: float) -> list[SavedExtent]:
        """Copy the extents into the arena and the ledger; return the extents that are damaged or have no room."""
        allocator, lost = ExtentAllocator(self._arena.payload_bytes), []
        for record in ledger.extents.values():
            allocator.take(Extent(record.offset, record.nbytes))
        source = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        target = os.open(self._arena.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            for extent, start in zip(file.extents, file.starts, strict=True):
                # An extent that is in the ledger was restored before a kill, or never left it.
                if extent.ticket in ledger.extents:
                    continue
                try:
                    room = allocator.reserve(extent.nbytes)
                    place = self._arena.payload_offset + room.offset
                    if extent_file.copy(source, start, target, place, extent.nbytes) != extent.digest:
                        raise DecodeError(f"the extent of ticket {extent.ticket} is not the one that was saved")
                except (ArenaFullError, DecodeError) as error:
                    log.error("spooled experience not taken in: rows=%d: %s", len(extent.chosen), error)
                    lost.append(extent)
                    continue
                ledger.restore(extent, room.offset, now_s)
        finally:
            os.close(source)
            os.close(target)
        return lost

    def _prompts(self, extent: SavedExtent) -> PromptRange:
        return admission.prompts_of(extent, extent.chosen, self._config.group_size)

    def _set_aside(self, path: Path) -> None:
        """Move a damaged file to the quarantine's folder."""
        folder = run_dir(self._config) / "quarantine"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = not_taken(folder / f"{path.parent.name}-{path.name}")
        path.rename(kept)
        log.error("damaged %s kept: path=%s", path.parent.name, kept)


def _totals_of(file: ExtentFile) -> SpoolTotals:
    return msgspec.json.decode(file.metadata[_TOTALS], type=SpoolTotals)
