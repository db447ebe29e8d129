"""Experience made up for tests: random values, ragged lengths, in the maker's layout or any other."""

import torch

from pipeline.experience import Experience


def made_up(rows=4, prompt=5, actions=6, *, seed=0, ppo=True, holes=False, dtype=torch.float32):
    """Return a batch as a maker gives it: prompts padded on the left, responses on the right."""
    rng = torch.Generator().manual_seed(seed)
    width = prompt + actions
    prompts = torch.randint(1, prompt + 1, (rows,), generator=rng)
    responses = torch.randint(1, actions + 1, (rows,), generator=rng)
    columns = torch.arange(width)
    attention = (columns >= prompt - prompts[:, None]) & (columns < prompt + responses[:, None])
    action_mask = columns[prompt:] < prompt + responses[:, None]
    if holes:
        action_mask = action_mask & (torch.rand((rows, actions), generator=rng) < 0.7)
        action_mask[:, 0] = True

    def per_action():
        return (torch.randn((rows, actions), generator=rng) * action_mask).to(dtype)

    return Experience(
        sequences=torch.randint(3, 99, (rows, width), generator=rng) * attention,
        action_log_probs=per_action(),
        base_action_log_probs=per_action(),
        values=per_action() if ppo else torch.randn(rows, generator=rng),
        kl=per_action() if ppo else torch.randn(rows, generator=rng),
        advantages=per_action() if ppo else torch.randn(rows, generator=rng),
        reward=torch.randn(rows, generator=rng),
        attention_mask=attention.long(),
        action_mask=action_mask,
        info={"score": torch.randn(rows, generator=rng), "group_mixed": torch.rand(rows, generator=rng) < 0.5},
    )
