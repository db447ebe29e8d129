"""Reward functions by name: each gets the text of the response, and the prompt's answer or columns.

exact        1 if response and answer are equal, white space around them aside
format       1 if the response is its tags, in order, with text in each and none outside
json_schema  1 if the response's last JSON block, or its answer, is a JSON value that the schema admits
length       0 down to -1 as the response approaches the limit (DAPO, arXiv:2503.14476 eq. 13)
math         1 if the response's result equals the answer (`pipeline.rollout.reward.mathematics`)
regex        1 if the pattern is found; with a group, if the group of the last match equals the answer
code         1 if the tests pass after the response's code (`pipeline.rollout.reward.code`)
remote       a service's score, judge a model's (`pipeline.rollout.reward.remote`)

A row that lacks an answer or a column that the function needs has no reward: an error, never 0.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, Final

from pipeline.config.rewards import (
    MATH_CPU_S,
    CodeReward,
    ExactReward,
    FormatReward,
    JsonSchemaReward,
    JudgeReward,
    LengthReward,
    MathReward,
    RegexReward,
    RemoteReward,
    RewardConfig,
    missing_package,
)
from pipeline.errors import ConfigError, RewardError
from pipeline.prompts.lines import json_of_file
from pipeline.rollout.reward.answers import block_of, opened_by
from pipeline.rollout.reward.code import code_reward
from pipeline.rollout.reward.functions import NAMED
from pipeline.rollout.reward.mathematics import MathProcess

_PROMPT_TOKENS: Final = 64
"""Tokens at the end of a prompt in which a tag of the chat template is looked for."""


def named_reward(reward: RewardConfig) -> Callable[..., Any]:
    """Return a reward function of this package.

    Args:
        reward: Its name, one of `pipeline.config.rewards.REWARD_NAMES`, and its options in force.

    Raises:
        ConfigError: If an option is wrong, or a package is not installed.
    """
    if problem := missing_package(reward.name):
        raise ConfigError(f"rewards: {problem}")
    function = _MAKERS[type(reward)](reward)
    # Errors show it.
    function.__module__, function.__qualname__ = NAMED, reward.name
    return function


def _exact(settings: ExactReward) -> Callable[..., float]:
    def exact(input_ids: Any, attention_mask: Any, *, response: str, gt_answer: Any, **_: Any) -> float:
        return float(response.strip() == _answer("exact", gt_answer).strip())

    return exact


def _regex(settings: RegexReward) -> Callable[..., float]:
    fixed = None if settings.pattern is None else _compiled(settings.pattern)

    def regex(
        input_ids: Any, attention_mask: Any, *, response: str, gt_answer: Any, pattern: Any = None, **_: Any
    ) -> float:
        searched = fixed if pattern is None else re.compile(str(pattern))
        if searched is None:
            raise RewardError("regex needs a pattern, or a column named pattern")
        matches = list(searched.finditer(response))
        if not matches or not searched.groups:
            return float(bool(matches))
        return float((matches[-1][1] or "").strip() == _answer("regex with a group", gt_answer).strip())

    return regex


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"rewards.regex.pattern: {pattern!r} is no regular expression: {error}") from error


def _format(settings: FormatReward) -> Callable[..., float]:
    tags = settings.tags

    def form(input_ids: Any, attention_mask: Any, *, response: str, **named: Any) -> float:
        begun, done = opened_by(prompt_end(input_ids, **named), tags)
        rest = (begun + response).strip()
        for tag in [tag for tag in tags if tag not in done]:
            before, opened, rest = rest.partition(f"<{tag}>")
            inner, closed, rest = rest.partition(f"</{tag}>")
            nested = any(f"<{one}>" in inner or f"</{one}>" in inner for one in tags)
            if before.strip() or not opened or not closed or not inner.strip() or nested:
                return 0.0
        return float(not rest.strip())

    return form


class UnreadableJson(ValueError):
    """A text that is no JSON."""


def strict_json(text: str) -> Any:
    """Return the value of JSON by RFC 8259, which all readers understand alike.

    Raises:
        UnreadableJson: For other text: also for NaN and Infinity, for an object with a name twice (RFC 7493), for a
            number beyond float64, and for text that UTF-8 cannot encode.
    """
    try:
        text.encode()
        return json.loads(
            text, parse_constant=_no_constant, parse_float=_number, parse_int=_integer, object_pairs_hook=_object
        )
    except ValueError as error:
        raise UnreadableJson(str(error)) from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _number(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"{digits:.40} is no number that float64 holds")
    return value


def _integer(digits: str) -> int:
    _number(digits)
    return int(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a name twice")
    return found


def _json_schema(settings: JsonSchemaReward) -> Callable[..., float]:
    import jsonschema
    from referencing import Registry

    registry: Any = Registry()

    def validator(schema: Any) -> Any:
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        kind.check_schema(schema)
        # With a registry of its own, a reference to another file is an error: nothing is fetched.
        return kind(schema, registry=registry)

    fixed: Any = None
    if settings.schema_file is not None:
        schema_file = settings.schema_file
        try:
            fixed = validator(json_of_file(schema_file, "rewards.json_schema.schema_file", strict_json))
        except jsonschema.SchemaError as error:
            key = "rewards.json_schema.schema_file"
            raise ConfigError(f"{key}: {schema_file} is no JSON schema: {error.message}") from error

    def json_schema(input_ids: Any, attention_mask: Any, *, response: str, schema: Any = None, **_: Any) -> float:
        checked = fixed if schema is None else validator(strict_json(schema) if isinstance(schema, str) else schema)
        if checked is None:
            raise RewardError("json_schema needs a schema_file, or a column named schema")
        try:
            value = strict_json(block_of(response, settings.tags, lambda language: language == "json"))
            return float(checked.is_valid(value))
        except (UnreadableJson, RecursionError):
            return 0.0

    return json_schema


def prompt_end(input_ids: Any, *, response_start: int, tokenizer: Any, **_: Any) -> str:
    """Return the text of the last tokens of a prompt, special tokens included."""
    ids = input_ids[max(0, response_start - _PROMPT_TOKENS) : response_start].tolist()
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def _length(settings: LengthReward) -> Callable[..., float]:
    limit, buffer = settings.limit_tokens, settings.buffer_tokens
    if limit is None or buffer is None:
        raise ConfigError("rewards.length: limit_tokens and buffer_tokens must be set")

    def length(
        input_ids: Any, attention_mask: Any, *, response_start: int, response_end: int, gt_answer: Any, **_: Any
    ) -> float:
        beyond = response_end - response_start - (limit - buffer)
        return -min(1.0, max(0, beyond) / buffer)

    return length


def _math(settings: MathReward) -> Callable[..., float]:
    process = MathProcess(timeout_s=MATH_CPU_S)

    def math_of(input_ids: Any, attention_mask: Any, *, response: str, gt_answer: Any, **named: Any) -> float:
        opened, _ = opened_by(prompt_end(input_ids, **named), settings.tags)
        return float(process.is_right(_answer("math", gt_answer), opened + response, settings.tags))

    return math_of


def _of_service(settings: JudgeReward | RemoteReward) -> Callable[..., Any]:
    from pipeline.rollout.reward import remote

    return remote.judge_reward(settings) if isinstance(settings, JudgeReward) else remote.remote_reward(settings)


_MAKERS: Final[dict[type[RewardConfig], Callable[[Any], Callable[..., Any]]]] = {
    CodeReward: code_reward,
    ExactReward: _exact,
    FormatReward: _format,
    JsonSchemaReward: _json_schema,
    JudgeReward: _of_service,
    LengthReward: _length,
    MathReward: _math,
    RegexReward: _regex,
    RemoteReward: _of_service,
}


def _answer(name: str, answer: Any) -> str:
    if answer is None:
        raise RewardError(f"{name} needs an answer, the prompt's row has none")
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
