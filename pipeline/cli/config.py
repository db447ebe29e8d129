"""Commands about the configuration: `rlhfd config check`, `config show`, `config schema`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from pipeline.cli.options import configured, load, placing
from pipeline.errors import ConfigError


@click.group()
def config() -> None:
    """Check and show the configuration.

    \b
    Examples:
      rlhfd config check --config grpo.toml
      rlhfd config show --effective --origin
      rlhfd config schema > config.schema.json
    """


@config.command(short_help="Print every error at once, each with its place.")
@configured
def check(path: Path | None, sets: tuple[str, ...]) -> None:
    """Print every error at once, each with its place; exit 78 if there is one.

    With a model of yours it takes some seconds more: tokenizer and first prompts, layers of adapters, engine and
    reward functions are tried as a start does it, without weights. On a machine with GPUs the notes name what does
    not fit there, as `rlhfd plan` does.

    \b
    Examples:
      rlhfd config check
      rlhfd config check --config grpo.toml --set rollout.workers=8
    """
    from pipeline.buffer import sizing
    from pipeline.supervisor import notes, preflight
    from pipeline.supervisor.capacity.choices import misfits
    from pipeline.supervisor.capacity.disk import disk_notes

    loaded = load(path, sets, files=True)
    with placing(loaded):
        sizing.refuse_sizes(loaded.config)
    if problems := preflight.problems_of_imports(loaded):
        raise ConfigError("\n".join(problems))
    problems, noted = preflight.findings_of_start(loaded)
    if problems:
        raise ConfigError("\n".join(problems))
    found = [*misfits(loaded.config, os.environ), *disk_notes(loaded.config)]
    for note in [*noted, *notes.notes(loaded), *(f"rlhfd plan: {line}" for line in found)]:
        click.echo(f"note: {note}", err=True)
    click.echo(f"{loaded.path or 'embedded defaults'}: ok")


@config.command()
@configured
@click.option("--effective", is_flag=True, help="All values in force, defaults included.")
@click.option("--origin", is_flag=True, help="Add the source of each value as a comment.")
def show(path: Path | None, sets: tuple[str, ...], effective: bool, origin: bool) -> None:
    """Print the configuration as TOML.

    \b
    Examples:
      rlhfd config show
      RLHFD_ROLLOUT__WORKERS=8 rlhfd config show --effective --origin
    """
    from pipeline import sort_digits
    from pipeline.config import load as config_load
    from pipeline.config.identity import run_name
    from pipeline.config.load import get
    from pipeline.supervisor.capacity.choices import decided

    loaded = load(path, sets, files=False)
    # The identity has the paths of the embedded model and prompts.
    name = f"{run_name(sort_digits.with_paths(loaded.config))}, by the run's identity"
    chosen = {"daemon.run_name": name, **decided(loaded.config, os.environ).shown}
    remarks = {key: remark for key, remark in chosen.items() if get(loaded.config, key) in (None, "auto")}
    click.echo(config_load.render(loaded, effective=effective, origin=origin, remarks=remarks), nl=False)


@config.command(short_help="Print the JSON schema, for editors.")
def schema() -> None:
    """Print the JSON schema: every key with its type, bounds, default and meaning.

    \b
    Examples:
      rlhfd config schema > config.schema.json     # then: #:schema config.schema.json
      rlhfd config schema | jq '.properties.rollout.properties | keys'
    """
    from pipeline.config import json_schema

    click.echo(json.dumps(json_schema.schema(), indent=2))
