"""The spool: what a run had rolled out and not trained when it was stopped, on disk until its next start.

    state_dir/spool/IDENTITY.safetensors    extents (see `pipeline.extent_file`), and in its metadata: its number,
                                            the next prompt position, prompts to be issued again, published versions

A drained stop writes it; the next start of the same run takes it in before it serves anyone. Each extent goes into the
ledger by itself, the number of the spool last: a buffer killed on the way goes on where it was, for an extent that is
in the ledger is known by its ticket; one killed before the file is removed knows the number.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable

import msgspec

from pipeline import admission, extent_file
from pipeline.arena import Arena, Extent, ExtentAllocator
from pipeline.checkpoint_notes import Latest, checkpoints_dir, read_latest, why_anew
from pipeline.config import Config
from pipeline.errors import ArenaFullError, DecodeError
from pipeline.extent_file import ExtentFile, SavedExtent
from pipeline.ledger import Ledger
from pipeline.ledger_records import Chosen
from pipeline.ledger_tables import Run
from pipeline.workspace import identity_of

log = logging.getLogger(__name__)


class Books(msgspec.Struct, frozen=True):
    """What a spool says beside its extents."""

    number: int
    position: int
    policy_version: int
    redo: list[Run]
    versions: list[tuple[int, int]]


class Spool:
    """The spool of one run; the buffer owns it."""

    def __init__(self, config: Config, arena: Arena) -> None:
        """Name the file; nothing is touched.

        Args:
            config: Of the run.
            arena: Its payload need not be mapped.
        """
        self._config = config
        self._arena = arena
        self.path = config.daemon.state_dir / "spool" / f"{identity_of(config)}{extent_file.SUFFIX}"

    # The end of a run.

    def write(self, ledger: Ledger, chosen: Chosen, cut: list[Run]) -> None:
        """Write ready rows, and the prompts of tickets that came to nothing.

        Raises:
            OSError: If the disk does not take it.
        """
        redo = [*ledger.redo, *cut]
        totals = ledger.totals
        books = Books(random.getrandbits(62), totals.position, totals.policy_version, redo, ledger.versions.entries())
        nbytes = extent_file.save(self.path, self._arena, chosen, {"books": msgspec.json.encode(books).decode()})
        log.info("undelivered experiences spooled: rows=%d bytes=%d path=%s",
                 sum(len(rows) for _, rows in chosen), nbytes, self.path)  # fmt: skip

    # The start of one.

    def take_in(self, ledger: Ledger, now_s: float, damaged: Callable[[int], None]) -> None:
        """Go on where the run stopped: with its spool, or from its checkpoint's position if the spool was lost.

        Args:
            ledger: Fresh, or what a killed instance left.
            now_s: Monotonic time that counts as the time of the seal.
            damaged: Told of rows that were spooled and cannot be read.
        """
        self.path.with_suffix(".new").unlink(missing_ok=True)
        latest = self._latest()
        is_fresh = ledger.totals.tickets == 0
        file = self._load(damaged)
        if file is None:
            if is_fresh and latest is not None and latest.position > 0:
                ledger.resume(position=latest.position, redo=[], versions=[], spool=0)
                log.info("prompts go on from the checkpoint: position=%d", latest.position)
            return
        books = msgspec.json.decode(file.metadata["books"], type=Books)
        if ledger.totals.spool == books.number:
            self.path.unlink()
            return
        if is_fresh and latest is None and books.policy_version > 0 and self._config.trainer.kind == "builtin":
            log.warning("spool removed, there is no checkpoint to go on from: rows=%d path=%s",
                        sum(len(extent.chosen) for extent in file.extents), self.path)  # fmt: skip
            self.path.unlink()
            return
        lost = self._restore(file, ledger, now_s)
        runs = [*books.redo, *(self._prompts(extent) for extent in lost)]
        versions = books.versions if ledger.totals.policy_version < 0 else []
        ledger.resume(position=books.position, redo=runs, versions=versions, spool=books.number)
        log.info("spool taken in: rows=%d position=%d prompts_again=%d", ledger.ready, books.position,
                 sum(run.prompts for run in runs))  # fmt: skip
        if lost:
            damaged(sum(len(extent.chosen) for extent in lost))
            self._set_aside()
        else:
            self.path.unlink()

    def _latest(self) -> Latest | None:
        """Return the checkpoint that the trainer goes on from; a spool that does not go with one is removed."""
        reason = "asked to"
        if self._config.trainer.resume != "never":
            # A trainer of one's own keeps its checkpoints elsewhere; what lies here is another run's.
            is_builtin = self._config.trainer.kind == "builtin"
            latest = read_latest(checkpoints_dir(self._config)) if is_builtin else None
            if latest is None or not (reason := why_anew(self._config, latest)):
                return latest
        if self.path.exists():
            log.warning("spool removed, the run starts anew: %s: path=%s", reason, self.path)
            self.path.unlink()
        return None

    def _load(self, damaged: Callable[[int], None]) -> ExtentFile | None:
        try:
            file = extent_file.load(self.path)
            msgspec.json.decode(file.metadata["books"], type=Books)
            return file
        except FileNotFoundError:
            return None
        except (DecodeError, KeyError, msgspec.DecodeError) as error:
            log.error("spool not readable: %s", error)
            damaged(0)
            self._set_aside()
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

    def _prompts(self, extent: SavedExtent) -> Run:
        return admission.prompts_of(extent, extent.chosen, self._config.group_size)

    def _set_aside(self) -> None:
        """Keep a file that is damaged where the quarantine is."""
        folder = self._config.daemon.state_dir / "quarantine"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = folder / f"spool-{self.path.name}"
        self.path.rename(kept)
        log.error("damaged spool kept: path=%s", kept)
