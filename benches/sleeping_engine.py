"""The engine of `SMALL=1 bin/card --sleep`: the default one with memory beside the model, which it frees while asleep.

vLLM sleeps on GPUs alone. This engine takes its place on a CPU, so that the same run and the same readings are tried.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pipeline.progress import Telemetry
from pipeline.rollout.generation.transformers import TransformersGenerator

HELD_BYTES = 256 << 20
"""The memory that it frees while it sleeps."""


class SleepingEngine(TransformersGenerator):
    """Samples with the worker's model."""

    def __init__(self, model: Any, telemetry: Telemetry) -> None:
        super().__init__(model, telemetry)
        self._held: torch.Tensor | None = None
        self.wake()

    def sleep(self) -> None:
        """Free the memory."""
        self._held = None

    def wake(self) -> None:
        """Take the memory; each page is written, so that it is the process's own."""
        self._held = torch.ones(HELD_BYTES, dtype=torch.uint8)


def new_engine(actor: Any, *, directory: Path, device: Any, telemetry: Telemetry) -> SleepingEngine:
    """The factory that `rollout.engine` names."""
    return SleepingEngine(actor, telemetry)
