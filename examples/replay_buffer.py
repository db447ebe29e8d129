"""Two processes append experience, one takes batches of it: a replay buffer as a library, without a daemon.

.venv/bin/python examples/replay_buffer.py
"""

from __future__ import annotations

import multiprocessing

import torch

from pipeline import DetachedReplayBuffer, Experience

ROWS, BATCHES, PRODUCERS = 4, 6, 2


def made_up(number: int) -> Experience:
    """Return GRPO experience of four rows of equal length, with a number as their rewards."""
    prompt, actions = 3, 5
    return Experience(
        sequences=torch.randint(1, 100, (ROWS, prompt + actions)),
        action_log_probs=torch.randn(ROWS, actions),
        base_action_log_probs=torch.randn(ROWS, actions),
        values=torch.zeros(ROWS),
        kl=torch.zeros(ROWS),
        advantages=torch.randn(ROWS),
        reward=torch.full((ROWS,), float(number)),
        attention_mask=torch.ones(ROWS, prompt + actions, dtype=torch.int64),
        action_mask=torch.ones(ROWS, actions, dtype=torch.bool),
    )


def produce(buffer: DetachedReplayBuffer, first: int) -> None:
    """Append experience; `append` waits while the buffer is full."""
    for number in range(first, first + BATCHES):
        buffer.append(made_up(number))


def main() -> None:
    """Take all batches that are appended; each row is delivered once."""
    with DetachedReplayBuffer(sample_batch_size=2 * ROWS, limit=2, arena_bytes=8 << 20, timeout_s=60.0) as buffer:
        context = multiprocessing.get_context("spawn")
        producers = [context.Process(target=produce, args=(buffer, 100 * index)) for index in range(PRODUCERS)]
        for producer in producers:
            producer.start()
        total = 0.0
        for number in range(PRODUCERS * BATCHES // 2):
            batch = buffer.sample(to_device="cpu")
            total += batch.reward.sum().item()
            print(f"batch={number} rows={len(batch.reward)} rewards={sorted(set(batch.reward.tolist()))}", flush=True)
        for producer in producers:
            producer.join()
        print(f"rows={PRODUCERS * BATCHES * ROWS} sum={total:g} left={buffer.get_length()}", flush=True)


if __name__ == "__main__":
    main()
