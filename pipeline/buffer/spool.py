"""The spool: what a run had rolled out and not trained when it was stopped, on disk until its next start.

    state_dir/spool/IDENTITY.safetensors    extents (see `pipeline.storage.extent_file`), and in its metadata: its number,
                                            the next prompt position, prompts to be issued again, published versions
    state_dir/journal/IDENTITY.safetensors  the same in the midst of a run (see `pipeline.buffer.snapshot`)

A drained stop writes it; the next start of the same run takes it in before it serves anyone. Each extent goes into the
ledger by itself, the number of the spool last: a buffer killed on the way goes on where it was, for an extent that is
in the ledger is known by its ticket; one killed before the file is removed knows the number.

A journal is taken in where there is neither a spool nor an arena in which the run went on: after a crash of the
machine. It speaks of one moment, the checkpoint that the run goes on from of another. Rows that are in the checkpoint
must not be trained again, so a journal counts only if the checkpoint's very weights, by version and fingerprint, had
been published when it was written: it holds no row of theirs. Training that came after the checkpoint is undone; its
prompts, all from the checkpoint's position on of which the journal holds no row, are issued again. The file stays until
the next journal replaces it, for the machine may crash again before that.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from pathlib import Path

import msgspec

from pipeline.buffer import admission
from pipeline.config.schema import Config, identity_of
from pipeline.errors import ArenaFullError, DecodeError
from pipeline.runtime.latest_checkpoint import Latest, checkpoints_dir, read_latest, why_anew
from pipeline.storage import extent_file
from pipeline.storage.allocator import Extent, ExtentAllocator
from pipeline.storage.arena import Arena
from pipeline.storage.extent_file import ExtentFile, SavedExtent
from pipeline.storage.ledger import Ledger
from pipeline.storage.records import Chosen
from pipeline.storage.tables import PromptRange, between

log = logging.getLogger(__name__)


class Books(msgspec.Struct, frozen=True):
    """What a spool says beside its extents."""

    number: int
    position: int
    policy_version: int
    redo: list[PromptRange]
    versions: list[tuple[int, int]]

    def include(self, latest: Latest) -> bool:
        """Return whether a checkpoint's weights had been published when this was written."""
        known = (f"{fingerprint:016x}" for version, fingerprint in self.versions if version == latest.version)
        return latest.version <= self.policy_version and latest.fingerprint in known


def metadata_of(ledger: Ledger, cut: list[PromptRange]) -> dict[str, str]:
    """Return what goes with extents of a ledger; `cut` are prompts of tickets under way."""
    totals = ledger.totals
    redo = [*ledger.redo, *cut]
    books = Books(random.getrandbits(62), totals.position, totals.policy_version, redo, ledger.versions.entries())
    return {"books": msgspec.json.encode(books).decode()}


def journal_path(config: Config) -> Path:
    """Return where a run's journal lies."""
    return config.daemon.state_dir / "journal" / f"{identity_of(config)}{extent_file.SUFFIX}"


class Spool:
    """The spool of one run; the buffer owns it."""

    def __init__(self, config: Config, arena: Arena, on_progress: Callable[[], None] = lambda: None) -> None:
        """Name the files; nothing is touched.

        Args:
            config: Of the run.
            arena: Its payload need not be mapped.
            on_progress: Called again and again while the spool is written.
        """
        self._config = config
        self._arena = arena
        self._on_progress = on_progress
        self.path = config.daemon.state_dir / "spool" / f"{identity_of(config)}{extent_file.SUFFIX}"
        self.journal_path = journal_path(config)

    # The end of a run.

    def write(self, ledger: Ledger, chosen: Chosen, cut: list[PromptRange]) -> None:
        """Write ready rows, and the prompts of tickets that came to nothing.

        Raises:
            OSError: If the disk does not take it.
        """
        nbytes = extent_file.save(self.path, self._arena, chosen, metadata_of(ledger, cut), self._on_progress)
        log.info("undelivered experiences spooled: rows=%d bytes=%d path=%s",
                 sum(len(rows) for _, rows in chosen), nbytes, self.path)  # fmt: skip

    # The start of one.

    def take_in(self, ledger: Ledger, now_s: float, damaged: Callable[[int], None]) -> None:
        """Go on where the run stopped: with its spool, or its journal, or else from its checkpoint's position.

        Args:
            ledger: Fresh, or what a killed instance left.
            now_s: Monotonic time that counts as the time of the seal.
            damaged: Told of rows that were spooled and cannot be read.
        """
        for path in (self.path, self.journal_path):
            path.with_suffix(".new").unlink(missing_ok=True)
        # Nothing is rolled out before there is a version; what is in the ledger then is from a file half taken in.
        lived = ledger.totals.policy_version >= 0
        latest = self._latest(lived)
        is_fresh = ledger.totals.tickets == 0
        file = self._load(self.path, damaged)
        if file is not None:
            # It is newer than any journal.
            self.journal_path.unlink(missing_ok=True)
        elif not lived:
            file = self._journal(latest, damaged)
        if file is None:
            if is_fresh and latest is not None and latest.position > 0:
                ledger.resume(position=latest.position, redo=[], versions=[], spool=0)
                log.info("prompts go on from the checkpoint: position=%d", latest.position)
            return
        books = msgspec.json.decode(file.metadata["books"], type=Books)
        if ledger.totals.spool == books.number:
            self._done(file)
            return
        is_spool, is_builtin = file.path == self.path, self._config.trainer.kind == "builtin"
        if is_spool and is_fresh and latest is None and books.policy_version > 0 and is_builtin:
            log.warning("spool removed, there is no checkpoint to go on from: rows=%d path=%s",
                        sum(len(extent.chosen) for extent in file.extents), self.path)  # fmt: skip
            self.path.unlink()
            return
        lost = self._restore(file, ledger, now_s)
        runs = [*books.redo, *(self._prompts(extent) for extent in lost)]
        if not is_spool or (not lived and latest is not None and latest.version < books.policy_version):
            # Where no checkpoint was written at the stop, the training since the last one is undone as well.
            runs += self._undone(file, books, 0 if latest is None else latest.position)
        versions = books.versions if ledger.totals.policy_version < 0 else []
        ledger.resume(position=books.position, redo=runs, versions=versions, spool=books.number)
        log.info("%s taken in: rows=%d position=%d prompts_again=%d", file.path.parent.name, ledger.ready,
                 books.position, sum(run.prompts for run in runs))  # fmt: skip
        if lost:
            damaged(sum(len(extent.chosen) for extent in lost))
            self._set_aside(file.path)
        else:
            self._done(file)

    def _done(self, file: ExtentFile) -> None:
        """Remove a file that is taken in, save a journal that the next one replaces."""
        if file.path == self.path or not self._config.buffer.journal_interval_s:
            file.path.unlink()

    def _latest(self, lived: bool) -> Latest | None:
        """Return the checkpoint that the trainer goes on from; what does not go with one is removed."""
        reason = "asked to"
        if self._config.trainer.resume != "never":
            # A trainer of one's own keeps its checkpoints elsewhere; what lies here is another run's.
            is_builtin = self._config.trainer.kind == "builtin"
            latest = read_latest(checkpoints_dir(self._config)) if is_builtin else None
            if latest is None or not (reason := why_anew(self._config, latest)):
                return latest
        for path in (self.path,) if lived else (self.path, self.journal_path):
            if path.exists():
                log.warning("%s removed, the run starts anew: %s: path=%s", path.parent.name, reason, path)
                path.unlink()
        return None

    def _journal(self, latest: Latest | None, damaged: Callable[[int], None]) -> ExtentFile | None:
        """Return the journal if it goes with the checkpoint; without one the run goes on from version 0."""
        file = self._load(self.journal_path, damaged)
        if file is None or latest is None:
            return file
        books = msgspec.json.decode(file.metadata["books"], type=Books)
        if books.include(latest):
            return file
        log.warning("journal removed, its rows may be in the checkpoint: rows=%d version=%d checkpoint=%d path=%s",
                    sum(len(extent.chosen) for extent in file.extents), books.policy_version, latest.version,
                    file.path)  # fmt: skip
        file.path.unlink()
        return None

    def _undone(self, file: ExtentFile, books: Books, position: int) -> list[PromptRange]:
        """Return the prompts from a position on of which a file holds no row: their training is undone."""
        return between([*books.redo, *map(self._prompts, file.extents)], position, books.position)

    def _load(self, path: Path, damaged: Callable[[int], None]) -> ExtentFile | None:
        try:
            file = extent_file.load(path)
            msgspec.json.decode(file.metadata["books"], type=Books)
            return file
        except FileNotFoundError:
            return None
        except (DecodeError, KeyError, msgspec.DecodeError) as error:
            log.error("%s not readable: %s", path.parent.name, error)
            damaged(0)
            self._set_aside(path)
            return None

    def _restore(self, file: ExtentFile, ledger: Ledger, now_s: float) -> list[SavedExtent]:
        """Bring the extents into the arena and the ledger; return those that are damaged or have no room."""
        allocator, lost = ExtentAllocator(self._arena.payload_bytes), []
        for record in ledger.extents.values():
            allocator.take(Extent(record.offset, record.nbytes))
        source = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        target = os.open(self._arena.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            for extent, start in zip(file.extents, file.starts, strict=True):
                # One that is there was restored before a kill, or never left.
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
                ledger.restore(
                    ticket=extent.ticket, position=extent.position, prompts=extent.prompts, rows=extent.rows,
                    chosen=extent.chosen, policy_version=extent.policy_version, fingerprint=extent.fingerprint,
                    checksum=extent.checksum, offset=room.offset, nbytes=extent.nbytes, now_s=now_s,
                )  # fmt: skip
        finally:
            os.close(source)
            os.close(target)
        return lost

    def _prompts(self, extent: SavedExtent) -> PromptRange:
        return admission.prompts_of(extent, extent.chosen, self._config.group_size)

    def _set_aside(self, path: Path) -> None:
        """Keep a file that is damaged where the quarantine is."""
        folder = self._config.daemon.state_dir / "quarantine"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = folder / f"{path.parent.name}-{path.name}"
        path.rename(kept)
        log.error("damaged %s kept: path=%s", path.parent.name, kept)
