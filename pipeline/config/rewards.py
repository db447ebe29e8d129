"""The rewards: functions and models, each a table ``[[rewards]]`` with its weight and options; the environment's keys.

A function without options may be a name alone. `model.reward` is the short form of one table of a reward model.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter
from pydantic_core import PydanticCustomError

from pipeline.config import user_modules
from pipeline.config.sections import RewardTokenizer, Section
from pipeline.config.types import FUNCTION, AnyPath, Conflicts, Url, matches
from pipeline.config.user_modules import RewardStyle

if TYPE_CHECKING:
    from pipeline.config.schema import Config

MATH_CPU_S: Final = 5.0
"""CPU seconds that `math` gives a row to be read and compared; a response that needs more has 0."""

MOST_REWARDS: Final = 16
"""Tables ``[[rewards]]``, each with a metric of its own."""


EnvironmentName = Annotated[
    str,
    matches(FUNCTION.pattern, 'must be of the form "module:Factory"'),
    Field(json_schema_extra={"pattern": f"^{FUNCTION.pattern}$"}),
]


class EnvironmentSection(Section):
    """The environment of responses of several turns: part of ``[rollout]``; see docs/environments.md."""

    environment: EnvironmentName | None = None
    """Class or function "module:Factory" that makes the environment of a row: it answers each response until the row is
    done; left out: a row is one response."""
    max_turns: int = Field(default=8, ge=1, le=1024)
    """Maximum responses of a row in the environment; a row that has more is cut."""
    max_turn_tokens: int | None = Field(default=None, ge=1, lt=2**20)
    """Maximum tokens of one response in the environment; left out: the room that the row has left."""
    environment_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that the environment gets for a step of a row; a row that takes longer is left out."""
    environment_processes: int = Field(default=1, ge=1, le=256)
    """Processes per worker that hold the environments of its rows."""


Tags = Annotated[list[Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]], Field(min_length=1)]


class RewardConfig(Section):
    """A reward function: its name and its weight, which the functions of this package have as well."""

    name: str
    """Name of a function of this package, or "module:function" of your own."""
    weight: float = Field(default=1.0, ge=-1e9, le=1e9)
    """Factor of the score; the weighted scores of all functions and reward models are added up; negative for a
    penalty."""


class OwnReward(RewardConfig):
    """A function of your own, "module:function"."""

    style: RewardStyle = "auto"
    """Signature by which a function of your own is called: that of rlhfd, trl or verl (docs/rewards.md), or with auto
    the one that it has."""


class ExactReward(RewardConfig):
    """1 if response and answer are equal."""

    name: Literal["exact"]


class _TaggedReward(RewardConfig):
    tags: Tags = Field(default=["think", "answer"])
    """Tags of a response; the text of the last one is read, if the response has it."""


class CodeReward(_TaggedReward):
    """1 if the tests of the row pass after the response's code."""

    name: Literal["code"]
    timeout_s: float = Field(default=5.0, gt=0, le=3600)
    """Seconds that the tests of a row get, of CPU and of wall time; below rollout.reward_timeout_s."""
    unisolated: bool = False
    """Run code where this kernel has neither namespaces nor Landlock for its process: it can then read the files and
    the memory of this user's processes."""


class FormatReward(RewardConfig):
    """1 if the response is its tags, in order."""

    name: Literal["format"]
    tags: Tags = Field(default=["think", "answer"])
    """Tags that are expected, each once, in this order, with text in each and none outside."""


class JsonSchemaReward(_TaggedReward):
    """1 if the JSON of the response is what a schema admits."""

    name: Literal["json_schema"]
    schema_file: AnyPath | None = None
    """JSON schema, unless the prompt's row has a column named schema."""


class LengthReward(RewardConfig):
    """0 down to -1 as the response approaches a limit of tokens."""

    name: Literal["length"]
    limit_tokens: int | None = Field(default=None, ge=1, le=2**20)
    """Tokens of a response from which the score is -1; left out: the maximum of a response."""
    buffer_tokens: int | None = Field(default=None, ge=1, le=2**20)
    """Tokens below limit_tokens over which the score falls from 0 to -1; left out: a fifth of them."""


class MathReward(_TaggedReward):
    """1 if the result of the response equals the answer."""

    name: Literal["math"]


class ModelReward(RewardConfig):
    """The score of a reward model, which each worker holds."""

    name: Literal["model"]
    path: AnyPath
    """Directory of a sequence classification model that scores responses."""
    label: str | None = Field(default=None, pattern=r"^[a-z0-9-]+$", max_length=40)
    """Name of the model in metrics, samples and messages; left out: model, then model-2, ..."""
    tokenizer: RewardTokenizer = "policy"
    """Tokenizer of the rows that the model gets: policy, the actor's token ids, or own: each row is decoded and encoded
    again with the tokenizer and the chat template of the model."""


class RegexReward(RewardConfig):
    """1 if a pattern is found."""

    name: Literal["regex"]
    pattern: str | None = Field(default=None, min_length=1)
    """Regular expression, unless the prompt's row has a column of this name."""


class ServiceReward(RewardConfig):
    """The options of a reward that asks a service."""

    url: Url
    """Address of the service."""
    request_timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """Seconds of an attempt of a request."""
    concurrency: int = Field(default=8, ge=1, le=1024)
    """Requests at the same time, of each worker."""
    deadline_s: float = Field(default=45.0, gt=0, le=86400)
    """Seconds of all requests for a call's rows; below rollout.reward_timeout_s."""
    api_key_variable: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable with the key that is sent as a bearer token."""


class JudgeReward(ServiceReward):
    """The score of a model behind an OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1."""

    name: Literal["judge"]
    model: str = Field(min_length=1)
    """Model that is asked."""
    template_file: AnyPath | None = None
    """Text of a request with {prompt}, {response}, {answer}, {best} and columns in braces; left out: a short one."""


class RemoteReward(ServiceReward):
    """The score of a service that gets rows, such as http://127.0.0.1:8000/score."""

    name: Literal["remote"]
    batch_size: int = Field(default=16, ge=1, le=4096)
    """Rows of a request."""


REWARDS: Final[dict[str, type[RewardConfig]]] = {
    "code": CodeReward,
    "exact": ExactReward,
    "format": FormatReward,
    "json_schema": JsonSchemaReward,
    "judge": JudgeReward,
    "length": LengthReward,
    "math": MathReward,
    "model": ModelReward,
    "regex": RegexReward,
    "remote": RemoteReward,
}
"""The table of each reward of this package, by its name."""

REWARD_NAMES: Final = tuple(REWARDS)


def table_of(name: str) -> type[RewardConfig]:
    """Return the table of a name."""
    return REWARDS.get(name, OwnReward)


def problem_of_name(name: object) -> str:
    """Return the problem of the name of a reward function; empty if it may be one."""
    if not isinstance(name, str):
        return "must be a string"
    if name in REWARDS or FUNCTION.fullmatch(name) is not None:
        return ""
    one_of = f"one of {', '.join(REWARD_NAMES)}, or " if name.isidentifier() else ""
    return f'must be {one_of}of the form "module:function"'


def _checked(value: object) -> object:
    """Return the table of a name without options; any other value as it is."""
    table = {"name": value} if isinstance(value, str) else value
    if isinstance(table, dict) and "name" in table and (problem := problem_of_name(table["name"])):
        raise PydanticCustomError("reward", "{problem}", {"problem": problem})
    return table


def _kind(value: Any) -> str:
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    return name if name in REWARDS else "own"


if TYPE_CHECKING:
    Reward = RewardConfig
else:
    _TABLES = (Annotated[table, Tag(name)] for name, table in {**REWARDS, "own": OwnReward}.items())
    Reward = Annotated[functools.reduce(operator.or_, _TABLES), Discriminator(_kind), BeforeValidator(_checked)]

DEFAULT_REWARD: Final = OwnReward(name="pipeline.sort_digits:exact_answer")
"""The reward of the embedded task."""


def to_json(rewards: Sequence[RewardConfig]) -> str:
    """Return reward functions as text for another process."""
    return _adapter().dump_json(list(rewards)).decode()


def of_json(text: str) -> list[RewardConfig]:
    """Return the reward functions of `to_json`."""
    rewards: list[RewardConfig] = _adapter().validate_json(text)
    return rewards


@functools.cache
def _adapter() -> TypeAdapter[Any]:
    return TypeAdapter(list[Reward])


def reward_of(one: str | RewardConfig) -> RewardConfig:
    """Return the table of a reward function that is given by its name alone."""
    return table_of(one)(name=one) if isinstance(one, str) else one


_PACKAGES: Final = {
    "json_schema": ("jsonschema", "jsonschema"),
    "judge": ("httpx", "httpx"),
    "math": ("math_verify", "math-verify"),
    "remote": ("httpx", "httpx"),
}
"""Module and package of each reward that needs one."""


def missing_package(name: str) -> str:
    """Return what to install for a reward whose package is missing; empty for any other one."""
    return user_modules.missing_package(name, *_PACKAGES[name]) if name in _PACKAGES else ""


def labels_of(functions: list[str]) -> list[str]:
    """Return a short name for each reward function: its own, and with its module where two would be the same."""
    short = [name.rpartition(":")[2] for name in functions]
    named = [one if short.count(one) == 1 else full for one, full in zip(short, functions, strict=True)]
    seen: dict[str, int] = {}
    labels = []
    for name in named:
        seen[name] = seen.get(name, 0) + 1
        labels.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return labels


def table_labels(rewards: Sequence[RewardConfig]) -> list[str]:
    """Return a name for each table: its `label`, else as `labels_of`."""
    return labels_of([_named(reward) for reward in rewards])


def _named(reward: RewardConfig) -> str:
    return (reward.label if isinstance(reward, ModelReward) else None) or reward.name


class RewardModel(NamedTuple):
    """A reward model of a run, of `model.reward` or of a table.

    Attributes:
        label: Its name in metrics, samples and messages.
        path: Its folder.
        weight: Factor of its score.
        tokenizer: Tokenizer of the rows that it gets.
        key: Key of the folder, such as ``rewards.LABEL.path``.
        tokenizer_key: Key of the tokenizer.
    """

    label: str
    path: str
    weight: float
    tokenizer: RewardTokenizer
    key: str
    tokenizer_key: str


def reward_models(config: Config) -> list[RewardModel]:
    """Return the reward models in the order of their tables; `model.reward` is one of weight 1."""
    found = []
    for at, (label, table) in enumerate(_labelled(config)):
        if isinstance(table, ModelReward):
            keys = f"rewards.{label}.path", f"rewards.{label}.tokenizer"
            if at == len(config.rewards):
                keys = "model.reward", "model.reward_tokenizer"
            found.append(RewardModel(label, str(table.path), table.weight, table.tokenizer, *keys))
    return found


def _labelled(config: Config) -> list[tuple[str, RewardConfig]]:
    """Return the tables with their labels; `model.reward` is the last one."""
    model, tables = config.model, list[RewardConfig](config.rewards)
    if model.reward is not None:
        tables.append(ModelReward(name="model", path=Path(model.reward), tokenizer=model.reward_tokenizer))
    return list(zip(table_labels(tables), tables, strict=True))


def reward_functions(config: Config) -> list[RewardConfig]:
    """Return the tables of reward functions, with the values in force of options that follow from other keys."""
    return [_in_force(reward, config) for reward in config.rewards if not isinstance(reward, ModelReward)]


def function_labels(config: Config) -> list[str]:
    """Return the label of each of `reward_functions`."""
    return [label for label, reward in _labelled(config) if not isinstance(reward, ModelReward)]


def part_names(config: Config) -> list[str]:
    """Return the names of the parts of a reward as they stand in the tables: labels where two would be the same."""
    names = [reward.name for reward in reward_functions(config)]
    named = zip(names, function_labels(config), strict=True)
    functions = [name if names.count(name) == 1 else label for name, label in named]
    return [*functions, *(model.label for model in reward_models(config))]


def part_labels(config: Config) -> list[str]:
    """Return the names of the parts of a reward that have a metric and a column in `info`; none if it has one part.

    Reward models come after the functions. The rewards of an environment's turns are a part without a name.
    """
    labels = [*function_labels(config), *(model.label for model in reward_models(config))]
    has_turns = config.rollout.environment is not None and bool(labels)
    return labels if len(labels) > 1 or has_turns else []


def may_have_numbers(config: Config) -> bool:
    """Return whether a reward function may return further numbers: those of your own may."""
    return any(isinstance(reward, OwnReward) and not reward.name.startswith("pipeline.") for reward in config.rewards)


def conflicts_of_rewards(config: Config) -> Conflicts:
    """Yield the conflicts between reward functions and models and their options."""
    rewards, limit_s = config.rewards, config.rollout.reward_timeout_s
    if len(rewards) > MOST_REWARDS:
        yield ("rewards",), f"must have at most {MOST_REWARDS} functions and models, got {len(rewards)}"
    yield from _conflicts_of_models(config)
    for label, reward in zip(table_labels(rewards), rewards, strict=True):
        timeouts = {"deadline_s": reward.deadline_s} if isinstance(reward, ServiceReward) else {}
        timeouts |= {"timeout_s": reward.timeout_s} if isinstance(reward, CodeReward) else {}
        for option, seconds in timeouts.items():
            if 0 < limit_s <= seconds:
                message = f"must be below the {limit_s:g} of rollout.reward_timeout_s, got {seconds:g}"
                yield (f"rewards.{label}.{option}", "rollout.reward_timeout_s", "rewards"), message
        if isinstance(reward, MathReward) and 0 < limit_s <= MATH_CPU_S:
            message = f"must be above the {MATH_CPU_S:g} s of CPU that math gives a row, got {limit_s:g}"
            yield ("rollout.reward_timeout_s", "rewards"), message
        limit, buffer = (
            (reward.limit_tokens, reward.buffer_tokens) if isinstance(reward, LengthReward) else (None, None)
        )
        if limit and buffer and buffer > limit:
            message = f"must be at most the {limit} of limit_tokens, got {buffer}"
            yield (f"rewards.{label}.buffer_tokens", f"rewards.{label}.limit_tokens"), message


def _conflicts_of_models(config: Config) -> Conflicts:
    tables = [reward for reward in config.rewards if isinstance(reward, ModelReward)]
    if tables and config.model.reward is not None:
        message = 'must be left out with a table [[rewards]] of the name "model": each reward model has a table then'
        yield ("model.reward", "rewards"), message
        return
    labels = table_labels(config.rewards)
    names = [_named(reward).rpartition(":")[2] for reward in config.rewards]
    # Of two of one label the later one is told.
    for label, reward in reversed(list(zip(labels, config.rewards, strict=True))):
        own = reward.label if isinstance(reward, ModelReward) else None
        if own is not None and (names.count(own) > 1 or labels.count(label) > 1):
            message = f'must be another one than that of any other function or model, got "{own}"'
            yield (f"rewards.{label}.label", "rewards"), message
            return
    for model in reward_models(config) if config.rollout.environment is not None else []:
        if model.label == "environment":
            message = "must be another one than that of the part that the environment's turns give"
            yield (f"rewards.{model.label}.label", "rollout.environment"), message
        if model.tokenizer == "own":
            message = 'must be "policy" with rollout.environment: the turns of a row are no one response'
            yield (model.tokenizer_key, "rollout.environment"), message


def conflicts_of_environment(config: Config) -> Conflicts:
    """Yield the conflicts between the environment and other keys."""
    rollout, longest = config.rollout, config.lengths.response or config.lengths.row - 1
    if rollout.environment is None:
        if rollout.max_turn_tokens is not None:
            yield ("rollout.max_turn_tokens", "rollout.environment"), "needs rollout.environment"
        return
    if "rewards" not in config.model_fields_set:
        message = "must be set with rollout.environment; [] for the rewards of its turns alone"
        yield ("rewards", "rollout.environment"), message
    if rollout.max_turn_tokens is not None and rollout.max_turn_tokens > longest:
        message = f"must be at most the {longest} tokens of a row's response, got {rollout.max_turn_tokens}"
        yield ("rollout.max_turn_tokens", "rollout.max_new_tokens", "rollout.max_length"), message


def rewards_in_force(config: Config) -> list[RewardConfig]:
    """Return the tables, with the values in force of options that follow from other keys."""
    return [_in_force(reward, config) for reward in config.rewards]


def scoring(config: Config) -> list[dict[str, Any]]:
    """Return the options of all functions and models that determine a row's score, `model.reward` as its table."""
    tables = [_in_force(reward, config) for _, reward in _labelled(config)]
    return [table.model_dump(mode="json", exclude=_SCORES_STAY) for table in tables]


_SCORES_STAY: Final = {"label", "concurrency", "api_key_variable", "unisolated"}
"""Options without an effect on a score."""


def _in_force(reward: RewardConfig, config: Config) -> RewardConfig:
    if not isinstance(reward, LengthReward):
        return reward
    limit = reward.limit_tokens or config.lengths.response or config.lengths.row
    buffer = reward.buffer_tokens or max(1, limit // 5)
    return reward.model_copy(update={"limit_tokens": limit, "buffer_tokens": min(buffer, limit)})
