"""The end of a run after `trainer.max_epochs` passes over its prompts."""

from __future__ import annotations

import contextlib

from pipeline.config.schema import Config
from pipeline.errors import ConfigError, counted
from pipeline.prompts.source import PromptSource


def prompts_of_passes(config: Config) -> int:
    """Return the prompts of all passes: the first position of which no ticket is issued; 0 without an end.

    Raises:
        ConfigError: If a file of prompts cannot be read.
    """
    if not config.trainer.max_epochs:
        return 0
    with contextlib.closing(PromptSource(config.prompts, config.daemon.seed)) as source:
        return config.trainer.max_epochs * len(source)


def last_step(config: Config, *, step: int = 0, position: int = 0) -> int:
    """Return the most steps of a run; 0 without an end.

    They are those of `trainer.max_steps`, or of the rows of `trainer.max_epochs` passes if those are fewer: the last
    rows that are fewer than a step's are not trained.

    Args:
        config: The run's configuration.
        step: Steps taken so far, which may have had other numbers of rows.
        position: First prompt that may be missing from them.

    Raises:
        ConfigError: If the passes have fewer rows than a step, or a file of prompts cannot be read.
    """
    trainer = config.trainer
    if not trainer.max_epochs:
        return trainer.max_steps
    prompts, of_step = prompts_of_passes(config), config.rows_per_version // trainer.publish_every
    steps = prompts * config.group_size // of_step
    if not steps:
        raise ConfigError(
            f"trainer.max_epochs: {counted(trainer.max_epochs, 'pass has', 'passes have')} "
            f"{counted(prompts, 'prompt')}, of {counted(prompts * config.group_size, 'row')}, fewer than the "
            f"{of_step:,} of a step (buffer.sample_batch_size)"
        )
    if step:
        steps = step + max(0, prompts - position) * config.group_size // of_step
    return min(steps, trainer.max_steps or steps)
