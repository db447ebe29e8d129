"""Stop strings: each response ends with the first token that completes one, by a slow reference over whole texts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pipeline.errors import FieldError
from pipeline.rollout.generation.stop_strings import StopStrings
from pipeline.rollout.prompt_batch import read_sampling

CORPUS = ["<answer>12</answer> is the answer. Question: naïve café\n\nEnd of é and 日本 text </answer>done"] * 8
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<eos>", "<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def sentencepiece() -> Any:
    """Spaces as a sign, a space left out at the start of a text, characters as bytes."""
    pieces = [
        "<unk>",
        "<eos>",
        *BYTES,
        "▁",
        "▁the",
        "▁answer",
        "answer",
        "</",
        ">",
        "x</",
        "r>",
        "▁is",
        "Question",
        ":",
        "\n",
    ]
    tokenizer = Tokenizer(models.BPE({piece: place for place, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")


def wordpiece() -> Any:
    pieces = [
        "[UNK]",
        "<eos>",
        "the",
        "answer",
        "##er",
        "##s",
        "a",
        "<",
        "/",
        ">",
        "##>",
        "question",
        ":",
        "end",
        "##ing",
    ]
    tokenizer = Tokenizer(models.WordPiece({piece: place for place, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="[UNK]")


TOKENIZERS = {"byte-level": byte_level(), "sentencepiece": sentencepiece(), "wordpiece": wordpiece()}
STRINGS = [
    ["</answer>"], ["é"], ["日本"], ["\n\n"], ["Question: "], ["e"], ["r>", "</"], ["<end>"], [" is"], [": end"],
    ["answers"], ["the answer"], ["naïve café"],
]  # fmt: skip


def slow_end(tokenizer: Any, strings: Sequence[str], ids: list[int]) -> int | None:
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if any(string in text for string in strings):
            return end
    return None


def rows(tokenizer: Any, strings: Sequence[str], seed: int) -> list[list[int]]:
    """Random tokens, those of the strings and of their characters more often than others."""
    draws = random.Random(seed)
    pieces = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in [*strings, *CORPUS[0].split()]]
    pieces += [tokenizer(character, add_special_tokens=False)["input_ids"] for character in "".join(strings)]
    pieces += [[draws.randrange(len(tokenizer))] for _ in range(12)]
    return [
        [token for _ in range(draws.randrange(1, 40)) for token in draws.choice(pieces)[: draws.randrange(1, 9)]]
        for _ in range(25)
    ]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("strings", STRINGS, ids=repr)
def test_the_end_is_the_first_token_with_which_the_text_holds_a_string(name: str, strings: list[str]) -> None:
    tokenizer = TOKENIZERS[name]
    stops = StopStrings(strings, tokenizer)

    for ids in rows(tokenizer, strings, seed=len(repr(strings))):
        assert stops.end_of(ids) == slow_end(tokenizer, strings, ids), ids


def test_rows_hold_strings_and_lack_them() -> None:
    """The rows of the test above are of both kinds for each tokenizer."""
    for tokenizer in TOKENIZERS.values():
        ends = [
            slow_end(tokenizer, strings, ids)
            for strings in STRINGS
            for ids in rows(tokenizer, strings, seed=len(repr(strings)))
        ]
        assert sum(end is None for end in ends) > 20 and sum(end is not None and end > 3 for end in ends) > 20


def test_a_string_is_found_however_it_is_tokenized() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    usual = tokenizer("</answer>")["input_ids"]
    by_character = [token for character in "</answer>" for token in tokenizer(character)["input_ids"]]
    # The first token has a character before the string, the last one a character after it.
    inside = [*tokenizer("12<")["input_ids"], *tokenizer("/answer")["input_ids"], *tokenizer(">d")["input_ids"]]

    stops = StopStrings(["</answer>"], tokenizer)

    assert len(usual) < len(by_character)
    for ids in (usual, by_character, inside):
        end = slow_end(tokenizer, ["</answer>"], ids)
        assert end is not None
        assert stops.end_of(ids) == end
        assert stops.completed_by(ids[:end]) == "</answer>"
        assert end < 2 or stops.completed_by(ids[: end - 1]) is None


EMOJI = "😀😃🙂 नमस्ते 日本。"


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
@pytest.mark.parametrize("string", ["。", "本", "日本。", "🙂 न", "本\N{REPLACEMENT CHARACTER}"])
def test_the_end_is_found_among_characters_of_several_tokens(name: str, string: str) -> None:
    tokenizer, draws = TOKENIZERS[name], random.Random(3)
    characters = [tokenizer(character, add_special_tokens=False)["input_ids"] for character in EMOJI]
    # The sign of a space that sentencepiece puts in front.
    characters = [ids[1:] if len(ids) > 1 and not tokenizer.decode(ids[:1]) else ids for ids in characters]
    stops = StopStrings([string], tokenizer)
    found = 0

    for _ in range(60):
        ids = [token for _ in range(draws.randrange(1, 40)) for token in draws.choice(characters[:13])]
        # With and without a broken character in between.
        ids += draws.choice(characters)[: draws.randrange(1, 4)] if draws.random() < 0.5 else []
        ids += [token for character in characters[12:] for token in character]
        end = slow_end(tokenizer, [string], ids)
        assert stops.end_of(ids) == end, ids
        found += end is not None
    # A broken character of sentencepiece breaks all of its neighbours.
    assert found or (name, string[-1]) == ("sentencepiece", "\N{REPLACEMENT CHARACTER}")


def count_decoded(stops: StopStrings, tokenizer: Any) -> list[int]:
    """Return the texts that are decoded from now on, and their tokens."""
    decoded = [0, 0]

    class Counting:
        def decode(self, ids: list[int], **keywords: Any) -> str:
            decoded[0] += 1
            decoded[1] += len(ids)
            return str(tokenizer.decode(ids, **keywords))

    stops._tokenizer = Counting()
    return decoded


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
def test_characters_of_several_tokens_are_decoded_at_the_end_of_a_response_alone(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer("😀😃🙂 नमस्ते " * 80, add_special_tokens=False)["input_ids"]
    stops = StopStrings(["。"], tokenizer)
    decoded = count_decoded(stops, tokenizer)

    assert stops.end_of(ids) is None

    assert len(ids) > 2000
    assert decoded[1] < 400 * len(ids), "the whole response each time is 500 tokens for each 1,000 of them, and more"


def test_a_long_response_is_not_decoded_a_token_at_a_time() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    stops = StopStrings(["</answer>"], tokenizer)
    decoded = count_decoded(stops, tokenizer)
    text = tokenizer("the answer is 12 > 11. " * 80, add_special_tokens=False)["input_ids"]
    ids = [*text, *tokenizer("</answer>", add_special_tokens=False)["input_ids"]]
    ended = [n for n in range(1, len(ids) + 1) if stops.completed_by(ids[:n]) is not None]

    assert ended == [len(ids)] and len(ids) > 800
    # A sign > is in each of the 80 repeats; each look is at the end of the response, the confirmation at all of it.
    assert decoded[0] <= 83
    assert decoded[1] <= 83 * (len("</answer>") + 8) + len(ids)


def test_rows_of_a_batch_are_looked_at_alone() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    stops = StopStrings(["e"], tokenizer)
    (e,), (x,) = tokenizer("e")["input_ids"], tokenizer("x")["input_ids"]
    responses = torch.tensor([[x, e], [e, x], [x, e], [x, len(tokenizer) + 50]])

    ended = stops.end_rows(responses, torch.tensor([True, True, False, True]))

    assert ended.tolist() == [True, False, False, False]


@pytest.mark.parametrize("given", [["a", ""], [3]])
def test_other_stop_strings_of_a_call_are_refused(given: Any) -> None:
    seeds = torch.Generator()

    with pytest.raises(FieldError, match="stop_strings is"):
        read_sampling(
            {"max_length": 9, "stop_strings": given}, 2, TOKENIZERS["wordpiece"], temperature=1.0, seeds=seeds
        )
