"""The embedded task in plain PyTorch, in one process: generate, score, step; a line of JSON a step.

What a user writes without a library: transformers' `generate` with its key-value cache, one forward pass for the
log-probs of the reference, one forward and backward pass for the loss, AdamW. Settings and loss are rlhfd's defaults.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

ROWS, GROUP, MAX_LENGTH = 256, 8, 24
LEARNING_RATE, BETAS, CLIP_NORM = 4e-4, (0.9, 0.99), 1.0
WARMUP_STEPS, DECAY_STEPS, FINAL_RATIO = 10, 150, 0.1
CLIP, KL_COEF, EPS = 0.2, 0.01, 1e-4


def learning_rate_ratio(step: int) -> float:
    """Return the learning rate of a step as a share of the largest."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    if step >= DECAY_STEPS:
        return FINAL_RATIO
    top = WARMUP_STEPS - 1
    return 1.0 - (1.0 - FINAL_RATIO) * (step - top) / (DECAY_STEPS - top)


def score(response: list[int], answer: str, tokenizer: PreTrainedTokenizerFast) -> float:
    """Return 1 for the exact answer ended by eos, else 0."""
    if tokenizer.eos_token_id not in response:
        return 0.0
    return float(tokenizer.decode(response[: response.index(tokenizer.eos_token_id)]) == answer)


def log_probs_of(model: PreTrainedModel, sequences: Tensor, mask: Tensor, columns: int) -> Tensor:
    """Return the log-probs of the last tokens, ``(B, columns)``."""
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    logits = model(
        input_ids=sequences, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=columns + 1
    ).logits[:, :-1]
    return torch.gather(logits.log_softmax(dim=-1), 2, sequences[:, -columns:, None]).squeeze(-1)


def main() -> None:
    """Train for the steps of the settings in the first argument."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(settings["seed"])
    task = Path(settings["task"])
    records = [json.loads(line) for line in (task / "prompts.jsonl").read_text().splitlines()]
    random.Random(settings["seed"]).shuffle(records)
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    actor, reference = (AutoModelForCausalLM.from_pretrained(task / "model").eval() for _ in range(2))
    optimizer = torch.optim.AdamW(actor.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_ratio)
    prompts_a_step = ROWS // GROUP
    with Path(settings["trace"]).open("a") as trace:
        for step in range(settings["steps"]):
            chosen = [records[(step * prompts_a_step + number) % len(records)] for number in range(prompts_a_step)]
            rewards = _step(actor, reference, optimizer, tokenizer, chosen)
            schedule.step()
            line = {"step": step + 1, "time_unix_s": time.time(), "reward_mean": rewards}
            print(json.dumps(line), file=trace, flush=True)


def _step(
    actor: PreTrainedModel,
    reference: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    tokenizer: PreTrainedTokenizerFast,
    chosen: list[dict[str, str]],
) -> float:
    """Take one step; return the mean reward of its rows."""
    given = tokenizer([record["prompt"] for record in chosen], return_tensors="pt", padding=True, padding_side="left")
    prompt_columns = given["input_ids"].shape[1]
    with torch.no_grad():
        sequences = actor.generate(
            **given, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, num_return_sequences=GROUP,
            max_new_tokens=MAX_LENGTH - prompt_columns, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
    responses = sequences[:, prompt_columns:]
    is_eos = responses == tokenizer.eos_token_id
    actions = (is_eos.cumsum(dim=1) - is_eos.long()) == 0
    answers = [record["answer"] for record in chosen for _ in range(GROUP)]
    rewards = torch.tensor(
        [score(row, answer, tokenizer) for row, answer in zip(responses.tolist(), answers, strict=True)]
    )
    groups = rewards.view(-1, GROUP)
    advantages = ((groups - groups.mean(dim=1, keepdim=True)) / (groups.std(dim=1, keepdim=True) + EPS)).view(-1, 1)
    mask = torch.cat([given["attention_mask"].repeat_interleave(GROUP, dim=0), actions.long()], dim=1)
    with torch.no_grad():
        base = log_probs_of(reference, sequences, mask, responses.shape[1])
    log_probs = log_probs_of(actor, sequences, mask, responses.shape[1])
    # One update a batch: the policy that sampled is the policy that is trained.
    ratios = (log_probs - log_probs.detach()).exp()
    policy = -torch.min(ratios * advantages, ratios.clamp(1 - CLIP, 1 + CLIP) * advantages)
    k = log_probs - base
    loss = ((policy + KL_COEF * ((-k).exp() - 1 + k)) * actions).sum() / actions.sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(actor.parameters(), CLIP_NORM)
    optimizer.step()
    return float(rewards.mean())


if __name__ == "__main__":
    main()
