"""Makes both models of this recipe in the folders `policy` and `reward` beside this file, in seconds, without a hub.

The policy continues a word, letter by letter, and begins with random weights. The reward model has learned from pairs
of words which one a reader prefers. This reader prefers words that can be spoken: those in which vowels and consonants
take turns. The reward model sees the pairs alone, never the rule.
"""

from __future__ import annotations

import argparse
import itertools
import random
import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import logsigmoid
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent
SYMBOLS = ["<pad>", "<eos>", *string.ascii_lowercase]
LETTERS = 8  # of the longest word, the prompt's letter included
STEPS, PAIRS = 120, 64


def turns(word: str) -> int:
    """Return how often a vowel follows a consonant, or a consonant a vowel: the reader's taste."""
    return sum((one in "aeiou") != (other in "aeiou") for one, other in itertools.pairwise(word))


def random_word() -> str:
    """Return a word whose letters are vowels and consonants by a chance of its own."""
    vowels = random.random()
    letters = random.randint(2, LETTERS)
    return "".join(
        random.choice("aeiou" if random.random() < vowels else "bcdfghjklmnpqrstvwxyz") for _ in range(letters)
    )


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer in which each letter is a token."""
    backend = Tokenizer(models.WordLevel({symbol: number for number, symbol in enumerate(SYMBOLS)}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def shape() -> LlamaConfig:
    """Return the shape of both models."""
    return LlamaConfig(
        vocab_size=len(SYMBOLS),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        initializer_range=0.05,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        num_labels=1,
    )


def rows(words: list[str], tokenizer: PreTrainedTokenizerFast) -> dict[str, torch.Tensor]:
    """Return words as a batch; half of them end with eos, the others were cut."""
    texts = [word + "<eos>" * random.randint(0, 1) for word in words]
    return dict(tokenizer(texts, padding=True, padding_side="right", return_tensors="pt"))


def learn_preferences(model: LlamaForSequenceClassification, tokenizer: PreTrainedTokenizerFast) -> float:
    """Train a reward model on pairs (Bradley-Terry); return the share of pairs that it ranks as the reader."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    right = torch.zeros(())
    for _ in range(STEPS):
        pairs = [sorted((random_word(), random_word()), key=turns, reverse=True) for _ in range(PAIRS)]
        pairs = [pair for pair in pairs if turns(pair[0]) > turns(pair[1])]
        preferred = model(**rows([pair[0] for pair in pairs], tokenizer)).logits[:, 0]
        other = model(**rows([pair[1] for pair in pairs], tokenizer)).logits[:, 0]
        optimizer.zero_grad()
        (-logsigmoid(preferred - other).mean()).backward()
        optimizer.step()
        right = (preferred > other).float().mean()
    return right.item()


@torch.no_grad()
def normalize(model: LlamaForSequenceClassification, tokenizer: PreTrainedTokenizerFast) -> None:
    """Scale the scores so that those of random words have a standard deviation of 1."""
    scores = model(**rows([random_word() for _ in range(1024)], tokenizer)).logits[:, 0]
    model.score.weight /= scores.std()


def main() -> None:
    """Make the models; another seed makes other ones."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    torch.manual_seed(arguments.seed)
    tokenizer, policy, reward = make_tokenizer(), LlamaForCausalLM(shape()), LlamaForSequenceClassification(shape())
    right = learn_preferences(reward, tokenizer)
    normalize(reward, tokenizer)
    for name, model in (("policy", policy), ("reward", reward)):
        model.save_pretrained(FOLDER / name)
        tokenizer.save_pretrained(FOLDER / name)
    print(f"the reward model ranks {right:.0%} of the last pairs as the reader does")


if __name__ == "__main__":
    main()
