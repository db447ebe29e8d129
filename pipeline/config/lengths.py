"""Lengths of prompt, response and row, in tokens, from the keys of ``[rollout]`` that are set; bounds on their bytes.

`max_length` is the sum of `max_prompt_length` and `max_new_tokens`. Any two of the three give the third; with
`max_length` alone a response gets the room that the longest prompt of its ticket leaves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from pipeline.config.types import Conflicts

if TYPE_CHECKING:
    from pipeline.config.schema import RolloutConfig

DEFAULT_MAX_LENGTH: Final = 24
MOST_TOKENS: Final = 2**20
LENGTH_KEYS: Final = ("rollout.max_length", "rollout.max_prompt_length", "rollout.max_new_tokens")
# Header of an extent: fields, groups and vision fields, and some numbers per row, which `row_bytes_bound` includes.
EXTENT_OVERHEAD_BYTES = 8192


class Lengths(NamedTuple):
    """The lengths in force.

    Attributes:
        row: Maximum tokens of prompt and response together.
        prompt: Maximum tokens of a prompt; a longer one is set aside.
        response: Maximum tokens of a response; None: the room that the longest prompt of its ticket leaves.
    """

    row: int
    prompt: int
    response: int | None


def lengths_of(rollout: RolloutConfig) -> Lengths:
    """Return the lengths in force; of keys without a conflict."""
    row, prompt, response = rollout.max_length, rollout.max_prompt_length, rollout.max_new_tokens
    if row is None:
        row = DEFAULT_MAX_LENGTH if prompt is None or response is None else prompt + response
    if prompt is None and response is None:
        return Lengths(row, row - 1, None)
    if prompt is None:
        assert response is not None
        return Lengths(row, row - response, response)
    return Lengths(row, prompt, row - prompt)


def conflicts_of_lengths(rollout: RolloutConfig) -> Conflicts:
    """Yield the conflict between the three keys, if there is one."""
    if (found := _conflict(rollout)) is not None:
        key, message = found
        yield tuple(dict.fromkeys((key, *LENGTH_KEYS))), message


def _conflict(rollout: RolloutConfig) -> tuple[str, str] | None:
    row, prompt, response = rollout.max_length, rollout.max_prompt_length, rollout.max_new_tokens
    given = {"max_prompt_length": prompt, "max_new_tokens": response}
    if rollout.long_prompts == "cut_left" and prompt is None and response is None:
        return "rollout.long_prompts", "needs rollout.max_prompt_length: a cut prompt would leave one token to respond"
    for name, value in given.items():
        other = next(key for key in given if key != name)
        if value is not None and given[other] is None and row is None:
            return f"rollout.{name}", f"needs rollout.{other} or rollout.max_length (their sum) beside it"
        if value is not None and given[other] is None and row is not None and value >= row:
            kind = "response" if name == "max_prompt_length" else "prompt"
            return f"rollout.{name}", f"must be below rollout.max_length = {row}, it leaves no {kind}, got {value}"
    if prompt is None or response is None:
        return None
    if row is not None and row != prompt + response:
        total = f"{prompt} of rollout.max_prompt_length + {response} of rollout.max_new_tokens = {prompt + response}"
        return "rollout.max_length", f"must be the sum {total}, or left out, got {row}"
    if prompt + response > MOST_TOKENS:
        most = f"must be at most {MOST_TOKENS - response} with rollout.max_new_tokens = {response}"
        return "rollout.max_prompt_length", f"{most}: a row has at most {MOST_TOKENS} tokens, got {prompt}"
    return None


def row_bytes_bound(max_length: int) -> int:
    """Return an upper bound on the bytes of a text row of `max_length` tokens, its share of the header included.

    Per token two int64 columns, seven float32 and one bool; per row 256 B for scalars, lengths and alignment. Of the
    eight float32 fields makers write six at most: never `returns` and `action_entropy`. The bytes of pixels are not
    known beforehand: `buffer.row_bytes` sets them.
    """
    return max_length * (2 * 8 + 7 * 4 + 1) + 256


def extent_bytes_bound(rows: int, row_bytes: int) -> int:
    """Return the room to reserve for an append of `rows` rows."""
    return rows * row_bytes + EXTENT_OVERHEAD_BYTES
