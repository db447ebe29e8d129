"""Reward functions by name: each gets the text of the response, and the prompt's answer or columns.

exact        1 if response and answer are equal, white space around them aside
format       1 if the response is the tags of `reward.format_tags`, in order, with text in each and none outside
json_schema  1 if the response is a JSON value that the schema admits
length       0 down to -1 as the response approaches the limit (DAPO, arXiv:2503.14476 eq. 13)
math         1 if the response's mathematical result equals the answer (the library math-verify)
regex        1 if the pattern is found; with a group, if the group of the last match equals the answer
code         1 if the tests pass after the response's code (`pipeline.rollout.reward.code`)
remote       a service's score, judge a model's (`pipeline.rollout.reward.remote`)

A row that lacks an answer or a column that the function needs has no reward: an error, never 0.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
from collections.abc import Callable
from typing import Any, Final

from pipeline.config.rewards import RewardConfig, needs_package
from pipeline.errors import ConfigError, RewardError
from pipeline.rollout.reward.code import code_reward
from pipeline.rollout.reward.functions import NAMED

_MARKED: Final = re.compile(r"\$|\\boxed|\\\(|\\\[")
_JSON_BLOCK: Final = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


def named_reward(name: str, settings: RewardConfig) -> Callable[..., Any]:
    """Return the reward function of a name.

    Args:
        name: One of `pipeline.config.rewards.REWARD_NAMES`.
        settings: Its options, `reward_settings` of the configuration.

    Raises:
        ConfigError: If an option is wrong, or a package is not installed.
    """
    function = _MAKERS[name](settings)
    # Errors show it.
    function.__module__, function.__qualname__ = NAMED, name
    return function


def _exact(settings: RewardConfig) -> Callable[..., float]:
    def exact(input_ids: Any, attention_mask: Any, *, response: str, gt_answer: Any, **_: Any) -> float:
        return float(response.strip() == _answer("exact", gt_answer).strip())

    return exact


def _regex(settings: RewardConfig) -> Callable[..., float]:
    fixed = None if settings.pattern is None else _compiled(settings.pattern)

    def regex(
        input_ids: Any, attention_mask: Any, *, response: str, gt_answer: Any, pattern: Any = None, **_: Any
    ) -> float:
        searched = fixed if pattern is None else re.compile(str(pattern))
        if searched is None:
            raise RewardError("regex needs reward.pattern, or a column named pattern")
        matches = list(searched.finditer(response))
        if not matches or not searched.groups:
            return float(bool(matches))
        return float((matches[-1][1] or "").strip() == _answer("regex with a group", gt_answer).strip())

    return regex


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"reward.pattern: {pattern!r} is no regular expression: {error}") from error


def _format(settings: RewardConfig) -> Callable[..., float]:
    tags = settings.format_tags

    def form(input_ids: Any, attention_mask: Any, *, response: str, **_: Any) -> float:
        rest = response.strip()
        for tag in tags:
            before, opened, rest = rest.partition(f"<{tag}>")
            inner, closed, rest = rest.partition(f"</{tag}>")
            nested = any(f"<{one}>" in inner or f"</{one}>" in inner for one in tags)
            if before.strip() or not opened or not closed or not inner.strip() or nested:
                return 0.0
        return float(not rest.strip())

    return form


def _json_schema(settings: RewardConfig) -> Callable[..., float]:
    jsonschema: Any = _package("jsonschema", "json_schema")
    registry: Any = _package("referencing", "json_schema").Registry()

    def validator(schema: Any) -> Any:
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        kind.check_schema(schema)
        # With a registry of its own, a reference to another file is an error: nothing is fetched.
        return kind(schema, registry=registry)

    fixed: Any = None
    if settings.schema_file is not None:
        try:
            fixed = validator(json.loads(settings.schema_file.read_bytes()))
        except (OSError, ValueError, jsonschema.SchemaError) as error:
            reason = getattr(error, "message", None) or getattr(error, "strerror", None) or error
            raise ConfigError(f"reward.schema_file: {settings.schema_file} is no JSON schema: {reason}") from error

    def json_schema(input_ids: Any, attention_mask: Any, *, response: str, schema: Any = None, **_: Any) -> float:
        checked = fixed if schema is None else validator(json.loads(schema) if isinstance(schema, str) else schema)
        if checked is None:
            raise RewardError("json_schema needs reward.schema_file, or a column named schema")
        blocks = _JSON_BLOCK.findall(response)
        try:
            value = json.loads(blocks[-1] if blocks else response)
        except (ValueError, RecursionError):
            return 0.0
        return float(checked.is_valid(value))

    return json_schema


def _length(settings: RewardConfig) -> Callable[..., float]:
    limit, buffer = settings.length_limit, settings.length_buffer
    if limit is None or buffer is None:
        raise ConfigError("reward.length_limit and reward.length_buffer: must be set for length")

    def length(
        input_ids: Any, attention_mask: Any, *, response_start: int, response_end: int, gt_answer: Any, **_: Any
    ) -> float:
        beyond = response_end - response_start - (limit - buffer)
        return -min(1.0, max(0, beyond) / buffer)

    return length


def _math(settings: RewardConfig) -> Callable[..., float]:
    library: Any = _package("math_verify", "math")
    # It warns at each call that its limits of time are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def math(input_ids: Any, attention_mask: Any, *, response: str, gt_answer: Any, **_: Any) -> float:
        answer = _answer("math", gt_answer)
        # Without the library's limits of time, after which it takes a right answer for a wrong one.
        marked = answer if _MARKED.search(answer) else f"${answer}$"
        gold = library.parse(marked, parsing_timeout=None) or library.parse(answer, parsing_timeout=None)
        if not gold:
            raise RewardError(f"math cannot read the answer {answer[:80]!r}", bare="math cannot read the answer")
        found = library.parse(response, parsing_timeout=None)
        return float(bool(found) and library.verify(gold, found, timeout_seconds=None))

    return math


def _of_service(name: str, settings: RewardConfig) -> Callable[..., Any]:
    _package("httpx", name)
    from pipeline.rollout.reward import remote

    return {"judge": remote.judge_reward, "remote": remote.remote_reward}[name](settings)


def _answer(name: str, answer: Any) -> str:
    if answer is None:
        raise RewardError(f"{name} needs an answer, the prompt's row has none")
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def _package(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"rollout.reward_functions: {needs_package(name)}") from error


_MAKERS: Final[dict[str, Callable[[RewardConfig], Callable[..., Any]]]] = {
    "code": code_reward,
    "exact": _exact,
    "format": _format,
    "json_schema": _json_schema,
    "judge": lambda settings: _of_service("judge", settings),
    "length": _length,
    "math": _math,
    "regex": _regex,
    "remote": lambda settings: _of_service("remote", settings),
}
