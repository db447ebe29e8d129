"""The text of a response, as rewards and environments get it.

A tag or the mark of a tool's call may be a special token of the tokenizer: those that look for it get it. The end of a
response and padding are no text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.model_files import end_token_ids
from pipeline.config.schema import Config
from pipeline.config.types import stop_sequences_of


class ResponseText:
    """Decodes responses.

    Args:
        tokenizer: The actor's.
        hidden: Ids of special tokens that are no text; None: all of them.
    """

    def __init__(self, tokenizer: Any, hidden: Collection[int] | None) -> None:
        self._tokenizer = tokenizer
        self._hidden = None if hidden is None else frozenset(hidden)

    @classmethod
    def of(cls, tokenizer: Any) -> ResponseText:
        """Return the text of a tokenizer alone: its pad and eos tokens are left out."""
        ids = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
        return cls(tokenizer, [token for token in ids if token is not None])

    def __call__(self, ids: Sequence[int]) -> str:
        """Return the text of a response, or of a part of it."""
        if self._hidden is None:
            return str(self._tokenizer.decode(ids, skip_special_tokens=True))
        shown = [token for token in ids if token not in self._hidden]
        return str(self._tokenizer.decode(shown, skip_special_tokens=False))


def hidden_ids(config: Config, tokenizer: Any) -> list[int] | None:
    """Return the special tokens that are left out of the text of responses; None: all of them.

    They are padding, the tokens by which the model's files end a response, and those of `rollout.stop_token_ids`; one
    that is an ordinary token stays in the text.
    """
    if not config.rollout.special_tokens:
        return None
    ends = {one[0] for one in stop_sequences_of(config.rollout.stop_token_ids) if len(one) == 1}
    ends.add(tokenizer.eos_token_id)
    for ids in end_token_ids(Path(config.model.actor)).values():
        ends.update(ids)
    return sorted((ends & special_ids(tokenizer)) | ({tokenizer.pad_token_id} - {None}))


def special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of a tokenizer's special tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*getattr(tokenizer, "all_special_ids", ()), *(one for one, token in added.items() if token.special)}
