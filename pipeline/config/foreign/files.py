"""The options of a run of another trainer, read from its file: JSON, YAML, a shell script, or a program of Python.

Nothing is executed. In a script the variables and arrays that it sets itself are filled in; a value that needs the
shell for more stays as it is written, with its ``$``.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

import yaml

from pipeline.config.foreign.option import Trainer
from pipeline.config.foreign.program import Computed, of_program
from pipeline.config.foreign.script import Word, words
from pipeline.errors import ConfigError

_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_OVERRIDE: Final = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_PROCESSES: Final = (("num_processes", ""), ("nproc_per_node", "nnodes"), ("num_gpus", "num_nodes"))
"""Options of accelerate, torchrun and deepspeed: processes, and the number of machines that have so many each."""


class _OfBranch(Computed):
    reason = "a branch of the script sets it: write the value into the file"


def read(path: Path, trainer: Trainer) -> dict[str, Any]:
    """Return the options of a file by their names, those of tables with dots.

    Args:
        path: JSON, YAML or Python by its suffix, or else a shell script, or a list of options.
        trainer: The trainer whose options they are.

    Raises:
        ConfigError: If the file cannot be read or has no option of the trainer; the message has the place.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 but byte {error.object[error.start]:#04x}") from error
    match path.suffix.lower():
        case ".json" | ".yaml" | ".yml":
            found = dict(_flat(_loaded(path, text), trainer))
        case ".py" if trainer.has_programs:
            found = dict(of_program(path, text))
        case ".py":
            raise ConfigError(f"{path}: a program; of {trainer.name} JSON, YAML and shell scripts are converted")
        case _:
            found = {}
            for name, value in _of_script(path, text, trainer):
                # A branch that sets it to what it is anyway changes nothing.
                if not isinstance(value, _OfBranch) or name not in found or scalar(str(value)) != found[name]:
                    found[name] = value
    if not any(trainer.find(name) for name in found):
        raise ConfigError(f"{path}: no option of {trainer.name} is in the file")
    return {name: _resolved(value, found) for name, value in _with_tables(found, trainer).items()}


def _with_tables(found: Mapping[str, Any], trainer: Trainer) -> dict[str, Any]:
    """Return options with those of the chat template, which verl takes one by one too, as one table."""
    options: dict[str, Any] = {}
    for name, value in found.items():
        table, _, inner = name.rpartition(".")
        option = trainer.find(table) if trainer.find(name) is None else None
        before = options.get(table) or {}
        if option is not None and option.key == ("prompts.template_arguments",) and isinstance(before, dict):
            options[table] = {**before, inner: value}
        else:
            options[name] = value
    return options


def scalar(text: str) -> Any:
    """Return the value of a word of a command: a number, true, false, none, a list, a table, or the text itself."""
    if text.startswith(("[", "{")):
        try:
            return _with_numbers(yaml.safe_load(text))
        except (yaml.YAMLError, ValueError, RecursionError):
            return text
    if (word := text.strip().lower()) in ("true", "false"):
        return word == "true"
    if word in ("null", "none"):
        return None
    return _number(text)


def _number(text: str) -> Any:
    if _NUMBER.fullmatch(text) is None:
        return text
    return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)


def _with_numbers(value: Any) -> Any:
    """Return a value of YAML with the numbers that YAML 1.1 takes for texts, such as 1e-6."""
    if isinstance(value, dict):
        return {str(name): _with_numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_numbers(inner) for inner in value]
    return _number(value) if isinstance(value, str) and re.search(r"\d[eE][+-]?\d", value) else value


def _loaded(path: Path, text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text) if path.suffix.lower() == ".json" else yaml.safe_load(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}:{error.colno}: {error.msg}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{place}: {getattr(error, 'problem', None) or error}") from error
    except ValueError as error:
        # PyYAML makes dates and numbers of texts that are none, such as 2026-13-01.
        raise ConfigError(f"{path}: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply") from error
    overrides = [_OVERRIDE.fullmatch(str(one)) for one in value] if isinstance(value, list) else []
    if overrides and all(overrides):
        # The file overrides.yaml of a run with Hydra.
        value = {match[1]: scalar(match[2]) for match in overrides if match}
    if not isinstance(value, dict):
        raise ConfigError(f"{path}:1:1: must be options with their values, got {str(value)[:40]!r}")
    return {str(name): _with_numbers(inner) for name, inner in value.items()}


def _flat(table: Mapping[str, Any], trainer: Trainer, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if name in ("_target_", "defaults", "hydra"):
            continue
        full = f"{prefix}{name}"
        option = trainer.find(full)
        is_option = option is not None and full in (*option.names, *option.aliases)
        if isinstance(value, dict) and value and trainer.sections and not is_option:
            yield from _flat(value, trainer, f"{full}.")
        else:
            yield full, value


def _of_script(path: Path, text: str, trainer: Trainer) -> Iterator[tuple[str, Any]]:
    found = words(path, text)
    programs = _programs([word.text for word in found], trainer)
    first = programs[-1] + 1 if programs else 0
    program, *kinds = [word.text for word in found[first - 1 : first + 1]] if programs else [""]
    if PurePosixPath(program).stem in trainer.others or (kinds and kinds[0] in trainer.others):
        kind = program if program.endswith(".py") else f"{program} {kinds[0]}"
        raise ConfigError(f"{path}: a run of `{kind}`; of {trainer.name} those of `trl grpo` are converted")
    if programs and trainer.find("num_processes"):
        yield from _of_launcher(found[: programs[-1]])
    name, values = "", list[Word]()
    for word in _command(found[first:], trainer, is_program=bool(programs)):
        override = _OVERRIDE.fullmatch(word.text)
        is_override = override and (programs or "." in override[1]) and (not name or trainer.find(override[1]))
        if not (word.text.startswith("--") or is_override):
            if name:
                values.append(word)
            elif word.text.startswith("$") and word.text not in ("$@", "$*"):
                # More options, perhaps, that are not known.
                yield word.text, None
            continue
        if name:
            yield name, _joined(values)
        name, values = "", []
        if word.text.startswith("--"):
            name, has_value, value = _option(word.text)
            if has_value or not word.is_certain:
                yield name, _value(word._replace(text=value))
                name = ""
        elif override:
            yield override[1], _value(word._replace(text=override[2]))
    if name:
        yield name, _joined(values)


def _of_launcher(before: list[Word]) -> Iterator[tuple[str, Any]]:
    """Yield the processes, and the file, of a launcher; the words are those before the program."""
    begin = max((number for number, word in enumerate(before) if word.end), default=-1) + 1
    given: dict[str, Any] = {}
    for word, following in itertools.pairwise([*before[begin:], Word("")]):
        name, has_value, value = _option(word.text)
        if word.text.startswith("--"):
            given[name] = _value(word._replace(text=value) if has_value else following)
    if "config_file" in given:
        yield "config_file", given["config_file"]
    for name, of_machines in _PROCESSES:
        if name in given:
            count, machines = given[name], given.get(of_machines, 1)
            is_known = isinstance(count, int) and isinstance(machines, int)
            yield "num_processes", count * machines if is_known else count if machines == 1 else f"{count} x {machines}"


def _command(found: list[Word], trainer: Trainer, *, is_program: bool) -> Iterator[Word]:
    """Yield the words of a command; further lines that begin with an option belong to it, as behind a comment."""
    has_options, is_next_line = is_program, False
    for word in found:
        if word.end:
            is_next_line = is_program and (is_next_line or word.end == "\n")
            if has_options and word.end != "\n":
                return
            continue
        override = _OVERRIDE.fullmatch(word.text)
        is_option = word.text.startswith("--") or bool(
            override and ("." in override[1] or trainer.find(override[1]) is not None)
        )
        if is_next_line and not is_option:
            return
        has_options, is_next_line = has_options or is_option, False
        yield word


def _programs(texts: list[str], trainer: Trainer) -> list[int]:
    """Return the places of the trainer's program among the words; else that of a user's own, before its options."""
    named, own = list[int](), list[int]()
    for place, (before, word, after) in enumerate(zip(["", *texts], texts, [*texts[1:], ""], strict=False)):
        # A bare word behind an option is its value, as in `--loss_type grpo`.
        if _is_program(word, trainer) and not (before.startswith("--") and word.isidentifier()):
            named.append(place)
        elif trainer.has_programs and word.endswith(".py") and trainer.find(_option(after)[0]):
            own.append(place)
    return named or own[:1]


def _is_program(word: str, trainer: Trainer) -> bool:
    last = word.rpartition("/")[2].removesuffix(".py").rpartition(".")[2]
    return last in trainer.programs and not word.startswith("--")


def _option(word: str) -> tuple[str, str, str]:
    """Return the name of an option, an equals sign if its value follows in the same word, and this value."""
    name, sign, value = word.removeprefix("--").partition("=")
    return name.replace("-", "_"), sign, value


def _value(word: Word) -> Any:
    return scalar(word.text) if word.is_certain else _OfBranch(word.text)


def _joined(values: list[Word]) -> Any:
    found = [_value(value) for value in values]
    return True if not found else found[0] if len(found) == 1 else found


def _resolved(value: Any, options: Mapping[str, Any]) -> Any:
    """Return a value of verl that refers to another option: that option's, or the default that it names."""
    if not isinstance(value, str) or isinstance(value, Computed):
        return value
    if value == "???":
        return None
    match = re.fullmatch(r"\$\{(?:oc\.select:\s*)?([\w.]+)(?:,\s*(.*))?\}", value, re.DOTALL)
    if match is None:
        return re.sub(r"\$\{(\w+\.[\w.]+)\}", lambda inner: str(options.get(inner[1], inner[0])), value)
    found = options.get(match[1], scalar(match[2]) if match[2] else value if match[2] is None else None)
    return None if isinstance(found, str) and found.startswith("${oc.select") else found
