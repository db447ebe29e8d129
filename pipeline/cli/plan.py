"""`rlhfd plan`: the memory that a run needs, before anything is loaded."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.options import configured, load
from pipeline.errors import counted

if TYPE_CHECKING:
    from pipeline.config.load import LoadedConfig
    from pipeline.config.plan import Models
    from pipeline.supervisor.capacity.budgets import Budget
    from pipeline.supervisor.capacity.choices import Choices
    from pipeline.supervisor.capacity.machine import Machine


class _Bytes(click.ParamType[int]):
    name = "bytes"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> int:
        """Return the number of a size such as "80GB"."""
        from pydantic import TypeAdapter, ValidationError

        from pipeline.config.types import Bytes

        if isinstance(value, int):
            return value
        with contextlib.suppress(ValidationError, OverflowError):
            if (nbytes := TypeAdapter[int](Bytes).validate_python(_decimal(value))) >= 0:
                return nbytes
        self.fail(f"{value!r} is not a size such as 80GB, 141GiB or 1TB", parameter, context)


@click.command(short_help="Print the memory that a run needs, before anything is loaded.")
@configured
@click.option("--gpus", type=click.IntRange(min=0), help="Number of GPUs; else those that a run may use here.")
@click.option("--gpu-memory", type=_Bytes(), help="Memory of each GPU, such as 80GB; else of the smallest of these.")
@click.option("--ram", type=_Bytes(), help="Host memory, such as 1TB; else this machine's.")
@click.option(
    "--shm",
    type=_Bytes(),
    help="Room in /dev/shm, such as 800GB; else half of --ram, or what is free here.",
)
@click.option(
    "--disk", type=_Bytes(), help="Room for the run in daemon.state_dir, such as 2TB; else what is free there."
)
def plan(
    path: Path | None,
    sets: tuple[str, ...],
    gpus: int | None,
    gpu_memory: int | None,
    ram: int | None,
    shm: int | None,
    disk: int | None,
) -> None:
    """Print the memory that a run needs on each device, from config.json and the headers of safetensors files alone.

    The disk of the state directory is one of them; it is left out for another machine (--ram) without --disk.

    Exit 1 if it does not fit; the changes that would make it fit are listed, those first that change training least.

    \b
    Examples:
      rlhfd plan --config grpo.toml
      rlhfd plan --gpus 8 --gpu-memory 80GB --ram 1TB --set trainer.world_size=4
    """
    from pipeline import sort_digits
    from pipeline.config.plan import models_of
    from pipeline.supervisor.capacity import machine as machines
    from pipeline.supervisor.capacity.budgets import budgets_of, remedies
    from pipeline.supervisor.capacity.choices import choice
    from pipeline.supervisor.capacity.disk import disk_budget

    loaded = load(path, sets, files=False, on_cards=None if gpus is None else gpus > 0)
    config = loaded.config
    made = {str(sort_digits.model_directory(sort_digits.directory_of(config.daemon.state_dir))): sort_digits.sizes()}
    config = sort_digits.with_paths(config)
    machine = machines.described(os.environ, gpus=gpus, gpu_bytes=gpu_memory, ram_bytes=ram, shm_bytes=shm)
    models = models_of(config, made)
    chosen = choice(config, models, machine)
    config = chosen.config
    budgets = budgets_of(config, models, machine)
    is_memory_enough = not any(budget.lacks_bytes for budget in budgets)
    if disk is not None or ram is None:
        budgets.append(disk_budget(config, models, disk))
    click.echo("\n".join(_lines(loaded, chosen, models, machine, budgets)))
    if any(budget.lacks_bytes for budget in budgets):
        for line in [] if is_memory_enough else remedies(config, models, machine):
            click.echo(f"  {line}")
        if budgets[-1].name.startswith("disk") and budgets[-1].lacks_bytes:
            click.echo("  fewer trainer.keep_checkpoints, a smaller buffer.arena_bytes, or a larger disk")
        raise click.exceptions.Exit(1)


def _lines(
    loaded: LoadedConfig, chosen: Choices, models: Models, machine: Machine, budgets: list[Budget]
) -> Iterator[str]:
    from pipeline.config.plan import needs
    from pipeline.storage.control_groups import memory_limit_bytes
    from pipeline.supervisor.capacity.budgets import size

    config, actor = chosen.config, models.actor
    sizes = f"{actor.parameters:,} parameters, {counted(actor.layers, 'layer')}, {config.model.dtype}"
    yield f"model        {config.model.actor}: {sizes}"
    cards = f"{counted(machine.gpus, 'GPU')} of {size(machine.gpu_bytes)}, " if machine.gpus else "no GPU, "
    limit = " (the limit of its control group)" if machine.ram_bytes == memory_limit_bytes() else ""
    memory = f"{size(machine.ram_bytes)} of memory{limit}"
    yield f"machine      {cards}{memory}, {size(machine.shm_bytes)} of it for /dev/shm"
    if config.trainer.world_size > 1:
        is_auto = loaded.config.trainer.sharding == "auto"
        why = f" by auto: {chosen.reasons['trainer.sharding']}" if is_auto else ""
        yield f"sharding     {config.trainer.sharding}{why}"
    if why := loaded.reasons.get("rollout.engine", ""):
        yield f"engine       {config.rollout.engine} by {why}"
    if why := chosen.reasons.get("rollout.cache_bytes", ""):
        nbytes = config.rollout.cache_bytes
        yield f"cache        {'what is free' if nbytes is None else size(nbytes)}: {why}"
    if why := chosen.reasons.get("trainer.micro_batch_tokens", ""):
        tokens = config.trainer.micro_batch_tokens
        kept = "checkpointed" if config.trainer.activation_checkpointing is not False else "kept"
        yield f"passes       {f'{tokens:,} tokens' if tokens else 'as configured'}, activations {kept}: {why}"
    if why := chosen.reasons.get("rollout.logits_forward_tokens", ""):
        tokens = config.rollout.logits_forward_tokens
        yield f"log-probs    {f'passes of {tokens:,} tokens' if tokens else 'passes as without a plan'}: {why}"
    if why := chosen.reasons.get("trainer.keep_state", ""):
        yield f"state        in {'memory' if config.trainer.keep_state == 'memory' else 'checkpoints alone'}: {why}"
    for budget in budgets:
        yield ""
        verdict = f"{size(budget.lacks_bytes)} too much" if budget.lacks_bytes else "fits"
        yield f"{budget.name}: {size(budget.total_bytes)} of {size(budget.capacity_bytes)}, {verdict}"
        yield from (f"  {name:<44}{size(nbytes):>10}" for name, nbytes in budget.terms.items() if nbytes)
    written = needs(config, models, on_cards=machine.gpus > 0).publish
    yield ""
    yield f"a publish writes {size(sum(written.values()))}"
    yield from (f"  {name:<44}{size(nbytes):>10}" for name, nbytes in written.items() if nbytes)
    if lacking := [budget.name for budget in budgets if budget.lacks_bytes]:
        yield ""
        yield f"does not fit: {', '.join(lacking)}"


def _decimal(text: str) -> str | int:
    """Return the bytes of a size in powers of ten, such as "80GB"; other texts as they are."""
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    unit = text.strip()[-2:].upper()
    with contextlib.suppress(ValueError):
        if unit in units:
            return round(float(text.strip()[:-2]) * units[unit])
    return text
