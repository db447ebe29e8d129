"""Tokens that a model has positions for, and those up to which its positions do not depend on other rows.

`longrope` (Phi-3) takes other frequencies for all rows of a pass once one of them is longer than
``original_max_position_embeddings``; `dynamic` (NTK) takes new ones for each longest row beyond the model's positions,
and keeps them for later passes. A row's log-probs then depend on its neighbours, and keys that were cached before a
row crossed the limit are not those of a pass over the whole row. Below the limit both are like any other model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from pipeline.config.model_files import model_type, text_settings

POSITION_KEYS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx")
"""Names of a model's number of positions in config.json."""

_BEHIND_PADDING: Final = frozenset({
    "camembert", "data2vec-text", "ibert", "longformer", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta",
    "xlm-roberta-xl", "xmod",
})  # fmt: skip
"""Types of models whose first token has the position behind the number of the padding token, by default 1."""

_TABLES: Final = _BEHIND_PADDING | frozenset({
    "albert", "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "blenderbot",
    "blenderbot-small",
    "codegen", "cpmant", "ctrl", "distilbert", "electra", "ernie", "flaubert", "git", "gpt2", "gpt_bigcode", "gpt_neo",
    "gptj", "imagegpt", "layoutlm", "led", "lilt", "luke", "marian", "markuplm", "mbart", "megatron-bert", "mpt", "mvp",
    "openai-gpt", "opt", "pegasus", "plbart", "prophetnet", "rembert", "roc_bert", "roformer", "splinter",
    "squeezebert", "tapas", "trocr", "xlm",
})  # fmt: skip
"""Types of models with a table of positions: there is nothing beyond its end."""

_TABLES_BY_SETTING: Final = ("deberta", "deberta-v2")
"""Types that have one unless ``position_biased_input`` is false."""

_LONG: Final = ("longrope", "su")
_LLAMA_4: Final = ("llama4", "llama4_text")
_MOST_PADDING: Final = 128


class PositionLimit(NamedTuple):
    """The tokens of a row up to which a model is right.

    Attributes:
        tokens: The tokens.
        reason: The reason, after "because".
    """

    tokens: int
    reason: str


def positions_of(described: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return the name and value of a model's number of positions; None if its configuration does not tell.

    Args:
        described: config.json, or its text part.
    """
    found = ((name, described.get(name)) for name in POSITION_KEYS)
    return next(((name, given) for name, given in found if type(given) is int and given > 0), None)


def rope_boundary(described: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return the kind of a model's rotary positions that depend on the longest row, and the tokens up to which none do.

    Args:
        described: config.json, or its text part; of one kind of positions, or of several, by the type of layer.
    """
    found = [
        (kind, boundary)
        for rope in _ropes(described)
        if (kind := _kind(rope)) in (*_LONG, "dynamic")
        if (boundary := _boundary(kind, rope, described)) is not None
    ]
    return min(found, key=lambda each: each[1], default=None)


def row_limit(described: Mapping[str, Any]) -> PositionLimit | None:
    """Return the tokens of a row up to which a model is right in every pass; None without a limit.

    Args:
        described: config.json, or its text part.
    """
    limits = []
    positions, kind_of_model = positions_of(described), described.get("model_type")
    has_table = kind_of_model in _TABLES or (
        kind_of_model in _TABLES_BY_SETTING and described.get("position_biased_input", True) is not False
    )
    if positions is not None and has_table:
        name, tokens = positions
        padding = described.get("pad_token_id", 1) if kind_of_model in _BEHIND_PADDING else -1
        tokens -= 1 + (padding if type(padding) is int else 1)
        limits.append(PositionLimit(max(1, tokens), f"its table of positions ends there ({name})"))
    if (rope := rope_boundary(described)) is not None:
        kind, boundary = rope
        reason = f'beyond it the positions of a row depend on the rows beside it (rope_type "{kind}")'
        limits.append(PositionLimit(boundary, reason))
    if (columns := _columns_of_llama4(described)) is not None:
        limits.append(PositionLimit(columns, "beyond it its attention counts padding as tokens (floor_scale)"))
    return min(limits, default=None)


def problem_of_positions(folder: Path, row: int, *, engine: str, packed: bool) -> str:
    """Return why rows of a length cannot be computed with a model, else an empty text.

    Args:
        folder: The model's folder; one without a readable config.json has no problem here.
        row: Most tokens of a row.
        engine: `rollout.engine` if the model is the one that is sampled, else an empty text.
        packed: Whether `trainer.packing` has the model compute packed rows.
    """
    text = text_settings(folder)
    if packed and {model_type(folder), text.get("model_type")} & {*_LLAMA_4}:
        return (
            f"{folder} is a Llama 4, whose attention counts tokens from the start of a pass (chunks, temperature): its "
            "rows cannot be packed, take trainer.packing = false"
        )
    limit = row_limit(text)
    if limit is not None and row > limit.tokens:
        return (
            f"{folder} takes rows of at most {limit.tokens:,} tokens, because {limit.reason}; rows have up to {row:,}: "
            f"rollout.max_length = {limit.tokens} at most, or another model"
        )
    if engine == "vllm" and any(_kind(rope) == "dynamic" for rope in _ropes(text)):
        return (
            f'{folder} has positions of the kind rope_type "dynamic", which vllm scales for short rows too, and the '
            'trainer does not: take rollout.engine = "transformers"'
        )
    return ""


def _ropes(described: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the descriptions of rotary positions, those of each type of layer apart."""
    for name in ("rope_parameters", "rope_scaling"):
        given = described.get(name)
        if isinstance(given, Mapping):
            yield given
            yield from (part for part in given.values() if isinstance(part, Mapping))


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "")


def _boundary(kind: str, rope: Mapping[str, Any], described: Mapping[str, Any]) -> int | None:
    positions = positions_of(described)
    most = None if positions is None else positions[1]
    if kind == "dynamic":
        return most
    # transformers gives the model's own field priority over the one of the positions.
    given = described.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or most
    return given if type(given) is int else None


def _columns_of_llama4(described: Mapping[str, Any]) -> int | None:
    """Return the tokens of rows whose padded batches lie below the first step of Llama 4's attention temperature.

    It counts the columns of a batch, with the padding: at most twice a row, rounded up.
    """
    if described.get("model_type") not in ("llama4", "llama4_text") or not described.get(
        "attn_temperature_tuning", True
    ):
        return None
    scale = described.get("floor_scale", 8192)
    return max(1, (scale - 1 - _MOST_PADDING) // 2) if type(scale) is int else None
