"""The folder of a run: made, found again, completed, gone back to an earlier checkpoint, removed on demand only.

    state_dir/lock                     of the one live instance (`pipeline.runtime.lock`)
    state_dir/runs/NAME/run.json       `RunNote`: the run's name, identity and settings
                        checkpoints/   latest.json and step-000070/ ...
                        aside/         of each `start --from`: later checkpoints, spool and snapshot; never removed
                        spool/         untrained rows of the last stop       journal/      snapshot of a run's rows
                        samples/       recorded rollouts                     quarantine/   rows that are never delivered
                        inputs.json    digests of the files that it reads (`pipeline.runtime.run_inputs`)
                        metrics.jsonl      a line a step         evaluations.jsonl   a line an evaluation
                        reward-numbers.jsonl   names of the further numbers of reward functions
                        recording/     recorded steps
                        tracking/      of the trackers               history.msgpack     of the page

NAME is `pipeline.config.identity.run_name`: a start finds the folder by its configuration alone, and another
configuration has another folder. Nothing in it is removed but by its own run (`trainer.keep_checkpoints`) or by a start
with ``--fresh``, which keeps ``aside``. The caller holds the lock of the state directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pipeline.config.advice import toml
from pipeline.config.identity import (
    default_name,
    differing_settings,
    identifying_settings,
    identity_of,
    run_dir,
    run_name,
    runs_dir,
)
from pipeline.config.schema import Config
from pipeline.errors import CheckpointError, ConfigError
from pipeline.progress import Telemetry
from pipeline.runtime.checkpoint_note import NOTE as CHECKPOINT_NOTE
from pipeline.runtime.checkpoint_note import earlier_of_run, heads_in, verify
from pipeline.runtime.checkpoint_note import read_note as read_checkpoint
from pipeline.runtime.latest_checkpoint import Latest, put_back_replaced, read_latest, why_anew, write_latest
from pipeline.storage import sealed_json
from pipeline.storage.files import flush_folder, write_whole

_NOTE = "run.json"
_OF_A_START = ("run.json", "inputs.json", "history.msgpack")
"""Files that a start writes before any step; a run in which all other files are empty has done nothing."""
_REMOVED = ".removed-"
_ASIDE = "aside"
_DTYPE = "model.dtype"
DIFFERENCES = 3

log = logging.getLogger(__name__)


class RunNote(msgspec.Struct, frozen=True):
    """The description of a run.

    Attributes:
        name: Name of its folder.
        identity: Identity of its configuration (`pipeline.config.identity.identity_of`).
        made_unix_s: Unix time of its first start.
        started_unix_s: Unix time of its last start.
        algorithm: ``"ppo"`` or ``"grpo"``.
        model: The actor's path.
        settings: The settings that its identity is made of.
    """

    name: str
    identity: str
    made_unix_s: float
    started_unix_s: float
    algorithm: str
    model: str
    settings: dict[str, Any]


class Listed(NamedTuple):
    """A run of a state directory, with its latest checkpoint."""

    note: RunNote
    folder: Path
    latest: Latest | None

    @property
    def checkpoint(self) -> Path | None:
        """The folder of the latest checkpoint."""
        return None if self.latest is None else self.folder / "checkpoints" / self.latest.path


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The folder of the run of a configuration."""

    config: Config

    @property
    def path(self) -> Path:
        """The folder; it need not exist."""
        return run_dir(self.config)

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.path / "checkpoints"

    def claim(self, *, dtype_follows_gpus: bool = False) -> None:
        """Make the folder, or find it again; nothing in it is removed.

        Args:
            dtype_follows_gpus: Whether `model.dtype` is a default, which follows the visible GPUs: a start without
                them would begin another run without a word.

        Raises:
            ConfigError: If it belongs to another run, or cannot be made, or if it would be made for another default of
                `model.dtype` alone.
        """
        try:
            if not self.exists:
                self._compare(dtype_follows_gpus=dtype_follows_gpus)
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for left in self.path.parent.glob(f"{_REMOVED}*"):
                _discard(left)
            found = self._found()
            if found is None:
                self._write_note(made_unix_s=time.time())
            elif found.identity != identity_of(self.config):
                raise ConfigError(self._taken(found))
        except OSError as error:
            raise ConfigError(f"daemon.state_dir: cannot use {self.path}: {error}") from error

    @property
    def exists(self) -> bool:
        """Whether the run has been started before."""
        return (self.path / _NOTE).exists()

    def forget(self) -> None:
        """Remove the folder of a run whose first start was refused, unless the start has kept anything in it."""
        with contextlib.suppress(OSError):
            files = (path for path in self.path.rglob("*") if path.is_file())
            if all(path.name in _OF_A_START or not path.stat().st_size for path in files):
                shutil.rmtree(self.path)

    def _found(self) -> RunNote | None:
        """Return the run's description; None if there is none, or a damaged one in a folder that is surely this run's.

        Raises:
            ConfigError: If it cannot be read, and nothing else tells whose folder this is.
        """
        try:
            return read_note(self.path)
        except ConfigError as error:
            identity = identity_of(self.config)
            heads = [head.identity for _, head in heads_in(self.checkpoints)]
            name = default_name(self.config.rollout.algorithm, self.config.model.actor, identity)
            if set(heads) != {identity} and (heads or self.path.name != name):
                raise
            log.error("the run's description is damaged and is written again, nothing tells whether its files are "
                      "still those that it began with: %s", error)  # fmt: skip
            return None

    def completion(self) -> str:
        """Return the reason why there is nothing to train: its steps are taken; "" if there is something."""
        trainer = self.config.trainer
        if trainer.resume == "never" or trainer.kind != "builtin":
            return ""
        latest = read_latest(self.checkpoints)
        if latest is None:
            return ""
        if 0 < trainer.max_steps <= latest.step:
            key, ended = "trainer.max_steps", f"of trainer.max_steps = {trainer.max_steps}"
        elif self._has_all_epochs(latest):
            key, ended = "trainer.max_epochs", f"is the last of trainer.max_epochs = {trainer.max_epochs}"
        else:
            return ""
        return (
            f"run {self.path.name} is complete: step {latest.step} {ended}; raise {key} to go on, or "
            f"`rlhfd start --fresh` removes it and begins anew; its model: {self.checkpoints / latest.path}"
        )

    def _has_all_epochs(self, latest: Latest) -> bool:
        """Return whether a run had ended with all of `trainer.max_epochs` at a checkpoint, which says so."""
        most = self.config.trainer.max_epochs
        if not (most and latest.complete):
            return False
        try:
            before = read_checkpoint(self.checkpoints / latest.path).config["trainer"]
        except (CheckpointError, KeyError):
            return False
        return most <= before.get("max_epochs", 0) and not 0 < before["max_steps"] <= latest.step

    def begin(self) -> None:
        """Record a start; with ``trainer.resume = never`` the folder's content is removed first, and named in the log.

        Raises:
            ConfigError: If the folder cannot be made anew.
        """
        try:
            made = read_note(self.path)
            if self.config.trainer.resume == "never" and _has_content(self.path):
                self._remove()
                made = None
            self._write_note(time.time() if made is None else made.made_unix_s)
        except OSError as error:
            if not (self.path / _NOTE).exists():
                raise ConfigError(f"daemon.state_dir: cannot use {self.path}: {error}") from error
            # The former note stays; only the time of this start is missing.
            log.warning("the run's start is not recorded: path=%s: %s", self.path / _NOTE, error)

    def checkpoint_called(self, wanted: str) -> Path:
        """Return the checkpoint that `go_back` may go back to.

        Args:
            wanted: ``step-000070``, ``step-70`` or ``70``.

        Raises:
            ConfigError: If there is no such checkpoint, or it has all of `trainer.max_steps`.
        """
        match = re.fullmatch(r"(?:step-)?(\d+)", wanted.strip())
        heads, most = dict(heads_in(self.checkpoints)), self.config.trainer.max_steps
        for folder, head in heads.items():
            if match and head.step == int(match[1]):
                if 0 < most <= head.step:
                    raise ConfigError(f"--from {wanted}: it has all of trainer.max_steps = {most}; raise it")
                return folder
        names = ", ".join(folder.name for folder in heads) or "none"
        raise ConfigError(f"--from {wanted}: no such checkpoint of run {self.path.name}; it has: {names}")

    def has_rows_or_checkpoints(self) -> bool:
        """Return whether there is anything to go on from."""
        return any(any((self.path / name).glob("*")) for name in ("checkpoints", "spool", "journal"))

    def settle(self, telemetry: Telemetry = Telemetry.none()) -> None:
        """Decide once, for all processes of a start, from which checkpoint it goes on: the newest that is whole.

        With damaged later ones the run goes back to it as with ``--from``: trainer, prompts, spool, snapshot,
        recording and evaluations follow from `latest.json` and from the files that are left.

        Args:
            telemetry: Told of progress while checkpoints are read.

        Raises:
            ConfigError: If the run has checkpoints, and none of them is whole.
        """
        trainer = self.config.trainer
        if trainer.resume == "never" or trainer.kind != "builtin":
            return
        latest = read_latest(self.checkpoints)
        if latest is None or why_anew(self.config, latest):
            return
        for folder in earlier_of_run(self.checkpoints, latest):
            try:
                note = read_checkpoint(folder)
                verify(folder, note, telemetry)
            except CheckpointError as error:
                log.error("a checkpoint cannot be used, trying the one before it: %s", error)
                continue
            if folder.name != latest.path:
                log.warning("the run goes back to its newest whole checkpoint, steps after it are taken again: "
                            "step=%d instead of %d path=%s", note.step, latest.step, folder)  # fmt: skip
                self.go_back(folder)
            return
        raise ConfigError(
            f"{self.checkpoints / latest.path}: no checkpoint of this run can be used; "
            "`rlhfd start --fresh` starts anew"
        )

    def refuse_damaged(self, target: Path, telemetry: Telemetry = Telemetry.none()) -> None:
        """Raise ConfigError if a checkpoint that is to be gone back to is not whole."""
        try:
            verify(target, read_checkpoint(target), telemetry)
        except CheckpointError as error:
            raise ConfigError(f"--from {target.name}: {error}") from error

    def go_back(self, target: Path) -> None:
        """Make an earlier checkpoint the latest; later checkpoints, spool and snapshot are moved aside.

        A kill in between leaves a run that continues from a checkpoint not later than the wanted one, or from the
        latest as before.

        Args:
            target: A checkpoint's folder.

        Raises:
            ConfigError: If a file cannot be moved.
        """
        head = dict(heads_in(self.checkpoints))[target]
        aside = self._new_aside(head.step)
        # By their names: the description of a damaged one may not be readable.
        later = [folder for folder in sorted(self.checkpoints.glob("step-*")) if _step_of(folder) > head.step]
        rows = [path for name in ("spool", "journal") for path in (self.path / name).glob("*.safetensors")]
        try:
            # Rows first: they go with the checkpoint that is the latest until the end.
            for path in (*rows, *later):
                place = aside / path.parent.name
                place.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.rename(place / path.name)
            write_latest(self.checkpoints, head.latest(target))
        except OSError as error:
            raise ConfigError(f"daemon.state_dir: cannot go back to {target.name}: {error}") from error
        log.info("gone back to a checkpoint: step=%d path=%s moved_aside=%d%s", head.step, target,
                 len(rows) + len(later), f" aside={aside}" if aside.exists() else "")  # fmt: skip

    def _new_aside(self, step: int) -> Path:
        numbers = (folder.name.partition("-")[0] for folder in (self.path / _ASIDE).glob("*"))
        number = 1 + max((int(number) for number in numbers if number.isdecimal()), default=0)
        return self.path / _ASIDE / f"{number}-from-step-{step:06d}"

    def find_latest(self) -> None:
        """Record the newest checkpoint as the latest if none is: a kill came between the checkpoint and its record.

        A checkpoint that was moved away for another one of its step, which a kill left unfinished, is put back.

        Raises:
            ConfigError: If the record cannot be written.
        """
        try:
            put_back_replaced(self.checkpoints)
            if read_latest(self.checkpoints) is not None:
                return
        except OSError as error:
            raise ConfigError(f"daemon.state_dir: a checkpoint cannot be put back: {error}") from error
        except ConfigError as error:
            # Without a checkpoint that could take its place, `settle` reports it again, unless the run starts anew.
            log.error("the record of the latest checkpoint is damaged: %s", error)
        if (newest := _newest_of_run(self.checkpoints, identity_of(self.config))) is not None:
            try:
                write_latest(self.checkpoints, newest)
            except OSError as error:
                raise ConfigError(f"daemon.state_dir: no checkpoints can be written: {error}") from error
            log.warning("a checkpoint that no record named is the latest: step=%d path=%s",
                        newest.step, self.checkpoints / newest.path)  # fmt: skip

    def _remove(self) -> None:
        """Remove the folder but ``aside``, in one rename, and make it again."""
        steps = [head.step for _, head in heads_in(self.checkpoints)]
        removed = self.path.with_name(f"{_REMOVED}{self.path.name}")
        _discard(removed)
        self.path.rename(removed)
        self.path.mkdir(mode=0o700)
        # Before the first file is removed: a crash of the machine must not leave a part of the run under its name.
        flush_folder(self.path.parent)
        _discard(removed)
        log.warning("removed, because a fresh start was asked for: run=%s checkpoints=%d step=%d path=%s",
                    self.path.name, len(steps), max(steps, default=0), self.path)  # fmt: skip

    def _compare(self, *, dtype_follows_gpus: bool) -> None:
        """Refuse a new run that differs from another one in a default of `model.dtype` alone; log the nearest one.

        A change of a size or a number, meant for a run that was to go on, would begin anew without a word.
        """
        near: list[tuple[int, Listed, list[str]]] = []
        for run in reversed(runs_of(Path(self.config.daemon.state_dir))):
            odd = differing_settings(identifying_settings(self.config), run.note.settings)
            if [*odd] == [_DTYPE] and dtype_follows_gpus:
                here, there = odd[_DTYPE]
                raise ConfigError(
                    f"{_DTYPE}: it is {here} here by default, which follows the visible GPUs, and this start "
                    f"would begin a new run beside that in {there}, {run.folder}; set {_DTYPE} = "
                    f'"{there}" to go on with it, or "{here}" for a new run'
                )
            if run.latest is not None and 0 < len(odd) <= DIFFERENCES:
                near.append((len(odd), run, differences_to(run.note, self.config)))
        if near:
            _, run, differences = min(near, key=lambda found: found[0])
            assert run.latest is not None
            log.warning("a new run begins, from step 0: name=%s; run %s, of step %d, is gone on with by %s",
                        run_name(self.config), run.folder.name, run.latest.step, "; ".join(differences))  # fmt: skip

    def _write_note(self, made_unix_s: float) -> None:
        run, rollout, actor = run_name(self.config), self.config.rollout, self.config.model.actor
        identity, settings = identity_of(self.config), identifying_settings(self.config)
        write_note(self.path, RunNote(run, identity, made_unix_s, time.time(), rollout.algorithm, actor, settings))

    def _taken(self, found: RunNote) -> str:
        pairs = differing_settings(identifying_settings(self.config), found.settings).items()
        odd = [f"{key} is {there!r} there, {here!r} here" for key, (here, there) in pairs]
        differences = "; ".join(odd[:DIFFERENCES]) or "another identity"
        return (
            f"daemon.run_name: the name {self.path.name} belongs to another run ({differences}): choose another name, "
            f"or remove {self.path}"
        )


def _discard(removed: Path) -> None:
    """Remove the folder of a removed run; what was moved aside goes back to the run's own folder."""
    aside, run = removed / _ASIDE, removed.with_name(removed.name.removeprefix(_REMOVED))
    if aside.exists():
        run.mkdir(mode=0o700, exist_ok=True)
        aside.rename(run / _ASIDE)
        flush_folder(run)
    shutil.rmtree(removed, ignore_errors=True)


def differences_to(run: RunNote, config: Config) -> list[str]:
    """Return the settings with which a start would go on with a run, and those of a configuration: "KEY = 4, not 8"."""
    odd = differing_settings(identifying_settings(config), run.settings)
    return [f"{key} = {_shown(there)}, not {_shown(here)}" for key, (here, there) in odd.items()]


def _shown(value: object) -> str:
    return "(left out)" if value is None else toml(value)


def write_note(folder: Path, note: RunNote) -> None:
    """Write the description of a run; it is flushed to disk at the return."""
    write_whole(folder / _NOTE, sealed_json.encode(note), folder / ".run.json.new")


def read_note(folder: Path) -> RunNote | None:
    """Return the description of a run, None if there is none.

    Raises:
        ConfigError: If it cannot be read.
    """
    return sealed_json.read(folder / _NOTE, RunNote, "remove this file, the next start writes it again")


def runs_of(state_dir: Path) -> list[Listed]:
    """Return the runs of a state directory, the one that was started last at the end.

    One whose description cannot be read is left out, with a warning.

    Raises:
        OSError: If the folder of the runs cannot be read.
    """
    found = []
    try:
        folders = sorted(runs_dir(state_dir).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    for folder in folders:
        try:
            if (note := read_note(folder)) is not None:
                found.append(Listed(note, folder, _latest_of(folder / "checkpoints", note.identity)))
        except ConfigError as error:
            log.warning("a run is left out, its description cannot be read: %s", error)
    return sorted(found, key=lambda run: run.note.started_unix_s)


def _latest_of(checkpoints: Path, identity: str) -> Latest | None:
    """Return the latest checkpoint of a run; if its record is damaged, the one that the next start takes for it."""
    try:
        return read_latest(checkpoints)
    except ConfigError as error:
        log.warning("the record of the latest checkpoint is damaged: %s", error)
    return _newest_of_run(checkpoints, identity)


def _newest_of_run(checkpoints: Path, identity: str) -> Latest | None:
    """Return the checkpoint of an identity that was written last; None without one."""

    def written(latest: Latest) -> tuple[int, int]:
        return (checkpoints / latest.path / CHECKPOINT_NOTE).stat().st_mtime_ns, latest.step

    mine = (head.latest(folder) for folder, head in heads_in(checkpoints) if head.identity == identity)
    return max(mine, key=written, default=None)


def _step_of(folder: Path) -> int:
    number = folder.name.removeprefix("step-")
    return int(number) if number.isdecimal() else -1


def _has_content(folder: Path) -> bool:
    return any(path.name not in (_NOTE, _ASIDE) for path in folder.iterdir())
