"""Advice for a command line that click refuses: the option, command or key that was meant."""

from __future__ import annotations

import difflib
import re

import click


def advised(error: click.UsageError) -> click.UsageError:
    """Return the error with the advice in its message; the same error if there is none."""
    found = ""
    if isinstance(error, click.NoSuchOption):
        found = _key_of(error.option_name)
    elif match := re.match(r"Got unexpected extra arguments? \((.+)\)", error.message):
        words = match[1].split() or [""]  # an argument of blanks
        assignment = next((word for word in words if re.match(r"[a-z]+\.[a-z_]+=", word)), None)
        if words[0].endswith(".toml"):
            found = f"a configuration file is given by --config {words[0]}"
        elif assignment:
            found = f"a value is given by --set {assignment}"
        elif bare := [key for key in (error.ctx.params.get("sets", ()) if error.ctx else ()) if "=" not in key]:
            found = f"a value is given by --set {bare[-1]}={words[0]}"
    elif (match := re.match(r"No such command '(.+)'\.?", error.message)) and isinstance(error.ctx, click.Context):
        group = error.ctx.command
        names = group.list_commands(error.ctx) if isinstance(group, click.Group) else []
        if close := difflib.get_close_matches(match[1], names, n=1):
            found = f"did you mean {close[0]}?"
    if not found:
        return error
    return click.UsageError(f"{error.message.rstrip('.')}. {found[0].upper()}{found[1:]}", error.ctx)


def _key_of(option: str) -> str:
    """Return the assignment for an option that has the name of a key, or of one of another trainer; else empty."""
    from pipeline.config.advice import SECTIONS
    from pipeline.config.foreign.lookup import key_of

    name = option.lstrip("-").replace("-", "_").rpartition(".")[2]
    homes = [f"{section}.{name}" for section, model in SECTIONS.items() if name in type(model).model_fields]
    homes = homes or [key for key in [key_of(name)] if key]
    return f"keys are set by {' or '.join(f'--set {key}=VALUE' for key in homes)}" if homes else ""
