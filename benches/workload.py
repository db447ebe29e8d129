"""The work of the transport benchmarks: appends of ragged rows as arrays, which each peer's own Python can make.

An append is 8 rows, or as many as the environment says, left-padded to its longest row; response lengths are uniform in
[A/2, A], prompt lengths in [P/2, P]. A consumer's batch is two appends, left-padded to the longest row of both. True
bytes are counted: tokens, log-probs and pixels of the rows, masks included, without padding.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# Of this process and those that it starts.
ROWS_VARIABLE = "RLHFD_BENCH_APPEND_ROWS"
# The trainer of rlhfd's way: external with padded batches, or "ragged", or its "own".
TRAINER_VARIABLE = "RLHFD_BENCH_TRAINER"
APPEND_ROWS = int(os.environ.get(ROWS_VARIABLE, "8"))
BATCH_ROWS = 2 * APPEND_ROWS
PATCH_VALUES = 1176
TOKEN_FIELDS = ("sequences", "attention_mask")
ACTION_FIELDS = ("action_log_probs", "base_action_log_probs", "kl", "advantages", "action_mask")

Arrays = dict[str, "np.ndarray[Any, Any]"]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Maximum tokens of a row (S) and of its response (A), and the patches of its image, 0 for none."""

    name: str
    tokens: int
    actions: int
    patches: int = 0


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny", 16, 8),
        Shape("small", 512, 256),
        Shape("medium", 2048, 1024),
        Shape("large", 8192, 7168),
        Shape("vl", 2048, 1024, patches=256),
    )
}


@dataclasses.dataclass(frozen=True)
class Append:
    """One append: its arrays, its true bytes, and the sum of its tokens, which checks a delivery."""

    arrays: Arrays
    nbytes: int
    tokens: int


def appends(shape: Shape, count: int, *, seed: int = 0) -> list[Append]:
    """Return different appends, the same for the same seed in any process."""
    rng = np.random.default_rng([seed, shape.tokens, shape.actions])
    return [_append(shape, rng) for _ in range(count)]


def _append(shape: Shape, rng: np.random.Generator) -> Append:
    rows, prompt = APPEND_ROWS, shape.tokens - shape.actions
    actions = rng.integers(shape.actions // 2, shape.actions, rows, endpoint=True)
    lengths = actions + rng.integers(prompt // 2, prompt, rows, endpoint=True)
    width, action_width = int(lengths.max()), int(actions.max())
    mask = np.arange(width) >= width - lengths[:, None]
    action_mask = np.arange(action_width) >= action_width - actions[:, None]
    arrays: Arrays = {
        "sequences": rng.integers(3, 50_000, (rows, width)) * mask,
        "attention_mask": mask.astype(np.int64),
        **{
            name: rng.standard_normal((rows, action_width), np.float32) * action_mask
            for name in ACTION_FIELDS
            if name != "action_mask"
        },
        "action_mask": action_mask,
        "reward": rng.standard_normal(rows, np.float32),
    }
    nbytes = int(16 * lengths.sum() + 17 * actions.sum() + 4 * rows)
    if shape.patches:
        arrays["pixel_values"] = rng.standard_normal((rows * shape.patches, PATCH_VALUES), np.float32)
        nbytes += arrays["pixel_values"].nbytes
    return Append(arrays, nbytes, int(arrays["sequences"].sum()))


def rebatch(parts: Sequence[Mapping[str, Any]]) -> Arrays:
    """Return the left-padded batch of several appends' arrays, each block of an append copied by one slice."""
    batch: Arrays = {}
    for name, first in parts[0].items():
        values = [part[name] for part in parts]
        if first.ndim == 1 or name == "pixel_values":
            batch[name] = np.concatenate(values)
            continue
        width = max(value.shape[1] for value in values)
        out = np.zeros((sum(len(value) for value in values), width), first.dtype)
        start = 0
        for value in values:
            out[start : start + len(value), width - value.shape[1] :] = value
            start += len(value)
        batch[name] = out
    return batch


def touch(arrays: Mapping[str, Any]) -> int:
    """Read every byte of a batch; return the sum of its tokens."""
    tokens = 0
    for name, value in arrays.items():
        if name == "sequences":
            tokens = int(value.sum())
            continue
        flat = value.reshape(-1).view(np.uint8)
        whole = len(flat) // 8 * 8
        flat[:whole].view(np.int64).sum()
        flat[whole:].sum()
    return tokens
