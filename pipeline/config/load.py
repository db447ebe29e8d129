"""Reads a configuration: file, environment and ``--set`` into one `Config`, all errors at once, each with its location.

Precedence, highest first: ``--set section.key=value``, the variable ``RLHFD_SECTION__KEY``, the file, the defaults.
``--set rewards=math,format`` takes the place of all reward functions, ``--set rewards.judge.url=...`` sets an option of
one; their origins are by ``rewards.LABEL.OPTION``, the label that of the metrics. The
file is the given one, else the one that RLHFD_CONFIG names, else none. RLHFD_RUNTIME_DIR is a short name for
RLHFD_DAEMON__RUNTIME_DIR and takes precedence over it.

An unknown key or one that is set twice is shown at the key, a wrong value at the value.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pipeline.config import own_model, presets
from pipeline.config.advice import (
    SECTIONS,
    describe,
    describe_option,
    problem_of_key,
    problem_of_section,
    shown_value,
    toml,
    without_password,
)
from pipeline.config.conflicts import conflicts
from pipeline.config.derived import derived
from pipeline.config.foreign.lookup import key_of
from pipeline.config.prompts import CACHED_PREFIX
from pipeline.config.rewards import (
    DEFAULT_REWARD,
    RewardConfig,
    labels_of,
    problem_of_name,
    rewards_in_force,
    table_labels,
    table_of,
)
from pipeline.config.schema import Config
from pipeline.config.toml_positions import KeyPath, Positions, line_and_column, scan, syntax_errors
from pipeline.config.types import BUILTIN_PREFIX
from pipeline.config.vllm_release import problem_of_vllm
from pipeline.errors import ConfigError

CONFIG_VARIABLE = "RLHFD_CONFIG"
RUNTIME_DIR_VARIABLE = "RLHFD_RUNTIME_DIR"
_PREFIX = "RLHFD_"
_REWARDS = "rewards"
FOLDER_KEYS = ("daemon.runtime_dir", "daemon.state_dir")
SECRET_KEYS = ("metrics.tls_cert", "metrics.tls_key", "metrics.token_file")
MODEL_KEYS = ("model.actor", "model.reference", "model.critic", "model.reward")
FUNCTION_KEYS = ("rollout.environment", "rollout.engine", "rollout.advantages", "trainer.policy_loss")
_PATH_KEYS = {
    *FOLDER_KEYS, *MODEL_KEYS, *SECRET_KEYS, "model.lora_adapter", "prompts.path", "prompts.sources.path",
    "prompts.tools_file", "evaluation.files", "rewards.path", "rewards.schema_file", "rewards.template_file",
}  # fmt: skip
_LISTS_WITH_PATHS = ("prompts.sources", "evaluation.files", _REWARDS)
_CACHED_KEYS = ("prompts.path", "prompts.sources.path")
"""Those of them that may be the name of a data set in the local cache."""


_Table = TypeVar("_Table", bound=BaseModel)
_ENGINE = "rollout.engine"
_REWARD_KEY = r"rewards(?:\.[\w.-]+(?::[\w.-]+)?)?"


class ConfigErrors(ConfigError):
    """All errors of a configuration, one per line."""

    def __init__(self, errors: Sequence[str]) -> None:
        super().__init__("\n".join(errors))
        self.errors = tuple(errors)


class Origin(NamedTuple):
    """The source of a value.

    Attributes:
        layer: Layer that set the value.
        location: ``config.toml:8:15``, ``--set rollout.workers``, or the variable's name; empty for a default.
    """

    layer: Literal["default", "file", "environment", "set"]
    location: str = ""


@dataclass(frozen=True)
class LoadedConfig:
    """A checked configuration, its paths absolute.

    Attributes:
        config: The configuration.
        origins: Origins of the values that are no defaults, by ``section.key``.
        path: The file that was read, if any.
        sets: The assignments of the command line.
        environ: The environment variables with the prefix ``RLHFD_``.
        reasons: Why a default differs from the schema's, by ``section.key``: a model of its own, a preset.
        preset: The keys whose default is that of a preset (`pipeline.config.presets`).
        on_cards: Whether the run has GPUs.
    """

    config: Config
    origins: Mapping[str, Origin]
    path: Path | None
    sets: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    preset: frozenset[str] = frozenset()
    on_cards: bool = False

    def where(self, key: str) -> str:
        """Return the prefix of an error about ``section.key``: location and name."""
        return _where(self._origin(key) or Origin("default"), key)

    @property
    def dtype_follows_gpus(self) -> bool:
        """Whether `model.dtype` is the default of a model of its own (`pipeline.config.own_model`)."""
        return "model.dtype" not in self.origins and not self.config.model.actor.startswith(BUILTIN_PREFIX)

    def placed(self, error: str) -> str:
        """Return a one-line error that begins with its key, preceded by the key's location."""
        key = re.match(rf"{_REWARD_KEY}|[a-z]+\.[a-z_]+", error)
        origin = self._origin(key[0]) if key else None
        if key is None or origin is None:
            return error
        return f"{origin.location}: {error}" if origin.layer == "file" else f"{origin.location}{error[key.end() :]}"

    def _origin(self, key: str) -> Origin | None:
        """Return the origin of ``section.key``; of a reward function's default option that of the function."""
        label = key.rpartition(".")[0]
        near = (key, f"{key}.name", f"{label}.name", _REWARDS) if key.startswith(f"{_REWARDS}.") else (key,)
        return next((self.origins[one] for one in near if one in self.origins), None)


FileChecks = Callable[[LoadedConfig], list[str]]


def load(
    path: Path | None,
    sets: Sequence[str],
    environ: Mapping[str, str],
    *,
    check_files: FileChecks | None = None,
    on_cards: bool = False,
) -> LoadedConfig:
    """Read and check a configuration.

    Relative paths are taken from the file's folder where the file or a default gives them, and from the current folder
    where the environment or ``--set`` does, or where there is no file.

    Args:
        path: The file, or None for the one that RLHFD_CONFIG names, or none at all.
        sets: Assignments ``section.key=value``, the value in TOML or else a bare string.
        environ: The environment.
        check_files: Returns the problems of the files that the configuration names; None: files are not checked.
            `pipeline.supervisor.preflight.problems_of_files` is the daemon's.
        on_cards: Whether the run has GPUs, for the defaults of a model of its own.

    Raises:
        ConfigErrors: If there are errors; contains all of them.
    """
    path = path or path_in(environ)
    of_sources: list[str] = []
    given = _from_file(path, of_sources) if path else {}
    given |= _from_environment(environ, of_sources)
    given |= _from_sets(sets, of_sources)
    plain = {key: value.value for key, value in given.items()}
    ours = {name: value for name, value in environ.items() if name.startswith(_PREFIX)}

    def checked(engine: own_model.Default | None) -> LoadedConfig:
        """Return the configuration with an engine in place of "auto"; None: another one is set."""
        errors, values, by_preset = [*of_sources], dict(given), dict[str, own_model.Default]()
        if (preset := presets.preset_of(plain)) is not None:
            by_preset = presets.defaults(preset, plain)
            values[presets.ALGORITHM] = replace(values[presets.ALGORITHM], value=presets.BASE, text=None)
        defaults = own_model.defaults(plain, on_cards=on_cards) | by_preset
        reasons = {key: default.reason for key, default in defaults.items()}
        values |= {key: _Value(default.value, Origin("default")) for key, default in defaults.items()}
        if engine is not None:
            auto = values.get(_ENGINE, _Value(engine.value, Origin("default")))
            values[_ENGINE] = replace(auto, value=engine.value, text=None)
            reasons[_ENGINE] = engine.reason
        if preset is not None:
            reasons[presets.ALGORITHM] = f"preset {preset}"
        config = _validate(values, path.parent if path else Path(), errors)
        errors += _not_utf8(values, config)
        origins = {key: value.origin for key, value in values.items() if value.origin.layer != "default"}
        loaded = LoadedConfig(config, origins, path, tuple(sets), ours, reasons, frozenset(by_preset), on_cards)
        if check_files is not None:
            errors += check_files(loaded)
        if errors:
            raise ConfigErrors(sorted(errors, key=_by_location(path)))
        return loaded

    auto = _engine(plain, on_cards=on_cards)
    if auto is None or auto.value != "vllm":
        return checked(auto)
    try:
        return checked(auto)
    except ConfigErrors as refused:
        # Errors that are not of the engine come again.
        return checked(own_model.Default("transformers", f"auto: vllm is installed, but {refused.errors[0]}"))


def _engine(values: Mapping[str, Any], *, on_cards: bool) -> own_model.Default | None:
    """Return the engine of `rollout.engine = "auto"` with the reason; None if another one is in force.

    It is the default of a model of its own: vLLM's start takes longer than the embedded task.
    """
    if values.get(_ENGINE, "auto" if own_model.is_own(values) else "transformers") != "auto":
        return None
    if values.get("cluster.engine", "local") != "local":
        reason = "whether the machines of a cluster have vllm is not known here"
    elif not on_cards:
        reason = "no GPU"
    elif not (reason := problem_of_vllm()):
        return own_model.Default("vllm", "auto: vllm is installed here, and the run has GPUs")
    return own_model.Default("transformers", f"auto: {reason}")


def load_again(loaded: LoadedConfig, check_files: FileChecks) -> LoadedConfig:
    """Read the same file again, under the same environment and ``--set``, with the same checks as `load`.

    Raises:
        ConfigErrors: As `load`.
    """
    return load(loaded.path, loaded.sets, loaded.environ, check_files=check_files, on_cards=loaded.on_cards)


def overridden(loaded: LoadedConfig) -> dict[str, str]:
    """Return the keys of the file whose values are not in force, with the location of the value that is.

    A value in the file that is equal to the one above it is left out.
    """
    errors: list[str] = []
    given = _from_file(loaded.path, errors) if loaded.path else {}
    above = {key: origin for key, origin in loaded.origins.items() if origin.layer in ("set", "environment")}
    forced = {**given, **_from_environment(loaded.environ, errors), **_from_sets(loaded.sets, errors)}
    for values in (given, forced):
        # Each option has a key of its own from then on.
        _validate_rewards(values, errors, set())
    return {key: above[key].location for key in given if key in above and given[key].value != forced[key].value}


def find_runtime_dir(path: Path | None, environ: Mapping[str, str]) -> Path:
    """Return the runtime directory alone, despite other errors: `rlhfd stop` must work with a broken file.

    Args:
        path: As in `load`.
        environ: The environment.

    Raises:
        ConfigErrors: If the file cannot be read.
    """
    for variable in (RUNTIME_DIR_VARIABLE, "RLHFD_DAEMON__RUNTIME_DIR"):
        if environ.get(variable):
            return Path(_resolve("daemon.runtime_dir", environ[variable], Path()))
    path = path or path_in(environ)
    errors: list[str] = []
    _, tables, _ = _parse_file(path, errors) if path else ("", {}, None)
    if errors:
        raise ConfigErrors(errors)
    daemon = tables.get("daemon")
    folder = daemon.get("runtime_dir") if isinstance(daemon, dict) else None
    if not isinstance(folder, str) or not folder:
        folder = str(Config().daemon.runtime_dir)
    return Path(_resolve("daemon.runtime_dir", folder, path.parent if path else Path()))


def render(loaded: LoadedConfig, *, effective: bool, origin: bool, remarks: Mapping[str, str] = {}) -> str:
    """Return a configuration as TOML: the keys that were set, with those of a preset, or all values in force.

    Args:
        loaded: The configuration.
        effective: Include defaults, and the values in force of keys that were left out.
        origin: Add the origin of each value as a comment.
        remarks: Comments by ``section.key``, beside those of `LoadedConfig.reasons`.
    """
    config, missing = loaded.config, own_model.missing(loaded.config.model.actor, loaded.origins)
    remarks = {**loaded.reasons, **missing, **remarks}
    in_force = derived(config, on_cards=loaded.on_cards)
    blocks = []
    if not config.rewards or _REWARDS in missing:
        line = "# rewards are left out" if _REWARDS in missing else "rewards = []"
        location = loaded.origins.get(_REWARDS, Origin("default")).location or "default"
        comments = [*([location] if origin and _REWARDS not in missing else []), *filter(None, [remarks.get(_REWARDS)])]
        if effective or _REWARDS in loaded.origins:
            # A key without a table stands above all tables.
            blocks.append(f"{line}  # {'; '.join(comments)}\n" if comments else f"{line}\n")
    for section, defaults in SECTIONS.items():
        lines = []
        for name in type(defaults).model_fields:
            key = f"{section}.{name}"
            if key not in loaded.origins and key not in loaded.preset and not effective:
                continue
            value = None if key in missing else get(config, key)
            default = in_force.get(key) if key not in loaded.origins and key not in remarks else None
            value = default.value if default is not None and value is None else value
            line = f"# {name} is left out" if value is None else f"{name} = {toml(value)}"
            location = loaded.origins.get(key, Origin("default")).location or "default"
            comments = [
                *([location] if origin and value is not None else []),
                *([remarks[key]] if key in remarks else []),
                *([default.reason] if default is not None and default.reason and (origin or value is None) else []),
            ]
            lines.append(f"{line}  # {'; '.join(comments)}" if comments else line)
        if lines:
            blocks.append("\n".join([f"[{section}]", *lines, ""]))
    if _REWARDS not in missing:
        blocks += _rendered_rewards(loaded, effective=effective, origin=origin)
    return "\n".join(blocks)


def _rendered_rewards(loaded: LoadedConfig, *, effective: bool, origin: bool) -> list[str]:
    blocks, rewards = [], loaded.config.rewards
    if not effective and not any(key == _REWARDS or key.startswith(f"{_REWARDS}.") for key in loaded.origins):
        return []
    for label, reward, in_force in zip(table_labels(rewards), rewards, rewards_in_force(loaded.config), strict=True):
        lines = []
        for option in type(reward).model_fields:
            given = loaded.origins.get(f"{_REWARDS}.{label}.{option}")
            if given is None and not effective and option != "name":
                continue
            value, own = getattr(in_force, option), getattr(reward, option)
            line = f"# {option} is left out" if value is None else f"{option} = {toml(value)}"
            reason = "" if own == value else "; by the length of a response"
            comment = (given.location if given else f"default{reason}") if origin and value is not None else ""
            lines.append(f"{line}  # {comment}" if comment else line)
        blocks.append("\n".join(["[[rewards]]", *lines, ""]))
    return blocks


def get(config: Config, key: str) -> Any:
    """Return the value of ``section.key``."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def path_in(environ: Mapping[str, str]) -> Path | None:
    """Return the file that RLHFD_CONFIG names; None without one."""
    return Path(environ[CONFIG_VARIABLE]) if environ.get(CONFIG_VARIABLE) else None


@dataclass
class _Value:
    value: Any
    origin: Origin
    # The text on the command line: `--set daemon.name=7` is a name.
    text: str | None = None
    element_origins: Mapping[KeyPath, Origin] = field(default_factory=dict)


def _from_file(path: Path, errors: list[str]) -> dict[str, _Value]:
    text, tables, positions = _parse_file(path, errors)
    values = {}

    def origin(offset: int) -> Origin:
        line, column = line_and_column(text, offset)
        return Origin("file", f"{path}:{line}:{column}")

    def located(value: Any, *place: str) -> _Value:
        inner = {at[len(place) :]: mark for at, mark in positions.marks.items() if at[: len(place)] == place}
        origins = {at: origin(mark.value) for at, mark in inner.items()}
        return _Value(_resolve(".".join(place), value, path.parent), origins[()], element_origins=origins)

    for section, table in tables.items():
        if section == _REWARDS:
            values[section] = located(table, section)
            continue
        if problem := problem_of_section(section, table):
            errors.append(f"{origin(positions.marks[section,].key).location}: {problem}")
            continue
        for name, value in table.items():
            if problem := problem_of_key(section, name):
                errors.append(f"{origin(positions.marks[section, name].key).location}: {problem}")
                continue
            values[f"{section}.{name}"] = located(value, section, name)
    return values


def _parse_file(path: Path, errors: list[str]) -> tuple[str, dict[str, Any], Positions]:
    try:
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
        return text, tomllib.loads(text), scan(text)
    except OSError as error:
        errors.append(f"{path}: cannot be read: {error.strerror}{_file_advice(path)}")
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode("utf-8-sig")
        is_utf16 = error.object[:2] in (b"\xff\xfe", b"\xfe\xff")
        found = "UTF-16" if is_utf16 else f"byte 0x{error.object[error.start]:02x}"
        location = "{}:{}:{}".format(path, *line_and_column(before, len(before)))
        errors.append(f"{location}: not UTF-8 but {found}, save the file as UTF-8")
    except tomllib.TOMLDecodeError as error:
        errors += [
            f"{path}:{line}:{column}: {without_password(message)}"
            for line, column, message in syntax_errors(text, str(error))
        ]
    except ValueError as error:
        # A number of more digits than Python reads.
        errors.append(f"{path}: {error}")
    except RecursionError:
        errors.append(f"{path}: nested too deeply")
    return "", {}, Positions({}, [])


def _file_advice(path: Path) -> str:
    if path.is_dir():
        found = sorted(path.glob("*.toml"))
        return f", did you mean {found[0]}?" if found else ""
    close = difflib.get_close_matches(path.name, [each.name for each in path.parent.glob("*.toml")], n=1)
    return f", did you mean {path.parent / close[0]}?" if close else ""


def _from_environment(environ: Mapping[str, str], errors: list[str]) -> dict[str, _Value]:
    values: dict[str, _Value] = {}
    for variable in sorted(environ):
        section, separator, name = variable.removeprefix(_PREFIX).lower().partition("__")
        if variable.startswith(_PREFIX) and section == _REWARDS:
            key = f"{_REWARDS}.{name.replace('__', '.')}" if separator else _REWARDS
            values[key] = _reward_value(key, environ[variable], Origin("environment", variable))
        elif variable.startswith(_PREFIX) and separator:
            values |= _from_text(section, name, environ[variable], Origin("environment", variable), errors)
        elif variable.startswith(_PREFIX) and (meant := _variable_meant(variable, environ[variable])):
            errors.append(f"{variable}: unknown variable, did you mean {meant}?")
    if folder := environ.get(RUNTIME_DIR_VARIABLE):
        key = "daemon.runtime_dir"
        values[key] = _Value(_resolve(key, folder, Path()), Origin("environment", RUNTIME_DIR_VARIABLE))
    return values


def _variable_meant(variable: str, value: str) -> str:
    """Return the known variable that was probably meant; empty for a variable of another program.

    Kubernetes sets RLHFD_PORT and the like in every container if a service is called rlhfd.
    """
    if variable in (CONFIG_VARIABLE, RUNTIME_DIR_VARIABLE) or value.startswith(("tcp://", "udp://")):
        return ""
    known = [
        f"{_PREFIX}{section}__{name}".upper()
        for section, model in SECTIONS.items()
        for name in type(model).model_fields
    ]
    same = [
        name
        for name in known
        if name.replace("__", "_") == variable or name.endswith(f"__{variable.removeprefix(_PREFIX)}")
    ]
    close = difflib.get_close_matches(variable, [*known, CONFIG_VARIABLE, RUNTIME_DIR_VARIABLE], n=1, cutoff=0.85)
    return next(iter([*same, *close]), "")


def _from_sets(sets: Sequence[str], errors: list[str]) -> dict[str, _Value]:
    values: dict[str, _Value] = {}
    for assignment in sets:
        key, separator, text = (part.strip() for part in assignment.partition("="))
        section, dot, name = key.partition(".")
        if separator and (key == _REWARDS or (section == _REWARDS and name)):
            values[key] = _reward_value(key, text, Origin("set", f"--set {key}"))
        elif not (section and dot and name and separator):
            shown = without_password(assignment)
            errors.append(f"--set {shown}: must be of the form section.key=value{_assignment_meant(shown)}")
        else:
            values |= _from_text(section, name, text, Origin("set", f"--set {key}"), errors)
    return values


def _assignment_meant(assignment: str) -> str:
    """Return the assignment that was probably meant by one of another form; empty if none is found."""
    match = re.fullmatch(r"\s*(?:([A-Za-z_]+)(?:__|[./:-]))?([A-Za-z_]+)\s*(?::=|==|[=:\s])\s*(.+?)\s*", assignment)
    if match is None:
        return ""
    section, name, value = match[1], match[2].lower(), match[3]
    homes = [home for home, model in SECTIONS.items() if name in type(model).model_fields]
    key = f"{section}.{name}" if section in homes else ""
    if section is None:
        key = f"{homes[0]}.{name}" if homes else key_of(name)
    return f", did you mean --set {key}={value}?" if key else ""


def _from_text(section: str, name: str, text: str, origin: Origin, errors: list[str]) -> dict[str, _Value]:
    if problem := problem_of_section(section, {name: text}) or problem_of_key(section, name):
        errors.append(f"{origin.location}: {problem}")
        return {}
    key = f"{section}.{name}"
    return {key: _Value(_resolve(key, _parsed(text), Path()), origin, text=text)}


def _parsed(text: str) -> Any:
    """Return the value of a text in TOML, or else the text."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        # A bare string, or a number of more digits than Python reads.
        return text
    # More than one key: the text holds line breaks and is no single value.
    return parsed["value"] if list(parsed) == ["value"] else text


def _reward_value(key: str, text: str, origin: Origin) -> _Value:
    """Return the value of ``rewards``, names divided by commas or TOML, or that of an option of one function."""
    value = _parsed(text)
    if key != _REWARDS:
        return _Value(_resolve(f"{_REWARDS}.{key.rpartition('.')[2]}", value, Path()), origin, text=text)
    if isinstance(value, str):
        value = [name.strip() for name in value.split(",") if name.strip()]
    return _Value(_resolve(_REWARDS, value, Path()), origin)


def _resolve(key: str, value: Any, base: Path) -> Any:
    """Return a value with its relative paths, those of lists and tables in it too, from a folder."""
    if isinstance(value, list) and key in _LISTS_WITH_PATHS:
        return [_resolve(key, one, base) for one in value]
    if isinstance(value, dict):
        return {name: _resolve(f"{key}.{name}", one, base) for name, one in value.items()}
    if key not in _PATH_KEYS or not isinstance(value, str) or not value or value.startswith(BUILTIN_PREFIX):
        return value
    if key in _CACHED_KEYS and value.startswith(CACHED_PREFIX):
        return value
    return os.path.abspath(base / os.path.expanduser(value))


def _validate(values: dict[str, _Value], base: Path, errors: list[str]) -> Config:
    wrong: set[str] = set()
    sections: dict[str, Any] = {name: _validate_section(name, values, base, errors, wrong) for name in SECTIONS}
    if (rewards := _validate_rewards(values, errors, wrong)) is not None:
        sections[_REWARDS] = rewards
    # Without validation: conflicts are looked for here, where their locations are known.
    config = Config.model_construct(**sections)
    ratio, steps = (values.get(f"trainer.{name}") for name in ("warmup_ratio", "warmup_steps"))
    if ratio is not None and ratio.value and steps is not None and steps.origin.layer != "default":
        message = "must be left out with trainer.warmup_ratio, which takes its place"
        errors.append(f"{_where(steps.origin, 'trainer.warmup_steps')}: {message}")
    for keys, message in conflicts(config):
        if wrong.isdisjoint(keys):
            # Defaults do not conflict, so at least one of the keys was set, or is that of a preset or of an own model.
            found = [key for key in keys if key in values]
            key = next((key for key in found if values[key].origin.layer != "default"), found[0])
            origin = values[key].origin
            errors.append(f"{_where(origin, key) if key == keys[0] else f'{origin.location}: {keys[0]}'}: {message}")
    return config


def _not_utf8(values: Mapping[str, _Value], config: Config) -> list[str]:
    """Return an error for each path that is no text: files and messages of a run hold paths in UTF-8."""
    found = {key: value.value for key, value in values.items()} | {key: get(config, key) for key in FOLDER_KEYS}
    return [
        f"{_where(values[key].origin if key in values else Origin('default'), key)}: the bytes of {str(path)!a} are "
        "not UTF-8: rename its folder, or set LC_ALL=C.UTF-8 and leave PYTHONUTF8=0 out if it is UTF-8"
        for key, path in found.items()
        if any("\ud800" <= character <= "\udfff" for character in str(path))
    ]


def _validate_table(
    table: str, model: type[_Table], values: Mapping[str, _Value], given: dict[str, Any],
    refuse: Callable[[str, ErrorDetails], None],
) -> _Table | None:  # fmt: skip
    """Return a table with every valid value; None without a value that it needs.

    Args:
        table: The name of the table, for its keys of paths.
        model: Its model.
        values: The values that are set, by the names of their keys.
        given: Other values of keys that are not set.
        refuse: Called with the key's name and the error of each wrong value.
    """
    given |= {name: value.value for name, value in values.items()}
    while True:
        try:
            return model.model_validate(given)
        except ValidationError as error:
            for details in error.errors(include_url=False):
                name = str(details["loc"][0])
                text = values[name].text if name in values else None
                bare = None if text is None else _resolve(f"{table}.{name}", text, Path())
                if details["type"] in ("string_type", "path") and bare is not None and given.get(name) != bare:
                    given[name] = bare
                    continue
                refuse(name, details)
                given.pop(name, None)
            if any(field.is_required() and name not in given for name, field in model.model_fields.items()):
                return None


def _validate_section(
    section: str, values: Mapping[str, _Value], base: Path, errors: list[str], wrong: set[str]
) -> BaseModel:
    """Return the section with every valid value; errors go to `errors`, the keys of invalid values to `wrong`."""
    defaults = SECTIONS[section]
    keys = {name: f"{section}.{name}" for name in type(defaults).model_fields}
    ours = {name: values[key] for name, key in keys.items() if key in values}
    folders = {
        name: _resolve(key, str(getattr(defaults, name)), base) for name, key in keys.items() if key in FOLDER_KEYS
    }

    def refuse(name: str, details: ErrorDetails) -> None:
        value = ours[name]
        wrong.add(keys[name])
        origin = value.element_origins.get(details["loc"][1:], value.origin)
        errors.append(f"{_where(origin, keys[name])}: {describe(section, name, value.value, details)}")

    found = _validate_table(section, type(defaults), ours, folders, refuse)
    # No key of a section is required.
    assert found is not None
    return found


def _validate_rewards(values: dict[str, _Value], errors: list[str], wrong: set[str]) -> list[RewardConfig] | None:
    """Return the reward functions that are set, with options that ``--set`` gives one of them; None for the default.

    In `values` each option has a key of its own from then on, ``rewards.LABEL.OPTION``.
    """
    options = {key: values.pop(key) for key in [*values] if key.startswith(f"{_REWARDS}.")}
    if _REWARDS not in values and not options:
        return None
    whole = values.get(_REWARDS, _Value([DEFAULT_REWARD.name], Origin("default")))
    if not isinstance(whole.value, list):
        shown = shown_value(whole.value)
        errors.append(f"{_where(whole.origin, _REWARDS)}: must be tables [[rewards]], or a list of names, got {shown}")
        wrong.add(_REWARDS)
        return None
    tables: list[dict[str, _Value]] = []
    origins = whole.element_origins
    for number, one in enumerate(whole.value):
        at = origins.get((number,), whole.origin)
        table = {"name": one} if isinstance(one, str) else one
        problem = (
            f"must be a name or a table, got {shown_value(one)}" if not isinstance(table, dict)
            else "must have a name" if "name" not in table
            else f"{problem}, got {shown_value(table['name'])}" if (problem := problem_of_name(table["name"]))
            else ""
        )  # fmt: skip
        if problem:
            errors.append(f"{_where(origins.get((number, 'name'), at), _REWARDS)}: {problem}")
            wrong.add(_REWARDS)
            continue
        tables.append({key: _Value(value, origins.get((number, key), at)) for key, value in table.items()})
    labels = _labels_of(tables)
    for key, option in options.items():
        label, _, name = key.removeprefix(f"{_REWARDS}.").rpartition(".")
        found = [table for own, table in zip(labels, tables, strict=True) if label == own]
        found = found or [table for table in tables if label == table["name"].value]
        if len(found) == 1 and name != "name":
            found[0][name] = option
        elif _REWARDS not in wrong:
            said = f"must be rewards.NAME.OPTION, with a name of {', '.join(labels) or 'no function'}"
            errors.append(f"{option.origin.location}: {said}")
    rewards = []
    # An option may be a label.
    for label, table in zip(_labels_of(tables), tables, strict=True):
        if (reward := _validate_reward(label, table, errors, wrong)) is not None:
            rewards.append(reward)
        values |= {f"{_REWARDS}.{label}.{option}": value for option, value in table.items()}
    return rewards


def _labels_of(tables: list[dict[str, _Value]]) -> list[str]:
    """Return the labels of tables, whose options may be wrong."""
    given = [(table["label"].value if "label" in table else None, table["name"].value) for table in tables]
    return labels_of([label if isinstance(label, str) and label else name for label, name in given])


def _validate_reward(
    label: str, table: Mapping[str, _Value], errors: list[str], wrong: set[str]
) -> RewardConfig | None:
    model = table_of(table["name"].value)

    def refuse(option: str, details: ErrorDetails) -> None:
        wrong.update((_REWARDS, f"{_REWARDS}.{label}.{option}"))
        is_of_table = details["type"] in ("missing", "extra_forbidden")
        key = f"{_REWARDS}.{label}" if is_of_table else f"{_REWARDS}.{label}.{option}"
        origin = table.get(option, table["name"]).origin
        errors.append(f"{_where(origin, key)}: {describe_option(model, details)}")

    return _validate_table(_REWARDS, model, table, {}, refuse)


def _where(origin: Origin, key: str) -> str:
    return {"default": key, "file": f"{origin.location}: {key}"}.get(origin.layer, origin.location)


def _by_location(path: Path | None) -> Callable[[str], tuple[float, float]]:
    """Return a sort key of errors: those in the file by line and column, then the others in their order."""

    def line_and_column_of(error: str) -> tuple[float, float]:
        match = re.match(re.escape(f"{path}:") + r"(\d+):(\d+):", error)
        return (int(match[1]), int(match[2])) if match else (math.inf, 0)

    return line_and_column_of
