"""`trainer.sharding = "auto"`: full where a whole model does not fit beside each rank, none elsewhere.

The choice follows from the configuration, the headers of the model's files and the size of the machine, so that each
start on one machine chooses alike. Checkpoints are the same in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pipeline.config.conflicts import conflicts
from pipeline.config.model_files import has_images
from pipeline.config.plan import Models, models_of
from pipeline.config.schema import Config
from pipeline.config.types import BUILTIN_PREFIX
from pipeline.errors import ConfigError
from pipeline.supervisor.capacity.budgets import Budget, budgets_of, remedies, size
from pipeline.supervisor.capacity.machine import Machine, of_processes


class Choice(NamedTuple):
    """The value in force of `trainer.sharding`, and its reason."""

    config: Config
    reason: str


def decided(config: Config, environ: Mapping[str, str]) -> Choice:
    """Return the configuration with "none" or "full" in place of "auto", for this machine and its environment."""
    if (reason := _settled(config)) is not None:
        return Choice(_with(config, "none") if config.trainer.sharding == "auto" else config, reason)
    try:
        return choice(config, models_of(config), of_processes(environ))
    except ConfigError as error:
        return Choice(_with(config, "none"), f"no plan: {error}")


def choice(config: Config, models: Models, machine: Machine) -> Choice:
    """Return the configuration with "none" or "full" in place of "auto", for a machine.

    Args:
        config: The configuration.
        models: The sizes of its models.
        machine: The machine.

    Raises:
        ConfigError: If the machine has fewer GPUs than ranks.
    """
    if (reason := _settled(config)) is not None:
        return Choice(_with(config, "none") if config.trainer.sharding == "auto" else config, reason)
    whole, sharded = _with(config, "none"), _with(config, "full")
    budget = max(_of_ranks(whole, models, machine), key=lambda budget: budget.total_bytes - budget.capacity_bytes)
    needed = f"with whole ranks {budget.name} takes {size(budget.total_bytes)} of {size(budget.capacity_bytes)}"
    if not budget.lacks_bytes:
        return Choice(whole, needed)
    if has_images(Path(config.model.actor)):
        return Choice(whole, f"{needed}, and vision-language models are not sharded")
    if found := conflicts(sharded):
        return Choice(whole, f"{needed}, and {found[0].keys[0]} {found[0].message}")
    before, after = (sum(budget.lacks_bytes for budget in budgets_of(one, models, machine)) for one in (whole, sharded))
    return Choice(sharded, needed) if after < before else Choice(whole, f"{needed}, and shards need no less")


def misfits(config: Config, environ: Mapping[str, str]) -> list[str]:
    """Return what does not fit on this machine, if it has GPUs, and the keys to change: a line each, usually none."""
    try:
        machine = of_processes(environ)
        if not machine.gpus or str(config.model.actor).startswith(BUILTIN_PREFIX):
            return []
        models = models_of(config)
        config = choice(config, models, machine).config
        lacking = [budget for budget in budgets_of(config, models, machine) if budget.lacks_bytes]
    except ConfigError as error:
        return [f"no plan: {error}"]
    lines = [f"{budget.name} takes {size(budget.total_bytes)} of {size(budget.capacity_bytes)}" for budget in lacking]
    return [*lines, *(f"to fit: {line}" for line in remedies(config, models, machine))] if lacking else []


def _settled(config: Config) -> str | None:
    """Return the reason of a value that no plan decides; None if the plan decides."""
    if config.trainer.sharding != "auto":
        return "configured"
    if config.trainer.kind == "external":
        return "an external trainer shards its own models"
    if config.trainer.world_size == 1:
        return "one rank"
    if str(config.model.actor).startswith(BUILTIN_PREFIX):
        return "the embedded model fits"
    return None


def _of_ranks(config: Config, models: Models, machine: Machine) -> list[Budget]:
    return [budget for budget in budgets_of(config, models, machine) if budget.holds_ranks]


def _with(config: Config, sharding: str) -> Config:
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"sharding": sharding})})
