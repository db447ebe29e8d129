"""The section of the rewards by name: weights, and the options of each of them; the keys of the environment."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from pipeline.config.sections import Section
from pipeline.config.types import FUNCTION, AnyPath
from pipeline.config.user_modules import install_command

if TYPE_CHECKING:
    from pipeline.config.schema import Config

REWARD_NAMES: Final = ("code", "exact", "format", "json_schema", "judge", "length", "math", "regex", "remote")
"""Reward functions of this package, by the names that `rollout.reward_functions` takes."""

OPTIONS: Final[dict[str, tuple[str, ...]]] = {
    "code": ("reward.code_timeout_s", "reward.format_tags"),
    "format": ("reward.format_tags",),
    "json_schema": ("reward.schema_file", "reward.format_tags"),
    "judge": ("reward.judge_url", "reward.judge_model", "reward.judge_template_file"),
    "length": ("reward.length_limit", "reward.length_buffer"),
    "math": ("reward.format_tags",),
    "regex": ("reward.pattern",),
    "remote": ("reward.service_url", "reward.service_batch_size"),
}  # fmt: skip
"""The keys of each name."""

MATH_CPU_S: Final = 5.0
"""CPU seconds that `math` gives a row to be read and compared; a response that needs more has 0."""

MOST_FUNCTIONS: Final = 16
"""Reward functions with a metric of their own."""


def _check_reward(value: str) -> str:
    if value not in REWARD_NAMES and FUNCTION.fullmatch(value) is None:
        kind = "reward" if value.isidentifier() else ""
        problem = f'must be one of {", ".join(REWARD_NAMES)}, or of the form "module:function"'
        raise PydanticCustomError(
            "function",
            "{problem}",
            # Quoted names are the ones that a wrong one is compared with.
            {"problem": problem if kind else 'must be of the form "module:function"',
             "expected": ", ".join(f"'{name}'" for name in REWARD_NAMES) if kind else ""},
        )  # fmt: skip
    return value


RewardName = Annotated[
    str,
    AfterValidator(_check_reward),
    Field(json_schema_extra={"pattern": f"^({'|'.join(REWARD_NAMES)}|{FUNCTION.pattern})$"}),
]


def _check_environment(value: str) -> str:
    if FUNCTION.fullmatch(value) is None:
        raise PydanticCustomError("function", 'must be of the form "module:Factory"')
    return value


EnvironmentName = Annotated[
    str, AfterValidator(_check_environment), Field(json_schema_extra={"pattern": f"^{FUNCTION.pattern}$"})
]


class EnvironmentSection(Section):
    """The environment of responses of several turns: part of ``[rollout]``; see docs/environments.md."""

    environment: EnvironmentName | None = Field(
        default=None,
        description='Class or function "module:Factory" that makes the environment of a row: it answers each response '
        "until the row is done; left out: a row is one response.",
    )
    max_turns: int = Field(
        default=8,
        ge=1,
        le=1024,
        description="Maximum responses of a row in the environment; a row that has more is cut.",
    )
    max_turn_tokens: int | None = Field(
        default=None,
        ge=1,
        lt=2**20,
        description="Maximum tokens of one response in the environment; left out: the room that the row has left.",
    )
    environment_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="Seconds that the environment gets for a step of a row; a row that takes longer is left out.",
    )
    environment_processes: int = Field(
        default=1, ge=1, le=256, description="Processes per worker that hold the environments of its rows."
    )


def _check_url(value: str) -> str:
    try:
        parts = urlsplit(value)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise PydanticCustomError("url", "must be an address such as http://127.0.0.1:8000/score")
    if parts.username is not None or parts.password is not None:
        raise PydanticCustomError("url", "must have no password: reward.api_key_variable names a variable with one")
    return value


Url = Annotated[str, AfterValidator(_check_url), Field(json_schema_extra={"pattern": "^https?://[^/@]+([/?].*)?$"})]


class RewardConfig(Section):
    """The weights of the reward functions, and the options of those that are known by name."""

    weights: list[Annotated[float, Field(ge=-1e9, le=1e9)]] = Field(
        default=[],
        description="Weight of each of rollout.reward_functions, in their order, negative for a penalty; left out: 1 "
        "each.",
    )
    pattern: str | None = Field(
        default=None,
        min_length=1,
        description="Regular expression of regex, unless the prompt's row has a column of this name.",
    )
    format_tags: list[Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]] = Field(
        default=["think", "answer"],
        min_length=1,
        description="Tags that format expects, each once, in this order, with text in each and none outside; math, "
        "code and json_schema read the text of the last one, if the response has it.",
    )
    schema_file: AnyPath | None = Field(
        default=None,
        description="JSON schema of json_schema, unless the prompt's row has a column named schema.",
    )
    length_limit: int | None = Field(
        default=None,
        ge=1,
        le=2**20,
        description="Tokens of a response from which length is -1; left out: the maximum of a response.",
    )
    length_buffer: int | None = Field(
        default=None,
        ge=1,
        le=2**20,
        description="Tokens below length_limit over which length falls from 0 to -1; left out: a fifth of the limit.",
    )
    code_timeout_s: float = Field(
        default=5.0,
        gt=0,
        le=3600,
        description="Seconds that code gives the tests of a row, of CPU and of wall time; below "
        "rollout.reward_timeout_s.",
    )
    code_unisolated: bool = Field(
        default=False,
        description="Run code where this kernel has neither namespaces nor Landlock for its process: it can then read "
        "the files and the memory of this user's processes.",
    )
    service_url: Url | None = Field(
        default=None, description="Address that remote posts rows to, such as http://127.0.0.1:8000/score."
    )
    service_batch_size: int = Field(default=16, ge=1, le=4096, description="Rows of a request of remote.")
    judge_url: Url | None = Field(
        default=None, description="OpenAI-compatible endpoint of judge, such as http://127.0.0.1:8000/v1."
    )
    judge_model: str | None = Field(default=None, min_length=1, description="Model that judge asks.")
    judge_template_file: AnyPath | None = Field(
        default=None,
        description="Text of a request of judge with {prompt}, {response}, {answer}, {best} and columns in braces; "
        "left out: a short one.",
    )
    request_timeout_s: float = Field(
        default=10.0, gt=0, le=3600, description="Seconds of an attempt of a request of remote or judge."
    )
    request_concurrency: int = Field(
        default=8, ge=1, le=1024, description="Requests of remote or judge at the same time, of each worker."
    )
    requests_deadline_s: float = Field(
        default=45.0,
        gt=0,
        le=86400,
        description="Seconds of all requests of remote or judge for a call's rows; below rollout.reward_timeout_s.",
    )
    api_key_variable: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Environment variable with the key that remote and judge send as a bearer token.",
    )


_PACKAGES: Final = {
    "json_schema": ("jsonschema", "jsonschema"),
    "judge": ("httpx", "httpx"),
    "math": ("math_verify", "math-verify"),
    "remote": ("httpx", "httpx"),
}
"""Module and package of each reward that needs one."""


def needs_package(name: str) -> str:
    """Return the line that says what to install for a reward that needs a package."""
    package = _PACKAGES[name][1]
    return f"{name} needs the package {package}: {install_command(package)}"


def missing_package(name: str) -> str:
    """Return `needs_package` for the name of a reward whose package is not installed; else an empty text."""
    if name not in _PACKAGES or importlib.util.find_spec(_PACKAGES[name][0]) is not None:
        return ""
    return needs_package(name)


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


def part_labels(config: Config) -> list[str]:
    """Return the names of the parts of a reward that have a metric and a column in `info`; none if there is one."""
    labels = labels_of(config.rollout.reward_functions)
    labels += ["model"] if config.model.reward is not None else []
    return labels if len(labels) > 1 else []


def conflict_of_rewards(config: Config) -> tuple[tuple[str, ...], str] | None:
    """Return the keys and the message of a conflict between reward functions and their options; None if none."""
    functions, reward = config.rollout.reward_functions, config.reward
    keys: tuple[str, ...]
    if len(functions) > MOST_FUNCTIONS:
        return ("rollout.reward_functions",), f"must name at most {MOST_FUNCTIONS} functions, got {len(functions)}"
    if reward.weights and len(reward.weights) != len(functions):
        keys = ("reward.weights", "rollout.reward_functions")
        return keys, f"has {len(reward.weights)} weights for {len(functions)} functions of rollout.reward_functions"
    for name, needed in (("remote", ("service_url",)), ("judge", ("judge_url", "judge_model"))):
        for key in needed:
            if name in functions and getattr(reward, key) is None:
                keys = (f"reward.{key}", "rollout.reward_functions")
                return keys, f'must be set with "{name}" in rollout.reward_functions'
    limit_s = config.rollout.reward_timeout_s
    if {"remote", "judge"} & set(functions) and 0 < limit_s <= reward.requests_deadline_s:
        keys = ("reward.requests_deadline_s", "rollout.reward_timeout_s", "rollout.reward_functions")
        return keys, f"must be below the {limit_s:g} of rollout.reward_timeout_s, got {reward.requests_deadline_s:g}"
    if "code" in functions and 0 < limit_s <= reward.code_timeout_s:
        keys = ("reward.code_timeout_s", "rollout.reward_timeout_s", "rollout.reward_functions")
        return keys, f"must be below the {limit_s:g} of rollout.reward_timeout_s, got {reward.code_timeout_s:g}"
    if "math" in functions and 0 < limit_s <= MATH_CPU_S:
        keys = ("rollout.reward_timeout_s", "rollout.reward_functions")
        return keys, f"must be above the {MATH_CPU_S:g} s of CPU that math gives a row, got {limit_s:g}"
    if reward.length_limit and reward.length_buffer and reward.length_buffer > reward.length_limit:
        keys = ("reward.length_buffer", "reward.length_limit")
        return keys, f"must be at most the {reward.length_limit} of reward.length_limit, got {reward.length_buffer}"
    return None


def conflict_of_environment(config: Config) -> tuple[tuple[str, ...], str] | None:
    """Return the keys and the message of a conflict between the environment and other keys; None if none."""
    rollout = config.rollout
    keys: tuple[str, ...]
    if rollout.environment is None:
        if rollout.max_turn_tokens is not None:
            return ("rollout.max_turn_tokens", "rollout.environment"), "needs rollout.environment"
        return None
    if config.cluster.engine == "ray":
        keys = ("rollout.environment", "cluster.engine")
        return keys, 'must be left out with cluster.engine = "ray", whose actors run no environments'
    if "reward_functions" not in rollout.model_fields_set:
        keys = ("rollout.reward_functions", "rollout.environment")
        return keys, "must be set with rollout.environment; [] for the rewards of its turns alone"
    longest = config.lengths.response or config.lengths.row - 1
    if rollout.max_turn_tokens is not None and rollout.max_turn_tokens > longest:
        keys = ("rollout.max_turn_tokens", "rollout.max_new_tokens", "rollout.max_length")
        return keys, f"must be at most the {longest} tokens of a row's response, got {rollout.max_turn_tokens}"
    return None


def weights_of(config: Config) -> list[float]:
    """Return the weight of each reward function."""
    return list(config.reward.weights or [1.0] * len(config.rollout.reward_functions))


def reward_settings(config: Config) -> RewardConfig:
    """Return the options with the values in force where they follow from other keys."""
    limit = config.reward.length_limit or config.lengths.response or config.lengths.row
    buffer = config.reward.length_buffer or max(1, limit // 5)
    return config.reward.model_copy(update={"length_limit": limit, "length_buffer": min(buffer, limit)})
