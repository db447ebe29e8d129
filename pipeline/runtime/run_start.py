"""A start's folders: the run's own is claimed, shared memory prepared.

The caller holds the locks of runtime and state directory.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.progress import Telemetry
from pipeline.runtime import run_inputs
from pipeline.runtime.run_folder import RunFolder
from pipeline.runtime.signals import end_if_asked
from pipeline.runtime.workspace import Workspace
from pipeline.storage.layout import LedgerLayout
from pipeline.storage.weights_header import newest_version

log = logging.getLogger(__name__)


class StartProgress(Telemetry):
    """Ends a start at a signal: a large checkpoint is read for minutes, and signals are held back meanwhile."""

    def progress(self, **numbers: Any) -> None:
        """End the process if a signal has asked for it."""
        end_if_asked()


def open_run(
    config: Config,
    shm_dir: Path,
    *,
    back_to: str = "",
    dtype_follows_gpus: bool = False,
    telemetry: Telemetry | None = None,
) -> str:
    """Find or make the run's folder; no checkpoint of any run is removed or replaced.

    Args:
        config: The configuration, its paths absolute.
        shm_dir: The instance's folder in shared memory; a killed supervisor may have left it.
        back_to: A checkpoint to go back to, such as ``step-000070``; the state in shared memory is given up then.
        dtype_follows_gpus: Whether `model.dtype` is a default, which follows the visible GPUs.
        telemetry: Told of progress while a checkpoint is verified; None for `StartProgress`.

    Returns:
        The reason why there is nothing to train; "" if there is something, as in most cases.

    Raises:
        ConfigError: As `RunFolder.claim`, `RunFolder.settle` and `run_inputs.check`, or if `back_to` is no whole
            checkpoint of this run.
    """
    telemetry = telemetry or StartProgress()
    folder = RunFolder(config)
    folder.claim(dtype_follows_gpus=dtype_follows_gpus)
    folder.find_latest()
    is_left = Workspace.is_left(shm_dir, config)
    if is_left or folder.has_rows_or_checkpoints():
        run_inputs.check(config)
    if back_to:
        if config.trainer.kind != "builtin":
            raise ConfigError(f"--from {back_to}: an external trainer keeps its own checkpoints")
        target = folder.checkpoint_called(back_to)
        folder.refuse_damaged(target, telemetry)
        if is_left:
            log.warning("the state of a killed supervisor is given up for the checkpoint: folder=%s", shm_dir)
            Workspace.open(shm_dir).remove()
        folder.go_back(target)
        return ""
    if not (is_left and newest_version(shm_dir / "weights")):
        # Versions of a killed supervisor are newer than any checkpoint.
        folder.settle(telemetry)
    # A killed run may have steps beyond its last checkpoint: it is taken over, and writes its checkpoint.
    return "" if is_left else folder.completion()


@contextlib.contextmanager
def forgotten_if_refused(config: Config) -> Iterator[Callable[[], None]]:
    """Enclose a start: with a ConfigError the folder of a run that was never started before is removed again.

    Yields:
        A function that removes it too, for a start that a process of the run refuses.
    """
    folder = RunFolder(config)
    forget: Callable[[], None] = (lambda: None) if folder.exists else folder.forget
    try:
        yield forget
    except ConfigError:
        forget()
        raise


def begin_run(config: Config, shm_dir: Path, layout: LedgerLayout) -> Workspace:
    """Prepare shared memory, then record the start; ``trainer.resume = never`` removes the run's earlier files.

    Raises:
        ConfigError: As `Workspace.prepare` and `RunFolder.begin`; the run's folder is as before then.
    """
    workspace = Workspace.prepare(shm_dir, config, layout)
    try:
        RunFolder(config).begin()
        run_inputs.note(config)
    except BaseException:
        workspace.undo()
        raise
    return workspace
