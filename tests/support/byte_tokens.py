"""A tokenizer whose tokens are bytes, beside special tokens and others of a test's choice."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END, TURN_END, PAD = "<|endoftext|>", "<|im_end|>", "<|pad|>"


def byte_tokenizer(
    special: Sequence[str] = (), plain: Sequence[str] = (), *, template: str | None = None
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes.

    Args:
        special: Special tokens beside end, end of a turn, and padding.
        plain: Tokens that are added and not special.
        template: The chat template.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({one: number for number, one in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in (END, TURN_END, PAD, *special)])
    tokenizer.add_tokens([AddedToken(one, special=False) for one in plain])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    fast.chat_template = template
    return fast
