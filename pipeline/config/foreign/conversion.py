"""A run of another trainer as a configuration: the keys of its options, and what could not be carried."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import ValidationError

from pipeline.config import own_model
from pipeline.config.advice import SECTIONS, describe, printable, toml
from pipeline.config.foreign.lookup import PAGE
from pipeline.config.foreign.option import Given, NotCarriedError, Option, Trainer
from pipeline.config.foreign.program import Computed
from pipeline.config.types import BUILTIN_PREFIX

_PATHS: Final = (
    "daemon.state_dir", "evaluation.files", "model.actor", "model.critic", "model.lora_adapter", "model.reference",
    "model.reward", "prompts.path", "prompts.sources", "prompts.tools_file", "rewards",
)  # fmt: skip
_NO_VALUE: Final = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
"""Errors of a conversion whose value is not of the kind that the trainer takes."""

_PLACES: Final = {
    "model.actor": ("models/my-model", "no model is named: the folder of a causal LM and its tokenizer"),
    "prompts.path": ("prompts.jsonl", "no data are named: a file of prompts"),
    "rewards": ([{"name": "my_rewards:score"}], 'no reward is named: "module:function", or a name of docs/rewards.md'),
}  # fmt: skip
"""Keys that a run needs where the file names nothing, with a value in their place."""


class Setting(NamedTuple):
    """The value of a key and its origin.

    Attributes:
        value: The value.
        comment: The option, and the difference in meaning.
    """

    value: Any
    comment: str


@dataclass
class Conversion:
    """The result of a conversion.

    Attributes:
        trainer: The trainer that the file is of.
        settings: The settings by ``section.key``, and ``rewards``.
        lost: The options that could not be carried, each with the reason.
    """

    trainer: Trainer
    settings: dict[str, Setting] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)

    @property
    def algorithm(self) -> str:
        """The algorithm, ``grpo`` or ``ppo``."""
        found = self.settings.get("rollout.algorithm")
        return "grpo" if found is None else str(found.value)


def convert(trainer: Trainer, options: Mapping[str, Any], own: Mapping[str, Any]) -> Conversion:
    """Return the options of a file as settings.

    Args:
        trainer: The trainer that the file is of.
        options: Its options, as `pipeline.config.foreign.files.read` returns them.
        own: Values by ``section.key`` in place of those of the file.
    """
    rows = {name: trainer.find(name) for name in options}
    named: dict[str, str] = {}
    for name, row in rows.items():
        present = row.name if row and row.kind == "carried" else name
        # A file of all options has the earlier names too, as null.
        if present not in named or options[named[present]] is None or (name == present and options[name] is not None):
            named[present] = name
    values = {present: options[name] for present, name in named.items()}
    given = Given(values, trainer.defaults)
    done = Conversion(trainer)
    for option in trainer.options:
        names = [name for name, row in rows.items() if row is option]
        if option.kind == "carried":
            _carry(done, option, named.get(option.name, ""), given)
        elif option.kind == "missing":
            _miss(done, option, names, given)
    done.lost += [f"{name}: {_not_an_option(name)}" for name, row in rows.items() if row is None]
    done.settings |= {key: Setting(value, "") for key, value in own.items()}
    bounds_rows = "rollout.max_length" in done.settings
    for key, value, reason in trainer.always:
        if key not in done.settings and not (key == "rollout.max_prompt_length" and bounds_rows):
            done.settings[key] = Setting(value, reason)
    for key, (place, reason) in _PLACES.items():
        others = {key, *own_model.NEEDED.get(key, ())}
        if others.isdisjoint(done.settings):
            done.settings[key] = Setting(place, reason)
            done.lost.append(f"{key}: {reason}; {toml(place)} is in its place")
    # Words of a script may have several lines.
    done.lost = [printable(line) for line in done.lost]
    return done


def render(done: Conversion, source: str, folder: Path) -> str:
    """Return a configuration in TOML, with comments on differences, and at its end what could not be carried.

    Args:
        done: The conversion.
        source: The name of the file.
        folder: The folder of the configuration: relative paths of the file are from the current folder, then from it.
    """
    lines = [
        f"# {source} of {done.trainer.name}, converted by `rlhfd init --from {done.trainer.word}`.",
        f"# A comment names the option of a key, and the difference; {PAGE} has all options.",
    ]  # fmt: skip
    settings = {
        key: setting._replace(value=_from(key, setting.value, folder)) for key, setting in done.settings.items()
    }
    settings.setdefault("daemon.runtime_dir", Setting("run", ""))
    for section, model in SECTIONS.items():
        keys = [name for name in type(model).model_fields if f"{section}.{name}" in settings]
        plain = [name for name in keys if f"{section}.{name}" != "prompts.sources"]
        lines += ["", f"[{section}]"] if plain else []
        for name in plain:
            setting = settings[f"{section}.{name}"]
            lines.append(f"{name} = {toml(setting.value)}" + (f"  # {setting.comment}" if setting.comment else ""))
        for name in keys:
            lines += _tables(f"{section}.{name}", settings) if name not in plain else []
        lines += _tables("rewards", settings) if section == "rollout" else []
    if done.lost:
        lines += ["", "# Not carried:", *(f"# - {line}" for line in done.lost)]
    return "\n".join(lines) + "\n"


def _carry(done: Conversion, option: Option, name: str, given: Given) -> None:
    value = given.values.get(option.name)
    is_given = bool(name) and value is not None
    if not is_given and not option.is_written:
        return
    value = value if is_given else option.default
    shown = f"{name or option.name} = {_short(value)}" + ("" if is_given else f" ({done.trainer.name}'s default)")
    try:
        if reason := _not_known(value):
            raise NotCarriedError(reason)
        # None is another option's null, which TOML lacks.
        known = {key: each for key, each in option.converted(value, given).items() if each is not None}
        found = {key: _checked(key, each) for key, each in known.items()}
    except NotCarriedError as error:
        done.lost.append(f"{shown}: {error}")
        found = dict(error.rest)
    except _NO_VALUE:
        done.lost.append(f"{shown}: no value that {done.trainer.name} takes")
        return
    source = option.name if is_given else f"{option.name}, {done.trainer.name}'s default"
    comment = f"{source}: {option.remark}" if option.remark else source
    trains_adapters = bool(found.get("model.lora_rank")) or "model.lora_rank" in done.settings
    for key, each in found.items():
        is_same = not option.remark and is_given and key.partition(".")[2] == option.name.rpartition(".")[2]
        if is_given or each != _default(key, trains_adapters=trains_adapters):
            done.settings[key] = Setting(each, "" if is_same else comment)


def _miss(done: Conversion, option: Option, names: list[str], given: Given) -> None:
    values = {name: given.values[name] for name in names}
    if not names and option.is_written:
        values = {option.name: option.default}
    for name, value in values.items():
        if not _changes_nothing(option, name, value, given):
            default = "" if names else f" ({done.trainer.name}'s default)"
            done.lost.append(f"{name} = {_short(value)}{default}: {option.remark}")


def _changes_nothing(option: Option, name: str, value: Any, given: Given) -> bool:
    """Return whether nothing is lost by the value of a name of an option that is missing."""
    if value is None or value is False or value in ("", "no", "none", [], {}, option.off_by_name.get(name)):
        return True
    try:
        return option.unless is not None and option.unless(value, given)
    except (NotCarriedError, *_NO_VALUE):
        return False


def _not_an_option(name: str) -> str:
    """Return why a name that no table has is not carried; that of a program's data set is the call that changes it."""
    is_of_data = name.endswith(")") and not name.startswith("$")
    return "the data are read as they are: write the result to a file" if is_of_data else f"no option that {PAGE} has"


def _not_known(value: Any) -> str:
    """Return why a value is not known from the file alone; empty if it is."""
    if isinstance(value, list | dict):
        return next(filter(None, map(_not_known, value.values() if isinstance(value, dict) else value)), "")
    if isinstance(value, Computed):
        return value.reason
    needs_shell = isinstance(value, str) and ("$" in value or "`" in value)
    return "the value needs the shell, or another option: write it into the file" if needs_shell else ""


def _checked(key: str, value: Any) -> Any:
    """Return a value as the key takes it.

    Raises:
        NotCarriedError: If the key does not take it.
    """
    if key == "rewards":
        return value
    section, _, name = key.partition(".")
    is_whole = isinstance(value, float) and value.is_integer()
    try:
        type(SECTIONS[section]).model_validate({name: value})
    except ValidationError as error:
        if is_whole and error.errors()[0]["type"] == "int_type":
            return _checked(key, int(value))
        raise NotCarriedError(f"{key} {describe(section, name, value, error.errors()[0])}") from error
    return value


def _default(key: str, *, trains_adapters: bool) -> Any:
    """Return the default of a key for a model of one's own."""
    section, _, name = key.partition(".")
    values = {"model.actor": os.devnull, **({"model.lora_rank": 1} if trains_adapters else {})}
    own = own_model.defaults(values, on_cards=False)
    return own[key].value if key in own else getattr(SECTIONS[section], name) if name else None


def _tables(key: str, settings: Mapping[str, Setting]) -> Iterator[str]:
    if key not in settings:
        return
    for number, table in enumerate(settings[key].value):
        yield ""
        yield f"[[{key}]]" + (f"  # {settings[key].comment}" if number == 0 and settings[key].comment else "")
        yield from (f"{name} = {toml(value)}" for name, value in table.items())


def _from(key: str, value: Any, folder: Path) -> Any:
    """Return a value with relative paths from the folder of the configuration, in place of the current one."""
    if key not in _PATHS or any(value is place for place, _ in _PLACES.values()):
        return value
    if isinstance(value, list):
        return [_from(key, one, folder) for one in value]
    if isinstance(value, dict):
        return {name: _from(key, one, folder) if name == "path" else one for name, one in value.items()}
    path = str(value)
    if path.startswith(("datasets:", BUILTIN_PREFIX, "~")) or os.path.isabs(path):
        return path
    return os.path.normpath(os.path.relpath(path, folder)) if folder.resolve() != Path.cwd() else path


def _short(value: Any) -> str:
    text = toml(value) if isinstance(value, bool | int | float | str | list) else str(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
