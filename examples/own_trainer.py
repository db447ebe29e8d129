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
    options = parser.parse_args()
    actor = load_actor(options.model, dtype="float32", device=options.device)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=4e-4, betas=(0.9, 0.99), weight_decay=0.0)

    with pipeline.connect(options.runtime_dir) as daemon:
        if daemon.newest() is not None:
            daemon.restore(actor=actor.state_dict())
        for step, experience in enumerate(daemon.experiences(device=options.device), start=1):
            loss = policy_gradient_loss(actor, experience)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            published = daemon.publish(actor=actor.state_dict())
            reward = experience.reward.mean().item()
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


if __name__ == "__main__":
    main()
