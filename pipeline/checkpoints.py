"""Checkpoints in Hugging Face's format: a folder that `from_pretrained` reads, whole or not there at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any


def save_checkpoint(root: Path, step: int, *, actor: Any, tokenizer: Any, critic: Any = None) -> Path:
    """Write the models of one step.

    Args:
        root: Folder of all checkpoints; made if need be.
        step: Optimizer steps taken.
        actor: A `PreTrainedModel`.
        tokenizer: Its tokenizer, saved beside it.
        critic: With PPO, saved in ``critic/`` inside.

    Returns:
        ``root/step-000150``. A folder of that name from before is replaced once the new one is whole.
    """
    root.mkdir(parents=True, exist_ok=True)
    target = root / f"step-{step:06d}"
    temporary = root / f".{target.name}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        actor.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        if critic is not None:
            critic.save_pretrained(temporary / "critic")
        _flush(temporary)
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    descriptor = os.open(root, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return target


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
