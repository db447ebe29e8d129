"""Stop strings: the token of a response that completes one of several texts.

The text of a response is that of its own tokens, special tokens included. The first token with which this text holds a
stop string ends the response, wherever the string begins: a tokenizer may split a string in many ways, inside of other
tokens too. So strings are looked for in texts, and never as sequences of tokens.

A text is decoded only where it can matter. A token can complete a string only if its own text has the string's last
character; a table over the vocabulary says so for each token, and most tokens need nothing else. For the others the end
of the response is decoded, as many tokens as the string can have; a string that is found there is confirmed in the
whole text. Tokens alone decide, so that each engine ends a response with the same token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# A decoder may read the first tokens of a text differently: a space is left out, a character lacks its first bytes.
_CONTEXT_TOKENS = 8
_CHARACTER_BYTES = 4
_WIDER = 4


class StopStrings:
    """Finds the token that completes a stop string.

    Args:
        strings: At least one, none of them empty.
        tokenizer: Decodes responses; a Hugging Face tokenizer.

    Attributes:
        strings: The strings.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Any) -> None:
        self.strings = tuple(strings)
        self._tokenizer = tokenizer
        self._longest = max(map(len, self.strings))
        self._are_unfinished = any(_UNFINISHED in string for string in self.strings)
        # A token with a text has at least one byte of it.
        self._window_tokens = max(len(string.encode()) for string in self.strings) + _CONTEXT_TOKENS
        self._can_complete = torch.tensor([*self._candidates(), False])  # (tokens + 1,) bool
        self._on_device = self._can_complete

    def candidates(self, tokens: Tensor) -> Tensor:
        """Return which tokens may complete a string, in the shape and on the device of `tokens`, which are ids."""
        if self._on_device.device != tokens.device:
            self._on_device = self._can_complete.to(tokens.device)
        # A model may have more tokens than its tokenizer; these have no text.
        return self._on_device[tokens.clamp(max=len(self._can_complete) - 1)]

    def completed_by(self, token_ids: Sequence[int]) -> str | None:
        """Return the string that the last token of a response completes; None if it completes none.

        Args:
            token_ids: The response so far, at least one token; no token before the last one completes a string.
        """
        last = token_ids[-1]
        if last + 1 >= len(self._can_complete) or not self._can_complete[last]:
            return None
        width = self._window_tokens
        while width < len(token_ids):
            text = self._end(token_ids, width)
            if text is None:
                break
            if len(text) >= self._longest + _CONTEXT_TOKENS:
                if not any(string in text for string in self.strings):
                    return None
                break
            width *= _WIDER
        text = self._text(token_ids)
        return next((string for string in self.strings if string in text), None)

    def end_of(self, token_ids: Sequence[int]) -> int | None:
        """Return the tokens of a response up to the one that completes a string, included; None without one."""
        for place in self.candidates(torch.tensor(token_ids, dtype=torch.int64)).nonzero().flatten().tolist():
            if self.completed_by(token_ids[: place + 1]) is not None:
                return int(place) + 1
        return None

    def end_rows(self, responses: Tensor, wanted: Tensor) -> Tensor:
        """Return which responses end with a token that completes a string, ``(B,)`` bool.

        Args:
            responses: ``(B, n)`` int64, n tokens of each.
            wanted: ``(B,)`` bool, the rows in question; the others are False.
        """
        ended = wanted & self.candidates(responses[:, -1])
        for row in ended.nonzero().flatten().tolist():
            ended[row] = self.completed_by(responses[row].tolist()) is not None
        return ended

    def _end(self, token_ids: Sequence[int], width: int) -> str | None:
        """Return the text of the last tokens, some `width`, up to the last whole character.

        None if a character before is broken: the tokens in front of these may make it another one. Where the first
        token has the rest of a character, one of the next three in front of it begins one.
        """
        best: str | None = None
        for more in range(_CHARACTER_BYTES):
            text = self._text(token_ids[-width - more :])
            if _UNFINISHED not in text:
                return text
            # An unfinished character completes nothing, unless a string has one.
            whole = text.rstrip(_UNFINISHED)
            if not self._are_unfinished and _UNFINISHED not in whole and (best is None or len(whole) > len(best)):
                best = whole
        return best

    def _text(self, token_ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def _candidates(self) -> list[bool]:
        """Return for each id whether its text has the last character of a string, or a part of that character."""
        anchors = self._tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        before = self._text(anchors) if anchors else ""
        count = 1 + max(self._tokenizer.get_vocab().values(), default=-1)
        # Behind another token too: a decoder may leave out the space in front of the first one.
        texts = [
            text.removeprefix(before) + alone
            for text, alone in zip(
                self._texts([[*anchors, token] for token in range(count)]),
                self._texts([[token] for token in range(count)]),
                strict=True,
            )
        ]
        last = {string[-1] for string in self.strings}
        if not all(character.isascii() for character in last):
            last.add(_UNFINISHED)
        return [not last.isdisjoint(text) for text in texts]

    def _texts(self, rows: list[list[int]]) -> list[str]:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return [self._text(row) for row in rows]
        texts: list[str] = backend.decode_batch(rows, skip_special_tokens=False)
        return texts
