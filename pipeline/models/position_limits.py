"""Refusal of passes in which the positions of a row would depend on the rows beside it.

A configuration whose rows can be that long is refused before (`pipeline.config.positions`); this is for makers and
trainers of one's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from pipeline.errors import FieldError

_boundaries: WeakKeyDictionary[nn.Module, tuple[str, int] | None] = WeakKeyDictionary()


def boundary_of(model: object) -> tuple[str, int] | None:
    """Return the kind of a model's positions that depend on the longest row, and the tokens up to which none do."""
    inner = getattr(model, "backbone", model)
    if not isinstance(inner, nn.Module):
        return None
    if inner not in _boundaries:
        _boundaries[inner] = _boundary(getattr(inner, "config", None))
    return _boundaries[inner]


def _boundary(config: Any) -> tuple[str, int] | None:
    """Return the least boundary of a model's positions, which transformers may describe for each type of layer."""
    if not hasattr(config, "get_text_config"):
        return None
    text: Any = config.get_text_config()
    described = getattr(text, "rope_parameters", None) or {}
    ropes = [described, *(part for part in described.values() if isinstance(part, Mapping))]
    found: list[tuple[str, int]] = []
    most = getattr(text, "max_position_embeddings", None)
    for rope in ropes:
        kind = rope.get("rope_type")
        boundary = rope.get("original_max_position_embeddings") or most if kind == "longrope" else most
        if kind in ("longrope", "dynamic") and isinstance(boundary, int):
            found.append((kind, boundary))
    return min(found, key=lambda each: each[1], default=None)


def check_rows(model: object, lengths: Tensor) -> None:
    """Refuse rows whose positions would depend on each other, or on the passes before.

    Args:
        model: The model of the pass.
        lengths: Tokens of each row, any shape.

    Raises:
        FieldError: If rows lie on both sides of the boundary, or with positions of the kind "dynamic" beyond it.
    """
    found = boundary_of(model)
    if found is None or not lengths.numel():
        return
    kind, boundary = found
    shortest, longest = int(lengths.min()), int(lengths.max())
    if longest > boundary and (shortest <= boundary or kind == "dynamic"):
        raise FieldError(
            f"rows of {shortest:,} to {longest:,} tokens in one pass: beyond {boundary:,} tokens the positions of a "
            f'{type(model).__name__} depend on its longest row (rope_type "{kind}"), and log-probs with them'
        )


def check_generation(model: object, prompts: Tensor, most: int) -> None:
    """Refuse to sample rows that cross the boundary while they grow: cached keys would have other positions.

    Args:
        model: The model.
        prompts: Tokens of each prompt, ``(B,)``.
        most: Most tokens of a row.

    Raises:
        FieldError: If a row can.
    """
    found = boundary_of(model)
    if found is not None and most > found[1] and (found[0] == "dynamic" or int(prompts.min()) <= found[1]):
        raise FieldError(
            f"rows of up to {most:,} tokens: a row that grows beyond {found[1]:,} tokens gets other positions than its "
            f'keys in the cache ({type(model).__name__}, rope_type "{found[0]}"); max_length is {found[1]} at most'
        )
