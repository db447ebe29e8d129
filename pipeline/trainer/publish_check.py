"""Refusal of an external trainer's weights that the workers could not use, before any of them is in shared memory."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from pipeline.config.schema import Config
from pipeline.errors import UnreachableError, WeightsError
from pipeline.models.expected import expected_tensors, faults, nonfinite
from pipeline.runtime.workspace import Workspace


class PublishCheck:
    """Compares state dicts with the run's models.

    Args:
        folder: The instance's folder in shared memory.
    """

    def __init__(self, folder: Path) -> None:
        self._workspace = Workspace.open(folder)
        self._config = Config.model_validate_json(self._workspace.config_path.read_bytes())
        self._arena = _inode(self._workspace.arena_path)
        self._has_critic: bool | None = None

    def __call__(self, actor: Mapping[str, Tensor], critic: Mapping[str, Tensor] | None) -> None:
        """Refuse weights that workers could not load, or that no worker would read.

        Args:
            actor: The actor's state dict, under Hugging Face's names.
            critic: The critic's; None if it is not published.

        Raises:
            UnreachableError: If the daemon of this connection has ended, or was started anew.
            WeightsError: If tensors are missing, are not the model's, or have another shape or dtype, or hold
                a NaN or an infinity.
        """
        self._refuse_other_daemon()
        given = {"actor": actor} | ({} if critic is None else {"critic": critic})
        expected = self._models
        found = [] if critic is None or "critic" in expected else ["critic: rollout.algorithm is grpo, there is none"]
        for model, state in given.items():
            found += (faults(model, state, expected[model]) or nonfinite(model, state)) if model in expected else []
        if not found and critic is not None and self._has_critic is False:
            # The file that the first publish has made has no room for it.
            found = ["critic: the first publish of this connection had none; publish both from the first one on"]
        if found:
            raise WeightsError(f"nothing is published: {'; '.join(found)}")
        self._has_critic = critic is not None if self._has_critic is None else self._has_critic

    def _refuse_other_daemon(self) -> None:
        # The arena is one file for the whole run, and the daemon that takes over a killed one keeps it.
        inode, folder = _inode(self._workspace.arena_path), self._workspace.folder
        if inode is None:
            raise UnreachableError(f"nothing is published: the daemon has ended, {folder} is gone; connect to the next")
        if inode != self._arena:
            raise UnreachableError(
                "nothing is published: the daemon was started anew after this connection was made "
                f"(run {self._workspace.run.run_id}); connect again"
            )

    @functools.cached_property
    def _models(self) -> dict[str, dict[str, Tensor]]:
        model = self._config.model
        return expected_tensors(
            model.actor,
            dtype=model.dtype,
            lora=model,
            with_critic=self._config.rollout.algorithm == "ppo",
            critic_path=model.critic,
        )


def _inode(path: Path) -> int | None:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return None
