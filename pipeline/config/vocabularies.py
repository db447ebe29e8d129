"""The vocabularies of the models that read the actor's rows: a token id must mean the same to each of them.

Only config.json and tokenizer.json are read. A table of embeddings may be longer than the tokenizer's vocabulary: its
last rows are padding, which the actor can sample all the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from pipeline.config.model_files import json_object, text_settings

NO_IMAGES = 'must be "policy" with a model.actor that takes images: their tokens are no text'
"""The problem of a tokenizer of the reward model's own beside a vision-language model."""

_PLACEHOLDER = re.compile(r"reserved|unused|extra_id|dummy|placeholder", re.IGNORECASE)


def problem_of_vocabulary(folder: Path, actor: Path) -> str:
    """Return why a model cannot read the rows of an actor, else an empty text.

    Args:
        folder: The model: reward, reference or critic. It may have no tokenizer of its own.
        actor: The actor, with its tokenizer.
    """
    rows, needed = _rows(folder), _rows(actor)
    if rows is not None and needed is not None and rows < needed:
        return (
            f"{folder} has a smaller vocabulary than model.actor ({rows:,} and {needed:,} tokens in vocab_size of "
            "config.json): it cannot read each token that the actor samples"
        )
    mine, its = _tokens(actor), _tokens(folder)
    if not mine or not its:
        return ""
    others = [
        (number, token, its[number])
        for number, token in sorted(mine.items())
        if number in its and its[number] != token and not _PLACEHOLDER.search(token + its[number])
    ]
    if not others:
        return ""
    number, token, other = others[0]
    return (
        f"{folder} has another tokenizer than model.actor, and gets its token ids: {len(others):,} of {len(mine):,} "
        f"mean another token there, such as {number}, {token!r} of the actor and {other!r} there"
    )


def problem_of_stop_tokens(folder: Path, sequences: Iterable[Sequence[int]]) -> str:
    """Return which token of stop sequences the model in a folder does not have, else an empty text."""
    return problem_of_tokens(sequences, _rows(folder))


def problem_of_tokens(sequences: Iterable[Sequence[int]], vocabulary: int | None) -> str:
    """Return which token of sequences a vocabulary does not have, else an empty text; None: it is not known."""
    highest = max((token for sequence in sequences for token in sequence), default=-1)
    if vocabulary is None or highest < vocabulary:
        return ""
    return f"model.actor has no token {highest:,}: its ids are below {vocabulary:,}"


def _rows(folder: Path) -> int | None:
    """Return the rows of a model's table of embeddings; None if config.json does not tell."""
    found = text_settings(folder).get("vocab_size")
    return found if isinstance(found, int) else None


def _tokens(folder: Path) -> dict[int, str]:
    """Return the token of each id in tokenizer.json; empty without one, or if it cannot be read."""
    described = json_object(folder / "tokenizer.json")
    try:
        vocabulary = described["model"]["vocab"]
        found = (
            {number: token for token, number in vocabulary.items()}
            if isinstance(vocabulary, dict)
            else {number: one[0] for number, one in enumerate(vocabulary)}
        )
        return found | {one["id"]: one["content"] for one in described.get("added_tokens") or []}
    except (KeyError, TypeError, IndexError, AttributeError):
        return {}
