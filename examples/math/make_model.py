r"""Makes the model of this recipe in the folder `model` beside this file, in seconds, without a hub.

A Llama of 0.43 M parameters with a tokenizer of 17 symbols, one of which is ``\boxed{``. Supervised steps
teach it the form of an answer, ``3+4=`` is answered ``\boxed{7}``, and end before it can add: most digits are wrong.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent
SYMBOLS = ["<pad>", "<eos>", *"0123456789", "+", "-", "=", "\\boxed{", "}"]
ROWS = 64  # of a supervised step
RIGHT = 0.3  # the share of right answers at which these steps end


def make_tokenizer() -> PreTrainedTokenizerFast:
    r"""Return a tokenizer in which each character, and each ``\boxed{``, is one token."""
    backend = Tokenizer(models.WordLevel({symbol: number for number, symbol in enumerate(SYMBOLS)}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{|[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def make_model() -> LlamaForCausalLM:
    """Return the model with random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(SYMBOLS),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=32,
            initializer_range=0.05,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        )
    )


def warm_up(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list[dict[str, str]]) -> float:
    """Teach the form of an answer until the share of right digits is large enough; return this share."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    texts = [f"{one['prompt']}\\boxed{{{one['answer']}}}<eos>" for one in problems]
    # Four tokens of the prompt, and as many of the answer: box, digit, end of the box, eos.
    rows = torch.tensor(tokenizer(texts)["input_ids"])
    while True:
        with torch.no_grad():
            chances = model(input_ids=rows).logits[:, :-1].softmax(-1).gather(-1, rows[:, 1:, None])[:, 3:, 0]
        right = chances.prod(1).mean().item()
        if right >= RIGHT:
            return right
        batch = rows[torch.randint(len(rows), (ROWS,))]
        loss = model(input_ids=batch, labels=batch.where(torch.arange(batch.shape[1]) >= 4, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> None:
    """Make the model; another seed makes another model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    torch.manual_seed(arguments.seed)
    problems = [json.loads(line) for line in (FOLDER / "prompts.jsonl").read_text().splitlines()]
    tokenizer, model = make_tokenizer(), make_model()
    right = warm_up(model, tokenizer, problems)
    model.save_pretrained(FOLDER / "model")
    tokenizer.save_pretrained(FOLDER / "model")
    print(f"{FOLDER / 'model'}: {model.num_parameters():,} parameters, {right:.0%} of its answers are right")


if __name__ == "__main__":
    main()
