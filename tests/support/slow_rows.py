"""Rows of experience as Python lists, with splitting, stripping, padding and packing done row by row.

An independent reference for `pipeline.experience.batching`: it uses tensors only to compare, and works on one column of
one row at a time. A value is a pair (dtype, list or number), a row a dict of values by field; a field may be missing.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
from torch import Tensor

from pipeline.experience.types import BufferItem, BufferItemVL

Row = dict[str, Any]

TOKENS = ("sequences", "attention_mask")
ACTIONS = ("action_log_probs", "base_action_log_probs", "behaviour_log_probs", "action_mask", "action_entropy")
SCORES = ("values", "reward", "kl", "advantages", "returns")


@dataclasses.dataclass(frozen=True)
class Kind:
    """Properties that all rows of one batch share.

    Attributes:
        floats: dtype of log-probs and scores.
        tokens: dtype of ids.
        attention: dtype of the attention mask.
        actions: dtype of the action mask.
        scores: "action" for one number per action (PPO), "row" for 0-dim ones (GRPO), "single" for shape (1,).
        missing: Fields that are None.
        info: Entries of `info`; None for no info.
        objects: Kind of labels: "text", "number", "equal", "ragged", "matrix".
        vision: Rows with images and videos.
    """

    floats: torch.dtype
    tokens: torch.dtype
    attention: torch.dtype
    actions: torch.dtype
    scores: str
    missing: frozenset[str]
    info: frozenset[str] | None
    objects: str
    vision: bool = False


def made_up_row(kind: Kind, prompt: int, actions: int, left: int, right: int, rng: random.Random) -> Row:
    """Make a row in the maker's layout: `left` columns of padding, prompt, response with holes, `right` of padding."""
    mask = [rng.random() < 0.7 for _ in range(actions)] + [False] * right
    # Of a row that was padded on the left once already, some action columns lie over the prompt.
    over_prompt = rng.randint(0, left + prompt) if rng.random() < 0.3 else 0
    mask = [False] * over_prompt + mask
    # With holes, and now and then over an action: then the action mask alone says that the token is there.
    real = [0] * left + [int(rng.random() < 0.9) for _ in range(prompt + actions)] + [0] * right
    real[left + rng.randrange(prompt + actions)] = 1
    row: Row = {
        # Token 0 is a token like others.
        "sequences": (kind.tokens, [rng.randint(0, 9) for _ in real]),
        "attention_mask": (kind.attention, [_as(kind.attention, one) for one in real]),
        "action_mask": (kind.actions, [_as(kind.actions, one) for one in mask]),
        "info": None if kind.info is None else {name: _info(name, rng) for name in sorted(kind.info)},
        "labels": _object(kind.objects, rng),
        "references": _object("text", rng),
    }
    for name in ("action_log_probs", "base_action_log_probs", "behaviour_log_probs", "action_entropy"):
        row[name] = (kind.floats, [_number(rng) for _ in mask])
    for name in SCORES:
        per_action = kind.scores == "action" and name != "reward"
        numbers = [_number(rng) for _ in mask] if per_action else [_number(rng)]
        row[name] = (kind.floats, numbers if per_action or kind.scores == "single" else numbers[0])
    if kind.vision:
        row.update(_vision(kind, rng))
    return {name: value for name, value in row.items() if value is not None and name not in kind.missing}


def item_of(row: Row, kind: Kind) -> BufferItem:
    """The row as the class that holds it."""
    fields = {name: tensors_of(value) for name, value in row.items()}
    return (BufferItemVL if kind.vision else BufferItem)(**fields)


def tensors_of(value: Any) -> Any:
    """The value with tensors in place of pairs."""
    if isinstance(value, dict):
        return {key: tensors_of(element) for key, element in value.items()}
    if isinstance(value, tuple):
        return torch.tensor(value[1], dtype=value[0])
    return value


def strip(row: Row) -> Row:
    """The row without its outer padding."""
    width, columns = len(row["sequences"][1]), action_columns(row)
    attended = row["attention_mask"][1]
    acted = row["action_mask"][1] if "action_mask" in row else [False] * columns
    token_of = [width - columns + column for column in range(columns)]
    real = [token for token in range(width) if attended[token] or (token in token_of and acted[token_of.index(token)])]
    first_action = next((column for column in range(columns) if acted[column]), 0)
    kept = [column for column in range(columns) if real[0] <= token_of[column] <= real[-1] and column >= first_action]
    stripped = dict(row)
    for name, value in row.items():
        if name in TOKENS:
            stripped[name] = (value[0], [value[1][token] for token in range(real[0], real[-1] + 1)])
        elif name in ACTIONS or (name in SCORES and isinstance(value[1], list) and len(value[1]) == columns):
            stripped[name] = (value[0], [value[1][column] for column in kept])
    return stripped


def pad(rows: list[Row]) -> list[Row]:
    """The rows of one width, zeros on the left, and `info` as `gather_info` leaves it."""
    padded = []
    for row in rows:
        wide = dict(row)
        for name in (*TOKENS, *ACTIONS, *SCORES):
            if name in row:
                wide[name] = _left(row[name], [other[name] for other in rows])
        padded.append(wide)
    return gather_info(padded)


def gather_info(rows: list[Row]) -> list[Row]:
    """The rows as they come out of a batch: numbers of `info` are tensors where those of all rows make up one."""
    if "info" not in rows[0]:
        return rows
    columns = {key: [row["info"][key] for row in rows] for key in rows[0]["info"]}
    gathered = {key: [_as_tensor(value) for value in column] for key, column in columns.items()}
    columns |= {key: column for key, column in gathered.items() if is_one_tensor(column)}
    return [{**row, "info": {key: column[place] for key, column in columns.items()}} for place, row in enumerate(rows)]


def is_one_tensor(column: list[Any]) -> bool:
    """Whether the values of all rows are tensors of one shape and dtype."""
    return all(isinstance(value, tuple) for value in column) and (
        len({(value[0], torch.tensor(value[1]).shape) for value in column}) == 1
    )


def action_columns(row: Row) -> int:
    """Number of action columns of a row."""
    counts = [len(row[name][1]) for name in ACTIONS if name in row]
    counts += [len(row[name][1]) for name in SCORES if name in row and isinstance(row[name][1], list)]
    return counts[0] if any(name in row for name in ACTIONS) else max(counts, default=0)


def expect(name: str, value: Any, expected: Any) -> None:
    """Compare a field with its reference: None-ness, dtype, shape and every number."""
    if expected is None or not isinstance(expected, tuple):
        assert not isinstance(value, Tensor), name
        assert value == expected, name
        return
    dtype, numbers = expected
    assert isinstance(value, Tensor), f"{name} is {value!r}"
    assert (value.dtype, value.tolist()) == (dtype, numbers), name


def _left(value: tuple[torch.dtype, Any], column: list[tuple[torch.dtype, Any]]) -> tuple[torch.dtype, Any]:
    dtype, numbers = value
    if not isinstance(numbers, list) or (numbers and isinstance(numbers[0], list)):
        return value
    longest = max(len(other) for _, other in column)
    return dtype, [_as(dtype, 0)] * (longest - len(numbers)) + numbers


def _as_tensor(value: Any) -> Any:
    """A plain number of `info` as a tensor: float32, int64 or bool."""
    if not isinstance(value, bool | int | float):
        return value
    return {bool: torch.bool, int: torch.int64, float: torch.float32}[type(value)], value


def _info(name: str, rng: random.Random) -> Any:
    length = rng.randint(0, 3)
    return {
        "scalar": (torch.float32, _number(rng)),
        "mixed": (torch.bool, rng.random() < 0.5),
        "number": _number(rng),
        "count": rng.randint(0, 9),
        "single": (torch.float64, [_number(rng)]),
        "vector": (torch.bfloat16, [_number(rng) for _ in range(3)]),
        "ragged": (torch.int64, [rng.randint(0, 9) for _ in range(length)]),
        "matrix": (torch.float32, [[_number(rng) for _ in range(3)] for _ in range(2)]),
        "text": f"answer {rng.randint(0, 9)}",
        "tokens": [rng.randint(0, 9) for _ in range(length)],
        "table": {"turns": rng.randint(0, 9), "tool": "search"},
        "either": rng.choice([_number(rng), "none", None]),
    }[name]


def _object(kind: str, rng: random.Random) -> Any:
    length = rng.randint(0, 3)
    return {
        "text": f"answer {rng.randint(0, 99)}",
        "number": (torch.int64, rng.randint(0, 9)),
        "equal": (torch.float32, [_number(rng) for _ in range(2)]),
        "ragged": (torch.int64, [rng.randint(0, 9) for _ in range(length)]),
        "matrix": (torch.float32, [[_number(rng) for _ in range(2)] for _ in range(2)]),
    }[kind]


def _vision(kind: Kind, rng: random.Random) -> Row:
    row: Row = {}
    for pixels, grids, most in (("pixel_values", "image_grid_thws", 3), ("pixel_values_videos", "video_grid_thws", 2)):
        number = rng.randint(0, most)
        shapes = [[rng.randint(1, 2) for _ in range(3)] for _ in range(number)]
        patches = sum(time * height * width for time, height, width in shapes)
        row[grids] = (torch.int64, shapes) if number else None
        row[pixels] = (kind.floats, [[_number(rng) for _ in range(2)] for _ in range(patches)]) if number else None
    images = 0 if row["image_grid_thws"] is None else len(row["image_grid_thws"][1])
    row["raw_images"] = [f"image {rng.randint(0, 99)}" for _ in range(images)] if images else None
    return row


def _number(rng: random.Random) -> float:
    """A number that every dtype, down to bfloat16, has exactly."""
    return rng.randint(-40, 40) / 8


def _as(dtype: torch.dtype, number: int) -> Any:
    return bool(number) if dtype == torch.bool else float(number) if dtype.is_floating_point else int(number)
