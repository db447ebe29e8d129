"""An option of another trainer: the key in its place, the conversion of its value, or the reason for having none.

The tables of `pipeline.config.foreign` are lists of these. docs/coming-from.md, `rlhfd init --from` and the advice
about unknown keys read them, and nothing else says what an option of another trainer is called here.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["carried", "needless", "missing"]


class NotCarriedError(Exception):
    """A value has no counterpart here; the message is the reason.

    Attributes:
        rest: Keys with their values, of the part that has one.
    """

    def __init__(self, reason: str, rest: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.rest = rest or {}


@dataclass(frozen=True)
class Given:
    """The options of a file, beside the defaults of its trainer.

    Attributes:
        values: Value of each option that the file sets, by the option's name.
        defaults: Value of each option that is left out, where the table has one.
    """

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        """Return the value in force; None for an option without a default."""
        return self.values[name] if name in self.values else self.defaults.get(name)

    def __contains__(self, name: str) -> bool:
        """Return whether the file sets an option to something."""
        return self.values.get(name) is not None

    def number(self, name: str, otherwise: float = 0) -> Any:
        """Return the value in force of an option that is a number.

        Raises:
            NotCarriedError: If it is none.
        """
        value = self[name]
        if value is None:
            return otherwise
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise NotCarriedError(f"{name} must be a number, got {value!r}")
        return value

    def count(self, name: str, otherwise: int = 1) -> int:
        """Return the value in force of an option that counts something, at least 1.

        Raises:
            NotCarriedError: If it is no such number.
        """
        value = self.number(name, otherwise)
        if value < 1 or value != int(value):
            raise NotCarriedError(f"{name} must be a number from 1 on, got {value!r}")
        return int(value)


Convert = Callable[[Any, Given], Mapping[str, Any]]


@dataclass(frozen=True)
class Option:
    """Options of another trainer that share a row of its table.

    Attributes:
        names: Their names; ``*`` stands for any characters.
        kind: Carried by a key, needless here, or missing.
        key: The keys that take their place, the first one before all; empty if there is none.
        remark: The difference in meaning, or the reason.
        default: The default of the trainer; None for none, or for one that follows from others.
        convert: Keys with their values by the value of the option; None: the same value under `key`.
        is_written: Whether a conversion writes the default where the file leaves the option out: the run would be
            another one with the default of here.
        aliases: Earlier names.
        unless: Whether a value of a missing option changes nothing; None, false and "none" never do.
        off_by_name: Value of a name by which nothing is lost, such as its default.
    """

    names: tuple[str, ...]
    kind: Kind
    key: tuple[str, ...] = ()
    remark: str = ""
    default: Any = None
    convert: Convert | None = None
    is_written: bool = False
    aliases: tuple[str, ...] = ()
    unless: Callable[[Any, Given], bool] | None = None
    off_by_name: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]

    def converted(self, value: Any, given: Given) -> Mapping[str, Any]:
        """Return keys with their values.

        Raises:
            NotCarriedError: If the value has no counterpart.
        """
        return self.convert(value, given) if self.convert else {self.key[0]: value}


@dataclass(frozen=True)
class Trainer:
    """A trainer and its options.

    Attributes:
        name: Its name, as it writes it.
        word: Its name in ``rlhfd init --from``.
        release: The release whose options these are.
        options: The table.
        programs: Parts of the name of its program in a shell script; the options come after it.
        others: Words behind its program that begin a run of another kind.
        has_programs: Whether its users write the program that trains, in Python.
        always: Keys that a conversion always sets, with the reason.
    """

    name: str
    word: str
    release: str
    options: tuple[Option, ...]
    programs: tuple[str, ...]
    always: tuple[tuple[str, Any, str], ...]
    others: tuple[str, ...] = ()
    has_programs: bool = False

    def find(self, name: str) -> Option | None:
        """Return the row of an option, by its name or an earlier one; None if the table lacks it."""
        for option in self.options:
            if name in option.names or name in option.aliases:
                return option
        for option in self.options:
            if any("*" in one and fnmatch.fnmatchcase(name, one) for one in option.names):
                return option
        return None

    @property
    def sections(self) -> set[str]:
        """The first parts of the names of its options that have several."""
        heads = (name.partition(".") for option in self.options for name in option.names)
        return {head for head, dot, _ in heads if dot and head != "*"}

    @property
    def defaults(self) -> dict[str, Any]:
        """The default of each option that has one."""
        return {option.name: option.default for option in self.options if option.default is not None}


def carried(
    name: str,
    key: str,
    remark: str = "",
    *,
    default: Any = None,
    to: Convert | None = None,
    written: bool = False,
    aliases: str = "",
) -> Option:
    """Return an option that a key takes the place of; several keys and earlier names are divided by spaces."""
    return Option((name,), "carried", tuple(key.split()), remark, default, to, written, tuple(aliases.split()))


def needless(names: str, reason: str, *, aliases: str = "") -> Option:
    """Return options, divided by spaces, that rlhfd does without."""
    return Option(tuple(names.split()), "needless", (), reason, aliases=tuple(aliases.split()))


def missing(
    names: str,
    reason: str,
    *,
    key: str = "",
    aliases: str = "",
    default: Any = None,
    written: bool = False,
    off: tuple[Any, ...] = (),
    unless: Callable[[Any, Given], bool] | None = None,
    off_by_name: Mapping[str, Any] | None = None,
) -> Option:
    """Return options, divided by spaces, that rlhfd lacks.

    Args:
        names: Their names.
        reason: The reason, or the way that leads there without them.
        key: The keys that are nearest.
        aliases: Earlier names.
        default: The default of the trainer.
        written: Whether the default is lost too, where a file leaves the option out.
        off: Values by which nothing is lost.
        unless: Whether nothing is lost by a value.
        off_by_name: Value of a name by which nothing is lost.
    """
    is_off = (lambda value, given: value in off) if off else None
    return Option(
        tuple(names.split()), "missing", tuple(key.split()), reason, default, None, written, tuple(aliases.split()),
        unless or is_off, off_by_name or {},
    )  # fmt: skip


def by_value(key: str, values: Mapping[Any, Any], *, otherwise: str) -> Convert:
    """Return a conversion that maps each value, and refuses others with a reason."""

    def convert(value: Any, given: Given) -> dict[str, Any]:
        if not isinstance(value, str | bool | int | float) or value not in values:
            raise NotCarriedError(otherwise)
        return {key: values[value]}

    return convert


def only_if(condition: Callable[[Given], bool], key: str) -> Convert:
    """Return a conversion of the same value where a condition holds; elsewhere the option has no effect."""
    return lambda value, given: {key: value} if condition(given) else {}


def is_ppo(given: Given) -> bool:
    """Return whether verl's or OpenRLHF's estimator is GAE, that of PPO."""
    return "gae" in (given["algorithm.adv_estimator"], given["algo.advantage.estimator"])


def of_ppo(key: str) -> Convert:
    """Return a conversion of the same value with PPO; elsewhere the option has no effect."""
    return only_if(is_ppo, key)


def generations(value: Any, given: Given) -> dict[str, Any]:
    """Convert the responses to a prompt; with PPO there is one here.

    Raises:
        NotCarriedError: If PPO has several.
    """
    if not is_ppo(given):
        return {"rollout.num_generations": value}
    if value != 1:
        raise NotCarriedError("PPO has one response to a prompt here")
    return {}


def estimator(names: Mapping[str, str], without_std: Callable[[Given], bool]) -> Convert:
    """Return the conversion of an estimator: PPO for gae, else GRPO with the advantages of that name.

    Args:
        names: The names of `rollout.advantages` by the trainer's.
        without_std: Whether an option leaves out the division by the group's standard deviation.
    """

    def convert(value: Any, given: Given) -> dict[str, Any]:
        if value == "gae":
            return {"rollout.algorithm": "ppo"}
        if value not in names:
            raise NotCarriedError(
                f"the estimators that are here too are gae, {', '.join(names)}; or one of your own, rollout.advantages"
            )
        is_plain = names[value] == "grpo" and without_std(given)
        return {"rollout.algorithm": "grpo", "rollout.advantages": "dr_grpo" if is_plain else names[value]}

    return convert


def positive(key: str) -> Convert:
    """Return a conversion of a number above 0; any other one, or none, is 0 here."""
    return lambda value, given: {key: value if isinstance(value, int | float) and value > 0 else 0}


def warmup_steps(steps: str, share: str, convert: Convert) -> Convert:
    """Return the conversion of the steps of a warm-up: the share stands where there are none; both keys are refused."""
    return lambda value, given: {} if given.number(steps) <= 0 and given[share] else convert(value, given)


def warmup_share(steps: str, total: str) -> Convert:
    """Return the conversion of a warm-up's share of all steps, which need a number; its own steps are above it."""

    def convert(value: Any, given: Given) -> dict[str, Any]:
        if given.number(steps) > 0 or not value:
            return {}
        if given.number(total) <= 0:
            raise NotCarriedError(f"a share needs {total} in the same file")
        return {"trainer.warmup_ratio": value}

    return convert


def unless_true(key: str) -> Convert:
    """Return a conversion of a switch that is on here wherever it can be: false alone is written."""
    return lambda value, given: {} if value else {key: False}


TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")


def data_path(name: str, subset: str = "") -> str:
    """Return the path of a data set: a file or folder as it is, a name as one of the local cache."""
    is_path = name.startswith(("/", ".", "~")) or name.endswith((".jsonl", ".json", ".parquet", ".arrow"))
    return name if is_path else f"datasets:{name}" + (f":{subset}" if subset else "")


def trackers(value: Any, given: Given) -> dict[str, Any]:
    """Return the trackers of a list of reports; the log on the console needs no key."""
    names = [value] if isinstance(value, str) else list(value or [])
    others = [name for name in names if name not in (*TRACKERS, "console", "none", "file")]
    if others:
        raise NotCarriedError(f"no tracker {', '.join(map(str, others))}: there are {', '.join(TRACKERS)}")
    return {"metrics.tracker": [name for name in names if name in TRACKERS]}


def passes(value: Any, name: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a number of passes over the prompts.

    Args:
        value: The number.
        name: The option.
        data: The keys of the files: a mixture of several has no passes.

    Raises:
        NotCarriedError: If there are several, or it is no whole number from 1 on.
    """
    if "prompts.sources" in data:
        raise NotCarriedError("several sources, mixed by weight, have no passes: trainer.max_steps ends the run")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NotCarriedError(f"{name} must be a number, got {value!r}")
    if not value >= 1 or value % 1:
        raise NotCarriedError("trainer.max_epochs counts whole passes")
    return {"trainer.max_epochs": int(value)}
