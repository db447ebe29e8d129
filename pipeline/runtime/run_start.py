"""A start's folders: the run's own is claimed, an earlier layout adopted, shared memory prepared.

The caller holds the locks of runtime and state directory.
"""

from __future__ import annotations

import logging
from pathlib import Path

from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.runtime.former_layout import adopt
from pipeline.runtime.run_folder import RunFolder
from pipeline.runtime.workspace import Workspace
from pipeline.storage.layout import LedgerLayout

log = logging.getLogger(__name__)


def open_run(config: Config, shm_dir: Path, *, back_to: str = "", dtype_follows_gpus: bool = False) -> str:
    """Find or make the run's folder; no checkpoint of any run is removed or replaced.

    Args:
        config: The configuration, its paths absolute.
        shm_dir: The instance's folder in shared memory; a killed supervisor may have left it.
        back_to: A checkpoint to go back to, such as ``step-000070``; the state in shared memory is given up then.
        dtype_follows_gpus: Whether `model.dtype` is a default, which follows the visible GPUs.

    Returns:
        The reason why there is nothing to train; "" if there is something, as in most cases.

    Raises:
        ConfigError: As `RunFolder.claim`, or if `back_to` is no checkpoint of this run.
    """
    folder = RunFolder(config)
    folder.claim(dtype_follows_gpus=dtype_follows_gpus)
    adopt(config)
    folder.find_latest()
    is_left = Workspace.is_left(shm_dir, config)
    if back_to:
        if config.trainer.kind != "builtin":
            raise ConfigError(f"--from {back_to}: an external trainer keeps its own checkpoints")
        target = folder.checkpoint_called(back_to)
        if is_left:
            log.warning("the state of a killed supervisor is given up for the checkpoint: folder=%s", shm_dir)
            Workspace.open(shm_dir).remove()
        folder.go_back(target)
        return ""
    # A killed run may have steps beyond its last checkpoint: it is taken over, and writes its checkpoint.
    return "" if is_left else folder.completion()


def begin_run(config: Config, shm_dir: Path, layout: LedgerLayout) -> Workspace:
    """Prepare shared memory, then record the start; ``trainer.resume = never`` removes the run's earlier files.

    Raises:
        ConfigError: As `Workspace.prepare` and `RunFolder.begin`; the run's folder is as before then.
    """
    workspace = Workspace.prepare(shm_dir, config, layout)
    try:
        RunFolder(config).begin()
    except BaseException:
        workspace.undo()
        raise
    return workspace
