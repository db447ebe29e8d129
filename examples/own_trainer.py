"""A trainer of one's own: policy gradient on the batches of a running daemon, new weights back after each step.

In one terminal the first command, and once it prints ``state=ready``, the second one in another terminal::

    bin/rlhfd start --set trainer.kind=external
    .venv/bin/python examples/own_trainer.py --steps 20

The trainer ends after `--steps` steps, or when the daemon drains. The daemon goes on without it, and the next trainer
continues from the weights that this one published last.
"""

from __future__ import annotations

import argparse

import torch

import pipeline
from pipeline import action_log_probs, load_actor


def main() -> None:
    """Train until `--steps` steps are done or the daemon drains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime-dir", default="run/rlhfd", help="the daemon's daemon.runtime_dir")
    parser.add_argument("--model", default="state/sort-digits/model", help="the daemon's model.actor, a directory")
    parser.add_argument("--steps", type=int, default=0, help="0: until the daemon drains")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ragged", action="store_true", help="take rows without padding")
    options = parser.parse_args()
    actor = load_actor(options.model, dtype="float32", device=options.device)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=4e-4, betas=(0.9, 0.99), weight_decay=0.0)

    with pipeline.connect(options.runtime_dir) as daemon:
        if daemon.newest() is not None:
            daemon.restore(actor=actor.state_dict())
        batches = daemon.experiences(device=options.device, ragged=options.ragged)
        for step, batch in enumerate(batches, start=1):
            if isinstance(batch, pipeline.RaggedRows):
                loss, scores = ragged_policy_gradient_loss(actor, batch), batch.tensors["reward"]
            else:
                loss, scores = policy_gradient_loss(actor, batch), batch.reward
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            published = daemon.publish(actor=actor.state_dict())
            reward = scores.mean().item()
            print(f"step={step} reward={reward:.3f} loss={loss.item():.4f} version={published.version}", flush=True)
            if step == options.steps:
                break


def policy_gradient_loss(actor: torch.nn.Module, experience: pipeline.Experience) -> torch.Tensor:
    """Return the mean of -ratio x advantage over the actions: REINFORCE with importance weights, without PPO's clip.

    Args:
        actor: The trained policy.
        experience: Experience of GRPO: ``(B, S)`` tokens, the last A columns actions, one advantage per row.

    Returns:
        Scalar.
    """
    mask = experience.action_mask  # (B, A)
    log_probs = action_log_probs(actor, experience.sequences, experience.attention_mask, mask.shape[1])
    ratios = (log_probs - experience.action_log_probs).exp()
    return -(ratios * experience.advantages[:, None])[mask].mean()


def ragged_policy_gradient_loss(actor: torch.nn.Module, rows: pipeline.RaggedRows) -> torch.Tensor:
    """Return the loss of `policy_gradient_loss` from rows end to end, by one pass without padding.

    Args:
        actor: The trained policy; transformers keeps rows apart by position ids that begin anew.
        rows: T tokens of B rows, of which N are actions, one advantage per row.

    Returns:
        Scalar.
    """
    tokens = rows.tensors["sequences"]  # (T,)
    positions = torch.cat([torch.arange(length) for length in rows.lengths]).to(tokens.device)  # (T,)
    ends = zip(rows.starts("S")[1:], rows.counts, strict=True)
    actions = torch.cat([torch.arange(end - count, end) for end, count in ends]).to(tokens.device)  # (N,)
    logits = actor(input_ids=tokens[None], position_ids=positions[None], use_cache=False).logits[0, actions - 1]
    log_probs = logits.float().log_softmax(-1).gather(1, tokens[actions, None])[:, 0]
    ratios = (log_probs - rows.tensors["action_log_probs"]).exp()
    counts = torch.tensor(rows.counts, device=tokens.device)
    losses = -ratios * rows.tensors["advantages"].repeat_interleave(counts)
    mask = rows.tensors.get("action_mask")  # (N,), only if tokens of a tool are among them
    return losses.mean() if mask is None else losses[mask].mean()


if __name__ == "__main__":
    main()
