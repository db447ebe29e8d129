"""The disk of the state directory: the most that a run writes there, against the room that is left."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from pipeline.buffer import quarantine
from pipeline.config.identity import run_dir
from pipeline.config.plan import Models, Terms, checkpoint_bytes, models_of
from pipeline.config.schema import Config
from pipeline.config.types import BUILTIN_PREFIX
from pipeline.errors import ConfigError, counted
from pipeline.storage import recording
from pipeline.supervisor.capacity.budgets import Budget, size
from pipeline.telemetry import log_file, samples

_SPOOLS = 3
"""Arenas on disk at most: the spool, a snapshot, and the next snapshot while it is written."""


def disk_budget(config: Config, models: Models, capacity_bytes: int | None = None) -> Budget:
    """Return the disk of `daemon.state_dir` and the most that a run writes there.

    Args:
        config: The configuration.
        models: The sizes of its models.
        capacity_bytes: Room for the run; None for what is free there, and what the run has there already.
    """
    folder = Path(config.daemon.state_dir)
    terms: Terms = {
        "spool and snapshots of the arena": _SPOOLS * config.buffer.arena_bytes,
        "quarantine, samples, log": quarantine.MOST_BYTES + samples.MOST_BYTES + log_file.MOST_BYTES,
    }
    if config.trainer.kind == "builtin":
        kept, best = _kept(config), config.evaluation.keep_best and bool(config.evaluation.files)
        number = "the first of those that are all kept" if _grows(config) else kept
        name = f"checkpoints, {number}{', the best' if best else ''} and the next one"
        terms = {name: (kept + best + 1) * checkpoint_bytes(config, models), **terms}
    if config.trainer.record == "rows":
        terms["recorded rows"] = recording.MOST_BYTES
    return Budget(f"disk of {folder}", terms, _room(config) if capacity_bytes is None else capacity_bytes)


def disk_notes(config: Config) -> list[str]:
    """Return a line if a run with a model of its own may fill the disk of `daemon.state_dir`; no line if it cannot."""
    if str(config.model.actor).startswith(BUILTIN_PREFIX):
        return []
    try:
        models = models_of(config)
    except ConfigError:
        # Others say so.
        return []
    budget = disk_budget(config, models)
    if not budget.lacks_bytes:
        if not _grows(config):
            return []
        each = size(checkpoint_bytes(config, models))
        return [
            f"daemon.state_dir: trainer.keep_checkpoints = 0 keeps all checkpoints, {each} each "
            f"{counted(config.trainer.save_every, 'step')}, without trainer.max_steps: the plan cannot say how many "
            "they will be"
        ]
    parts = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in budget.terms.items() if nbytes)
    # 0 keeps all of them.
    advice = {0: "set trainer.keep_checkpoints, or ", 1: ""}
    fewer = advice.get(config.trainer.keep_checkpoints, "lower trainer.keep_checkpoints, or ")
    return [
        f"daemon.state_dir: the {budget.name} has {size(budget.capacity_bytes)} for this run, which may write "
        f"{size(budget.total_bytes)}: {parts}; {fewer}take a larger disk"
    ]


def _kept(config: Config) -> int:
    """Return the checkpoints that a run keeps, of one that keeps all those until its last step, if it is known."""
    trainer = config.trainer
    if trainer.keep_checkpoints or _grows(config) or not trainer.save_every:
        return trainer.keep_checkpoints or 1
    return -(-trainer.max_steps // trainer.save_every)


def _grows(config: Config) -> bool:
    """Return whether a run keeps all its checkpoints, and nobody knows how many they will be."""
    trainer = config.trainer
    is_endless = trainer.save_every > 0 and not trainer.max_steps
    return trainer.kind == "builtin" and not trainer.keep_checkpoints and is_endless


def _room(config: Config) -> int:
    """Return the bytes that are free for the run, those of its own files included."""
    folder = Path(config.daemon.state_dir)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    found = os.statvfs(there)
    own = run_dir(config)
    # Nothing removes what was moved aside.
    return found.f_bavail * found.f_frsize + sum(_held(own)) - sum(_held(own / "aside"))


def _held(folder: Path) -> Iterator[int]:
    """Yield the bytes on disk of each file below a folder; a run that writes there may remove some meanwhile."""
    for inside, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                yield os.lstat(os.path.join(inside, name)).st_blocks * 512
